"""What Triton's kernels tell of emitted tokens: log-probabilities, raw ones too, and the most likely tokens."""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest
import torch
from cases import tensors_of
from problems import LOGPROBS, Problem, random_problem
from torch import Tensor

from specens_kernels import Mixture, Processing, Sampling, Verdict, sample, verify_chain

TIE = 1e-5  # log-probabilities nearer than this may change places
BITS = torch.tensor([[0b1000]], dtype=torch.int32)


def small_problems(count: int, seed: int) -> Iterator[tuple[int, Problem]]:
    """Random problems of at most three rows, without filters."""
    while count > 0:
        problem = random_problem(seed, (7, 33))
        batch, rows, _ = problem.logits[0].shape
        if 0 < batch * rows <= 3 and not problem.arguments["sampling"].filters:
            yield seed, problem
            count -= 1
        seed += 1


def assert_same_order(tokens: Tensor, values: Tensor, other_tokens: Tensor, others: Tensor) -> None:
    """The same tokens [..., top], but for those whose values, which are the same, nearly tie with a neighbour's."""
    torch.testing.assert_close(values, others, **LOGPROBS)
    gaps = torch.nn.functional.pad(-others.nan_to_num(neginf=-1e9).diff(dim=-1), (1, 1), value=math.inf)
    gaps[..., -1] = 0.0  # what follows the last one is not told
    alone = (torch.minimum(gaps[..., 1:], gaps[..., :-1]) > TIE) | (others == -math.inf)
    assert torch.equal(tokens[alone], other_tokens[alone])
    assert torch.equal(tokens >= 0, other_tokens >= 0)


@pytest.mark.parametrize("kind", ["target", "raw"])
def test_random_rounds_report_what_the_reference_reports(kind):
    emitted = 0
    for seed, problem in small_problems(4, 0 if kind == "raw" else 50):
        report = {"logprobs": kind, "top_logprobs": (1, 3, 40)[seed % 3]}
        result, expected = problem.verify("triton", **report), problem.verify("reference", **report)
        same = (result.tokens == expected.tokens).all(1) & (result.status == expected.status)
        for request in (~same).nonzero()[:, 0].tolist():
            assert problem.hangs_on_the_last_bits(request, result.tokens[request].tolist()), (seed, request)
        torch.testing.assert_close(result.logprobs[same], expected.logprobs[same], **LOGPROBS)
        ours, theirs = ((own.top_tokens[same], own.top_logprobs[same]) for own in (result, expected))
        assert_same_order(*ours, *theirs)
        emitted += int(result.num_tokens[same].sum())
    assert emitted >= 4


@pytest.mark.parametrize("kind", ["target", "raw"])
def test_a_draw_reports_what_the_reference_reports(kind):
    logits = [torch.randn(2, vocab, generator=torch.Generator().manual_seed(vocab)) for vocab in (150, 140)]
    arguments = {
        "ensemble": Mixture((0.3, 0.7)),
        "sampling": Sampling(temperature=torch.tensor([0.5, 0.0]), top_k=4),
        "processing": Processing(presence_penalty=1.0, output_tokens=torch.arange(60)[None].expand(2, -1)),
        "uniforms": torch.tensor([0.3, 0.6]),
        "logprobs": kind,
        "top_logprobs": 6,
    }
    drawn, expected = (sample(logits, backend=backend, **arguments) for backend in ("triton", "reference"))
    assert torch.equal(drawn.tokens, expected.tokens)
    torch.testing.assert_close(drawn.logprobs, expected.logprobs, **LOGPROBS)
    assert_same_order(drawn.top_tokens, drawn.top_logprobs, expected.top_tokens, expected.top_logprobs)


def test_fewer_tokens_than_asked_for_leave_padding():
    """Three of five are kept by the filter; with a mask, one; raw, all."""
    logits = torch.tensor([[0.5, 0.2, 0.15, 0.1, 0.05]]).log()
    arguments = {"sampling": Sampling(top_k=3), "uniforms": torch.tensor([0.1]), "top_logprobs": 7, "backend": "triton"}
    drawn = sample(logits, **arguments)
    assert drawn.top_tokens.tolist() == [[0, 1, 2, -1, -1, -1, -1]]
    assert (drawn.top_logprobs[0, 3:] == -math.inf).all()
    assert sample(logits, allowed=BITS, **arguments).top_tokens.tolist() == [[3, -1, -1, -1, -1, -1, -1]]
    drawn = sample(logits, logprobs="raw", allowed=BITS, **arguments)
    assert drawn.top_tokens.tolist() == [[0, 1, 2, 3, 4, -1, -1]]
    torch.testing.assert_close(drawn.top_logprobs[0, :5], logits[0])
    torch.testing.assert_close(drawn.logprobs, logits[:, 3])


def test_equal_tokens_are_reported_by_id_across_blocks():
    logits = torch.zeros(1, 300)
    logits[0, 200] = 1.0
    drawn = sample(logits, uniforms=torch.tensor([0.5]), top_logprobs=40, backend="triton")
    assert drawn.top_tokens.tolist() == [[200, *range(39)]]


def test_nothing_is_reported_of_a_request_that_emits_nothing():
    logits = torch.full((1, 2, 5), -math.inf)
    for report in ("target", "raw"):
        random_numbers = torch.full((1, 2), 0.5)
        arguments = {"uniforms": random_numbers, "top_logprobs": 2, "logprobs": report, "backend": "triton"}
        verdict = verify_chain(logits, torch.tensor([[0]]), **arguments)
        assert verdict.logprobs.tolist() == [[0, 0]]
        assert (verdict.top_tokens == -1).all()
        assert (verdict.top_logprobs == -math.inf).all()


def test_a_report_goes_into_the_buffers_that_were_given():
    logits = torch.randn(1, 2, 9, generator=torch.Generator().manual_seed(0))
    arguments = {"uniforms": torch.full((1, 2), 0.4), "logprobs": "raw", "top_logprobs": 3, "backend": "triton"}
    expected = verify_chain(logits, torch.tensor([[0]]), **arguments)
    out = Verdict(*(None if value is None else torch.full_like(value, 77) for value in expected))
    assert verify_chain(logits, torch.tensor([[0]]), out=out, **arguments) is out
    for own, other in zip(tensors_of(out), tensors_of(expected), strict=True):
        assert torch.equal(own, other)
