"""The block and the typical rule against their definitions: exact laws, lengths, and texts over several rounds."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from scipy import stats
from torch import Tensor

from specens_kernels import Mixture, Sampling, Typical, sample, verify_chain

TARGET, DRAFT = torch.tensor([1 / 3, 2 / 3]), torch.tensor([2 / 3, 1 / 3])
TEXTS = 100_000
LEAST_PROBABILITY = 1e-4


def chains(draft_len: int, grid: int) -> tuple[Tensor, Tensor, Tensor]:
    """Every chain of two tokens, on a grid of uniforms: tokens, uniforms, and the probability of each pair."""
    random_numbers = [(index + 0.5) / grid for index in range(grid)]
    tokens, uniforms, weights = [], [], []
    for chain in itertools.product(range(2), repeat=draft_len):
        probability = math.prod(float(DRAFT[token]) for token in chain)
        for point in itertools.product(random_numbers, repeat=draft_len + 1):
            tokens.append(chain)
            uniforms.append(point)
            weights.append(probability / grid ** (draft_len + 1))
    return torch.tensor(tokens), torch.tensor(uniforms, dtype=torch.float64), torch.tensor(weights).double()


def verdict_of(tokens: Tensor, uniforms: Tensor, rule: str, bonus: bool = True):
    batch, draft_len = tokens.shape
    target = TARGET.log().expand(batch, draft_len + bonus, 2)
    draft = DRAFT.log().expand(batch, draft_len, 2)
    return verify_chain(target, tokens, draft_logits=draft, uniforms=uniforms, rule=rule, backend="reference")


@pytest.mark.parametrize(("rule", "length"), [("token", 10 / 9), ("block", 11 / 9)])
def test_the_expected_number_of_accepted_drafts_is_that_of_the_paper(rule, length):
    tokens, uniforms, weights = chains(2, 12)
    accepted = verdict_of(tokens, uniforms, rule).num_accepted
    assert abs(float((accepted * weights).sum()) - length) < 1e-6


@pytest.mark.parametrize("rule", ["token", "block"])
@pytest.mark.parametrize("bonus", [True, False])
def test_the_emitted_tokens_have_the_law_of_the_target(rule, bonus):
    tokens, uniforms, weights = chains(2, 12)
    emitted = verdict_of(tokens, uniforms, rule, bonus).tokens
    for prefix in itertools.product(range(2), repeat=2):
        whole = emitted[:, 1] >= 0  # texts that this round carries to two tokens
        longer = torch.tensor(prefix).expand(len(emitted), 2) == emitted[:, :2]
        got = float((weights * longer.all(1)).sum())
        first = float((weights * longer[:, 0] * ~whole).sum()) * float(TARGET[prefix[1]])  # drawn by a later round
        assert abs(got + first - math.prod(float(TARGET[token]) for token in prefix)) < 1e-6


def test_a_later_prefix_can_be_kept_after_a_uniform_that_refuses_an_earlier_one():
    # the second draft alone would be refused after the first, but the block as a whole is kept
    tokens = torch.tensor([[0, 1]])
    uniforms = torch.tensor([[0.99, 0.0, 0.5]], dtype=torch.float64)
    assert int(verdict_of(tokens, uniforms, "token").num_accepted) == 0
    assert int(verdict_of(tokens, uniforms, "block").num_accepted) == 2


@pytest.mark.parametrize("members", [1, 2])
def test_block_texts_over_several_rounds_have_the_law_of_the_target(members):
    """Two tokens that depend on the one before, three drafts a round; uniforms by seed and start of the round."""
    generator = torch.Generator().manual_seed(members)
    tables = torch.randn(members, 3, 3, generator=generator) * 1.5  # logits of the next token by the one before
    draft_table = torch.randn(3, 3, generator=generator)
    ensemble = None if members == 1 else Mixture((0.3, 0.7))
    weights = (1.0,) if members == 1 else (0.3, 0.7)
    target = sum(weight * table.softmax(-1) for weight, table in zip(weights, tables, strict=True))
    texts, lengths = torch.zeros(TEXTS, 9, dtype=torch.int64), torch.zeros(TEXTS, dtype=torch.int64)
    seeds = torch.arange(TEXTS)
    while (lengths < 4).any():
        rows = (lengths < 4).nonzero()[:, 0]
        before = texts[rows].gather(1, lengths[rows, None])[:, 0]
        drafts, logits = [], []
        for step in range(3):
            logits.append(draft_table[before])
            before = sample(
                logits[-1], seeds=seeds[rows], positions=lengths[rows], step=step, backend="reference"
            ).tokens
            drafts.append(before)
        chain = torch.stack(drafts, 1)
        after = torch.cat([texts[rows].gather(1, lengths[rows, None]), chain], 1)
        verdict = verify_chain(
            [table[after] for table in tables],
            chain,
            ensemble=ensemble,
            draft_logits=torch.stack(logits, 1),
            rule="block",
            seeds=seeds[rows],
            positions=lengths[rows],
            backend="reference",
        )
        for column in range(4):
            indices = rows[verdict.tokens[:, column] >= 0]
            lengths[indices] += 1
            texts[indices, lengths[indices]] = verdict.tokens[verdict.tokens[:, column] >= 0, column]
    code = (texts[:, 1:5] * torch.tensor([27, 9, 3, 1])).sum(1)
    counts = torch.bincount(code, minlength=81)
    law = [
        math.prod(float(target[a, b]) for a, b in itertools.pairwise((0, *text)))
        for text in itertools.product(range(3), repeat=4)
    ]
    expected = torch.tensor(law, dtype=torch.float64)
    expected *= TEXTS / expected.sum()
    assert stats.chisquare(counts.double().numpy(), expected.numpy()).pvalue > LEAST_PROBABILITY


def test_block_accepts_at_least_as_many_as_token_on_average():
    generator = torch.Generator().manual_seed(7)
    batch, vocab, draft_len = 20_000, 12, 4
    draft = torch.randn(1, draft_len, vocab, generator=generator).expand(batch, -1, -1)
    target = draft[:1] + torch.randn(1, draft_len, vocab, generator=generator)
    target = torch.cat([target, target[:, :1]], 1).expand(batch, -1, -1)
    tokens = torch.multinomial(draft[0].softmax(-1), batch, replacement=True, generator=generator).t().contiguous()
    uniforms = torch.rand(batch, draft_len + 1, dtype=torch.float64, generator=generator)
    means = [
        verify_chain(target, tokens, draft_logits=draft, uniforms=uniforms, rule=rule, backend="reference")
        .num_accepted.double()
        .mean()
        for rule in ("token", "block")
    ]
    assert means[1] > means[0] + 0.01


@pytest.mark.parametrize("rule", ["typical", Typical(0.3, 0.1), Typical(0.9, 0.5)], ids=str)
def test_typical_accepts_what_exceeds_the_threshold_of_its_entropy(rule):
    settings = rule if isinstance(rule, Typical) else Typical()
    logits = torch.randn(300, 2, 20, generator=torch.Generator().manual_seed(9)) * 2
    tokens = torch.randint(20, (300, 1), generator=torch.Generator().manual_seed(10))
    uniforms = torch.full((300, 2), 0.5, dtype=torch.float64)
    verdict = verify_chain(logits, tokens, uniforms=uniforms, rule=rule, backend="reference")
    probabilities = logits[:, 0].double().softmax(-1)
    entropy = torch.special.entr(probabilities).sum(-1)
    limit = torch.clamp(settings.alpha * torch.exp(-entropy), max=settings.threshold)
    expected = probabilities.gather(1, tokens)[:, 0] > limit
    assert torch.equal(verdict.num_accepted, expected.long())
    rejected = sample(logits[:, 0], uniforms=uniforms[:, 0], backend="reference").tokens
    assert torch.equal(verdict.next_token[~expected], rejected[~expected])


@pytest.mark.parametrize("rule", ["block", "typical"])
def test_greedy_requests_ignore_the_rule(rule):
    logits = torch.randn(50, 4, 9, generator=torch.Generator().manual_seed(11))
    tokens = torch.where(
        torch.rand(50, 3, generator=torch.Generator().manual_seed(12)) < 0.8, logits[:, :3].argmax(-1), 0
    )
    arguments = {"sampling": Sampling(temperature=0.0), "backend": "reference"}
    assert torch.equal(
        verify_chain(logits, tokens, rule=rule, **arguments).tokens, verify_chain(logits, tokens, **arguments).tokens
    )


@pytest.mark.parametrize("rule", ["greedy", 3, None])
def test_an_unknown_rule_is_refused_by_name(rule):
    with pytest.raises(ValueError, match=r"^rule: expected"):
        verify_chain(torch.zeros(1, 2, 3), torch.zeros(1, 1, dtype=torch.int64), rule=rule)


def test_typical_settings_out_of_range_are_refused_by_name():
    with pytest.raises(ValueError, match=r"^threshold: expected"):
        Typical(1.5)
    with pytest.raises(ValueError, match=r"^alpha: expected"):
        Typical(0.3, -1.0)
