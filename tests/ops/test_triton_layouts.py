"""Packed rows, slots and synthetic acceptance in Triton's kernels: dense rows' bits, and the reference's verdicts."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from cases import lay_out, tensors_of
from packed import Requests, assert_equal, packed_arguments, ragged, verify_packed
from problems import Judge, random_problem
from torch import Tensor

from specens_kernels import Processing, Sampling, Status, Synthetic, verify_chain

ROWS = torch.zeros(9, 5)
PLAIN = {"uniforms": torch.full((3, 3), 0.5), "max_draft_len": 2, "backend": "triton"}


def small_requests(count: int, seed: int, bonus: bool) -> Iterator[tuple[int, Requests]]:
    """Random requests of at most four rows in all, without filters, whose search takes the interpreter long."""
    while count > 0:
        requests = ragged(seed, bonus)
        arguments = requests.problem.arguments
        plain = not arguments["sampling"].filters and not arguments.get("draft_sampling", Sampling()).filters
        if plain and 0 < sum(requests.num_rows) <= 4 and requests.problem.logits[0].shape[-1] <= 33:
            yield seed, requests
            count -= 1
        seed += 1


@pytest.mark.parametrize("bonus", [True, False], ids=["bonus", "no bonus"])
def test_packed_rows_and_drafts_give_the_verdict_of_dense_ones(bonus):
    judge = Judge()
    for seed, requests in small_requests(2, 0, bonus):
        dense = requests.problem.verify("triton")
        assert_equal(verify_packed(requests, "triton", padding=seed % 3), dense)
        judge.compare(requests.problem, dense, requests.problem.verify("reference"), seed)
    judge.finish(at_least=2)


def test_filters_of_packed_rows_keep_the_tokens_of_dense_ones():
    """The second request has no draft, and the drafts' filters are of their own."""
    logits = torch.randn(2, 2, 9, generator=torch.Generator().manual_seed(0))
    arguments = {"sampling": Sampling(top_k=3), "draft_sampling": Sampling(top_k=2), "drafter": 0, "backend": "triton"}
    arguments["uniforms"] = torch.tensor([[0.9, 0.4], [0.1, 0.7]])
    tokens = logits[:, :1].argmax(-1)
    expected = verify_chain(logits, tokens, draft_lens=torch.tensor([1, 0]), **arguments)
    packed = {"row_offsets": torch.tensor([0, 2, 3]), "max_draft_len": 1}
    assert_equal(verify_chain(logits.flatten(0, 1)[:3], tokens[0], **packed, **arguments), expected)


def test_packed_rows_with_dense_drafts_give_the_verdict_of_dense_ones():
    """Here each request has a bonus row or none, as it likes."""
    for _, requests in small_requests(2, 100, bonus=True):
        with_row = [index % 2 == 0 for index in range(len(requests.lens))]
        rows = [length + own for length, own in zip(requests.lens, with_row, strict=True)]
        requests = replace(requests, num_rows=rows)
        arguments = packed_arguments(requests, 2) | {"draft_lens": torch.tensor(requests.lens)}
        del arguments["max_draft_len"]
        for name in ("draft_logits", "drafter"):
            if name in arguments:
                arguments[name] = requests.problem.arguments[name]
        logits = [requests.packed_rows(values, 2) for values in requests.problem.logits]
        result = verify_chain(logits, requests.problem.tokens, backend="triton", **arguments)
        whole = requests.problem.verify("triton")
        kept = torch.tensor(with_row)
        for own, other in zip(tensors_of(result), tensors_of(whole), strict=True):
            assert torch.equal(own[kept], other[kept])


def test_offsets_of_32_bits_and_strided_packed_arguments_give_the_same():
    for _, requests in small_requests(2, 200, bonus=True):
        expected = verify_packed(requests, "triton")
        arguments = packed_arguments(requests)
        for name in ("draft_logits", "allowed"):
            if isinstance(arguments.get(name), Tensor):
                arguments[name] = lay_out(arguments[name], "sliced")
        arguments["row_offsets"] = lay_out(requests.offsets.int(), "sliced")
        logits = [lay_out(requests.packed_rows(values), "sliced") for values in requests.problem.logits]
        tokens = lay_out(requests.packed_drafts(requests.problem.tokens).int(), "sliced")
        assert_equal(verify_chain(logits, tokens, backend="triton", **arguments), expected)


@pytest.mark.parametrize("rows", [0, 4])
def test_no_requests_and_requests_without_rows_emit_nothing(rows):
    logits, tokens = torch.full((rows, 5), torch.nan), torch.zeros(rows, dtype=torch.int64)
    for batch in (0, 2):
        arguments = {"row_offsets": torch.zeros(batch + 1, dtype=torch.int64), "uniforms": torch.rand(batch, 4)}
        for drafts in (tokens, torch.zeros(batch, 3, dtype=torch.int64)):
            verdict = verify_chain(logits, drafts, max_draft_len=3, backend="triton", **arguments)
            assert verdict.tokens.tolist() == [[-1] * 4] * batch
            assert verdict.status.tolist() == [0] * batch


@pytest.mark.parametrize(
    "offsets",
    [
        [0, 3, 6, 10],
        [-3, 0, 3, 6],
        [0, 3, 2, 5],
        [0, 3, 7, 9],
        [0, 2**62, 3, 6],
        [2**63 - 3, 2**63 - 1, 6, 9],
        [0, 0, 3, 6],
        [3, 6, 9, 9],
    ],
    ids=str,
)
def test_offsets_that_cannot_be_are_a_status_of_their_request(offsets):
    """With packed drafts and a bonus row each: also requests whose drafts would lie before or after them all."""
    arguments = PLAIN | {"row_offsets": torch.tensor(offsets), "processing": Processing(presence_penalty=1.0)}
    tokens = torch.tensor([0, 1] * 3)
    verdict = verify_chain(ROWS, tokens, **arguments)
    assert_equal(verdict, verify_chain(ROWS, tokens, **(arguments | {"backend": "reference"})))
    assert (verdict.status == Status.INVALID_PARAMETER).any()


@pytest.mark.parametrize(("length", "status"), [(-1, 128), (1, 0), (2, 0), (3, 128), (2**40, 128)])
def test_lengths_that_do_not_fit_the_rows_are_a_status_of_their_request(length, status):
    lens, offsets = torch.tensor([2, length, 2]), torch.tensor([0, 3, 5, 8])
    arguments = {"row_offsets": offsets, "draft_lens": lens, "uniforms": PLAIN["uniforms"], "rule": "typical"}
    verdict = verify_chain(ROWS, torch.zeros(3, 2, dtype=torch.int64), backend="triton", **arguments)
    assert verdict.status.tolist() == [0, status, 0]


def test_slots_give_the_verdict_of_dense_draft_logits():
    compared = 0
    for seed, requests in small_requests(6, 300, bonus=True):
        problem = requests.problem
        if "draft_logits" not in problem.arguments:
            continue
        own = problem.arguments["draft_logits"]
        batch, draft_len = problem.tokens.shape
        slots = torch.randperm(batch + 3, generator=torch.Generator().manual_seed(seed))[:batch]
        kept = torch.full((batch + 3, draft_len + 2, own.shape[-1]), torch.nan, dtype=own.dtype)
        kept[slots, :draft_len] = own
        in_slots: dict[str, Any] = {"draft_logits": lay_out(kept, "sliced"), "draft_slots": slots.int()}
        expected = problem.verify("triton")
        assert_equal(problem.verify("triton", **in_slots), expected)
        assert_equal(verify_packed(requests, "triton", **in_slots), expected)
        compared += 1
    assert compared >= 1


@pytest.mark.parametrize("count", [3, 0])
@pytest.mark.parametrize("slot", [-1, 3, -(2**63)])
def test_a_slot_that_is_not_there_is_a_status_of_its_request(slot, count):
    logits, tokens = torch.zeros(2, 2, 5), torch.zeros(2, 1, dtype=torch.int64)
    arguments = {"uniforms": torch.full((2, 2), 0.25), "draft_logits": torch.zeros(count, 1, 5), "backend": "triton"}
    verdict = verify_chain(logits, tokens, draft_slots=torch.tensor([slot, 0]), **arguments)
    assert verdict.status.tolist() == [Status.INVALID_PARAMETER, 0 if count else Status.INVALID_PARAMETER]
    assert verdict.num_tokens.tolist() == [0, 2 if count else 0]


@pytest.mark.parametrize("drafter", [{}, {"drafter": 0}], ids=["one-hot", "member"])
def test_synthetic_acceptance_is_that_of_the_reference(drafter):
    """Also of greedy requests, of drafts without any probability, and after rows without any token."""
    logits = torch.randn(4, 3, 7, generator=torch.Generator().manual_seed(0))
    logits[1, :, 2] = -torch.inf
    logits[2, 0] = -torch.inf
    arguments = {
        "rule": Synthetic((0.8, 0.5)),
        "sampling": Sampling(temperature=torch.tensor([1.0, 1.0, 1.0, 0.0])),
        "uniforms": torch.tensor([[0.1, 0.6, 0.5], [0.7, 0.4, 0.5], [0.79, 0.2, 0.5], [0.9, 0.4, 0.5]]),
        **drafter,
    }
    tokens = torch.tensor([[1, 2], [2, 2], [3, 4], [5, 6]])
    verdict, expected = (verify_chain(logits, tokens, backend=name, **arguments) for name in ("triton", "reference"))
    assert_equal(verdict, expected)
    assert verdict.num_accepted.tolist() == [1, 2, 2, 0]


def test_rates_of_synthetic_acceptance_are_not_rounded():
    """The uniform lies between a rate and its nearest float32."""
    for rate, uniform in ((0.8, 0.8), (0.7, 0.7 - 1e-9), (1.0, 1 - 2.0**-53), (0.0, 0.0)):
        verdict = verify_chain(
            torch.zeros(1, 2, 3),
            torch.tensor([[1]]),
            rule=Synthetic(rate),
            uniforms=torch.tensor([[uniform, 0.5]], dtype=torch.float64),
            backend="triton",
        )
        assert verdict.num_accepted.item() == (uniform < rate)


def test_random_synthetic_rounds_are_verified_as_by_the_reference():
    judge = Judge()
    for seed in range(300, 330):
        problem = random_problem(seed, (7, 33))
        batch, rows, _ = problem.logits[0].shape
        if isinstance(problem.arguments["rule"], Synthetic) and 0 < batch * rows <= 4:
            judge.compare(problem, problem.verify("triton"), problem.verify("reference"), seed)
    judge.finish(at_least=2)


def test_a_uniform_of_a_greedy_request_counts_where_acceptance_is_synthetic():
    random_numbers = torch.tensor([[0.1, 2.0], [2.0, 0.1]])  # the next token's is not needed
    arguments = {
        "sampling": Sampling(temperature=0.0),
        "uniforms": random_numbers,
        "rule": "synthetic",
        "backend": "triton",
    }
    verdict = verify_chain(torch.zeros(2, 2, 3), torch.tensor([[1], [1]]), **arguments)
    assert verdict.status.tolist() == [0, Status.INVALID_PARAMETER]
    assert verdict.tokens.tolist() == [[1, 0], [-1, -1]]
