"""The rule gumbel: every backend gives the tokens of the reference, for all that verification and draws take."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from cases import DTYPES, FULL, many, with_threads
from problems import LOGPROBS, Maker, Problem
from torch import Tensor
from tree_cases import random_case

from specens_kernels import (
    Contrastive,
    LogitMixture,
    Mixture,
    Processing,
    Sampling,
    Status,
    Verdict,
    sample,
    verify_chain,
    verify_tree,
)

PROBLEMS = {"cpp": many(100), "triton": many(6)}
VOCABS = {"cpp": (1, 2, 33, 200, 2049), "triton": (1, 33, 200)}


def random_problem(seed: int, vocabs: tuple[int, ...]) -> Problem:
    """Everything at once; drafts are what the reference would accept, some of them wrong."""
    maker = Maker(seed, vocabs)
    rows = maker.draft_len + maker.bonus
    logits = [maker.logits(rows, max(1, maker.vocab - maker.choice.choice([0, 0, 1]))) for _ in range(maker.members)]
    arguments: dict[str, Any] = {
        "rule": "gumbel",
        "ensemble": maker.ensemble(),
        "sampling": maker.sampling(),
        "processing": maker.processing(torch.nan_to_num(logits[0][:, : maker.draft_len].float(), -99.0).argmax(-1)),
        "allowed": maker.mask(rows),
        "seeds": torch.randint(-(2**62), 2**62, (maker.batch,), generator=maker.generator),
        "positions": torch.randint(2**40, (maker.batch,), generator=maker.generator),
        "logprobs": maker.choice.choice([True, "raw"]),
        "top_logprobs": maker.choice.choice([0, 0, 3]),
    }
    tokens = torch.randint(-1, maker.vocab, (maker.batch, maker.draft_len), generator=maker.generator)
    for step in range(maker.draft_len):
        right = Problem(logits, tokens, arguments).verify("reference").tokens[:, step]
        keep = maker.uniform(maker.batch) < 0.85
        tokens[:, step] = torch.where(keep & (right >= 0), right, tokens[:, step])
    if maker.chance(0.3):
        arguments["draft_lens"] = torch.randint(maker.draft_len + 1, (maker.batch,), generator=maker.generator)
    return Problem(logits, maker.laid_out(tokens.to(maker.choice.choice([torch.int64, torch.int32]))), arguments)


def assert_alike(result: Any, expected: Any, name: object) -> None:
    """Equal but for the rounding of log-probabilities."""
    for field, own, other in zip(expected._fields, result, expected, strict=True):
        assert (own is None) == (other is None), (name, field)
        if own is not None and own.is_floating_point():
            torch.testing.assert_close(own, other, **LOGPROBS, msg=lambda text, field=field: f"{name} {field}: {text}")
        elif own is not None and field != "top_tokens":  # which may tie but for rounding
            assert torch.equal(own, other), (name, field, own, other)


def test_random_chains_get_the_tokens_of_the_reference(backend):
    accepted = 0
    for seed in range(PROBLEMS[backend]):
        problem = random_problem(seed, VOCABS[backend])
        result, expected = problem.verify(backend), problem.verify("reference")
        assert_alike(result, expected, seed)
        accepted += int(expected.num_accepted.sum())
    assert accepted > PROBLEMS[backend] / 2


def draw(problem: Problem, backend: str, **changes: Any) -> Any:
    """From the first row of a problem."""
    names = ("ensemble", "sampling", "processing", "seeds", "positions", "logprobs", "top_logprobs")
    arguments = {name: problem.arguments[name] for name in names}
    allowed = problem.arguments["allowed"]
    arguments["allowed"] = None if allowed is None else allowed[:, 0]
    return sample([logits[:, 0] for logits in problem.logits], method="gumbel", backend=backend, **arguments, **changes)


def test_random_draws_are_those_of_the_reference(backend):
    for seed in range(PROBLEMS[backend]):
        problem = random_problem(seed + 50_000, VOCABS[backend])
        if problem.logits[0].shape[1] > 0:
            changes = {"count": (None, 1, 2, 7)[seed % 4], "step": seed % 3}
            assert_alike(draw(problem, backend, **changes), draw(problem, "reference", **changes), seed)


TREES = {"cpp": many(150), "triton": many(4)}
TREE_SIZES: dict[str, dict[str, tuple[int, ...]]] = {
    "cpp": {},
    "triton": {"batches": (2,), "vocabs": (7, 33), "sizes": (3, 6)},
}


def test_random_trees_get_the_tokens_of_the_reference(backend):
    accepted = 0
    for seed in range(TREES[backend]):
        case = random_case(seed, **TREE_SIZES[backend])
        drawn = ("drafter", "draft_logits", "draft_sampling", "siblings", "uniforms")
        arguments = {name: value for name, value in case.arguments.items() if name not in drawn}
        batch = len(case.draft_tokens)
        arguments |= {"rule": "gumbel", "seeds": torch.arange(batch) + seed, "positions": torch.arange(batch)}
        trees = (case.member_logits, case.draft_tokens, case.parents)
        expected = verify_tree(*trees, backend="reference", **arguments)
        assert_alike(verify_tree(*trees, backend=backend, **arguments), expected, seed)
        accepted += int(expected.num_accepted.sum())
    assert accepted > TREES[backend] / 3


def scale_of(dtype: torch.dtype) -> float:
    return {torch.float32: 2.0, torch.bfloat16: 2.5, torch.float16: 3.0}[dtype]


LONG_ROWS = (None, Mixture((0.3, 0.7)), LogitMixture((1.3, -0.4)), Contrastive(0.5, 0.1))
TEMPERATURES = (0.01, 0.7, 1.0, 5.0, 1e9)


@pytest.mark.parametrize("backend", ["cpp"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("ensemble", LONG_ROWS, ids=str)
def test_long_rows_get_the_tokens_of_the_reference(backend, ensemble, dtype):
    """Many requests, since what pruning passes over is rare: rows of real width, and temperatures far from 1."""
    batch, vocab = 60, 6007
    generator = torch.Generator().manual_seed(1)
    members = 1 if ensemble is None else 2
    logits = [(torch.randn(batch, vocab, generator=generator) * scale_of(dtype)).to(dtype) for _ in range(members)]
    first = 2 * DTYPES.index(dtype) + LONG_ROWS.index(ensemble)  # each temperature with each of both
    for temperature in TEMPERATURES if FULL else (TEMPERATURES * 3)[first : first + 2]:
        arguments: dict[str, Any] = {"seeds": torch.arange(batch), "positions": torch.arange(batch) * 3, "count": 3}
        arguments |= {"method": "gumbel", "ensemble": ensemble, "sampling": Sampling(temperature)}
        expected = sample(logits, backend="reference", **arguments)
        assert torch.equal(sample(logits, backend=backend, **arguments).tokens, expected.tokens), temperature


# sums of several largest floats have no common meaning in float32 and float64
LARGEST = ([torch.inf, 1.0, torch.inf], [3.4e38, -3.4e38])
UNUSUAL = [(ensemble, values) for ensemble in (None, Mixture((0.5, 0.5))) for values in LARGEST]
UNUSUAL += [
    (own, [value]) for own in (None, Mixture((0.5, 0.5)), LogitMixture((1, 2))) for value in (-torch.inf, torch.nan)
]


@pytest.mark.parametrize(("ensemble", "values"), UNUSUAL, ids=str)
def test_rows_of_unusual_logits_get_the_tokens_and_the_status_of_the_reference(backend, ensemble, values):
    row = torch.tensor(values * 70)[:70]
    logits = torch.stack([row, torch.where(torch.arange(70) == 33, 2.0, row)])
    temperatures = (1.0, 1e-30, 1e38, 0.0)
    if backend == "triton" and not FULL:
        temperatures = temperatures[UNUSUAL.index((ensemble, values)) % 2 :: 2]
    for temperature in temperatures:
        arguments: dict[str, Any] = {"sampling": Sampling(temperature), "ensemble": ensemble, "method": "gumbel"}
        arguments |= {"seeds": torch.arange(2), "positions": torch.arange(2), "count": 2}
        members = [logits] if ensemble is None else [logits, logits]
        expected = sample(members, backend="reference", **arguments)
        assert_alike(sample(members, backend=backend, **arguments), expected, temperature)


def test_a_row_whose_plausible_tokens_are_all_excluded_has_no_token(backend):
    """As the expert's token at the top is one that the amateur, at -inf, excludes."""
    expert, amateur = torch.zeros(2, 70), torch.ones(2, 70)
    expert[:, 33], amateur[0, 33] = 9.0, -torch.inf
    arguments = {"seeds": torch.arange(2), "positions": torch.arange(2), "method": "gumbel"}
    for temperature in (1.0, 0.0):
        given = arguments | {"sampling": Sampling(temperature), "ensemble": Contrastive(0.2, 0.1)}
        drawn = sample([expert, amateur], backend=backend, **given)
        assert drawn.tokens.tolist() == [-1, 33]
        assert drawn.status.tolist() == [Status.NO_TOKEN, 0]


def test_equal_logits_at_a_small_temperature_are_drawn_by_their_noise(backend):
    """Noise is not lost beside logits that the temperature makes huge."""
    logits = torch.full((6, 300), 10.0)
    arguments: dict[str, Any] = {"seeds": torch.arange(6), "positions": torch.arange(6), "method": "gumbel"}
    at_one, at_little = (
        sample(logits, sampling=Sampling(temperature), backend=backend, **arguments).tokens
        for temperature in (1.0, 1e-20)
    )
    assert torch.equal(at_one, at_little)
    assert len(set(at_little.tolist())) > 3


@pytest.mark.parametrize("backend", ["cpp"])
def test_packed_rows_and_buffers_give_the_bits_of_dense_rows(backend):
    checked = 0
    for seed in range(60):
        problem = random_problem(seed + 90_000, (33, 300))
        lens = problem.arguments.get("draft_lens")
        if lens is None:
            continue
        dense = problem.verify(backend)
        bonus = problem.logits[0].shape[1] - problem.tokens.shape[1]
        num_rows = [int(length) + bonus for length in lens]
        rows = list(problem.logits)
        arguments = {name: value for name, value in problem.arguments.items() if name not in ("draft_lens", "allowed")}
        if problem.arguments["allowed"] is not None:
            arguments["allowed"] = _packed(problem.arguments["allowed"], num_rows)
        arguments["row_offsets"] = torch.tensor([0, *num_rows]).cumsum(0)
        tokens = _packed(problem.tokens, [int(length) for length in lens])
        arguments["max_draft_len"] = problem.tokens.shape[1]
        packed = verify_chain([_packed(values, num_rows) for values in rows], tokens, backend=backend, **arguments)
        buffers = Verdict(*(None if value is None else torch.full_like(value, 77) for value in dense))
        problem.verify(backend, out=buffers)
        for own, other, into in zip(packed, dense, buffers, strict=True):
            assert own is None or (torch.equal(own, other) and torch.equal(into, other)), seed
        checked += 1
    assert checked > 10


def _packed(values: Tensor, lens: list[int]) -> Tensor:
    return torch.cat([values[request, :length] for request, length in enumerate(lens)])


@pytest.mark.parametrize("backend", ["cpp"])
@pytest.mark.parametrize(("batch", "vocab"), [(40, 3000), (1, 300_000)], ids=["many requests", "a long row"])
@pytest.mark.parametrize("ensemble", [None, Mixture((0.5, 0.5)), LogitMixture((1.0, 0.5))], ids=str)
def test_the_number_of_threads_does_not_change_a_token(backend, batch, vocab, ensemble):
    generator = torch.Generator().manual_seed(2)
    logits = [torch.randn(batch, vocab, generator=generator) for _ in range(1 if ensemble is None else 2)]
    arguments: dict[str, Any] = {"seeds": torch.arange(batch), "positions": torch.arange(batch), "method": "gumbel"}
    arguments |= {"ensemble": ensemble, "backend": backend}
    single, double = (with_threads(count, lambda: sample(logits, **arguments).tokens) for count in (1, 2))
    assert torch.equal(single, double)


def test_a_token_is_one_alone_in_any_batch_and_at_any_place_of_a_chain(backend):
    generator = torch.Generator().manual_seed(3)
    batch = 5 if backend == "cpp" else 2
    logits = torch.randn(batch, 4, 150, generator=generator)
    seeds, positions = torch.arange(batch), torch.arange(batch) * 10
    common: dict[str, Any] = {"backend": backend, "sampling": Sampling(0.8, top_k=40 if backend == "cpp" else None)}
    alone = torch.stack(
        [
            sample(
                logits[:, row], seeds=seeds, positions=positions + row - shift, step=shift, method="gumbel", **common
            ).tokens
            for row, shift in zip(range(4), (0, 1, 0, 2))
        ],
        1,
    )
    chain = verify_chain(logits, alone[:, :3], seeds=seeds, positions=positions, rule="gumbel", **common)
    assert torch.equal(chain.tokens, alone)
    for request in (0, batch - 1):
        own = slice(request, request + 1)
        result = verify_chain(
            logits[own], alone[own, :3], seeds=seeds[own], positions=positions[own], rule="gumbel", **common
        )
        assert torch.equal(result.tokens[0], chain.tokens[request])


@pytest.mark.parametrize("backend", ["cpp"])
def test_penalties_and_weights_count_to_the_last_bit(backend):
    """Python numbers are not rounded to float32, so that a score is the reference's to float64 rounding."""
    generator = torch.Generator().manual_seed(4)
    rng = random.Random(4)
    for _ in range(200):
        logits = [torch.randn(1, 40, generator=generator) for _ in range(2)]
        shift = rng.uniform(-1e-9, 1e-9)
        arguments: dict[str, Any] = {"seeds": torch.zeros(1, dtype=torch.int64), "method": "gumbel", "count": 40}
        arguments |= {"positions": torch.tensor([rng.randrange(1000)]), "ensemble": LogitMixture((0.1 + shift, 0.7))}
        arguments["processing"] = Processing(
            repetition_penalty=1.1 + shift, frequency_penalty=0.3, output_tokens=torch.arange(20)[None]
        )
        arguments["sampling"] = Sampling(0.7 + shift)
        result, expected = (sample(logits, backend=name, **arguments).tokens for name in (backend, "reference"))
        assert torch.equal(result, expected)
