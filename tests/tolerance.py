"""How far a backend may be from the reference: one table, and the judgement whether other tokens are a near-tie.

A backend rounds logits and probabilities to float32, so it may decide otherwise than the float64 reference where the
decision hangs on the last bits. The noise of a row is the rounding of its largest score (a logit over temperature),
and so the relative error of its probabilities; a decision is a near-tie if its margin is below TIES times the noise:
- an acceptance: |uniform * draft - target|, relative to the target probability;
- a draw: the distance of uniform * mass from the nearest step of the cumulative mass, in probability;
- a greedy choice between members: the gap between the two largest log-probabilities.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from cases import Case, operator_arguments
from torch import Tensor

import specens_kernels.ops.verify_chain as chain_operation
from specens_kernels import Draw, Verdict
from specens_kernels.arguments import ChainArguments, RandomSource, Target, target_of
from specens_kernels.ensembles import EnsembleKind
from specens_kernels.ops.target_logprobs.reference import (
    ensemble_logprobs,
    parameters,
    target_probs,
)
from specens_kernels.ops.uniforms.reference import uniforms as philox_uniforms
from specens_kernels.ops.verify_chain.reference import chain_uniforms, draft_probs, pick_row
from specens_kernels.packing import sampling_numbers, target_options

ROUNDING = 2.0**-23  # of float32
TIES = {"acceptance": 4.0, "draw": 4.0, "greedy": 4.0, "plausibility": 4.0}  # in units of noise
LOGPROBS = 4.0  # in units of noise
SET_ASIDE = 0.01  # the share of rows that may be near-ties decided otherwise
SMALLEST = 2.0**-126  # probabilities below it may be 0 in float32
NEVER = math.inf


def _target(case: Case) -> Target:
    """The target without its processing."""
    members, ensemble = case.member_logits, case.target["ensemble"]
    return target_of(members, target_options(members, ensemble, sampling_numbers(case.target["sampling"])))


def row_noise(case: Case) -> Tensor:
    """float64 [batch, steps]."""
    target = _target(case)
    batch = case.draft_tokens.shape[0]
    temperature = parameters(target.sampling, case.draft_tokens).temperature
    sizes = []
    for logits in case.member_logits:
        finite = torch.where(torch.isfinite(logits), logits.double(), 0.0).abs()
        sizes.append(finite.amax(-1))
    largest = torch.stack(sizes)  # [members, batch, steps]
    if target.ensemble == EnsembleKind.LOGIT_MIXTURE:
        weights = torch.tensor(target.weights, dtype=torch.float64, device=temperature.device).expand(batch, -1)
        weights = weights if target.weight_rows is None else target.weight_rows.double()
        score = (weights.t()[..., None].abs() * largest).sum(0)
    else:
        score = largest.amax(0)
    return ROUNDING * (1 + score / temperature[:, None])


def verify_ties(case: Case, num_accepted: Tensor) -> Tensor:
    """bool [batch]: whether a decision on the reference's way, which accepted num_accepted drafts, is a near-tie."""
    tokens = case.draft_tokens.long()
    draft_len = tokens.shape[1]
    target = _target(case)
    rows = ensemble_logprobs(target)
    probs, noise = target_probs(rows), row_noise(case)
    draft = _draft_distribution(case, probs.shape[-1], rows.greedy)
    random_numbers = RandomSource(*(case.random_numbers.get(name) for name in ("uniforms", "seeds", "positions")))

    token = tokens.clamp(0, probs.shape[-1] - 1)[..., None]
    at_token, draft_at_token = probs[:, :draft_len].gather(2, token)[..., 0], draft.gather(2, token)[..., 0]
    tests = chain_uniforms(random_numbers, None, tokens) * draft_at_token
    margin = _acceptance_margin(tests, at_token) / noise[:, :draft_len] / TIES["acceptance"]
    ties = (margin < 1) & ~rows.greedy[:, None]

    last = pick_row(probs, num_accepted)
    mass = (last - pick_row(draft, num_accepted)).clamp(min=0)
    uniform = chain_uniforms(random_numbers, num_accepted, tokens)
    last_noise = pick_row(noise[..., None], num_accepted)[:, 0]
    drawn = torch.minimum(_draw_margin(last, uniform), _draw_margin(mass, uniform)) < TIES["draw"] * last_noise
    used = torch.arange(draft_len, device=tokens.device) <= num_accepted[:, None]
    of_rows = row_ties(case)
    rows_used = torch.arange(of_rows.shape[1], device=tokens.device) <= num_accepted[:, None]
    return (ties & used).any(1) | (drawn & ~rows.greedy) | (of_rows & rows_used).any(1)


def draw_ties(case: Case, row: int) -> Tensor:
    """bool [batch]: whether the draw from this row is a near-tie."""
    case = replace(case, member_logits=[logits[:, row : row + 1] for logits in case.member_logits])
    target = _target(case)
    rows, noise = ensemble_logprobs(target), row_noise(case)
    if "uniforms" in case.random_numbers:
        random_numbers = case.random_numbers["uniforms"][:, row]
    else:
        random_numbers = philox_uniforms(case.random_numbers["seeds"], case.random_numbers["positions"], row, 2)
    drawn = _draw_margin(target_probs(rows)[:, 0], random_numbers) < TIES["draw"] * noise[:, 0]
    return (drawn & ~rows.greedy) | row_ties(case)[:, 0]


def _draft_distribution(case: Case, vocab: int, greedy: Tensor) -> Tensor:
    given, options = operator_arguments(chain_operation, case.verify)
    arguments = ChainArguments.of(*given, **options)
    return draft_probs(arguments.target, arguments.draft, vocab, greedy)[0]


def _acceptance_margin(tested: Tensor, target: Tensor) -> Tensor:
    margin = (tested - target).abs() / target.clamp(min=SMALLEST)
    return torch.where(target > 0, margin, NEVER)  # a probability of exactly 0 is 0 everywhere


def _draw_margin(masses: Tensor, uniform: Tensor) -> Tensor:
    """Distance of uniform * total from the nearest step of the cumulative mass; masses [batch, vocab]."""
    if masses.shape[-1] == 1:
        return torch.full_like(uniform, NEVER)
    cumulative = masses.cumsum(-1)
    return (cumulative[:, :-1] - (uniform * cumulative[:, -1])[:, None]).abs().amin(-1)


def row_ties(case: Case) -> Tensor:
    """bool [batch, steps]: greedy near-ties of an ensemble, and tokens at the threshold of plausibility."""
    ensemble, noise = case.target["ensemble"], row_noise(case)
    if ensemble is None:
        return torch.zeros_like(noise, dtype=torch.bool)
    rows = ensemble_logprobs(_target(case))
    ties = threshold_distance(case).amin(-1) < TIES["plausibility"] * noise
    if rows.logprobs.shape[-1] > 1:
        first, second = rows.logprobs.topk(2).values.unbind(-1)
        gap = torch.where(first > -math.inf, first - second, NEVER)
        ties = ties | ((gap < TIES["greedy"] * noise) & rows.greedy[:, None])
    return ties


def threshold_distance(case: Case) -> Tensor:
    """|logit - threshold of plausibility| of each token of member 0, infinite without a threshold."""
    logits = case.member_logits[0].double()
    plausibility = case.target["ensemble"].plausibility if case.target["ensemble"] is not None else None
    if plausibility in (None, 1.0):
        return torch.full_like(logits, NEVER)
    usable = torch.nan_to_num(logits, nan=-math.inf, neginf=-math.inf)
    return torch.nan_to_num((usable - usable.amax(-1, keepdim=True) - math.log(plausibility)).abs(), nan=NEVER)


class Comparison:
    """Judges the results of many cases, and how many rows were set aside in all of them."""

    def __init__(self) -> None:
        self.rows = 0
        self.set_aside = 0

    def verify(self, case: Case, result: Verdict, expected: Verdict) -> None:
        same = (result.tokens == expected.tokens).all(1) & (result.status == expected.status)
        self._judge(same, lambda: verify_ties(case, expected.num_accepted), (case, result, expected))
        for name in ("num_accepted", "num_tokens", "next_token"):
            assert torch.equal(getattr(result, name)[same], getattr(expected, name)[same]), name
        noise = torch.nn.functional.pad(row_noise(case), (0, 1), value=ROUNDING)[:, : case.draft_tokens.shape[1] + 1]
        if result.logprobs is not None and expected.logprobs is not None:
            assert_logprobs(result.logprobs[same], expected.logprobs[same], noise[same])

    def sample(self, case: Case, row: int, result: Draw, expected: Draw) -> None:
        same = (result.tokens == expected.tokens) & (result.status == expected.status)
        self._judge(same, lambda: draw_ties(case, row), (case, result, expected))
        if result.logprobs is not None and expected.logprobs is not None:
            assert_logprobs(result.logprobs[same], expected.logprobs[same], row_noise(case)[same, row])

    def _judge(self, same: Tensor, find_ties: Callable[[], Tensor], compared: tuple[Any, ...]) -> None:
        if not same.all():
            wrong = ~same & ~find_ties()
            assert not wrong.any(), "\n".join(map(str, (f"requests {wrong.nonzero()[:, 0].tolist()} of", *compared)))
        self.rows += len(same)
        self.set_aside += int((~same).sum())

    def finish(self, at_least: int) -> None:
        assert self.rows >= at_least
        assert self.set_aside <= max(1, SET_ASIDE * self.rows), f"{self.set_aside} of {self.rows} rows set aside"


def assert_logprobs(result: Tensor, expected: Tensor, noise: Tensor) -> None:
    """Equal up to the noise [...] of their rows; beyond float32's range only the order of magnitude counts."""
    assert result.dtype == expected.dtype == torch.float32
    assert result.shape == expected.shape
    floor = -1e30
    result, expected = result.double(), expected.double()
    assert not result.isnan().any()
    assert torch.equal(result < floor, expected < floor)
    error = torch.where(expected < floor, 0.0, result.clamp(min=floor) - expected.clamp(min=floor)).abs()
    assert (error <= LOGPROBS * noise).all(), f"error {(error / noise).max():.1f} times the noise"
