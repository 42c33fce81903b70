"""Logit processing and bit masks: the C++ backend against the reference, in every layout."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from cases import lay_out, operator_arguments, tensors_of, with_threads
from hypothesis import given, settings
from hypothesis import strategies as st
from problems import LOGPROBS, Judge, Maker, Problem, random_problem
from torch import Tensor

import specens_kernels.ops.target_logprobs as score_operation
import specens_kernels.ops.verify_chain as verify_operation
from specens_kernels import Mixture, Processing, Sampling, Status, sample, target_logprobs, verify_chain

VOCABS = (1, 33, 33, 33, 200, 200, 1500)
EVERYTHING = {
    "logit_bias": (torch.tensor([[4, 4, -1], [0, 33, 8]]), torch.tensor([[1.5, -0.5, 9.0], [-math.inf, 9.0, 2.0]])),
    "repetition_penalty": 1.3,
    "frequency_penalty": 0.4,
    "presence_penalty": -0.2,
    "min_tokens": torch.tensor([1, 3]),
    "end_tokens": torch.tensor([11, 12]),
    "prompt_tokens": torch.tensor([[3, 5, 5, -1], [40, 1, 0, 2]]),
    "output_tokens": torch.tensor([[7, 7, -1], [3, 33, 3]]),
}


def random_logits(*shape: int, seed: int = 0) -> Tensor:
    return 2 * torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.fixture
def everything() -> Problem:
    """Two requests of three rows under all processing, a bit mask and filters."""
    arguments = {
        "ensemble": Mixture((0.5, 0.5)),
        "sampling": Sampling(temperature=0.8, top_k=20),
        "processing": Processing(**EVERYTHING),
        "allowed": torch.full((2, 3, 2), -2, dtype=torch.int32),
        "drafter": 0,
        "uniforms": torch.tensor([[0.1, 0.2, 0.3], [0.4, 0.1, 0.6]], dtype=torch.float64),
        "logprobs": True,
    }
    return Problem(
        [random_logits(2, 3, 33), random_logits(2, 3, 30, seed=1)], torch.tensor([[7, 3], [9, 9]]), arguments
    )


def with_processing(problem: Problem, **changes: Any) -> Problem:
    processing = replace(problem.arguments["processing"], **changes)
    return replace(problem, arguments=problem.arguments | {"processing": processing})


def assert_same_bits(problem: Problem, other: Problem) -> None:
    for own, expected in zip(tensors_of(other.verify("cpp")), tensors_of(problem.verify("cpp")), strict=True):
        assert torch.equal(own, expected)


def test_cpp_verifies_processed_chains_as_the_reference():
    judge = Judge()
    for seed in range(300):
        problem = random_problem(seed, VOCABS)
        judge.compare(problem, problem.verify("cpp"), problem.verify("reference"), seed)
    judge.finish(at_least=600)


@pytest.mark.parametrize("seed", range(6))
def test_cpp_verifies_processed_chains_of_a_large_vocabulary_as_the_reference(seed):
    problem, judge = random_problem(1000 + seed, (50257,)), Judge()
    judge.compare(problem, problem.verify("cpp"), problem.verify("reference"), seed)
    judge.finish(at_least=1)


@settings(max_examples=150, deadline=None, derandomize=True)
@given(seed=st.integers(0, 2**32), vocab=st.integers(1, 2100), threads=st.integers(1, 2))
def test_any_problem_has_the_verdict_of_the_reference(seed, vocab, threads):
    problem = random_problem(seed, (vocab,))
    result = with_threads(threads, lambda: problem.verify("cpp"))
    Judge().compare(problem, result, problem.verify("reference"), (seed, vocab))


def test_cpp_scores_processed_rows_as_the_reference():
    rows = differing = 0
    for seed in range(150):
        problem = random_problem(seed, VOCABS)
        if problem.logits[0].shape[1] == 0:
            continue
        for tokens in (problem.tokens, None):
            given = problem.target() | {"draft_tokens": tokens}
            expected = target_logprobs(problem.logits, backend="reference", **given)
            result = target_logprobs(problem.logits, backend="cpp", **given)
            agree = (expected.isinf() == result.isinf()).all(-1)  # a filter can hang on the last bits
            torch.testing.assert_close(result[agree], expected[agree], **LOGPROBS)
            rows, differing = rows + agree.numel(), differing + int((~agree).sum())
    assert rows > 500
    assert differing <= 0.02 * rows


def test_cpp_draws_from_processed_rows_as_the_reference():
    draws = differing = 0
    for seed in range(150):
        problem = random_problem(seed, VOCABS)
        if problem.logits[0].shape[1] == 0:
            continue
        given = problem.target() | {"uniforms": problem.arguments["uniforms"][:, 0].contiguous(), "logprobs": True}
        given["allowed"] = None if given["allowed"] is None else given["allowed"][:, 0]
        row = [values[:, 0] for values in problem.logits]
        expected, result = (sample(row, backend=backend, **given) for backend in ("reference", "cpp"))
        same = (expected.tokens == result.tokens) & (expected.status == result.status)
        torch.testing.assert_close(result.logprobs[same], expected.logprobs[same], **LOGPROBS)
        draws, differing = draws + len(same), differing + int((~same).sum())
    assert draws > 300
    assert differing <= 0.01 * draws


@pytest.mark.parametrize("name", ["prompt_tokens", "output_tokens", "end_tokens"])
def test_tables_of_32_bits_and_strided_ones_give_the_same_bits(everything, name):
    table = getattr(everything.arguments["processing"], name)
    assert_same_bits(everything, with_processing(everything, **{name: table.int()}))
    assert_same_bits(everything, with_processing(everything, **{name: lay_out(table, "sliced")}))


def test_strided_biases_penalties_and_masks_give_the_same_bits(everything):
    tokens, values = EVERYTHING["logit_bias"]
    penalty = torch.tensor([1.3, 1.3])
    everything = with_processing(everything, repetition_penalty=penalty)
    strided = with_processing(
        everything,
        logit_bias=(lay_out(tokens.int(), "sliced"), lay_out(values.double(), "sliced")),
        repetition_penalty=lay_out(penalty, "sliced"),
        min_tokens=lay_out(torch.tensor([1, 3], dtype=torch.int32), "sliced"),
    )
    mask = lay_out(everything.arguments["allowed"], "sliced")
    assert_same_bits(everything, replace(strided, arguments=strided.arguments | {"allowed": mask}))


def test_processing_that_changes_nothing_gives_the_bits_of_none(everything):
    bare = replace(everything, arguments=everything.arguments | {"processing": None, "allowed": None})
    tables = {name: EVERYTHING[name] for name in ("prompt_tokens", "output_tokens", "end_tokens")}
    for idle in (Processing(), Processing(**tables), Processing(min_tokens=-5, end_tokens=torch.tensor([[1], [2]]))):
        whole = torch.full((2, 3, 5), -1, dtype=torch.int32)
        assert_same_bits(bare, replace(bare, arguments=bare.arguments | {"processing": idle}))
        assert_same_bits(bare, replace(bare, arguments=bare.arguments | {"processing": idle, "allowed": whole}))


def of_requests(problem: Problem, indices: Sequence[int]) -> Problem:
    index = torch.tensor(indices)

    def own(value: Any) -> Any:
        if isinstance(value, Tensor) and value.dim() > 0:
            return value[index]
        return tuple(map(own, value)) if isinstance(value, tuple) else value

    table = problem.arguments["processing"]
    fields = {name: own(getattr(table, name)) for name in EVERYTHING if name != "end_tokens"}
    arguments = {name: own(value) for name, value in problem.arguments.items()}
    arguments["processing"] = replace(table, **fields)
    return Problem([own(values) for values in problem.logits], own(problem.tokens), arguments)


@pytest.mark.parametrize("indices", [[0], [1], [1, 0, 1, 1, 0]], ids=str)
def test_a_request_alone_gets_the_bits_that_it_gets_in_a_batch(everything, indices):
    together, alone = everything.verify("cpp"), of_requests(everything, indices).verify("cpp")
    for own, expected in zip(tensors_of(alone), tensors_of(together), strict=True):
        assert torch.equal(own, expected[indices])


@pytest.mark.parametrize("vocab", [3000, 300_000])
def test_the_number_of_threads_does_not_change_a_bit(vocab):
    maker = Maker(1, (vocab,))
    batch = 40 if vocab == 3000 else 1
    tokens = torch.randint(vocab, (batch, 2), generator=maker.generator)
    arguments = {
        "processing": Processing(frequency_penalty=1.0, repetition_penalty=1.2, output_tokens=tokens[:, :1]),
        "allowed": torch.randint(-(2**31), 2**31, (batch, 3, vocab // 32), dtype=torch.int32) | 1,
        "seeds": torch.arange(batch),
        "positions": torch.arange(batch),
    }
    logits = torch.randn(batch, 3, vocab, generator=maker.generator)
    single, double = (
        with_threads(count, lambda: verify_chain(logits, tokens, drafter=0, backend="cpp", **arguments))
        for count in (1, 2)
    )
    for own, expected in zip(tensors_of(single), tensors_of(double), strict=True):
        assert torch.equal(own, expected)


def test_a_request_without_any_allowed_token_emits_nothing_and_leaves_the_others_alone(everything):
    closed = everything.arguments["allowed"].clone()
    closed[1] = 0
    for backend in ("reference", "cpp"):
        verdict = everything.verify(backend, allowed=closed)
        assert verdict.status[1] & Status.NO_TOKEN
        assert verdict.num_tokens.tolist()[1] == 0
        assert torch.equal(verdict.tokens[0], everything.verify(backend).tokens[0])


def test_a_nan_that_is_masked_or_held_back_is_not_reported():
    logits = torch.tensor([[0.0, math.nan, 1.0]])
    processing = Processing(min_tokens=1, end_tokens=torch.tensor([1]))
    mask = torch.tensor([[0b101]], dtype=torch.int32)
    random_numbers = {"uniforms": torch.tensor([0.9])}
    for backend in ("reference", "cpp"):
        for arguments in ({"processing": processing}, {"allowed": mask}):
            assert sample(logits, backend=backend, **random_numbers, **arguments).status.tolist() == [0]
        assert sample(logits, backend=backend, **random_numbers).status.tolist() == [1]


@pytest.mark.parametrize("name", ["repetition_penalty", "frequency_penalty", "presence_penalty"])
def test_a_penalty_out_of_range_in_a_tensor_is_a_status_of_its_request(name):
    penalty = torch.ones(3)
    processing = Processing(**{name: penalty}, output_tokens=torch.zeros(3, 1, dtype=torch.int64))
    penalty[1] = math.nan  # after the check
    logits, tokens = torch.zeros(3, 2, 4), torch.zeros(3, 1, dtype=torch.int64)
    random_numbers = {"uniforms": torch.full((3, 2), 0.5)}
    for backend in ("reference", "cpp"):
        verdict = verify_chain(logits, tokens, processing=processing, backend=backend, **random_numbers)
        assert verdict.status.tolist() == [0, 128, 0]
        assert verdict.num_tokens.tolist()[1] == 0
        dense = target_logprobs(logits, processing=processing, backend=backend)
        assert (dense[1] == -math.inf).all()
        assert dense[[0, 2]].isfinite().all()


@pytest.mark.parametrize("report", ["target", "raw"])
def test_nothing_of_the_size_of_the_vocabulary_is_copied(report):
    batch, vocab = 2, 50_000
    tokens = torch.randint(vocab, (batch, 3))
    processing = Processing(
        logit_bias=(tokens, torch.ones(batch, 3)),
        repetition_penalty=torch.full((batch,), 1.1),
        frequency_penalty=0.1,
        min_tokens=1,
        end_tokens=torch.tensor([2]),
        prompt_tokens=torch.randint(vocab, (batch, 2000)),
        output_tokens=torch.randint(vocab, (batch, 2000), dtype=torch.int32),
    )
    arguments = {
        "processing": processing,
        "allowed": torch.full((batch, 4, vocab // 32 + 1), -1, dtype=torch.int32),
        "uniforms": torch.full((batch, 4), 0.1),
        "ensemble": Mixture((0.5, 0.5)),
        "sampling": Sampling(top_k=50, top_p=0.9, min_p=0.01),
        "drafter": 1,
        "top_logprobs": 3,
        "logprobs": report,
    }
    logits = [lay_out(torch.randn(batch, 4, vocab).bfloat16(), "sliced") for _ in range(2)]
    with torch.profiler.profile(profile_memory=True) as profile:
        verify_chain(logits, tokens, backend="cpp", **arguments)
    allocated = sum(max(0, event.self_cpu_memory_usage) for event in profile.key_averages())
    assert 0 < allocated < 2000


def test_the_operators_keep_their_contract_with_processing(everything):
    for call, operation, name in (
        (everything.verify, verify_operation, "verify_chain"),
        (
            lambda backend: target_logprobs(everything.logits, backend=backend, **everything.target()),
            score_operation,
            "target_logprobs",
        ),
    ):
        operator = getattr(torch.ops.specens, name).default
        assert set(torch.library.opcheck(operator, *operator_arguments(operation, call)).values()) == {"SUCCESS"}


def test_processing_compiles_to_one_graph():
    def step(logits: Tensor, tokens: Tensor, values: Tensor, mask: Tensor, penalty: Tensor) -> tuple[Tensor, ...]:
        processing = Processing(
            logit_bias=(tokens, values),
            repetition_penalty=penalty,
            presence_penalty=0.5,
            min_tokens=1,
            end_tokens=tokens[0],
            output_tokens=tokens,
        )
        arguments = {"processing": processing, "allowed": mask, "backend": "cpp"}
        seeds = tokens[:, 0]
        verdict = verify_chain(logits, tokens, seeds=seeds, positions=seeds, top_logprobs=2, **arguments)
        drawn = sample(
            logits[:, 0], seeds=seeds, positions=seeds, **(arguments | {"allowed": mask[:, 0]}), logprobs="raw"
        )
        return *tensors_of(verdict), *tensors_of(drawn), target_logprobs(logits, draft_tokens=tokens, **arguments)

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    for batch in (2, 3):
        generator = torch.Generator().manual_seed(batch)
        tokens = torch.randint(33, (batch, 2), generator=generator)
        mask = torch.randint(-(2**31), 2**31, (batch, 3, 2), generator=generator, dtype=torch.int32) | 1
        penalty = torch.rand(batch, generator=generator) + 0.5
        arguments = (random_logits(batch, 3, 33), tokens, torch.ones(batch, 2), mask, penalty)
        for own, expected in zip(compiled(*arguments), step(*arguments), strict=True):
            assert torch.equal(own, expected)
