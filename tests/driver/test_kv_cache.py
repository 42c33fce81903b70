"""Caches after rejections, and caches that cannot be rolled back."""

import random

import pytest
import torch
from driver.cache_models import CACHES, KINDS, tiny_model
from driver.tiny_models import PROMPT, record_members, relative_of, tiny_llama
from specens import SpeculativeEnsemble
from specens.engines.protocol import Needs
from specens.engines.transformers.causal_lm import CausalLM
from specens.engines.transformers.member import FED_TOGETHER, Member
from specens.engines.transformers.probing import reading_of
from transformers import DynamicCache, StaticCache

from specens_kernels import Sampling

TOLERANCE = {"rtol": 1e-4, "atol": 1e-3}  # of logits with a deviation of 5
GREEDY = Sampling(temperature=0.0)
RECURRENT = ["mamba", "mamba2", "falcon_mamba", "gated_delta", "attention_and_mamba", "convolution"]


class CheckedMember(Member):
    """Compares every score with a forward that knows no cache, and counts what it forgets."""

    num_forgotten = 0

    def score(self, sequence, rows):
        logits = super().score(sequence, rows)
        ids = torch.tensor([PROMPT + sequence])
        torch.testing.assert_close(logits, self._model.model(ids).logits[0, -rows:], **TOLERANCE)
        return logits

    def roll_back(self, length):
        self.num_forgotten += max(self.num_seen - length, 0)
        super().roll_back(length)
        assert self.cache.get_seq_length() == len(PROMPT) + self.num_seen


@pytest.mark.parametrize("kind", ["full", "sliding_hybrid"])
@pytest.mark.parametrize("schedule", ["fixed", "alternate"])
@pytest.mark.parametrize("draft_lens", [1, 4])
def test_members_score_as_if_they_had_never_seen_a_rejected_draft(monkeypatch, kind, schedule, draft_lens):
    first = tiny_model(kind)
    members = record_members(monkeypatch, CheckedMember)
    ensemble = SpeculativeEnsemble([first, relative_of(first, 1, 0.4)], draft_lens=draft_lens, schedule=schedule)
    members.clear()
    result = ensemble.generate(PROMPT, max_new_tokens=40, seed=0)
    assert result.statistics.recovered >= 5
    assert sum(member.num_forgotten for member in members) >= 5
    for index, member in enumerate(members):
        # Nothing is fed twice: all that went in is still there, or was rejected.
        assert result.statistics.tokens_fed[index] == len(PROMPT) + member.num_seen + member.num_forgotten


def test_roll_back_keeps_the_settled_tokens_in_place():
    member = Member(CausalLM(tiny_llama(0)), PROMPT)
    with torch.inference_mode():
        member.score([1, 2, 3], 1)
        before = member.cache.layers[0].keys
        member.roll_back(1)
    kept = member.cache.layers[0].keys
    assert kept.shape[-2] == len(PROMPT) + 1
    assert kept.data_ptr() == before.data_ptr()


def rounds_with_rejections(member, draft_len, one_by_one, rounds=14):
    """Feed drafts and take back all but the first few of them, another number in every round.

    Yields the settled tokens and drafts of each round, and the logits of the positions after each of them.
    """
    generator, settled = random.Random(0), []
    for number in range(rounds):
        drafts = [generator.randrange(61) for _ in range(draft_len)]
        if one_by_one:
            logits = torch.cat([member.score(settled + drafts[:length], 1) for length in range(draft_len + 1)])
        else:
            logits = member.score(settled + drafts, draft_len + 1)
        yield settled + drafts, logits
        accepted = (3 * number) % (draft_len + 1)
        member.roll_back(len(settled) + accepted)
        settled = settled + drafts[:accepted] + [generator.randrange(61)]


@pytest.mark.parametrize("one_by_one", [False, True], ids=["at_once", "one_by_one"])
@pytest.mark.parametrize("kind", ["full", *KINDS])
@torch.inference_mode()
def test_logits_after_rollback_are_those_of_a_fresh_forward(kind, one_by_one):
    model = CausalLM(tiny_model(kind))
    member = Member(model, PROMPT, reading=reading_of(model, Needs()))
    for tokens, logits in rounds_with_rejections(member, 4, one_by_one):
        whole = model.model(torch.tensor([PROMPT + tokens])).logits[0]
        torch.testing.assert_close(logits, whole[-5:], **TOLERANCE)
    fed_again = FED_TOGETHER if kind in RECURRENT and not one_by_one else 0
    assert sum(forward.num_tokens[0] for forward in member.forwards) <= len(PROMPT) + 14 * (1 + 4 + fed_again)


@pytest.mark.parametrize("one_by_one", [False, True], ids=["at_once", "one_by_one"])
@torch.inference_mode()
def test_a_static_cache_is_cut_in_place(one_by_one):
    model = CausalLM(tiny_llama(0), CACHES["static"])
    member = Member(model, PROMPT)
    buffers = set()
    for tokens, logits in rounds_with_rejections(member, 4, one_by_one):
        whole = model.model(torch.tensor([PROMPT + tokens])).logits[0]
        torch.testing.assert_close(logits, whole[-5:], **TOLERANCE)
        buffers |= {layer.keys.data_ptr() for layer in member.cache.layers}
    assert len(buffers) == 2


@pytest.mark.parametrize("cache", ["fp8", "rounded"])
@torch.inference_mode()
def test_a_quantised_cache_comes_back_as_if_it_had_never_held_the_drafts(cache):
    """Quantisation depends on what is fed together, so the same settled tokens go the same way into a second cache."""
    model = CausalLM(tiny_llama(0), CACHES[cache])
    tried, untouched = (Member(model, PROMPT) for _ in range(2))
    settled, generator = [7], random.Random(0)
    for _ in range(20):
        tried.score(settled + [generator.randrange(61) for _ in range(7)], 1)  # more than make it requantise
        tried.roll_back(len(settled))
        logits = tried.score(settled, 1)
        torch.testing.assert_close(logits, untouched.score(settled, 1), rtol=0, atol=0)
        tried.roll_back(len(settled))
        untouched.roll_back(len(settled))
        settled = [*settled, generator.randrange(61)]
    exact = model.model(torch.tensor([PROMPT + settled[:-1]])).logits[0, -1:]
    assert torch.nn.functional.cosine_similarity(logits, exact) > 0.9


@pytest.mark.parametrize("schedule", ["fixed", "alternate"])
@pytest.mark.parametrize("kind", ["mamba", "gated_delta", "attention_and_mamba", "convolution"])
def test_greedy_speculation_on_states_writes_the_tokens_of_standard(kind, schedule):
    first = tiny_model(kind)
    members = [first, relative_of(first, 1, 0.2)]
    job = {"max_new_tokens": 40, "sampling": GREEDY}
    expected = SpeculativeEnsemble(members, schedule="standard").generate(PROMPT, **job)
    result = SpeculativeEnsemble(members, draft_lens=3, schedule=schedule).generate(PROMPT, **job)
    assert result.tokens == expected.tokens
    assert result.statistics.recovered >= 3
    assert sum(result.statistics.accepted) >= 3


def static_with_short_windows(config):
    return StaticCache(config, max_cache_len=256)


class Folded(DynamicCache):
    """A cache of another library, whose layers say nothing about rolling back."""

    def __init__(self, config):
        super().__init__(config=config)
        self.layers = [type("FoldedLayer", (), {})() for _ in self.layers]


@pytest.mark.parametrize(
    ("kind", "make_cache", "message"),
    [
        ("sliding_hybrid", static_with_short_windows, "StaticCache with layers StaticSlidingWindowLayer cannot"),
        ("attention_and_mamba", static_with_short_windows, "with layers LinearAttentionAndStaticFullAttentionLayer"),
        ("full", Folded, "the cache class Folded with layers FoldedLayer cannot be rolled back"),
    ],
)
def test_a_cache_that_cannot_be_rolled_back_is_refused_before_anything_is_generated(kind, make_cache, message):
    members = [CausalLM(tiny_model(kind, seed), make_cache) for seed in range(2)]
    for schedule in ("fixed", "alternate"):
        with pytest.raises(ValueError, match=message):
            SpeculativeEnsemble(members, schedule=schedule)
    if make_cache is not Folded:
        SpeculativeEnsemble(members, schedule="standard")


def test_a_static_cache_that_is_too_short_is_refused_before_anything_is_generated():
    members = [CausalLM(tiny_llama(seed), lambda config: StaticCache(config, max_cache_len=20)) for seed in range(2)]
    ensemble = SpeculativeEnsemble(members, draft_lens=3)
    assert len(ensemble.generate(PROMPT, max_new_tokens=16).tokens) == 16
    with pytest.raises(ValueError, match=r"max_new_tokens: .* the 20 slots of StaticCache, got 21"):
        ensemble.generate(PROMPT, max_new_tokens=17)
