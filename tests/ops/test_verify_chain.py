"""verify_chain: every backend gives the tokens of the reference, for all inputs, layouts and surroundings."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from cases import (
    DRAFTERS,
    DTYPES,
    ENSEMBLES,
    FULL,
    LAYOUTS,
    TRACED_BACKENDS,
    Recipe,
    build,
    far_apart,
    lay_out,
    many,
    operator_arguments,
    random_recipe,
    tensors_of,
    with_threads,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from tolerance import Comparison
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

import specens_kernels.ops.verify_chain as operation
from specens_kernels import Contrastive, Mixture, Sampling, Verdict, verify_chain

RANDOM_CASES = {"cpp": many(300), "triton": many(20)}  # Triton's interpreter takes a tenth of a second for each row
RANDOM_VOCABS = {"cpp": (1, 2, 7, 33, 2049), "triton": (1, 2, 33)}


@pytest.fixture
def everything(backend: str) -> Recipe:
    """A recipe that uses every per-request argument."""
    return Recipe(
        batch=2 if backend == "triton" else 7,
        draft_len=1 if backend == "triton" else 3,
        vocabs=(33, 40),
        ensemble="mixture rows",
        drafter="member a token",
        temperature="requests",
        ragged=True,
        degenerates=("nan", "-inf", "dead row"),
    )


def assert_equal(result: Verdict, expected: Verdict) -> None:
    for name, own, other in zip(Verdict._fields, result, expected, strict=True):
        assert (own is None and other is None) or torch.equal(own, other), name


def test_random_requests_get_the_tokens_of_the_reference(backend, device):
    comparison = Comparison()
    for seed in range(RANDOM_CASES[backend]):
        recipe = random_recipe(random.Random(seed), RANDOM_VOCABS[backend], (1,) if backend == "triton" else (1, 4))
        case = build(recipe, seed, device)
        comparison.verify(case, case.verify(backend), case.verify("reference"))
    comparison.finish(at_least=RANDOM_CASES[backend])


@pytest.mark.parametrize("vocab", [1, 33, 1024, 2049, 50257])
def test_every_vocabulary_size_and_dtype_gives_the_tokens_of_the_reference(backend, device, vocab):
    comparison = Comparison()
    choices = list(itertools.product(("none", "mixture", "plausible"), DTYPES))
    for seed, (ensemble, dtype) in enumerate(choices if backend == "cpp" else choices[vocab % 9 :][:1]):
        recipe = Recipe(1, 1, vocabs=(vocab, max(1, vocab - 7)), ensemble=ensemble, dtype=dtype, drafter="outside")
        case = build(recipe, seed, device)
        comparison.verify(case, case.verify(backend), case.verify("reference"))
    comparison.finish(at_least=1)


@pytest.mark.parametrize("drafter", DRAFTERS)
@pytest.mark.parametrize("ensemble", ENSEMBLES)
def test_every_ensemble_and_drafter_gives_the_tokens_of_the_reference(backend, device, ensemble, drafter):
    comparison = Comparison()
    plain = Recipe(1, 1, vocabs=(33, 30), ensemble=ensemble, drafter=drafter)
    varied = replace(plain, batch=33, draft_len=3, temperature="requests", ragged=True)
    quick = backend == "triton" and not FULL
    for recipe in (plain,) if quick else (plain, varied, replace(varied, bonus=False)):
        case = build(recipe, 2, device)
        comparison.verify(case, case.verify(backend), case.verify("reference"))
    comparison.finish(at_least=1)


@settings(max_examples=100, deadline=None, derandomize=True)
@given(
    seed=st.integers(0, 2**16),
    batch=st.integers(0, 5),
    draft_len=st.integers(0, 6),
    vocabs=st.lists(st.integers(1, 2100), min_size=2, max_size=2).map(tuple),
    ensemble=st.sampled_from(ENSEMBLES),
    drafter=st.sampled_from(DRAFTERS),
    layout=st.sampled_from(LAYOUTS),
    dtype=st.sampled_from(DTYPES),
    temperature=st.one_of(st.just("requests"), st.just(0.0), st.floats(0.1, 10)),
    draft_temperature=st.one_of(st.none(), st.just(0.0), st.floats(0.1, 10)),
    flags=st.tuples(st.booleans(), st.booleans(), st.booleans()),
)
def test_every_request_gets_the_tokens_of_the_reference(seed, flags, **choices):
    bonus, ragged, seeded = flags
    case = build(Recipe(bonus=bonus, ragged=ragged, seeded=seeded, **choices), seed)
    Comparison().verify(case, case.verify("cpp"), case.verify("reference"))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_strided_inputs_give_the_bits_of_contiguous_ones(everything, backend, device, layout):
    recipe = replace(everything, layout=layout, drafter="outside", dtype=torch.bfloat16)
    case = build(recipe if backend == "cpp" else replace(recipe, ensemble="none"), 1, device)
    plain = replace(
        case,
        member_logits=[logits.contiguous() for logits in case.member_logits],
        draft_tokens=case.draft_tokens.contiguous(),
        draft=case.draft | {"draft_logits": case.draft["draft_logits"].contiguous()},
    )
    assert_equal(case.verify(backend), plain.verify(backend))


def test_strided_parameters_give_the_bits_of_contiguous_ones(everything, backend, device):
    case = build(replace(everything, seeded=False), 1, device)
    temperatures, weights = case.target["sampling"].temperature, case.target["ensemble"].weights
    strided = replace(
        case,
        target={
            "ensemble": Mixture(lay_out(weights.double(), "steps first")),
            "sampling": Sampling(lay_out(temperatures, "sliced")),
        },
        draft={name: lay_out(value, "sliced") for name, value in case.draft.items()},
        random_numbers={name: lay_out(value, "steps first") for name, value in case.random_numbers.items()},
    )
    assert_equal(strided.verify(backend), case.verify(backend))


def test_draft_tokens_of_32_bits_give_the_result_of_64(everything, backend, device):
    case = build(everything, 2, device)
    narrow = replace(
        case, draft_tokens=case.draft_tokens.int(), draft=case.draft | {"draft_lens": case.draft["draft_lens"].int()}
    )
    assert_equal(narrow.verify(backend), case.verify(backend))


def test_members_may_have_different_dtypes(everything, backend, device):
    case = build(replace(everything, degenerates=()), 3, device)
    half = replace(case, member_logits=[case.member_logits[0].bfloat16(), case.member_logits[1].half()])
    wide = replace(half, member_logits=[logits.float() for logits in half.member_logits])
    assert_equal(half.verify(backend), wide.verify(backend))


def test_a_request_alone_gets_the_bits_that_it_gets_in_a_batch_of_seven(everything, backend, device):
    case = build(replace(everything, batch=7), 4, device)
    together = case.verify(backend)
    for indices in ([3], [6, 2]) if backend == "triton" else ([0], [3], [6], [6, 5, 4, 3, 2, 1, 0], [2, 2]):
        alone = case.requests(indices).verify(backend)
        assert_equal(alone, Verdict(*(None if value is None else value[indices] for value in together)))


def test_padding_behind_a_chain_changes_nothing(everything, backend, device):
    case = build(replace(everything, drafter="outside"), 5, device)
    padded = replace(
        case,
        member_logits=[_longer(logits, torch.nan) for logits in case.member_logits],
        draft_tokens=_longer(case.draft_tokens, 5),
        draft=case.draft | {"draft_logits": _longer(case.draft["draft_logits"], torch.nan)},
    )
    result, expected = padded.verify(backend), case.verify(backend)
    width = expected.tokens.shape[1]
    assert (result.tokens[:, width:] == -1).all()
    assert_equal(result._replace(tokens=result.tokens[:, :width], logprobs=result.logprobs[:, :width]), expected)


def _longer(values: Tensor, fill: float) -> Tensor:
    """Two more steps."""
    return torch.cat([values, torch.full_like(values[:, :1], fill).repeat_interleave(2, 1)], 1)


@pytest.mark.parametrize("backend", ["cpp"])
@pytest.mark.parametrize(("batch", "vocab"), [(40, 3000), (1, 300_000)], ids=["many requests", "a long row"])
def test_the_number_of_threads_does_not_change_a_bit(everything, backend, batch, vocab):
    for recipe in (everything, replace(everything, ensemble="plausible", drafter="outside")):
        case = build(replace(recipe, batch=batch, vocabs=(vocab, vocab)), 6)
        single, double = (with_threads(count, lambda case=case: case.verify(backend)) for count in (1, 2))
        assert_equal(single, double)


def test_without_log_probabilities_the_tokens_are_the_same(everything, backend, device):
    case = build(everything, 7, device)
    arguments = {**case.target, **case.draft, **case.random_numbers}
    bare = verify_chain(case.member_logits, case.draft_tokens, **arguments, backend=backend)
    assert_equal(bare, case.verify(backend)._replace(logprobs=None))


@pytest.mark.parametrize("bonus", [True, False])
def test_no_drafts_at_all_give_a_plain_draw_or_nothing(backend, device, bonus):
    case = build(Recipe(batch=3, draft_len=0, bonus=bonus, drafter="one-hot"), 8, device)
    verdict = case.verify(backend)
    assert_equal(verdict, case.verify("reference")._replace(logprobs=verdict.logprobs))
    assert verdict.num_tokens.tolist() == [int(bonus)] * 3


def test_an_empty_batch_gives_empty_results(backend, device):
    verdict = build(Recipe(batch=0, draft_len=4), 9, device).verify(backend)
    assert [list(value.shape) for value in tensors_of(verdict)] == [[0, 5], [0], [0], [0], [0, 5], [0]]
    dtypes = [torch.int64] * 4 + [torch.float32, torch.int32]
    assert [value.dtype for value in tensors_of(verdict)] == dtypes


def test_elements_beyond_two_to_the_31_are_read(backend, device, tmp_path: Path):
    case = build(Recipe(batch=1, draft_len=1, vocabs=(100,), dtype=torch.bfloat16, drafter="one-hot"), 10, device)
    stride = 2**31 + 5
    far = far_apart(2 * stride, torch.bfloat16, device, tmp_path)
    steps = far.as_strided((1, 2, 100), (stride, stride, 1)).copy_(case.member_logits[0])
    assert_equal(replace(case, member_logits=[steps]).verify(backend), case.verify(backend))
    twice = case.requests([0, 0])
    requests = far.as_strided((2, 2, 100), (stride, 100, 1)).copy_(twice.member_logits[0])
    assert_equal(replace(twice, member_logits=[requests]).verify(backend), twice.verify(backend))


@pytest.mark.parametrize("backend", TRACED_BACKENDS)
def test_the_operator_keeps_its_contract(everything, backend, device):
    operator = operation.IMPLEMENTATIONS[backend]
    others = (Recipe(1, 1, drafter="outside", seeded=False), Recipe(1, 1, drafter="one-hot"))
    for recipe in (replace(everything, batch=1),) if backend == "triton" else (everything, *others):
        arguments = operator_arguments(operation, build(recipe, 11, device).verify)
        assert set(torch.library.opcheck(operator, *arguments).values()) == {"SUCCESS"}


def test_fake_tensors_get_the_shapes_of_real_ones(everything, backend, device):
    case = build(replace(everything, drafter="outside"), 12, device)
    expected = case.verify(backend)
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        fake = replace(case, member_logits=[mode.from_tensor(logits) for logits in case.member_logits])
        result = fake.verify(backend)
    for own, other in zip(tensors_of(result), tensors_of(expected), strict=True):
        assert (own.shape, own.dtype, own.device) == (other.shape, other.dtype, other.device)


@pytest.mark.parametrize("backend", TRACED_BACKENDS)
def test_it_compiles_to_one_graph_with_everything_built_inside(everything, backend, device):
    def step(first: Tensor, second: Tensor, tokens: Tensor, temperatures: Tensor, weights: Tensor, seeds: Tensor):
        random_numbers = {"seeds": seeds, "positions": seeds + 1, "logprobs": True, "backend": backend}
        mixed = verify_chain(
            [first, second],
            tokens,
            ensemble=Mixture(weights),
            sampling=Sampling(temperature=temperatures),
            drafter=1,
            **random_numbers,
        )
        contrast = verify_chain([first, second], tokens, ensemble=Contrastive(0.1, plausibility=0.1), **random_numbers)
        outside = verify_chain(first, tokens, draft_logits=second[:, :-1], **random_numbers)
        return *tensors_of(mixed), *tensors_of(contrast), *tensors_of(outside)

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    for batch in (2,) if backend == "triton" else (3, 5, 4):
        case = build(replace(everything, batch=batch, ragged=False), batch, device)
        arguments = (*case.member_logits, case.draft_tokens, case.target["sampling"].temperature)
        arguments += (case.target["ensemble"].weights, case.random_numbers["seeds"])
        for own, expected in zip(compiled(*arguments), step(*arguments), strict=True):
            assert torch.equal(own, expected)


def test_the_call_makes_no_copy_of_the_logits():
    case = build(Recipe(2, 3, vocabs=(50_000, 50_000), dtype=torch.bfloat16, layout="sliced", ensemble="mixture"), 13)
    with torch.profiler.profile(profile_memory=True) as profile:
        case.verify("cpp")
    allocated = sum(max(0, event.self_cpu_memory_usage) for event in profile.key_averages())
    assert 0 < allocated < 0.01 * sum(2 * logits.numel() for logits in case.member_logits)
