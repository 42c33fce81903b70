"""The text law under processing, bit masks and filters, summed over all chains and integrated over all uniforms.

Rows depend on the token before them, by the penalties on all. A verdict is constant in a uniform between two
thresholds of the rule, so one uniform from each interval, weighted by its width, integrates it: were a decision made
elsewhere than at these thresholds, the law would not come out.
"""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from specens_kernels import LogitMixture, Mixture, Processing, Sampling, Synthetic, target_logprobs, verify_chain

VOCAB, DRAFT_LEN = 3, 2
CHAINS = torch.tensor(list(itertools.product(range(VOCAB), repeat=DRAFT_LEN)))
TEXTS = torch.tensor(list(itertools.product(range(VOCAB), repeat=DRAFT_LEN + 1)))
GENERATOR = torch.Generator().manual_seed(4)
TABLES = torch.randn(2, DRAFT_LEN + 1, VOCAB, VOCAB, generator=GENERATOR) * 0.7  # of members, by the token before
DRAFT_TABLE = torch.randn(DRAFT_LEN, VOCAB, VOCAB, generator=GENERATOR)
ENSEMBLES = {"none": None, "mixture": Mixture((0.3, 0.7)), "logit mixture": LogitMixture((1.2, -0.4))}
SAMPLINGS = {"plain": Sampling(0.8), "filters": Sampling(0.9, top_k=2, min_p=0.05), "top-p": Sampling(top_p=0.7)}


def processing(batch: int) -> Processing:
    def each(*values: Any) -> Tensor:
        return torch.tensor([values]).expand(batch, -1)

    return Processing(
        logit_bias=(each(0, 0, -1), each(0.9, 0.8, 9.0)),
        repetition_penalty=1.5,
        frequency_penalty=0.6,
        presence_penalty=0.3,
        min_tokens=1,
        end_tokens=torch.tensor([2]),
        prompt_tokens=each(0),
        output_tokens=each(2, 2),
    )


def mask(batch: int, rows: int) -> Tensor:
    """Row 1 may not emit token 0."""
    words = torch.full((batch, rows, 1), -1, dtype=torch.int32)
    words[:, 1:2] = 0b110
    return words


def rows_of(table: Tensor, tokens: Tensor) -> Tensor:
    """[batch, steps, vocab] of a table [steps, vocab, vocab]: each row after the token before it, first after 0."""
    before = torch.nn.functional.pad(tokens, (1, 0))[:, : len(table)]
    return table[torch.arange(before.shape[1]), before]


def target_of(tokens: Tensor, arguments: dict[str, Any]) -> Tensor:
    """float64 [batch, draft_len + 1, vocab]."""
    batch = len(tokens)
    logits = [rows_of(table, tokens) for table in TABLES[: 1 if arguments["ensemble"] is None else 2]]
    given = {name: arguments[name] for name in ("ensemble", "sampling")}
    given |= {"processing": processing(batch), "allowed": mask(batch, DRAFT_LEN + 1), "draft_tokens": tokens}
    return target_logprobs(logits, backend="reference", **given).double().exp()


def draft_of(tokens: Tensor, sampling: Sampling, processed: bool) -> Tensor:
    """float64 [batch, draft_len, vocab]: what an outside drafter draws from."""
    given: dict[str, Any] = {"sampling": sampling, "draft_tokens": tokens}
    if processed:
        given |= {"processing": processing(len(tokens)), "allowed": mask(len(tokens), DRAFT_LEN)}
    return target_logprobs(rows_of(DRAFT_TABLE, tokens), backend="reference", **given).double().exp()


def intervals(thresholds: list[float]) -> list[tuple[float, float]]:
    """(uniform, width) of each interval of [0, 1) between thresholds."""
    ends = sorted({0.0, 1.0, *(value for value in thresholds if 1e-9 < value < 1 - 1e-9)})
    return [((low + high) / 2, high - low) for low, high in itertools.pairwise(ends) if high - low > 1e-6]


def shares(target: Tensor, draft: Tensor, chain: list[int], rule: str) -> list[float]:
    """By how much the target is scaled in the residual of each row."""
    values = [1.0]
    for step, token in enumerate(chain):
        ratio = float(target[step, token] / draft[step, token])
        values.append(min(1.0, values[-1] * ratio) if rule == "block" else 1.0)
    return values


def chances(target: Tensor, draft: Tensor, chain: list[int], rule: str) -> list[float]:
    """The thresholds of the acceptance uniforms."""
    if rule == "token":
        return [float(target[step, token] / draft[step, token]) for step, token in enumerate(chain)]
    own = shares(target, draft, chain, rule)
    result = []
    for length in range(1, DRAFT_LEN):
        mass = float((own[length] * target[length] - draft[length]).clamp(min=0).sum())
        result.append(mass / (mass + 1 - own[length]) if mass + 1 - own[length] > 1e-6 else 1.0)
    return [*result, own[DRAFT_LEN]]


def enumerate_uniforms(
    target: Tensor, draft: Tensor, chain: list[int], rule: str
) -> list[tuple[tuple[float, ...], float]]:
    """The uniforms of a round and their weight."""
    masses = list(target)
    for step, share in enumerate(shares(target, draft, chain, rule)[:DRAFT_LEN]):
        masses.append((share * target[step] - draft[step]).clamp(min=0))
    steps = [float(step) for mass in masses if mass.sum() > 0 for step in mass.cumsum(0) / mass.sum()]
    axes = [intervals([chance]) for chance in chances(target, draft, chain, rule)] + [intervals(steps)]
    return [
        (tuple(uniform for uniform, _ in point), math.prod(width for _, width in point))
        for point in itertools.product(*axes)
    ]


def emitted_law(
    arguments: dict[str, Any], draft_sampling: Sampling, processed: bool, backend: str, *, said: bool | None = None
) -> Tensor:
    """float64 [texts]: of what one round emits, followed by draws from the target; said: what verification is told."""
    said = processed if said is None else said
    targets, drafts = target_of(CHAINS, arguments), draft_of(CHAINS, draft_sampling, processed)
    indices, random_numbers, weights = [], [], []
    for index, chain in enumerate(CHAINS.tolist()):
        probability = math.prod(float(drafts[index, step, token]) for step, token in enumerate(chain))
        if probability == 0:
            continue
        for point, width in enumerate_uniforms(targets[index], drafts[index], chain, arguments["rule"]):
            indices.append(index)
            random_numbers.append(point)
            weights.append(probability * width)
    tokens = CHAINS[indices]
    members = TABLES[: 1 if arguments["ensemble"] is None else 2]
    verdict = verify_chain(
        [rows_of(table, tokens) for table in members],
        tokens,
        **arguments,
        draft_logits=rows_of(DRAFT_TABLE, tokens),
        draft_sampling=draft_sampling,
        processing=processing(len(tokens)),
        process_drafts=said,
        allowed=mask(len(tokens), DRAFT_LEN + 1),
        uniforms=torch.tensor(random_numbers, dtype=torch.float64),
        backend=backend,
    )
    assert (verdict.status == 0).all()
    later = target_of(TEXTS, arguments)  # a text's own tokens are the drafts before its rows
    steps = torch.arange(DRAFT_LEN + 1)
    law = torch.zeros(len(TEXTS), dtype=torch.float64)
    for index, text in enumerate(TEXTS):
        fits = ((verdict.tokens == text) | (verdict.tokens == -1)).all(1)
        drawn = torch.where(verdict.tokens == -1, later[index, steps, text], 1.0).prod(1)
        law[index] = (torch.tensor(weights).double() * fits * drawn).sum()
    return law


def lawful(arguments: dict[str, Any]) -> Tensor:
    """float64 [texts]: the product of the target's probabilities."""
    return target_of(TEXTS, arguments).gather(2, TEXTS[..., None])[..., 0].prod(1)


@pytest.mark.parametrize("backend", ["reference", "cpp"])
@pytest.mark.parametrize("processed", [True, False], ids=["processed drafts", "raw drafts"])
@pytest.mark.parametrize("sampling", SAMPLINGS)
@pytest.mark.parametrize("ensemble", ENSEMBLES)
@pytest.mark.parametrize("rule", ["token", "block"])
def test_texts_follow_the_processed_target_with_their_own_tokens_counted(rule, ensemble, sampling, processed, backend):
    arguments = {"ensemble": ENSEMBLES[ensemble], "sampling": SAMPLINGS[sampling], "rule": rule}
    law = emitted_law(arguments, Sampling(0.7, top_k=2), processed, backend)
    torch.testing.assert_close(law, lawful(arguments), rtol=0, atol=2e-5)
    assert float(law.sum()) == pytest.approx(1, abs=2e-5)


def test_the_law_would_show_drafts_that_are_not_what_they_are_said_to_be():
    """Drafts from processed logits that are said to be from raw ones."""
    arguments = {"ensemble": None, "sampling": SAMPLINGS["plain"], "rule": "token"}
    law = emitted_law(arguments, Sampling(0.7), True, "reference", said=False)
    assert (law - lawful(arguments)).abs().max() > 0.005


def test_the_processed_target_is_not_the_raw_one_and_depends_on_the_drafts():
    arguments = {"ensemble": None, "sampling": Sampling()}
    rows = target_of(CHAINS, arguments)
    assert (rows[:, 0, 2] == 0).all()  # the end is held back in the first row only
    assert (rows[:, 1, 2] > 0).all()
    assert (rows[:, 1, 0] == 0).all()  # by the mask
    same_last = rows[CHAINS[:, 1] == 1][:, 2]
    assert (same_last - same_last[0]).abs().max() > 0.01


@pytest.mark.parametrize("backend", ["reference", "cpp"])
@pytest.mark.parametrize("temperature", [1.0, 0.0])
def test_synthetic_acceptance_meets_its_rates_on_a_grid_of_uniforms(backend, temperature):
    """Given that all before it are; whatever the target thinks of the drafts."""
    rates, size = (0.5, 0.25, 1.0, 0.0), 8
    grid = (torch.arange(size, dtype=torch.float64) + 0.5) / size
    uniforms = torch.cartesian_prod(*[grid] * 3)
    uniforms = torch.cat([uniforms, torch.full((len(uniforms), 2), 0.5)], 1)
    logits, tokens = torch.zeros(len(uniforms), 5, 4), torch.full((len(uniforms), 4), 3)
    logits[..., 3] = -math.inf  # the target would never emit the drafts
    verdict = verify_chain(
        logits,
        tokens,
        sampling=Sampling(temperature),
        rule=Synthetic(rates),
        uniforms=uniforms,
        backend=backend,
    )
    accepted = verdict.num_accepted
    shares = [float((accepted >= length).double().mean()) for length in (1, 2, 3, 4)]
    assert shares == [0.5, 0.125, 0.125, 0.0]
    assert (verdict.next_token == (0 if temperature == 0 else 1)).all()
    assert (verdict.status == 0).all()


@pytest.mark.parametrize("backend", ["reference", "cpp"])
@pytest.mark.parametrize("rate", [0.3, 0.8, 1e-9])
def test_a_uniform_on_its_synthetic_rate_refuses_and_the_one_below_accepts(backend, rate):
    below = math.nextafter(rate, 0.0)
    uniforms = torch.tensor([[rate, 0.5], [below, 0.5]], dtype=torch.float64)
    arguments = {"uniforms": uniforms, "rule": Synthetic(rate), "backend": backend}
    verdict = verify_chain(torch.zeros(2, 2, 4), torch.zeros(2, 1, dtype=torch.int64), **arguments)
    assert verdict.num_accepted.tolist() == [0, 1]


@pytest.mark.parametrize("backend", ["reference", "cpp"])
def test_the_token_after_a_synthetic_rejection_follows_the_target(backend):
    grid = (torch.arange(64, dtype=torch.float64) + 0.5) / 64
    probabilities = torch.tensor([0.25, 0.5, 0.25])
    logits = probabilities.log().expand(64, 2, -1)
    outside = torch.tensor([0.5, 0.25, 0.25]).log().expand(64, 1, -1)
    uniforms = torch.stack([torch.full_like(grid, 0.9), grid], 1)
    verdict = verify_chain(
        logits,
        torch.zeros(64, 1, dtype=torch.int64),
        draft_logits=outside,
        rule="synthetic",
        uniforms=uniforms,
        backend=backend,
    )
    assert torch.equal(torch.bincount(verdict.next_token, minlength=3) / 64, probabilities)
