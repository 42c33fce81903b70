"""Caches after rejections, and caches that cannot be rolled back."""

import pytest
import torch
from driver.tiny_models import PROMPT, record_members, relative_of, tiny_llama
from specens import SpeculativeEnsemble
from specens.member import Member
from specens.statistics import Statistics
from transformers import Gemma3ForCausalLM, Gemma3TextConfig, MambaConfig, MambaForCausalLM

from specens_kernels import Mixture

TOLERANCE = {"rtol": 1e-4, "atol": 1e-4}


class CheckedMember(Member):
    """Compares every score with a forward that knows no cache, and counts what it forgets."""

    num_forgotten = 0

    def score(self, sequence, rows):
        logits = super().score(sequence, rows)
        ids = torch.tensor([self._prompts[0] + sequence])
        torch.testing.assert_close(logits[0], self._model.model(ids).logits[0, -rows:], **TOLERANCE)
        return logits

    def roll_back(self, length):
        self.num_forgotten += max(self.num_seen - length, 0)
        super().roll_back(length)
        assert self.cache.get_seq_length() == len(self._prompts[0]) + self.num_seen


def tiny_gemma(seed):
    """A model of which every second layer forgets all but the last 8 tokens."""
    config = Gemma3TextConfig(
        vocab_size=61,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        sliding_window=8,
        layer_types=["sliding_attention", "full_attention"],
        initializer_range=0.4,
        eos_token_id=None,
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = Gemma3ForCausalLM(config).eval()
    model.lm_head.weight = torch.nn.Parameter(torch.randn(61, 32, generator=torch.Generator().manual_seed(seed)))
    return model


@pytest.mark.parametrize("make", [tiny_llama, tiny_gemma])
@pytest.mark.parametrize("schedule", ["fixed", "alternate"])
@pytest.mark.parametrize("draft_lens", [1, 4])
def test_members_score_as_if_they_had_never_seen_a_rejected_draft(monkeypatch, make, schedule, draft_lens):
    first = make(0)
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
    model = tiny_llama(0)
    ensemble = SpeculativeEnsemble([model, relative_of(model, 1)])
    member = ensemble._members([PROMPT, PROMPT], Statistics.of(2))[0]
    with torch.inference_mode():
        member.score([1, 2, 3], 1)
        before = member.cache.layers[0].keys
        member.roll_back(1)
    kept = member.cache.layers[0].keys
    assert kept.shape[-2] == len(PROMPT) + 1
    assert kept.data_ptr() == before.data_ptr()


def test_a_cache_that_cannot_be_rolled_back_is_refused_before_anything_is_generated():
    config = MambaConfig(vocab_size=61, hidden_size=16, state_size=4, num_hidden_layers=2, eos_token_id=None)
    members = [MambaForCausalLM(config) for _ in range(2)]
    for schedule in ("fixed", "alternate"):
        with pytest.raises(ValueError, match=r"members: the cache class DynamicCache with layers LinearAttentionLayer"):
            SpeculativeEnsemble(members, schedule=schedule)
    text = SpeculativeEnsemble(members, ensemble=Mixture((0.5, 0.5)), schedule="standard").generate(
        PROMPT, max_new_tokens=5, seed=0
    )
    assert len(text.tokens) == 5
