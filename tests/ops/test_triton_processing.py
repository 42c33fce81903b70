"""Logit processing and bit masks in Triton's kernels: the reference's results, on small problems (interpreted)."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from cases import operator_arguments
from problems import LOGPROBS, Judge, Problem, random_problem
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

import specens_kernels.ops.verify_chain as operation
import specens_kernels.ops.verify_chain.triton_kernel as kernels
from specens_kernels import Contrastive, Mixture, Processing, Sampling, Status, sample, target_logprobs, verify_chain
from specens_kernels.parts.edits import quotient

EVERYTHING = {
    "logit_bias": (torch.tensor([[4, 4, -1], [0, 33, 8]]), torch.tensor([[1.5, -0.5, 9.0], [-math.inf, 9.0, 2.0]])),
    "repetition_penalty": torch.tensor([1.3, 0.7]),
    "frequency_penalty": 0.4,
    "presence_penalty": torch.tensor([-0.2, 0.3], dtype=torch.float64),
    "min_tokens": torch.tensor([1, 2], dtype=torch.int32),
    "end_tokens": torch.tensor([11, 9]),
    "prompt_tokens": torch.tensor([[3, 5, 5, -1], [40, 1, 0, 2]]),
    "output_tokens": torch.tensor([[7, 7, -1], [3, 33, 3]], dtype=torch.int32),
}


def filtered(problem: Problem) -> bool:
    return problem.arguments["sampling"].filters or problem.arguments.get("draft_sampling", Sampling()).filters


def small_problems(count: int, seed: int, largest: int = 4) -> Iterator[tuple[int, Problem]]:
    """Random problems of at most so many rows, some of whose logits are edited or masked, without filters."""
    while count > 0:
        problem = random_problem(seed, (7, 33))
        batch, rows, _ = problem.logits[0].shape
        processing = problem.arguments["processing"]
        edited = problem.arguments["allowed"] is not None or processing is not None
        if edited and not filtered(problem) and 0 < batch * rows <= largest:
            yield seed, problem
            count -= 1
        seed += 1


def everything(ensemble: Any, **changes: Any) -> Problem:
    """Two requests of a draft under all processing and a bit mask that leaves out token 0 and those after 31."""
    generator = torch.Generator().manual_seed(0)
    vocabs = (33,) if ensemble is None else (33, 40)
    logits = [2 * torch.randn(2, 2, vocab, generator=generator) for vocab in vocabs]
    arguments = {
        "ensemble": ensemble,
        "sampling": Sampling(temperature=torch.tensor([0.8, 1.1])),
        "processing": Processing(**EVERYTHING),
        "allowed": torch.tensor([[[-2], [-2]], [[-2], [-1]]], dtype=torch.int32),
        "uniforms": torch.tensor([[0.1, 0.3], [0.4, 0.6]], dtype=torch.float64),
        "logprobs": True,
    }
    return Problem(logits, torch.tensor([[7], [9]]), arguments | changes)


def assert_verified(problem: Problem) -> None:
    Judge().compare(problem, problem.verify("triton"), problem.verify("reference"), problem.arguments)


def test_random_processed_chains_are_verified_as_by_the_reference():
    judge = Judge()
    for seed, problem in small_problems(8, seed=0):
        judge.compare(problem, problem.verify("triton"), problem.verify("reference"), seed)
    judge.finish(at_least=8)


def test_random_processed_rows_are_scored_and_drawn_from_as_by_the_reference():
    for seed, problem in small_problems(3, seed=1000, largest=2):
        given = problem.target() | {"draft_tokens": problem.tokens if seed % 2 else None}
        if problem.tokens.shape[1] < problem.logits[0].shape[1] - 1:
            given["draft_tokens"] = None
        expected, result = (target_logprobs(problem.logits, backend=name, **given) for name in ("reference", "triton"))
        agree = (expected.isinf() == result.isinf()).all(-1)  # a filter can hang on the last bits
        assert agree.double().mean() >= 0.5
        torch.testing.assert_close(result[agree], expected[agree], **LOGPROBS)
        given = problem.target() | {"uniforms": problem.arguments["uniforms"][:, 0].contiguous(), "logprobs": True}
        given["allowed"] = None if given["allowed"] is None else given["allowed"][:, 0]
        row = [values[:, 0] for values in problem.logits]
        drawn, wanted = (sample(row, backend=name, **given) for name in ("triton", "reference"))
        assert torch.equal(drawn.tokens, wanted.tokens), seed
        assert torch.equal(drawn.status, wanted.status), seed
        torch.testing.assert_close(drawn.logprobs, wanted.logprobs, **LOGPROBS)


HALVES, CONTRAST = Mixture((0.5, 0.5)), Contrastive(0.2, 0.1)


@pytest.mark.parametrize(
    ("ensemble", "rule", "drafter", "process_drafts"),
    [
        (None, "block", "member", True),
        (None, "token", "outside", False),
        (HALVES, "block", "member", False),
        (HALVES, "token", "outside", True),
        (CONTRAST, "block", "outside", True),
        (CONTRAST, "token", "member", False),
    ],
)
def test_all_processing_at_once_under_each_drafter(ensemble, rule, drafter, process_drafts):
    outside = 2 * torch.randn(2, 1, 36, generator=torch.Generator().manual_seed(1))
    drafts = {"drafter": 0} if drafter == "member" else {"draft_logits": outside}
    assert_verified(everything(ensemble, rule=rule, process_drafts=process_drafts, **drafts))


@pytest.mark.parametrize("filter", ["mixture", "members"])
def test_filters_see_the_processed_logits(filter):
    ensemble = Mixture((0.5, 0.5), filter=filter)
    problem = everything(ensemble, sampling=Sampling(temperature=0.9, top_k=9))
    given = problem.target() | {"allowed": problem.arguments["allowed"][:, :1]}
    row = [values[:, :1] for values in problem.logits]
    expected, result = (target_logprobs(row, backend=backend, **given) for backend in ("reference", "triton"))
    torch.testing.assert_close(result, expected, **LOGPROBS)


def test_filters_of_drafts_see_the_logits_as_they_are_where_drafts_were_not_processed():
    filters = {"sampling": Sampling(), "draft_sampling": Sampling(temperature=0.9, top_k=9)}
    assert_verified(everything(None, drafter=0, process_drafts=False, **filters))


@pytest.mark.parametrize("name", [name for name in EVERYTHING if name != "min_tokens"])
def test_each_kind_of_processing_alone(name):
    own = {name: EVERYTHING[name]}
    if name == "end_tokens":
        own["min_tokens"] = 2
    if name.endswith("_tokens") and name != "end_tokens":
        own["repetition_penalty"] = 1.5
    problem = everything(None, processing=Processing(**own), allowed=None)
    given = problem.target() | {"draft_tokens": problem.tokens}
    expected, result = (
        target_logprobs(problem.logits, backend=backend, **given) for backend in ("reference", "triton")
    )
    torch.testing.assert_close(result, expected, **LOGPROBS)


def test_tables_longer_than_a_block_of_entries_count_every_token():
    """300 biases of which many are of the same token, and an output of as many tokens."""
    generator = torch.Generator().manual_seed(2)
    tokens = torch.randint(-2, 150, (2, 300), generator=generator)
    processing = Processing(
        logit_bias=(tokens, torch.randn(2, 300, generator=generator)),
        frequency_penalty=0.1,
        output_tokens=torch.randint(-2, 150, (2, 300), generator=generator),
        prompt_tokens=tokens[:, :100],
        repetition_penalty=1.1,
    )
    logits = torch.randn(2, 1, 140, generator=generator)
    expected, result = (
        target_logprobs(logits, processing=processing, backend=name) for name in ("reference", "triton")
    )
    torch.testing.assert_close(result, expected, **LOGPROBS)


def test_a_nan_that_processing_or_the_mask_removes_is_no_status():
    logits = torch.zeros(2, 5)
    logits[:, 3] = torch.nan
    drawn = sample(
        logits,
        allowed=torch.tensor([[0b10111], [0b11111]], dtype=torch.int32),
        uniforms=torch.tensor([0.9, 0.9]),
        backend="triton",
    )
    assert drawn.tokens.tolist() == [4, 4]
    assert drawn.status.tolist() == [0, Status.NAN_LOGITS]


def test_a_row_without_an_allowed_token_emits_nothing():
    words = torch.tensor([[[-1], [0]], [[-1], [2]]], dtype=torch.int32)
    verdict = verify_chain(
        torch.zeros(2, 2, 5),
        torch.tensor([[1], [1]]),
        allowed=words,
        uniforms=torch.tensor([[0.1, 0.5]] * 2),
        backend="triton",
    )
    assert verdict.tokens.tolist() == [[1, -1], [1, 1]]
    assert verdict.status.tolist() == [Status.NO_TOKEN, 0]


@pytest.mark.parametrize("name", ["repetition_penalty", "frequency_penalty", "presence_penalty"])
def test_a_penalty_out_of_range_in_a_tensor_is_a_status_of_its_request(name):
    processing = Processing(**{name: torch.ones(2)})
    getattr(processing, name)[1] = math.nan  # after the check
    verdict = verify_chain(
        torch.zeros(2, 2, 4),
        torch.zeros(2, 1, dtype=torch.int64),
        processing=processing,
        uniforms=torch.full((2, 2), 0.1),
        backend="triton",
    )
    assert verdict.status.tolist() == [0, Status.INVALID_PARAMETER]
    assert verdict.num_tokens.tolist() == [2, 0]


class Allocations(TorchDispatchMode):
    """The bytes of the tensors that operators return."""

    total = 0

    def __torch_dispatch__(self, operator: Any, types: Any, arguments: Any = (), options: Any = None) -> Any:
        result = operator(*arguments, **(options or {}))
        given = {value.untyped_storage().data_ptr() for value in arguments if isinstance(value, Tensor)}
        for value in result if isinstance(result, tuple | list) else (result,):
            if isinstance(value, Tensor) and value.untyped_storage().data_ptr() not in given:
                self.total += value.untyped_storage().nbytes()
        return result


def test_a_processed_call_makes_no_copy_of_the_logits():
    problem = everything(HALVES, drafter=0, process_drafts=False)
    logits = [torch.zeros(2, 2, 100_000, dtype=torch.bfloat16) for _ in range(2)]
    words = torch.zeros(2, 2, 3125, dtype=torch.int32)
    problem = replace(problem, logits=logits, arguments=problem.arguments | {"allowed": words})
    given, options = operator_arguments(operation, problem.verify)
    with Allocations() as allocations, patch.object(kernels, "run", lambda launches, _: list(launches)):
        kernels.launch(*given, **options)
    assert 0 < allocations.total < 0.01 * sum(2 * values.numel() for values in logits)


def fused(left: np.ndarray, right: np.ndarray, added: np.ndarray) -> np.ndarray:
    """left * right + added in float32, rounded once: float64 holds the products, and sums are first rounded to odd."""
    products, added = left.astype(np.float64) * right.astype(np.float64), np.float64(added)
    sums = products + added
    of_added = sums - products
    errors = (products - (sums - of_added)) + (added - of_added)
    next_to_it = np.nextafter(sums, np.where(errors > 0, np.inf, -np.inf))
    return np.where((errors != 0) & (sums.view(np.int64) % 2 == 0), next_to_it, sums).astype(np.float32)


@triton.jit
def divide_kernel(numerators_ptr, divisors_ptr, quotients_ptr, block: tl.constexpr):
    offsets = tl.program_id(0) * block + tl.arange(0, block)
    divided = quotient(tl.load(numerators_ptr + offsets), tl.load(divisors_ptr + tl.program_id(0)))
    tl.store(quotients_ptr + offsets, divided)


def test_logits_are_divided_by_a_penalty_as_ieee_says():
    """Where multiply-add is fused, as on GPUs; among the divisors those whose reciprocals are off by most."""
    generator = np.random.default_rng(0)
    divisors = np.linspace(1, 2, 2**23, endpoint=False, dtype=np.float32)
    errors = np.abs(divisors.astype(np.float64) * (1 / divisors) - 1)
    divisors = np.concatenate([divisors[np.argsort(errors)[-8:]], generator.uniform(0.01, 100, 8).astype(np.float32)])
    numerators = (generator.standard_normal((16, 2**18)) * 10 ** generator.uniform(-3, 3, (16, 1))).astype(np.float32)
    numerators[:, :3] = [0.0, np.inf, np.finfo(np.float32).max]
    quotients = torch.empty(numerators.shape)
    with (
        patch.object(
            InterpreterBuilder,
            "create_fma",
            lambda _, *factors: TensorHandle(fused(*(factor.data for factor in factors)), factors[0].dtype.scalar),
        ),
        np.errstate(all="ignore"),
    ):
        divide_kernel[(16,)](torch.from_numpy(numerators), torch.from_numpy(divisors), quotients, block=2**18)
        assert np.array_equal(quotients.numpy(), numerators / divisors[:, None])
        assert not np.array_equal(numerators * (1 / divisors)[:, None], numerators / divisors[:, None])
