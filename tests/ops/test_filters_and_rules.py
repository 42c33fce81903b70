"""Filters and rules of the backends against the reference, request by request."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from cases import FULL, many
from torch import Tensor

from specens_kernels import (
    Contrastive,
    LogitMixture,
    Mixture,
    Sampling,
    Synthetic,
    Typical,
    Verdict,
    sample,
    target_logprobs,
    verify_chain,
)

NUDGE = 2e-6  # by which uniforms and thresholds are moved to see whether a request hangs on the last bits
CPP_SHAPES = ((1, 3, 9), (0, 1, 3), (1, 2, 7, 33, 1500, 50257))  # batches, draft lengths, vocabularies
TRITON_SHAPES = ((1, 2), (1, 2), (7, 33, 70))  # interpreted, so small
Shapes = tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]
NEGLIGIBLE = -1e30  # a log-probability that float64 cannot tell from others, beside a largest float
SET_ASIDE = 0.02  # the share of requests that may be decided otherwise


def random_filters(choice: random.Random, batch: int, generator: torch.Generator) -> dict[str, Any]:
    filters: dict[str, Any] = {}
    if choice.random() < 0.6:
        filters["top_k"] = choice.choice([1, 2, 5, -1, 0, 50, torch.randint(-1, 40, (batch,), generator=generator)])
    if choice.random() < 0.6:
        filters["top_p"] = choice.choice([0.9, 0.5, 1e-9, 1.0, torch.rand(batch, generator=generator) * 0.98 + 0.01])
    if choice.random() < 0.4:
        filters["min_p"] = choice.choice([0.1, 0.5, 1.0, 0.0, torch.rand(batch, generator=generator)])
    if choice.random() < 0.4:
        filters["filter_order"] = "vllm"
    return filters


def random_problem(seed: int, shapes: Shapes = CPP_SHAPES) -> tuple[list[Tensor], Tensor, dict[str, Any]]:
    choice, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    batches, draft_lens, vocabs = shapes
    batch, draft_len, bonus = choice.choice(batches), choice.choice(draft_lens), choice.choice([0, 1])
    members, vocab = choice.choice([1, 1, 2, 3]), choice.choice(vocabs)
    dtype = choice.choice([torch.float32, torch.bfloat16, torch.float16])
    logits = [
        (torch.randn(batch, draft_len + bonus, max(1, vocab - choice.choice([0, 0, 1])), generator=generator) * 2).to(
            dtype
        )
        for _ in range(members)
    ]
    for values in logits:
        if values.numel() and choice.random() < 0.3:
            values.view(-1)[torch.randint(0, values.numel(), (5,), generator=generator)] = -torch.inf
    weights = torch.rand(members, generator=generator) + 0.1
    mixture = Mixture((weights / weights.sum()).tolist(), filter=choice.choice(["mixture", "members"]))
    ensembles = [mixture, LogitMixture(weights.tolist())]
    if members == 1:
        ensembles.append(None)
    if members == 2:
        ensembles.append(Contrastive(0.2, 0.1))
    temperature = choice.choice([1.0, 0.7, torch.rand(batch, generator=generator) * (torch.arange(batch) % 3 > 0)])
    arguments: dict[str, Any] = {
        "ensemble": choice.choice(ensembles),
        "sampling": Sampling(temperature=temperature, **random_filters(choice, batch, generator)),
        "rule": choice.choice(["token", "block", "typical", Typical(0.5, 0.4)]),
        "uniforms": torch.rand(batch, draft_len + 1, dtype=torch.float64, generator=generator),
        "logprobs": True,
    }
    widest = max(values.shape[-1] for values in logits)
    kind = choice.choice(["one-hot", "member", "outside"])
    if kind == "member":
        arguments["drafter"] = choice.randrange(members)
    if kind == "outside":
        arguments["draft_logits"] = torch.randn(batch, draft_len, widest, generator=generator)
    if choice.random() < 0.4:
        arguments["draft_sampling"] = Sampling(temperature=0.8, **random_filters(choice, batch, generator))
    likely = torch.nn.functional.pad(logits[0][:, :draft_len].float(), (0, widest - logits[0].shape[-1])).argmax(-1)
    tokens = torch.where(
        torch.rand(batch, draft_len, generator=generator) < 0.6,
        likely,
        torch.randint(0, widest, (batch, draft_len), generator=generator),
    )
    return logits, tokens, arguments


def nudged(sampling: Sampling, amount: float) -> Sampling:
    def move(value: Any) -> Any:
        if value is None or (not isinstance(value, Tensor) and value in (0.0, 1.0)):
            return value
        moved = torch.as_tensor(value) * (1 + amount)
        moved = moved.clamp(1e-30, 1.0)
        return moved if isinstance(value, Tensor) else float(moved)

    return replace(sampling, top_p=move(sampling.top_p), min_p=move(sampling.min_p))


def hangs_on_the_last_bits(call, arguments: dict[str, Any], request: int, result: list[int]) -> bool:
    """Whether moving uniforms and thresholds a little makes the reference decide as the backend did."""
    for amount in (-NUDGE, NUDGE):
        moved = {"sampling": nudged(arguments["sampling"], amount)}
        if "draft_sampling" in arguments:
            moved["draft_sampling"] = nudged(arguments["draft_sampling"], amount)
        random_numbers = {"uniforms": (arguments["uniforms"] + amount).clamp(0, 1 - 1e-12)}
        for change in (moved, random_numbers, moved | random_numbers):
            if call(backend="reference", **(arguments | change)).tokens[request].tolist() == result:
                return True
    return False


def verify_problems(backend: str, seeds: range, shapes: Shapes, at_least: int) -> None:
    """Compare the verdicts of a backend on random problems with the reference's."""
    requests = differing = 0
    for seed in seeds:
        logits, tokens, arguments = random_problem(seed, shapes)

        def call(logits=logits, tokens=tokens, **given) -> Verdict:
            return verify_chain(logits, tokens, **given)

        expected, result = call(backend="reference", **arguments), call(backend=backend, **arguments)
        same = (expected.tokens == result.tokens).all(1) & (expected.status == result.status)
        for request in (~same).nonzero()[:, 0].tolist():
            own = result.tokens[request].tolist()
            assert hangs_on_the_last_bits(call, arguments, request, own), (seed, request, expected, result)
        torch.testing.assert_close(result.logprobs[same], expected.logprobs[same], atol=5e-5, rtol=1e-5)
        requests, differing = requests + len(same), differing + int((~same).sum())
    assert requests > at_least
    assert differing <= SET_ASIDE * requests


def test_cpp_verifies_filtered_chains_under_every_rule_as_the_reference():
    verify_problems("cpp", range(150), CPP_SHAPES, at_least=500)


def test_triton_verifies_filtered_chains_under_every_rule_as_the_reference():
    verify_problems("triton", range(many(12)), TRITON_SHAPES, at_least=12)


@pytest.mark.parametrize(("backend", "seeds", "shapes"), [("cpp", 100, CPP_SHAPES), ("triton", 4, TRITON_SHAPES)])
def test_filtered_draws_and_distributions_are_those_of_the_reference(backend, seeds, shapes):
    for seed in range(many(seeds)):
        logits, _, arguments = random_problem(seed, shapes)
        given = {name: arguments[name] for name in ("ensemble", "sampling")}
        if logits[0].shape[1] == 0:
            continue
        expected = target_logprobs(logits, backend="reference", **given)
        result = target_logprobs(logits, backend=backend, **given)
        agree = (expected.isinf() == result.isinf()).all(-1)
        assert agree.double().mean() >= 0.6 or agree.numel() < 4, seed  # a nucleus can hang on the last bits
        torch.testing.assert_close(result[agree], expected[agree], atol=5e-5, rtol=1e-5)

        def call(row=tuple(values[:, 0] for values in logits), **own):
            own = {name: own[name] for name in ("ensemble", "sampling", "backend", "uniforms")}
            return sample(row, **(own | {"uniforms": own["uniforms"][:, 0].contiguous()}))

        expected_draw, draw = call(backend="reference", **arguments), call(backend=backend, **arguments)
        for request in (expected_draw.tokens != draw.tokens).nonzero()[:, 0].tolist():
            assert hangs_on_the_last_bits(call, arguments, request, draw.tokens[request].tolist()), (seed, request)


ROWS = {
    "flat": lambda vocab: torch.zeros(vocab),
    "two values": lambda vocab: (torch.arange(vocab) % 3 == 0).float(),
    "one-hot": lambda vocab: torch.where(torch.arange(vocab) == vocab // 2, 0.0, -torch.inf),
    "steep": lambda vocab: -torch.arange(vocab) * 0.01,
    "random": lambda vocab: torch.randn(vocab, generator=torch.Generator().manual_seed(vocab)) * 3,
}


FILTERS = (
    {"top_k": 1},
    {"top_k": 50},
    {"top_k": 1.0},  # a share of the vocabulary
    {"top_k": 0.5},
    {"top_p": 1e-9},
    {"top_p": 0.9},
    {"min_p": 0.3},
    {"top_k": 40, "top_p": 0.95, "min_p": 0.05},
)


def assert_thresholds(backend: str, rows: list[Tensor], choices: Sequence[dict[str, Any]]) -> None:
    """Compare what filters leave of rows [vocab], each row under each choice of filters, with the reference."""
    vocab = len(rows[0])
    for choice in choices:
        rank = choice.get("top_k")
        settings = choice | ({"top_k": max(1, int(rank * vocab))} if isinstance(rank, float) else {})
        logits = torch.stack(rows)
        expected = target_logprobs(logits, sampling=Sampling(**settings), backend="reference")
        result = target_logprobs(logits, sampling=Sampling(**settings), backend=backend)
        kept, wanted = result > NEGLIGIBLE, expected > NEGLIGIBLE
        difference = (kept.sum(-1) - wanted.sum(-1)).abs()
        assert difference.max() <= (1 if "top_p" in settings else 0), (settings, difference)
        both = kept & wanted
        torch.testing.assert_close(result[both], expected[both], atol=1e-4, rtol=1e-5)


@pytest.mark.parametrize("row", ROWS)
@pytest.mark.parametrize("vocab", [5, 1024, 4099, 262144])
def test_cpp_finds_thresholds_in_rows_of_every_shape(row, vocab):
    assert_thresholds("cpp", [ROWS[row](vocab)], FILTERS)


@pytest.mark.parametrize("vocab", [5, *[300] * FULL])
def test_triton_finds_thresholds_in_rows_of_every_shape(vocab):
    normal = ROWS["random"](vocab)
    degenerate = [
        torch.full([vocab], -torch.inf),
        torch.where(torch.arange(vocab) % 4 == 0, torch.nan, normal),
        torch.where(torch.arange(vocab) == 1, torch.inf, normal),
        torch.where(torch.arange(vocab) < 3, normal, -torch.inf),
    ]
    rows = [make(vocab) for make in ROWS.values()] + degenerate
    assert_thresholds("triton", rows, FILTERS if FULL and vocab == 5 else FILTERS[3:4] + FILTERS[5:])


@pytest.mark.parametrize("backend", ["reference", "cpp", "triton"])
@pytest.mark.parametrize("name", ["sampling", "draft_sampling"])
def test_filters_out_of_range_in_a_tensor_give_a_status_where_they_cannot_be_read_before(backend, name):
    logits, tokens = torch.zeros(2, 2, 4), torch.zeros(2, 1, dtype=torch.int64)
    sampling = Sampling(top_p=torch.tensor([0.5, 0.5]))
    sampling.top_p[1] = 0.0  # after the check
    verdict = verify_chain(
        logits, tokens, backend=backend, uniforms=torch.full((2, 2), 0.5), drafter=0, **{name: sampling}
    )
    assert verdict.status.tolist() == [verdict.status.tolist()[0] & 127, 128]
    assert verdict.num_tokens.tolist() == [verdict.num_tokens.tolist()[0], 0]


@pytest.mark.parametrize("backend", ["reference", "cpp", "triton"])
def test_greedy_requests_accept_the_most_likely_token_whatever_is_typical(backend):
    logits = torch.tensor([[[0.0, 3.0], [2.0, 0.0], [0.0, 1.0]]])
    arguments = {"sampling": Sampling(temperature=0.0), "rule": Typical(1.0, 1.0), "backend": backend}
    assert verify_chain(logits, torch.tensor([[1, 1]]), **arguments).tokens.tolist() == [[1, 0, -1]]


@pytest.mark.parametrize("backend", ["cpp", "triton"])
def test_a_draft_keeps_the_default_sampling_where_the_target_has_another(backend):
    generator, batch = torch.Generator().manual_seed(3), 64 if backend == "cpp" else 5
    logits, outside = (torch.randn(batch, 3, 9, generator=generator) for _ in range(2))
    tokens, random_numbers = (
        torch.randint(9, (batch, 2), generator=generator),
        torch.rand(batch, 3, generator=generator),
    )
    arguments = {"draft_logits": outside[:, :2], "uniforms": random_numbers, "sampling": Sampling(0.5, top_k=4)}

    def accepted(backend: str, **changes: Any) -> Tensor:
        return verify_chain(logits, tokens, **arguments, **changes, backend=backend).num_accepted

    expected = accepted("reference", draft_sampling=Sampling())
    assert torch.equal(accepted(backend, draft_sampling=Sampling()), expected)
    assert not torch.equal(accepted(backend), expected)


@pytest.mark.parametrize("temperature", [1e10, 1e38, 1e100, 1e300])
def test_filters_rank_by_logits_however_large_the_temperature(backend, temperature):
    """Probabilities that round alike are no ties: top-k, a small top-p and min-p of 1 keep the largest logits."""
    if backend == "triton" and temperature > 1e30:
        pytest.skip("the kernels of Triton take float32 parameters")
    generator = torch.Generator().manual_seed(5)
    logits = torch.randn(1 if backend == "triton" else 3, 300, generator=generator)
    two = torch.zeros_like(logits, dtype=torch.bool).scatter_(1, logits.topk(2).indices, True)
    for settings, kept in (
        ({"top_k": 2}, two),
        ({"top_p": 1.5 / 300}, two),
        ({"min_p": 1.0}, logits == logits.amax(1, keepdim=True)),
    ):
        for ensemble in (None, Mixture((1.0,), filter="members"), LogitMixture((1.0,))):
            sampling = Sampling(temperature, **settings)
            result = target_logprobs(logits, sampling=sampling, ensemble=ensemble, backend=backend)
            assert torch.equal(result > -torch.inf, kept), (settings, ensemble)


def test_a_row_without_a_token_has_no_probability_under_a_filter(backend):
    """A rule that accepts whatever the target says asks for the log-probability of a draft there."""
    verdict = verify_chain(
        torch.full((1, 2, 5), -torch.inf),
        torch.tensor([[3]]),
        ensemble=Mixture((1.0,)),
        sampling=Sampling(top_k=3),
        rule=Synthetic((1.0,)),
        uniforms=torch.zeros(1, 2, dtype=torch.float64),
        logprobs=True,
        backend=backend,
    )
    expected = verdict._replace(logprobs=torch.tensor([[-torch.inf, 0.0]]))
    assert torch.equal(verdict.logprobs, expected.logprobs)
