"""What is reported of emitted tokens: log-probabilities of the target or raw logits, and the most likely tokens."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from problems import LOGPROBS, Problem, random_problem
from torch import Tensor

from specens_kernels import Processing, Sampling, Synthetic, Verdict, sample, target_logprobs, verify_chain

BACKENDS = pytest.mark.parametrize("backend", ["reference", "cpp"])
VOCABS = (1, 33, 200)
TIE = 1e-5  # log-probabilities nearer than this may change places


def unfiltered(problem: Problem) -> dict[str, Any]:
    """What greedy requests report: the ensemble at temperature 1."""
    target = problem.target()
    return target | {"sampling": Sampling()}


def raw(problem: Problem) -> dict[str, Any]:
    return {"ensemble": problem.arguments["ensemble"]}


def expected_rows(problem: Problem, kind: str) -> Tensor:
    """[batch, draft_len + 1, vocab]: the distribution that is reported at each row, by target_logprobs."""
    tokens = problem.tokens if problem.tokens.shape[1] >= problem.logits[0].shape[1] - 1 else None
    if kind == "raw":
        rows = target_logprobs(problem.logits, backend="reference", **raw(problem))
    else:
        given = {"draft_tokens": tokens, "backend": "reference"}
        rows = target_logprobs(problem.logits, **problem.target(), **given)
        temperature = torch.as_tensor(problem.arguments["sampling"].temperature)
        greedy = (temperature == 0).expand(len(rows))[:, None, None]
        rows = torch.where(greedy, target_logprobs(problem.logits, **unfiltered(problem), **given), rows)
    missing = problem.tokens.shape[1] + 1 - rows.shape[1]
    return torch.nn.functional.pad(rows, (0, 0, 0, missing), value=-math.inf)


def assert_report(
    tokens: Tensor, logprobs: Tensor, top_tokens: Tensor, top: Tensor, rows: Tensor, name: object
) -> None:
    """tokens, logprobs [...]; top_tokens, top [..., n]; rows [..., vocab]."""
    emitted, count = tokens >= 0, top.shape[-1]
    own = rows.gather(-1, tokens.clamp(min=0)[..., None])[..., 0]
    torch.testing.assert_close(logprobs[emitted], own[emitted], **LOGPROBS)
    assert (logprobs[~emitted] == 0).all()
    assert (top_tokens[~emitted] == -1).all()
    assert (top[~emitted] == -math.inf).all()
    padded = torch.nn.functional.pad(rows, (0, max(0, count - rows.shape[-1])), value=-math.inf)
    best = padded.sort(dim=-1, descending=True, stable=True)
    values, ids = best.values[..., :count][emitted], best.indices[..., :count][emitted]
    torch.testing.assert_close(top[emitted], values, **LOGPROBS, msg=lambda text: f"{name}: {text}")
    there = values > -math.inf
    assert torch.equal(top_tokens[emitted] >= 0, there), name
    at_ids = padded[emitted].gather(-1, top_tokens[emitted].clamp(min=0))
    torch.testing.assert_close(at_ids[there], values[there], atol=TIE, rtol=TIE)
    distance = (padded[emitted][:, None, :] - values[..., None]).abs() < TIE * (1 + values.abs())[..., None]
    alone = there & (distance.sum(-1) == 1)
    assert torch.equal(top_tokens[emitted][alone], ids[alone]), name
    ordered = torch.where(there, top_tokens[emitted], -1 - torch.arange(count)).sort(-1).values
    assert (ordered.diff(dim=-1) > 0).all(), "a token is listed twice"


def hangs_on_a_filter(problem: Problem) -> Tensor:
    """bool [batch]: rows whose filters keep other tokens in C++ than in the reference."""
    given = problem.target() | {"draft_tokens": problem.tokens}
    own, other = (target_logprobs(problem.logits, backend=backend, **given) for backend in ("cpp", "reference"))
    return (own.isinf() != other.isinf()).flatten(1).any(1)


@BACKENDS
@pytest.mark.parametrize("kind", ["target", "raw"])
def test_verification_reports_the_most_likely_tokens_of_each_emitted_one(backend, kind):
    emitted = 0
    for seed in range(50):
        problem = random_problem(seed, VOCABS)
        verdict = problem.verify(backend, logprobs=kind, top_logprobs=(1, 3, 40)[seed % 3])
        assert torch.equal(verdict.tokens, problem.verify(backend, logprobs=False).tokens)
        rows = expected_rows(problem, kind)
        kept = ~hangs_on_a_filter(problem)
        report = (verdict.tokens, verdict.logprobs, verdict.top_tokens, verdict.top_logprobs, rows)
        assert_report(*(values[kept] for values in report), seed)
        emitted += int(verdict.num_tokens[kept].sum())
    assert emitted > 100


@BACKENDS
@pytest.mark.parametrize("kind", ["target", "raw"])
def test_a_draw_reports_the_most_likely_tokens(backend, kind):
    drawn = 0
    for seed in range(50):
        problem = random_problem(seed, VOCABS)
        if problem.logits[0].shape[1] == 0:
            continue
        given = problem.target() | {"uniforms": problem.arguments["uniforms"][:, 0].contiguous(), "backend": backend}
        given["allowed"] = None if given["allowed"] is None else given["allowed"][:, 0]
        row = [values[:, 0] for values in problem.logits]
        draw = sample(row, logprobs=kind, top_logprobs=(1, 3, 40)[seed % 3], **given)
        assert torch.equal(draw.tokens, sample(row, **given).tokens)
        kept = ~hangs_on_a_filter(problem)
        report = (draw.tokens, draw.logprobs, draw.top_tokens, draw.top_logprobs, expected_rows(problem, kind)[:, 0])
        assert_report(*(values[kept] for values in report), seed)
        drawn += int((draw.tokens >= 0).sum())
    assert drawn > 60


@pytest.mark.parametrize("kind", ["target", "raw"])
def test_log_probabilities_alone_are_those_reported_with_the_most_likely_tokens(kind):
    for seed in range(30):
        problem = random_problem(seed, VOCABS)
        alone, together = problem.verify("cpp", logprobs=kind), problem.verify("cpp", logprobs=kind, top_logprobs=2)
        torch.testing.assert_close(alone.logprobs, together.logprobs, **LOGPROBS)
        assert alone.top_tokens is None


def random_numbers(*values: float) -> Tensor:
    return torch.tensor([values], dtype=torch.float64)


@BACKENDS
def test_fewer_tokens_than_asked_for_leave_padding(backend):
    """Three of five are kept by the filter; with a mask, one."""
    logits = torch.tensor([[0.5, 0.2, 0.15, 0.1, 0.05]]).log()
    arguments = {"sampling": Sampling(top_k=3), "uniforms": torch.tensor([0.1]), "top_logprobs": 7, "backend": backend}
    draw = sample(logits, **arguments)
    assert draw.top_tokens.tolist() == [[0, 1, 2, -1, -1, -1, -1]]
    kept = torch.tensor([0.5, 0.2, 0.15]) / 0.85
    torch.testing.assert_close(draw.top_logprobs[0, :3], kept.log())
    assert (draw.top_logprobs[0, 3:] == -math.inf).all()
    draw = sample(logits, allowed=torch.tensor([[0b1000]], dtype=torch.int32), **arguments)
    assert draw.top_tokens.tolist() == [[3, -1, -1, -1, -1, -1, -1]]
    assert abs(float(draw.top_logprobs[0, 0])) < 1e-6
    draw = sample(logits, logprobs="raw", allowed=torch.tensor([[0b1000]], dtype=torch.int32), **arguments)
    assert draw.top_tokens.tolist() == [[0, 1, 2, 3, 4, -1, -1]]
    torch.testing.assert_close(draw.top_logprobs[0, :5], logits[0])


@BACKENDS
def test_equal_tokens_are_reported_by_id(backend):
    draw = sample(torch.zeros(1, 3000), uniforms=torch.tensor([0.5]), top_logprobs=4, backend=backend)
    assert draw.top_tokens.tolist() == [[0, 1, 2, 3]]


@BACKENDS
def test_raw_logprobs_know_nothing_of_temperature_filters_and_processing(backend):
    logits = torch.tensor([[[0.6, 0.3, 0.1]] * 2]).log()
    arguments = {
        "sampling": Sampling(temperature=0.5, top_k=2),
        "processing": Processing(presence_penalty=2.0, output_tokens=torch.tensor([[0]])),
        "allowed": torch.tensor([[[0b110]] * 2], dtype=torch.int32),
        "uniforms": random_numbers(0.0, 0.9),
        "backend": backend,
    }
    verdict = verify_chain(logits, torch.tensor([[1]]), logprobs="raw", **arguments)
    assert verdict.tokens.tolist() == [[1, 2]]
    torch.testing.assert_close(verdict.logprobs, torch.tensor([[0.3, 0.1]]).log())
    verdict = verify_chain(logits, torch.tensor([[1]]), logprobs="target", **arguments)
    assert verdict.logprobs[0, 0] == pytest.approx(math.log(0.9), abs=1e-5)


@BACKENDS
def test_nothing_is_reported_of_a_request_that_emits_nothing(backend):
    logits = torch.full((1, 2, 5), -math.inf)
    arguments = {"uniforms": random_numbers(0.5, 0.5), "top_logprobs": 2, "backend": backend}
    for report in ("target", "raw"):
        verdict = verify_chain(logits, torch.tensor([[0]]), logprobs=report, **arguments)
        assert verdict.logprobs.tolist() == [[0, 0]]
        assert (verdict.top_tokens == -1).all()
        assert (verdict.top_logprobs == -math.inf).all()
        drawn = sample(logits[:, 0], **(arguments | {"uniforms": torch.tensor([0.5])}), logprobs=report)
        assert drawn.top_tokens.tolist() == [[-1, -1]]
        assert drawn.top_logprobs.tolist() == [[-math.inf, -math.inf]]


@BACKENDS
@pytest.mark.parametrize("vocab", [1, 33])
def test_what_was_not_asked_for_is_none(backend, vocab):
    logits, tokens = torch.zeros(1, 2, vocab), torch.zeros(1, 1, dtype=torch.int64)
    verdict = verify_chain(logits, tokens, uniforms=random_numbers(0.5, 0.5), backend=backend)
    assert [name for name, value in zip(Verdict._fields, verdict) if value is None] == [
        "logprobs",
        "top_tokens",
        "top_logprobs",
        "path",
    ]
    draw = sample(logits[:, 0], uniforms=torch.tensor([0.5]), top_logprobs=1, backend=backend)
    assert draw.logprobs is not None
    assert draw.top_tokens.shape == (1, 1)


@pytest.mark.parametrize("backend", ["reference", "cpp", "triton"])
def test_a_draft_that_only_the_drafter_knows_has_no_probability(backend):
    verdict = verify_chain(
        torch.zeros(1, 2, 3),
        torch.tensor([[5]]),
        draft_logits=torch.zeros(1, 1, 8),
        rule=Synthetic(1.0),
        uniforms=random_numbers(0.5, 0.5),
        logprobs=True,
        backend=backend,
    )
    assert verdict.tokens[0, 0] == 5
    assert verdict.logprobs[0, 0] == -torch.inf
