"""The caller's own buffers, and what torch asks of the operators that take packed rows and write into buffers."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch
from cases import operator_arguments, tensors_of
from packed import assert_equal, buffers, ragged, verify_packed
from problems import random_problem
from torch import Tensor

from specens_kernels import Processing, Sampling, Verdict, verify_chain

operation = importlib.import_module("specens_kernels.ops.verify_chain")
BACKENDS = pytest.mark.parametrize("backend", ["reference", "cpp"])
GENERATOR = torch.Generator().manual_seed(0)
REPORTS = ({}, {"logprobs": False}, {"top_logprobs": 3}, {"logprobs": "raw", "top_logprobs": 2})


@BACKENDS
@pytest.mark.parametrize("report", REPORTS, ids=str)
def test_results_can_be_written_into_the_callers_buffers(backend, report):
    for seed in range(10):
        problem = random_problem(seed, (33,))
        expected = problem.verify(backend, **report)
        out = buffers(expected)
        assert problem.verify(backend, out=out, **report) is out
        assert_equal(out, expected)
        requests = ragged(seed, bonus=True)
        expected = verify_packed(requests, backend, **report)
        out = buffers(expected)
        assert verify_packed(requests, backend, out=out, **report) is out
        assert_equal(out, expected)


def test_every_backend_writes_into_the_callers_buffers(backend, device):
    logits = torch.randn(1, 2, 9, generator=GENERATOR).to(device)
    tokens, uniforms = torch.tensor([[3]], device=device), torch.tensor([[0.1, 0.7]], device=device)
    arguments = {"uniforms": uniforms, "logprobs": True, "backend": backend}
    expected = verify_chain(logits, tokens, **arguments)
    out = buffers(expected)
    assert verify_chain(logits, tokens, out=out, **arguments) is out
    assert_equal(out, expected)


@pytest.mark.parametrize("report", [{}, {"top_logprobs": 3}], ids=str)
def test_nothing_is_allocated_where_the_caller_brings_the_buffers(report):
    logits, tokens = torch.zeros(2, 3, 33), torch.zeros(2, 2, dtype=torch.int64)
    arguments = {
        "seeds": torch.arange(2),
        "positions": torch.arange(2),
        "sampling": Sampling(temperature=torch.ones(2)),
        "drafter": 0,
        "draft_lens": torch.tensor([1, 2]),
        "backend": "cpp",
        **report,
    }
    out = buffers(verify_chain(logits, tokens, **arguments))

    def allocated(**more: Any) -> int:
        with torch.profiler.profile(profile_memory=True) as profile:
            verify_chain(logits, tokens, **arguments, **more)
        return sum(max(0, event.self_cpu_memory_usage) for event in profile.key_averages())

    assert allocated(out=out) == 0
    assert allocated() > 0  # the profiler would see it


FULL = buffers(
    verify_chain(torch.zeros(3, 3, 5), torch.zeros(3, 2, dtype=torch.int64), uniforms=torch.rand(3, 3), top_logprobs=2)
)


@pytest.mark.parametrize(
    ("name", "buffer"),
    [
        ("tokens", FULL.tokens[:, :2]),
        ("tokens", FULL.tokens.int()),
        ("tokens", torch.empty(3, 3, dtype=torch.int64).t()),
        ("tokens", None),
        ("num_accepted", FULL.num_accepted[:2]),
        ("num_tokens", FULL.num_tokens.to("meta")),
        ("next_token", torch.empty(6, dtype=torch.int64)[::2]),
        ("status", FULL.status.long()),
        ("logprobs", None),
        ("logprobs", FULL.logprobs.double()),
        ("top_tokens", FULL.top_tokens[..., :1]),
        ("top_tokens", None),
        ("top_logprobs", FULL.top_logprobs.transpose(0, 1)),
    ],
)
def test_a_buffer_that_does_not_fit_is_refused_by_name(name, buffer):
    out = FULL._replace(**{name: buffer})
    arguments = {"uniforms": torch.rand(3, 3), "top_logprobs": 2}
    with pytest.raises(ValueError, match=rf"^out\.{name}: expected .*got"):
        verify_chain(torch.zeros(3, 3, 5), torch.zeros(3, 2, dtype=torch.int64), out=out, **arguments)


@pytest.mark.parametrize("name", ["logprobs", "top_tokens", "top_logprobs"])
def test_a_buffer_that_nothing_is_written_into_is_refused_by_name(name):
    out = FULL._replace(logprobs=None, top_tokens=None, top_logprobs=None)
    out = out._replace(**{name: getattr(FULL, name)})
    with pytest.raises(ValueError, match=rf"^out\.{name}: expected None.*got"):
        verify_chain(torch.zeros(3, 3, 5), torch.zeros(3, 2, dtype=torch.int64), out=out, uniforms=torch.rand(3, 3))


def test_the_operators_keep_their_contract_with_packed_rows_and_buffers():
    requests = ragged(5, bonus=True)
    out = buffers(verify_packed(requests, "reference", top_logprobs=2))

    def call(backend: str) -> Verdict:
        return verify_packed(requests, backend, top_logprobs=2)

    given, options = operator_arguments(operation, call)
    operator = torch.ops.specens.verify_chain.default
    assert set(torch.library.opcheck(operator, given, options).values()) == {"SUCCESS"}
    names = ("tokens", "num_accepted", "num_tokens", "next_token", "status", "logprobs", "top_tokens", "top_logprobs")
    written = [getattr(out, name) for name in names]
    operator = torch.ops.specens.verify_chain_out.default
    assert set(torch.library.opcheck(operator, (written, *given), options).values()) == {"SUCCESS"}


def test_packed_rows_compile_to_one_graph_also_with_buffers():
    def step(logits: Tensor, tokens: Tensor, offsets: Tensor, penalty: Tensor, seeds: Tensor, out: Verdict) -> Any:
        arguments = {"row_offsets": offsets, "max_draft_len": 2, "seeds": seeds, "positions": seeds, "backend": "cpp"}
        arguments["processing"] = Processing(presence_penalty=penalty)
        verdict = verify_chain(logits, tokens, logprobs=True, **arguments)
        verify_chain(logits, tokens, out=out, **arguments)
        return *tensors_of(verdict), out.tokens * 2

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    for lens in ([2, 0], [1, 2, 2]):
        batch, rows = len(lens), sum(lens) + len(lens)
        offsets = torch.tensor([0, *(length + 1 for length in lens)]).cumsum(0)
        tokens, logits = torch.randint(9, (sum(lens),)), torch.randn(rows, 9)
        outs = []
        for run in (compiled, step):
            out = Verdict(
                torch.empty(batch, 3, dtype=torch.int64),
                *(torch.empty(batch).long() for _ in range(3)),
                None,
                torch.empty(batch).int(),
            )
            outs.append((run(logits, tokens, offsets, torch.rand(batch).fill_(0.5), torch.arange(batch), out), out))
        for own, expected in zip(*(result for result, _ in outs), strict=True):
            assert torch.equal(own, expected)
        assert_equal(outs[0][1], outs[1][1])
