"""sample: every backend draws the tokens of the reference, with their log-probabilities."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from cases import (
    DTYPES,
    ENSEMBLES,
    LAYOUTS,
    TRACED_BACKENDS,
    Recipe,
    build,
    far_apart,
    many,
    operator_arguments,
    random_recipe,
    tensors_of,
    with_threads,
)
from tolerance import Comparison
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

import specens_kernels.ops.sample as operation
from specens_kernels import Contrastive, Draw, LogitMixture, Mixture, Sampling, sample, uniforms, verify_chain

RANDOM_CASES = {"cpp": many(300), "triton": many(20)}
RANDOM_VOCABS = {"cpp": (1, 2, 7, 33, 2049), "triton": (1, 2, 33)}
MIXED = Recipe(batch=2, draft_len=1, vocabs=(33, 40), ensemble="mixture rows", temperature="requests")


def assert_equal(result: Draw, expected: Draw) -> None:
    for name, own, other in zip(Draw._fields, result, expected, strict=True):
        assert (own is None and other is None) or torch.equal(own, other), name


def test_random_requests_draw_the_tokens_of_the_reference(backend, device):
    comparison = Comparison()
    for seed in range(RANDOM_CASES[backend]):
        recipe = random_recipe(random.Random(seed), RANDOM_VOCABS[backend], (1,) if backend == "triton" else (1, 4))
        case = build(replace(recipe, draft_len=1), seed, device)
        comparison.sample(case, 0, case.sample(backend), case.sample("reference"))
    comparison.finish(at_least=RANDOM_CASES[backend])


@pytest.mark.parametrize("vocab", [1, 33, 1024, 2049, 50257])
@pytest.mark.parametrize("ensemble", ENSEMBLES)
def test_every_ensemble_and_vocabulary_size_draws_the_tokens_of_the_reference(backend, device, ensemble, vocab):
    comparison = Comparison()
    for seed, dtype in enumerate(DTYPES if backend == "cpp" else DTYPES[vocab % 3 :][:1]):
        recipe = Recipe(1, 0, vocabs=(vocab, max(1, vocab - 7)), ensemble=ensemble, dtype=dtype)
        case = build(recipe, seed, device)
        comparison.sample(case, 0, case.sample(backend), case.sample("reference"))
    comparison.finish(at_least=1)


def test_a_batch_of_many_requests_draws_the_tokens_of_the_reference(backend, device):
    comparison = Comparison()
    batch = 2000 if backend == "cpp" else 5
    for seed, seeded in enumerate((True, False)):
        case = build(replace(MIXED, batch=batch, seeded=seeded, degenerates=("nan", "-inf", "dead row")), seed, device)
        comparison.sample(case, 1, case.sample(backend, row=1), case.sample("reference", row=1))
    comparison.finish(at_least=2 * batch)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_strided_logits_give_the_bits_of_contiguous_ones(backend, device, layout):
    case = build(replace(MIXED, layout=layout, dtype=torch.bfloat16), 1, device)
    plain = replace(case, member_logits=[logits.contiguous() for logits in case.member_logits])
    assert_equal(case.sample(backend), plain.sample(backend))


def test_a_request_alone_draws_the_bits_that_it_draws_in_a_batch_of_seven(backend, device):
    case = build(replace(MIXED, batch=7), 2, device)
    together = case.sample(backend)
    for indices in ([3], [6, 2]) if backend == "triton" else ([0], [3], [6], [6, 5, 4, 3, 2, 1, 0]):
        assert_equal(
            case.requests(indices).sample(backend),
            Draw(*(None if value is None else value[indices] for value in together)),
        )


@pytest.mark.parametrize("backend", ["cpp"])
@pytest.mark.parametrize(("batch", "vocab"), [(40, 3000), (1, 300_000)], ids=["many requests", "a long row"])
def test_the_number_of_threads_does_not_change_a_bit(backend, batch, vocab):
    for ensemble in ("mixture rows", "plausible"):
        case = build(replace(MIXED, batch=batch, vocabs=(vocab, vocab), ensemble=ensemble), 3)
        single, double = (with_threads(count, lambda case=case: case.sample(backend)) for count in (1, 2))
        assert_equal(single, double)


def test_seeds_give_what_their_uniforms_give(backend, device):
    """Step and stream choose the uniform, as in `uniforms`."""
    logits = torch.zeros(3, 100, device=device)
    seeds, positions = torch.arange(3, device=device), torch.arange(40, 43, device=device)
    for choice in ({}, {"step": 3}, {"step": 3, "stream": 1}, {"stream": 0}):
        random_numbers = uniforms(seeds, positions, **{"stream": 2, **choice}, backend="reference")
        drawn = sample(logits, seeds=seeds, positions=positions, **choice, backend=backend)
        assert torch.equal(drawn.tokens, sample(logits, uniforms=random_numbers, backend=backend).tokens)
        assert torch.equal(drawn.tokens, (random_numbers * 100).long())


def test_a_draw_is_the_next_token_of_a_round_without_drafts(backend, device):
    case = build(replace(MIXED, draft_len=0, drafter="one-hot"), 4, device)
    verdict = case.verify(backend)
    logits = [member[:, 0] for member in case.member_logits]
    drawn = sample(logits, **case.target, **case.random_numbers, step=0, stream=1, logprobs=True, backend=backend)
    assert torch.equal(drawn.tokens, verdict.next_token)
    assert torch.equal(drawn.logprobs, verdict.logprobs[:, 0])


@pytest.mark.parametrize("temperature", [1e-6, 1e-30, 1e-38])
@pytest.mark.parametrize("ensemble", [None, Mixture((0.5, 0.5)), LogitMixture((1.0, 0.5))])
def test_a_tiny_temperature_draws_the_most_likely_token(backend, device, ensemble, temperature):
    logits = torch.tensor([[0.0, 1.0, -2.0]], device=device)
    random_numbers = torch.tensor([0.5], dtype=torch.float64, device=device)
    drawn = sample(
        [logits] if ensemble is None else [logits, logits],
        ensemble=ensemble,
        sampling=Sampling(temperature=temperature),
        uniforms=random_numbers,
        logprobs=True,
        backend=backend,
    )
    assert (drawn.tokens.item(), drawn.logprobs.item(), drawn.status.item()) == (1, 0.0, 0)


def test_a_uniform_of_32_bits_is_the_same_number(backend, device):
    logits = torch.randn(5, 33, generator=torch.Generator().manual_seed(0)).to(device)
    random_numbers = torch.rand(5, generator=torch.Generator().manual_seed(1)).to(device)
    drawn = sample(logits, uniforms=random_numbers, backend=backend)
    assert_equal(drawn, sample(logits, uniforms=random_numbers.double(), backend=backend))


def test_an_empty_batch_draws_nothing(backend, device):
    drawn = build(replace(MIXED, batch=0), 5, device).sample(backend)
    assert [(list(value.shape), value.dtype) for value in tensors_of(drawn)] == [
        ([0], torch.int64),
        ([0], torch.float32),
        ([0], torch.int32),
    ]


def test_elements_beyond_two_to_the_31_are_read(backend, device, tmp_path: Path):
    case = build(Recipe(2, 0, vocabs=(100,), dtype=torch.bfloat16), 6, device)
    stride = 2**31 + 5
    logits = far_apart(stride, torch.bfloat16, device, tmp_path).as_strided((2, 1, 100), (stride, 100, 1))
    logits.copy_(case.member_logits[0])
    assert_equal(replace(case, member_logits=[logits]).sample(backend), case.sample(backend))


@pytest.mark.parametrize("backend", TRACED_BACKENDS)
def test_the_operator_keeps_its_contract(backend, device):
    operator = operation.IMPLEMENTATIONS[backend]
    for recipe in (MIXED, replace(MIXED, ensemble="none", seeded=False, temperature=1.0)):
        arguments = operator_arguments(operation, build(recipe, 7, device).sample)
        assert set(torch.library.opcheck(operator, *arguments).values()) == {"SUCCESS"}


def test_fake_tensors_get_the_shapes_of_real_ones(backend, device):
    case = build(MIXED, 8, device)
    expected = case.sample(backend)
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        fake = replace(case, member_logits=[mode.from_tensor(logits) for logits in case.member_logits])
        result = fake.sample(backend)
    for own, other in zip(tensors_of(result), tensors_of(expected), strict=True):
        assert (own.shape, own.dtype, own.device) == (other.shape, other.dtype, other.device)


@pytest.mark.parametrize("backend", TRACED_BACKENDS)
def test_it_compiles_to_one_graph_with_everything_built_inside(backend, device):
    def draft_and_verify(first: Tensor, second: Tensor, temperatures: Tensor, weights: Tensor, seeds: Tensor):
        random_numbers = {"seeds": seeds, "positions": seeds + 1, "logprobs": True, "backend": backend}
        sampling = Sampling(temperature=temperatures)
        draft = sample(second, sampling=sampling, **random_numbers)
        mixed = sample([first, second], ensemble=Mixture(weights), sampling=sampling, step=1, **random_numbers)
        contrast = sample([first, second], ensemble=Contrastive(0.1, plausibility=0.1), stream=1, **random_numbers)
        verdict = verify_chain(first[:, None], draft.tokens[:, None], draft_logits=second[:, None], **random_numbers)
        return *tensors_of(draft), *tensors_of(mixed), *tensors_of(contrast), verdict.tokens * 2

    compiler = "inductor" if backend == "cpp" else "aot_eager"
    compiled = torch.compile(draft_and_verify, fullgraph=True, backend=compiler)
    for batch in (2,) if backend == "triton" else (3, 5):
        case = build(replace(MIXED, batch=batch), batch, device)
        arguments = (*(logits[:, 0] for logits in case.member_logits), case.target["sampling"].temperature)
        arguments += (case.target["ensemble"].weights, case.random_numbers["seeds"])
        for own, expected in zip(compiled(*arguments), draft_and_verify(*arguments), strict=True):
            assert torch.equal(own, expected)
