"""The rule gumbel: its noise against another implementation, its law, and texts that are one, whatever is drafted."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from laws.enumeration import target_law
from laws.test_text_law import assert_law
from laws.tiny_targets import TARGETS, VOCAB, build
from scipy import stats
from torch import Tensor

from specens_kernels import Mixture, Sampling, TokenTree, sample, target_logprobs, verify_chain, verify_tree
from specens_kernels.ops.sample.gumbel import gumbel_noise

DRAWS, TEXTS = 20_000, 6_000
LENGTH = 4


def philox_words(seed: int, position: int, counter: int, stream: int) -> list[int]:
    """Philox4x32-10 in Python's integers."""
    mask = 2**32 - 1
    key = [seed & mask, seed >> 32 & mask]
    words = [position & mask, position >> 32 & mask, counter, stream]
    for _ in range(10):
        first, second = 0xD2511F53 * words[0], 0xCD9E8D57 * words[2]
        words = [second >> 32 ^ words[1] ^ key[0], second & mask, first >> 32 ^ words[3] ^ key[1], first & mask]
        key = [key[0] + 0x9E3779B9 & mask, key[1] + 0xBB67AE85 & mask]
    return words


def noise_of_token(seed: int, position: int, token: int) -> float:
    """As the definition says, one token at a time, in extended precision."""
    block, index = divmod(token, 128)
    high, low, where, _ = philox_words(seed, position, block, 3)
    unit = (np.longdouble((high >> 5) * 2**26 + (low >> 6)) + np.longdouble(0.5)) / np.longdouble(2) ** 53
    maximum = np.log(np.longdouble(128)) - np.log(-np.log(unit))
    if where >> 25 == index:
        return float(maximum)
    word = philox_words(seed, position, 32 * block + token % 32, 4)[index // 32]
    uniform = (np.longdouble(word) + np.longdouble(0.5)) / np.longdouble(2) ** 32
    return float(-np.log(np.exp(-maximum) - np.log(uniform)))


@pytest.mark.parametrize(("seed", "position"), [(0, 0), (7, 12), (-1, 2**40 + 3), (2**62 + 5, -9)])
def test_the_noise_is_that_of_an_independent_implementation(seed, position):
    vocab = 300
    noise = gumbel_noise(torch.tensor([seed]), torch.tensor([position]), vocab)[0]
    expected = [noise_of_token(seed % 2**64, position % 2**64, token) for token in range(vocab)]
    np.testing.assert_allclose(noise.numpy(), expected, rtol=0, atol=1e-12)


def test_noise_does_not_depend_on_the_vocabulary():
    seeds, positions = torch.arange(3), torch.arange(5, 8)
    wide = gumbel_noise(seeds, positions, 1000)
    for vocab in (1, 127, 128, 129, 999):
        assert torch.equal(gumbel_noise(seeds, positions, vocab), wide[:, :vocab])


def test_noise_is_standard_gumbel_and_independent_between_tokens_positions_and_seeds():
    noise = gumbel_noise(torch.arange(40).repeat_interleave(40), torch.arange(40).repeat(40), 256)
    assert stats.kstest(noise.flatten()[::7].numpy(), stats.gumbel_r.cdf).pvalue > 1e-4
    for first, second in ((noise[:, :-1], noise[:, 1:]), (noise[:-1], noise[1:]), (noise[:-40], noise[40:])):
        ranks = np.stack([stats.gumbel_r.cdf(first.flatten().numpy()), stats.gumbel_r.cdf(second.flatten().numpy())])
        assert abs(np.corrcoef(ranks)[0, 1]) < 5 / ranks.shape[1] ** 0.5
    maxima = noise[:, :128].argmax(1).bincount(minlength=128)
    assert stats.chisquare(maxima.numpy()).pvalue > 1e-4


def seeds_and_positions(count: int) -> dict[str, Tensor]:
    return {"seeds": torch.arange(count) % 997, "positions": torch.arange(count) // 997}


def assert_drawn_by(tokens: Tensor, probabilities: Tensor) -> None:
    """Chi-square of tokens [draws] against probabilities [vocab]."""
    possible = probabilities > 0
    counts = tokens.bincount(minlength=len(probabilities)).double()
    assert counts[~possible].sum() == 0
    if possible.sum() > 1:
        expected = probabilities[possible] * len(tokens) / probabilities[possible].sum()
        assert stats.chisquare(counts[possible].numpy(), expected.numpy()).pvalue > 1e-4


@pytest.mark.parametrize("target", TARGETS)
def test_every_ensemble_is_drawn_by_its_law(target):
    model = build(target, "one-hot", rows=1, draft_len=0, seed=5)
    logits = [member[0, :1].expand(DRAWS, -1) for member in model.member_logits]
    drawn = sample(logits, **model.arguments, **seeds_and_positions(DRAWS), method="gumbel", backend="reference")
    assert_drawn_by(drawn.tokens, model.target[0, 0])


FILTERS = [{"top_k": 5}, {"top_p": 0.7}, {"min_p": 0.2}, {"top_k": 9, "top_p": 0.8, "min_p": 0.1}]


@pytest.mark.parametrize("ways", ["lone", "mixture", "members"])
@pytest.mark.parametrize("filters", FILTERS, ids=str)
@pytest.mark.parametrize("order", ["transformers", "vllm"])
def test_filtered_targets_are_drawn_by_their_law(filters, ways, order):
    logits = [torch.randn(1, 20, generator=torch.Generator().manual_seed(seed)) * 2 for seed in (1, 2)]
    ensemble = None if ways == "lone" else Mixture((0.4, 0.6), filter=ways)
    members = logits[:1] if ensemble is None else logits
    arguments: dict[str, Any] = {"ensemble": ensemble, "sampling": Sampling(0.8, **filters, filter_order=order)}
    law = target_logprobs(members, **arguments, backend="reference")[0].double().exp()
    many = [member.expand(DRAWS, -1) for member in members]
    drawn = sample(many, **arguments, **seeds_and_positions(DRAWS), method="gumbel", backend="reference")
    assert_drawn_by(drawn.tokens, law)


def test_the_best_scores_are_a_sample_without_replacement():
    logits = torch.tensor([[0.0, 1.0, 2.0, -torch.inf]]).expand(DRAWS, -1)
    drawn = sample(logits, **seeds_and_positions(DRAWS), method="gumbel", count=4, backend="reference").tokens
    assert (drawn[:, 3] == -1).all()
    law = logits[0, :3].double().softmax(0)
    expected = torch.zeros(9, dtype=torch.float64)
    for first in range(3):
        for second in range(3):
            if first != second:
                expected[3 * first + second] = law[first] * law[second] / (1 - law[first])
    assert_drawn_by(drawn[:, 0] * 3 + drawn[:, 1], expected)
    assert (drawn[:, :3].sort(1).values == torch.arange(3)).all()


def texts_of(tables: list[Tensor], count: int, draft: Any, arguments: dict[str, Any]) -> tuple[Tensor, int]:
    """LENGTH tokens of each of `count` texts after token 0, and the rounds that it took.

    tables: float32 [vocab, vocab], the logits of each member after a token. draft(before, seeds, positions) gives draft
    tokens [texts, draft_len], of which any may be wrong.
    """
    seeds, lengths = torch.arange(count), torch.zeros(count, dtype=torch.int64)
    texts, rounds = torch.zeros(count, LENGTH + 8, dtype=torch.int64), 0
    before = texts[:, 0].clone()
    while (lengths < LENGTH).any():
        drafts = draft(before, seeds, lengths)
        rows = torch.cat([before[:, None], drafts.clamp(0, len(tables[0]) - 1)], 1)
        logits = [table[rows] for table in tables]
        common = {"seeds": seeds, "positions": lengths, "backend": "reference"}
        verdict = verify_chain(logits, drafts, rule="gumbel", **common, **arguments)
        for column in range(verdict.tokens.shape[1]):
            emitted = (verdict.tokens[:, column] >= 0) & (lengths < LENGTH)
            before = torch.where(emitted, verdict.tokens[:, column], before)
            texts[emitted, lengths[emitted]] = before[emitted]
            lengths += emitted
        rounds += 1
    return texts[:, :LENGTH], rounds


@pytest.mark.parametrize("target", ["single", "mixture", "logit mixture", "plausible, amateur drafts"])
def test_texts_of_several_rounds_follow_the_target_law(target):
    model = build(target, "one-hot", rows=1, draft_len=2, seed=11)
    tables = [member[0] for member in model.member_logits]

    def draft(before: Tensor, seeds: Tensor, _: Tensor) -> Tensor:
        second = before * 0 + 1
        return torch.stack([(before + seeds) % VOCAB, second], 1)

    texts, rounds = texts_of(tables, TEXTS, draft, model.arguments)
    assert rounds >= 2
    assert_law(texts, target_law(model.target.expand(LENGTH, -1, -1), LENGTH))


@given(st.integers(0, 2**31), st.integers(0, 4), st.sampled_from([0.0, 0.7, 1.0]), st.sampled_from([None, 3]))
@settings(max_examples=15, deadline=None)
def test_a_text_is_the_same_whatever_is_drafted(seed, draft_len, temperature, top_k):
    """Random drafts, ids that are no tokens, and drafts by Gumbel from logits with NaN: only the rounds differ."""
    generator = torch.Generator().manual_seed(seed)
    vocab = 9
    table = torch.randn(vocab, vocab, generator=generator) * 2
    broken = table + torch.randn(table.shape, generator=generator)
    broken[torch.rand(table.shape, generator=generator) < 0.3] = torch.nan
    arguments = {"sampling": Sampling(temperature, top_k=top_k)}

    def nothing(before: Tensor, *_: Tensor) -> Tensor:
        return torch.empty(len(before), 0, dtype=torch.int64)

    def anything(before: Tensor, *_: Tensor) -> Tensor:
        return torch.randint(-2, vocab + 3, (len(before), draft_len), generator=generator)

    def drawn(logits: Tensor) -> Any:
        def draft(before: Tensor, seeds: Tensor, positions: Tensor) -> Tensor:
            tokens: list[Tensor] = [before]
            for step in range(draft_len):
                own = sample(
                    logits[tokens[-1].clamp(min=0)],
                    **arguments,
                    seeds=seeds,
                    positions=positions,
                    step=step,
                    method="gumbel",
                    backend="reference",
                )
                tokens.append(own.tokens)
            return torch.stack(tokens, 1)[:, 1:]

        return draft

    expected, _ = texts_of([table], 8, nothing, arguments)
    for draft in (anything, drawn(broken)):
        assert torch.equal(texts_of([table], 8, draft, arguments)[0], expected)
    same, rounds = texts_of([table], 8, drawn(table), arguments)
    assert torch.equal(same, expected)
    assert rounds == -(-LENGTH // (draft_len + 1)), "a drafter that is the target is always right"


def test_a_tree_emits_the_text_of_the_chain_whatever_its_shape():
    generator = torch.Generator().manual_seed(4)
    texts, vocab = 400, 5
    table = torch.randn(vocab, vocab, generator=generator)
    common: dict[str, Any] = {"seeds": torch.arange(texts), "positions": torch.full((texts,), 7), "rule": "gumbel"}
    common |= {"backend": "reference", "sampling": Sampling(0.9)}
    longest = torch.empty(texts, 0, dtype=torch.int64)
    while longest.shape[1] < 4:
        rows = torch.cat([torch.zeros(texts, 1, dtype=torch.int64), longest], 1)
        longest = verify_chain(table[rows], longest, **common).tokens
    accepted = []
    for parents in ([-1], [-1, -1, -1], [-1, 0, 0, -1, 3, 3, 1], [-1, -1, -1, 1, 1, 3, 4]):
        tree = TokenTree(parents)
        drafts = torch.randint(-1, vocab + 1, (texts, len(parents)), generator=generator)
        rows = torch.cat([torch.zeros(texts, 1, dtype=torch.int64), drafts.clamp(0, vocab - 1)], 1)
        verdict = verify_tree(table[rows], drafts, tree, **common)
        emitted = torch.arange(verdict.tokens.shape[1]) < verdict.num_tokens[:, None]
        assert torch.equal(torch.where(emitted, verdict.tokens, -1), verdict.tokens)
        assert (verdict.tokens == torch.where(emitted, longest[:, : emitted.shape[1]], -1)).all()
        accepted.append(verdict.num_accepted.double().mean())
    assert accepted[1] > 1.5 * accepted[0] > 0


@pytest.mark.parametrize("name", ["uniforms", "drafter", "draft_logits", "draft_sampling"])
def test_what_plays_no_part_is_refused_by_name(name):
    values: dict[str, Any] = {"uniforms": torch.zeros(2, 2), "drafter": 0, "draft_logits": torch.zeros(2, 1, 5)}
    values["draft_sampling"] = Sampling()
    given_to_all = {} if name == "uniforms" else {"seeds": torch.arange(2), "positions": torch.arange(2)}
    logits, drafts = torch.zeros(2, 2, 5), torch.zeros(2, 1, dtype=torch.int64)
    for backend in (None, "reference"):
        common: dict[str, Any] = {"rule": "gumbel", "backend": backend, name: values[name], **given_to_all}
        with pytest.raises(ValueError, match=f"^{name}: expected None"):
            verify_chain(logits, drafts, **common)
        if name.startswith("draft"):
            common |= {"siblings": "with_replacement"} if name != "draft_sampling" else {}
            common |= {"draft_logits": torch.zeros(2, 2, 5)} if name == "draft_logits" else {}
        with pytest.raises(ValueError, match=f"^{name}: expected None"):
            verify_tree(logits, drafts, TokenTree([-1]), **common)


@pytest.mark.parametrize(
    ("arguments", "name"),
    [
        ({"method": "race"}, "method"),
        ({"method": "gumbel", "stream": 2}, "stream"),
        ({"method": "gumbel", "uniforms": torch.zeros(2), "seeds": None, "positions": None}, "uniforms"),
        ({"method": "gumbel", "count": 0}, "count"),
        ({"method": "gumbel", "count": True}, "count"),
        ({"count": 2}, "count"),
        ({"method": "gumbel", "seeds": None}, "seeds"),
    ],
)
def test_wrong_arguments_of_a_draw_are_named(arguments, name):
    common = {"seeds": torch.arange(2), "positions": torch.arange(2)}
    for backend in (None, "reference"):
        with pytest.raises(ValueError, match=f"^{name}: expected"):
            sample(torch.zeros(2, 5), **(common | arguments), backend=backend)
