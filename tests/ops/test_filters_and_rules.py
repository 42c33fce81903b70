"""Filters and rules of the C++ backend against the reference, request by request."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from specens_kernels import (
    Contrastive,
    LogitMixture,
    Mixture,
    Sampling,
    Typical,
    Verdict,
    sample,
    target_logprobs,
    verify_chain,
)

NUDGE = 2e-6  # by which coins and thresholds are moved to see whether a request hangs on the last bits
VOCABS = (1, 2, 7, 33, 1500, 50257)
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


def random_problem(seed: int) -> tuple[list[Tensor], Tensor, dict[str, Any]]:
    choice, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    batch, draft_len, bonus = choice.choice([1, 3, 9]), choice.choice([0, 1, 3]), choice.choice([0, 1])
    members, vocab = choice.choice([1, 1, 2, 3]), choice.choice(VOCABS)
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
    """Whether moving coins and thresholds a little makes the reference decide as the backend did."""
    for amount in (-NUDGE, NUDGE):
        moved = {"sampling": nudged(arguments["sampling"], amount)}
        if "draft_sampling" in arguments:
            moved["draft_sampling"] = nudged(arguments["draft_sampling"], amount)
        coins = {"uniforms": (arguments["uniforms"] + amount).clamp(0, 1 - 1e-12)}
        for change in (moved, coins, moved | coins):
            if call(backend="reference", **(arguments | change)).tokens[request].tolist() == result:
                return True
    return False


def test_cpp_verifies_filtered_chains_under_every_rule_as_the_reference():
    requests = differing = 0
    for seed in range(150):
        logits, tokens, arguments = random_problem(seed)

        def call(logits=logits, tokens=tokens, **given) -> Verdict:
            return verify_chain(logits, tokens, **given)

        expected, result = call(backend="reference", **arguments), call(backend="cpp", **arguments)
        same = (expected.tokens == result.tokens).all(1) & (expected.status == result.status)
        for request in (~same).nonzero()[:, 0].tolist():
            own = result.tokens[request].tolist()
            assert hangs_on_the_last_bits(call, arguments, request, own), (seed, request, expected, result)
        torch.testing.assert_close(result.logprobs[same], expected.logprobs[same], atol=5e-5, rtol=1e-5)
        requests, differing = requests + len(same), differing + int((~same).sum())
    assert requests > 500
    assert differing <= SET_ASIDE * requests


def test_cpp_draws_filtered_tokens_and_distributions_as_the_reference():
    for seed in range(150):
        logits, _, arguments = random_problem(seed)
        given = {name: arguments[name] for name in ("ensemble", "sampling")}
        if logits[0].shape[1] == 0:
            continue
        expected = target_logprobs(logits, backend="reference", **given)
        result = target_logprobs(logits, backend="cpp", **given)
        agree = (expected.isinf() == result.isinf()).all(-1)
        assert agree.double().mean() >= 0.6 or agree.numel() < 4, seed  # a nucleus can hang on the last bits
        torch.testing.assert_close(result[agree], expected[agree], atol=5e-5, rtol=1e-5)

        def call(row=tuple(values[:, 0] for values in logits), **own):
            own = {name: own[name] for name in ("ensemble", "sampling", "backend", "uniforms")}
            return sample(row, **(own | {"uniforms": own["uniforms"][:, 0].contiguous()}))

        expected_draw, draw = call(backend="reference", **arguments), call(backend="cpp", **arguments)
        for request in (expected_draw.tokens != draw.tokens).nonzero()[:, 0].tolist():
            assert hangs_on_the_last_bits(call, arguments, request, draw.tokens[request].tolist()), (seed, request)


ROWS = {
    "flat": lambda vocab: torch.zeros(vocab),
    "two values": lambda vocab: (torch.arange(vocab) % 3 == 0).float(),
    "one-hot": lambda vocab: torch.where(torch.arange(vocab) == vocab // 2, 0.0, -torch.inf),
    "steep": lambda vocab: -torch.arange(vocab) * 0.01,
    "random": lambda vocab: torch.randn(vocab, generator=torch.Generator().manual_seed(vocab)) * 3,
}


@pytest.mark.parametrize("row", ROWS)
@pytest.mark.parametrize("vocab", [5, 1024, 4099, 262144])
def test_thresholds_are_found_in_rows_of_every_shape(row, vocab):
    logits = ROWS[row](vocab)[None]
    for settings in (
        {"top_k": 1},
        {"top_k": 50},
        {"top_k": vocab},
        {"top_k": max(1, vocab // 2)},
        {"top_p": 1e-9},
        {"top_p": 0.9},
        {"min_p": 0.3},
        {"top_k": 40, "top_p": 0.95, "min_p": 0.05},
    ):
        expected = target_logprobs(logits, sampling=Sampling(**settings), backend="reference")
        result = target_logprobs(logits, sampling=Sampling(**settings), backend="cpp")
        assert abs(int(result.isfinite().sum()) - int(expected.isfinite().sum())) <= (1 if "top_p" in settings else 0)
        both = result.isfinite() & expected.isfinite()
        torch.testing.assert_close(result[both], expected[both], atol=1e-4, rtol=1e-5)


def test_filters_out_of_range_in_a_tensor_give_a_status_where_they_cannot_be_read_before():
    logits, tokens = torch.zeros(2, 2, 4), torch.zeros(2, 1, dtype=torch.int64)
    sampling = Sampling(top_p=torch.tensor([0.5, 0.5]))
    sampling.top_p[1] = 0.0  # after the check
    arguments = {"sampling": sampling, "uniforms": torch.full((2, 2), 0.5)}
    for backend in ("reference", "cpp"):
        verdict = verify_chain(logits, tokens, backend=backend, **arguments)
        assert verdict.status.tolist()[1] == 128
        assert verdict.num_tokens.tolist() == [verdict.num_tokens.tolist()[0], 0]
