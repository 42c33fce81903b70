"""Degenerate rows: each bit of Status, the same on every backend, and the other requests of the batch unchanged."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from cases import Case, Recipe, build, tensors_of
from tolerance import Comparison
from torch import Tensor

from specens_kernels import (
    Contrastive,
    LogitMixture,
    Mixture,
    Sampling,
    Status,
    Verdict,
    instruction_set,
    sample,
    target_logprobs,
    verify_chain,
)

VOCAB = 33
MIDDLE = 1  # the request, of three, that something is wrong with
Damage = Callable[[Case], Case | None]  # changes the case in place, or returns another


def healthy(device: torch.device, **choices: Any) -> Case:
    """Three requests that accept their first draft, so that both rows are used."""
    case = build(Recipe(3, 1, vocabs=(VOCAB, VOCAB), **{"drafter": "one-hot", "seeded": False, **choices}), 21, device)
    if choices.get("ensemble") == "mixture":
        case.target["ensemble"] = Mixture((0.5, 0.5))
    case.draft_tokens.fill_(7)
    for logits in case.member_logits:
        logits[:, 0, 7] = 20.0
    return case


@functools.cache
def healthy_verdict(backend: str, device: torch.device, choices: tuple[tuple[str, Any], ...], _: str | None) -> Verdict:
    return healthy(device, **dict(choices)).verify(backend)


def set_logit(value: float, member: int = 0, row: int = 0) -> Damage:
    def damage(case: Case) -> None:
        case.member_logits[member][MIDDLE, row, 3] = value

    return damage


def empty_row(*members: int, row: int = 0) -> Damage:
    def damage(case: Case) -> None:
        for member in members:
            case.member_logits[member][MIDDLE, row] = -math.inf

    return damage


def set_draft_token(token: int) -> Damage:
    def damage(case: Case) -> None:
        case.draft_tokens[MIDDLE] = token

    return damage


def set_draft_logits(value: float) -> Damage:
    def damage(case: Case) -> None:
        case.draft["draft_logits"][MIDDLE] = value

    return damage


def set_drafter(member: int) -> Damage:
    def damage(case: Case) -> Case:
        drafter = torch.full((3, 1), -1, device=case.draft_tokens.device)
        drafter[MIDDLE] = member
        return replace(case, draft={"drafter": drafter})

    return damage


def set_draft_len(length: int) -> Damage:
    def damage(case: Case) -> Case:
        lens = torch.ones(3, dtype=torch.int64, device=case.draft_tokens.device)
        lens[MIDDLE] = length
        return replace(case, draft=case.draft | {"draft_lens": lens})

    return damage


def set_uniform(value: float, column: int) -> Damage:
    def damage(case: Case) -> None:
        case.random_numbers["uniforms"][MIDDLE, column] = value

    return damage


def set_temperature(value: float) -> Damage:
    """After Sampling has looked at the tensor, as happens on a GPU, where it does not look."""

    def damage(case: Case) -> Case:
        temperatures = torch.ones(3, device=case.draft_tokens.device)
        sampling = Sampling(temperatures)
        temperatures[MIDDLE] = value
        return replace(case, target=case.target | {"sampling": sampling})

    return damage


def set_weights(first: float, second: float) -> Damage:
    def damage(case: Case) -> Case:
        weights = torch.full((3, 2), 0.5, device=case.draft_tokens.device)
        ensemble = Mixture(weights)
        weights[MIDDLE] = torch.tensor([first, second])
        return replace(case, target=case.target | {"ensemble": ensemble})

    return damage


DAMAGES: dict[str, tuple[dict[str, Any], Damage, Status]] = {
    "NaN in the first row": ({}, set_logit(math.nan), Status.NAN_LOGITS),
    "NaN in the bonus row": ({}, set_logit(math.nan, row=1), Status.NAN_LOGITS),
    "NaN in one member of a mixture": ({"ensemble": "mixture"}, set_logit(math.nan, 1), Status.NAN_LOGITS),
    "NaN in one member of a logit mixture": ({"ensemble": "contrastive"}, set_logit(math.nan, 1), Status.NAN_LOGITS),
    "+inf": ({}, set_logit(math.inf), Status.INFINITE_LOGITS),
    "+inf in one member of a mixture": ({"ensemble": "mixture"}, set_logit(math.inf, 1), Status.INFINITE_LOGITS),
    "+inf in the amateur": ({"ensemble": "contrastive"}, set_logit(math.inf, 1), Status.INFINITE_LOGITS),
    "no token in the first row": ({}, empty_row(0), Status.NO_TOKEN),
    "no token in the bonus row": ({}, empty_row(0, row=1), Status.NO_TOKEN),
    "no token in any member": ({"ensemble": "mixture"}, empty_row(0, 1), Status.NO_TOKEN),
    "no token in one member": ({"ensemble": "mixture"}, empty_row(1), Status.MEMBER_WITHOUT_TOKEN),
    "no token in one member of a logit mixture": ({"ensemble": "logit mixture"}, empty_row(1), Status.NO_TOKEN),
    "draft token -1": ({}, set_draft_token(-1), Status.INVALID_DRAFT_TOKEN),
    "draft token after the vocabulary": ({}, set_draft_token(VOCAB), Status.INVALID_DRAFT_TOKEN),
    "draft token far outside": ({}, set_draft_token(-(2**63)), Status.INVALID_DRAFT_TOKEN),
    "no token in the draft's logits": (
        {"drafter": "outside"},
        set_draft_logits(-math.inf),
        Status.INVALID_DRAFT_DISTRIBUTION,
    ),
    "drafter too large": ({"ensemble": "mixture"}, set_drafter(2), Status.INVALID_DRAFT_DISTRIBUTION),
    "drafter too small": ({"ensemble": "mixture"}, set_drafter(-2), Status.INVALID_DRAFT_DISTRIBUTION),
    "draft_lens below 0": ({}, set_draft_len(-1), Status.INVALID_PARAMETER),
    "draft_lens above draft_len": ({}, set_draft_len(2), Status.INVALID_PARAMETER),
    "acceptance uniform NaN": ({}, set_uniform(math.nan, 0), Status.INVALID_PARAMETER),
    "acceptance uniform 1": ({}, set_uniform(1.0, 0), Status.INVALID_PARAMETER),
    "last uniform negative": ({}, set_uniform(-0.1, 1), Status.INVALID_PARAMETER),
    "temperature NaN": ({}, set_temperature(math.nan), Status.INVALID_PARAMETER),
    "temperature negative": ({}, set_temperature(-1.0), Status.INVALID_PARAMETER),
    "temperature infinite": ({}, set_temperature(math.inf), Status.INVALID_PARAMETER),
    "weight NaN": ({"ensemble": "mixture"}, set_weights(math.nan, 0.5), Status.INVALID_PARAMETER),
    "weight negative": ({"ensemble": "mixture"}, set_weights(-0.5, 1.5), Status.INVALID_PARAMETER),
    "weights of sum 2": ({"ensemble": "mixture"}, set_weights(1.0, 1.0), Status.INVALID_PARAMETER),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_a_degenerate_request_is_marked_and_its_neighbours_are_not_touched(backend, device, name):
    choices, damage, bit = DAMAGES[name]
    case = healthy(device, **choices)
    case = damage(case) or case
    verdict, expected = case.verify(backend), case.verify("reference")
    assert verdict.status.tolist() == [0, int(bit), 0]
    comparison = Comparison()
    comparison.verify(case, verdict, expected)
    comparison.finish(at_least=3)
    whole = healthy_verdict(backend, device, tuple(choices.items()), instruction_set.in_use())
    for own, other in zip(tensors_of(verdict), tensors_of(whole), strict=True):
        assert torch.equal(own[[0, 2]], other[[0, 2]])
    if bit in (Status.NO_TOKEN, Status.INVALID_PARAMETER):
        assert verdict.next_token[MIDDLE] == -1
    if bit == Status.INVALID_PARAMETER:
        assert verdict.num_tokens[MIDDLE] == 0
        assert (verdict.tokens[MIDDLE] == -1).all()


def test_every_bit_is_tested():
    tested = {bit for _, _, bit in DAMAGES.values()} | {Status.EMPTY_RESIDUAL}
    assert tested == set(Status) - {Status.OK}


def test_several_faults_of_a_request_are_reported_together(backend, device):
    case = healthy(device)
    case.member_logits[0][MIDDLE, 0, 3] = math.nan
    case.member_logits[0][MIDDLE, 1, 3] = math.inf
    both = Status.NAN_LOGITS | Status.INFINITE_LOGITS
    assert case.verify(backend).status.tolist() == [0, int(both), 0]


def test_a_fault_in_a_row_that_is_not_used_is_not_reported(backend, device):
    case = healthy(device)
    case.member_logits[0][:, 0, 7] = -math.inf  # the draft is rejected
    case.member_logits[0][MIDDLE, 1] = math.nan
    verdict = case.verify(backend)
    assert verdict.num_accepted.tolist() == [0, 0, 0]
    assert verdict.status.tolist() == [0, 0, 0]


def test_a_fault_in_a_member_without_weight_is_not_reported(backend, device):
    case = healthy(device, ensemble="mixture")
    case.member_logits[1][:] = math.nan
    for ensemble in (Mixture((1.0, 0.0)), LogitMixture((1.0, 0.0))):
        alone = replace(case, member_logits=case.member_logits[:1], target=case.target | {"ensemble": None})
        verdict = replace(case, target=case.target | {"ensemble": ensemble}).verify(backend)
        assert verdict.status.tolist() == [0, 0, 0]
        assert torch.equal(verdict.tokens, alone.verify(backend).tokens)


@pytest.mark.parametrize("backend", ["reference", "cpp", "triton"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("other", [[1.0], [1.0, float("-inf"), 2.0]])
def test_a_fault_where_another_member_excludes_the_token_is_reported(backend, device, temperature, bad, other):
    members = [torch.tensor([[0.0, bad, 1.0]], device=device), torch.tensor([other], device=device)]
    random_numbers = torch.tensor([0.1], dtype=torch.float64, device=device)
    for pair, weights in ((members, (1.0, 0.5)), (members[::-1], (0.5, 1.0))):
        drawn = sample(
            pair,
            ensemble=LogitMixture(weights),
            sampling=Sampling(temperature=temperature),
            uniforms=random_numbers,
            backend=backend,
        )
        assert drawn.status.item() == (Status.NAN_LOGITS if bad != bad else Status.INFINITE_LOGITS)


@pytest.mark.parametrize("backend", ["reference", "cpp", "triton"])
def test_greedy_requests_ignore_their_uniforms(backend, device):
    """Also uniforms that would be out of range."""
    logits = torch.tensor([[[0.0, 1.0], [1.0, 0.0]]], device=device).expand(3, -1, -1)
    uniforms = torch.tensor([[0.5, 0.5], [math.nan, math.nan], [7.0, -1.0]], dtype=torch.float64, device=device)
    tokens = torch.ones(3, 1, dtype=torch.int64, device=device)
    greedy = Sampling(temperature=0.0)
    verdict = verify_chain(logits, tokens, sampling=greedy, uniforms=uniforms, backend=backend)
    assert verdict.tokens.tolist() == [[1, 0]] * 3
    assert verdict.status.tolist() == [0] * 3
    drawn = sample(logits[:, 0], sampling=greedy, uniforms=uniforms[:, 0], backend=backend)
    assert (drawn.tokens.tolist(), drawn.status.tolist()) == ([1] * 3, [0] * 3)


def test_a_residual_that_rounds_to_nothing_gives_a_draw_from_the_target(backend, device):
    """A mixture of equal members is its drafter up to rounding: the last uniform may reject and leave no residual."""
    batch = 24
    weights = torch.rand(batch, 3, generator=torch.Generator().manual_seed(0)) + 0.1
    logits = torch.zeros(batch, 2, 1, device=device)
    verdict = verify_chain(
        [logits] * 3,
        torch.zeros(batch, 1, dtype=torch.int64, device=device),
        ensemble=Mixture((weights / weights.sum(1, keepdim=True)).to(device)),
        drafter=0,
        uniforms=torch.full((batch, 2), 1 - 2.0**-53, dtype=torch.float64, device=device),
        backend=backend,
    )
    rejected = verdict.num_accepted == 0
    assert rejected.any()
    assert torch.equal(verdict.status, rejected * Status.EMPTY_RESIDUAL)
    assert (verdict.next_token == 0).all()


@pytest.mark.parametrize(
    ("values", "token", "status"),
    [
        ([math.nan, 0.0, -math.inf], 1, Status.NAN_LOGITS),
        ([0.0, math.inf, 5.0], 1, Status.INFINITE_LOGITS),
        ([-math.inf, -math.inf, -math.inf], -1, Status.NO_TOKEN),
        ([math.nan, math.nan, math.nan], -1, Status.NAN_LOGITS | Status.NO_TOKEN),
        ([-math.inf, -3e38, -math.inf], 1, Status.OK),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_draw_from_a_degenerate_row_is_marked(backend, device, dtype, values, token, status):
    logits = torch.tensor([[0.0, 0.0, 9.0], values, [9.0, 0.0, 0.0]], device=device).to(dtype)
    random_numbers = torch.full((3,), 0.5, dtype=torch.float64, device=device)
    for sampling in (Sampling(), Sampling(temperature=0.0)):
        drawn = sample(logits, sampling=sampling, uniforms=random_numbers, logprobs=True, backend=backend)
        assert drawn.tokens.tolist() == [2, token, 0]
        assert drawn.status.tolist() == [0, int(status), 0]
        assert drawn.logprobs.isfinite().all()
    dense = target_logprobs(logits, backend=backend)
    assert (dense[MIDDLE] > -1e30).sum() == (token >= 0)
    assert not dense.isnan().any()


def test_a_threshold_of_plausibility_from_an_earlier_call_is_forgotten(backend, device):
    """Its logits may no longer exist: the wide ones are given back to the system before the narrow ones are read."""

    def verify(vocab: int, draft: int, ensemble: Contrastive | LogitMixture) -> Tensor:
        generator = torch.Generator().manual_seed(vocab)
        members = [torch.randn(1, 1, vocab, generator=generator).to(device) for _ in range(2)]
        random_numbers = torch.zeros(1, 2, dtype=torch.float64, device=device)
        token = torch.tensor([[draft]], device=device)
        return verify_chain(members, token, ensemble=ensemble, uniforms=random_numbers, backend=backend).num_accepted

    wide = 10_000_000 if backend == "cpp" else 100
    verify(wide, 0, Contrastive(0.1, plausibility=1.0))
    assert verify(99, 98, LogitMixture((1.0, 0.5))).item() == 1
