"""target_logprobs: every backend gives the log-probabilities of the reference, up to float32 rounding."""

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
    Case,
    Recipe,
    build,
    far_apart,
    many,
    operator_arguments,
    random_recipe,
    with_threads,
)
from tolerance import SET_ASIDE, assert_logprobs, row_noise, row_ties
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

import specens_kernels.ops.target_logprobs as operation
from specens_kernels import Contrastive, LogitMixture, Mixture, Sampling, target_logprobs

RANDOM_CASES = {"cpp": many(300), "triton": many(20)}
RANDOM_VOCABS = {"cpp": (1, 2, 7, 33, 2049), "triton": (1, 2, 33)}
MIXED = Recipe(batch=2, draft_len=1, vocabs=(33, 40), ensemble="mixture rows", temperature="requests")


class Distributions:
    """Compares the distributions of many cases; rows whose support is a near-tie are set aside and counted."""

    def __init__(self) -> None:
        self.rows = 0
        self.set_aside = 0

    def compare(self, case: Case, backend: str) -> None:
        result, expected, ties = case.target_logprobs(backend), case.target_logprobs("reference"), row_ties(case)
        assert result.shape == expected.shape
        assert_logprobs(result[~ties], expected[~ties], row_noise(case)[~ties][:, None])
        self.rows += ties.numel()
        self.set_aside += int(ties.sum())

    def finish(self, at_least: int) -> None:
        assert self.rows >= at_least
        assert self.set_aside <= max(1, SET_ASIDE * self.rows), f"{self.set_aside} of {self.rows} rows set aside"


def test_random_requests_have_the_distribution_of_the_reference(backend, device):
    distributions = Distributions()
    for seed in range(RANDOM_CASES[backend]):
        recipe = random_recipe(random.Random(seed), RANDOM_VOCABS[backend], (1,) if backend == "triton" else (1, 4))
        distributions.compare(build(replace(recipe, draft_len=1), seed, device), backend)
    distributions.finish(at_least=RANDOM_CASES[backend])


@pytest.mark.parametrize("vocab", [1, 33, 1024, 2049, 50257])
@pytest.mark.parametrize("ensemble", ENSEMBLES)
def test_every_ensemble_and_vocabulary_size_has_the_distribution_of_the_reference(backend, device, ensemble, vocab):
    for seed, dtype in enumerate(DTYPES if backend == "cpp" else DTYPES[vocab % 3 :][:1]):
        recipe = Recipe(1, 0, vocabs=(vocab, max(1, vocab - 7)), ensemble=ensemble, dtype=dtype)
        distributions = Distributions()
        distributions.compare(build(recipe, seed, device), backend)
        distributions.finish(at_least=1)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_error_to_float64_is_that_of_rounding(backend, device, dtype):
    """Not more than torch's own log_softmax of the same float32 numbers loses, and two units in the last place."""
    logits = (3 * torch.randn(2, 2049, generator=torch.Generator().manual_seed(0))).to(dtype).to(device)
    exact = (logits.double() / 0.7).log_softmax(-1)
    result = target_logprobs(logits, sampling=Sampling(temperature=0.7), backend=backend)
    own = ((logits.float() / 0.7).log_softmax(-1) - exact).abs().max()
    assert (result - exact).abs().max() <= own + 2 * 2.0**-23 * exact.abs().max()
    total = result.double().exp().sum(-1)
    torch.testing.assert_close(total, torch.ones_like(total), rtol=0, atol=1e-5)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_strided_logits_give_the_bits_of_contiguous_ones(backend, device, layout):
    case = build(replace(MIXED, layout=layout, dtype=torch.bfloat16), 1, device)
    plain = replace(case, member_logits=[logits.contiguous() for logits in case.member_logits])
    assert torch.equal(case.target_logprobs(backend), plain.target_logprobs(backend))


def test_a_request_alone_has_the_bits_that_it_has_in_a_batch_of_seven(backend, device):
    case = build(replace(MIXED, batch=7), 2, device)
    together = case.target_logprobs(backend)
    for indices in ([3], [6, 2]) if backend == "triton" else ([0], [3], [6], [6, 5, 4, 3, 2, 1, 0]):
        assert torch.equal(case.requests(indices).target_logprobs(backend), together[indices])


@pytest.mark.parametrize("backend", ["cpp"])
@pytest.mark.parametrize(("batch", "vocab"), [(20, 3000), (1, 300_000)], ids=["many requests", "a long row"])
def test_the_number_of_threads_does_not_change_a_bit(backend, batch, vocab):
    for ensemble in ("mixture rows", "plausible"):
        case = build(replace(MIXED, batch=batch, vocabs=(vocab, vocab), ensemble=ensemble), 3)
        single, double = (with_threads(count, lambda case=case: case.target_logprobs(backend)) for count in (1, 2))
        assert torch.equal(single, double)


def test_two_dimensions_are_one_step(backend, device):
    case = build(MIXED, 4, device)
    rows = [logits[:, 1] for logits in case.member_logits]
    result = target_logprobs(rows, **case.target, backend=backend)
    assert torch.equal(result, case.target_logprobs(backend)[:, 1])


def test_improbable_tokens_keep_their_log_probability(backend, device):
    """Also in a mixture, where it is less than the logarithm of the smallest positive number."""
    logits = torch.tensor([[0.0, -20.0, -30.0]], device=device)
    for ensemble, members in ((None, 1), (LogitMixture((0.5, 0.5)), 2), (Mixture((0.5, 0.5)), 2)):
        sampling = Sampling(temperature=0.02)
        result = target_logprobs([logits] * members, ensemble=ensemble, sampling=sampling, backend=backend)
        torch.testing.assert_close(result.cpu(), torch.tensor([[0.0, -1000.0, -1500.0]]))


def test_an_empty_batch_has_no_distributions(backend, device):
    result = build(replace(MIXED, batch=0), 5, device).target_logprobs(backend)
    assert (list(result.shape), result.dtype) == ([0, 2, 40], torch.float32)


def test_elements_beyond_two_to_the_31_are_read(backend, device, tmp_path: Path):
    case = build(Recipe(2, 0, vocabs=(100,), dtype=torch.bfloat16), 6, device)
    stride = 2**31 + 5
    logits = far_apart(stride, torch.bfloat16, device, tmp_path).as_strided((2, 1, 100), (stride, 100, 1))
    logits.copy_(case.member_logits[0])
    assert torch.equal(replace(case, member_logits=[logits]).target_logprobs(backend), case.target_logprobs(backend))


@pytest.mark.parametrize("backend", TRACED_BACKENDS)
def test_the_operator_keeps_its_contract(backend, device):
    operator = operation.IMPLEMENTATIONS[backend]
    for recipe in (replace(MIXED, batch=1), replace(MIXED, batch=1, ensemble="plausible", temperature=1.0)):
        arguments = operator_arguments(operation, build(recipe, 7, device).target_logprobs)
        assert set(torch.library.opcheck(operator, *arguments).values()) == {"SUCCESS"}


def test_fake_tensors_get_the_shape_of_real_ones(backend, device):
    case = build(MIXED, 8, device)
    expected = case.target_logprobs(backend)
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        fake = replace(case, member_logits=[mode.from_tensor(logits) for logits in case.member_logits])
        result = fake.target_logprobs(backend)
    assert (result.shape, result.dtype, result.device) == (expected.shape, expected.dtype, expected.device)


@pytest.mark.parametrize("backend", TRACED_BACKENDS)
def test_it_compiles_to_one_graph_with_everything_built_inside(backend, device):
    def score(first: Tensor, second: Tensor, temperatures: Tensor, weights: Tensor) -> tuple[Tensor, ...]:
        members, sampling = [first, second], Sampling(temperature=temperatures)
        mixed = target_logprobs(members, ensemble=LogitMixture(weights), sampling=sampling, backend=backend)
        contrast = target_logprobs(members, ensemble=Contrastive(0.1, plausibility=0.1), backend=backend)
        return mixed, contrast, target_logprobs(first[:, 0], sampling=sampling, backend=backend).exp()

    compiled = torch.compile(score, fullgraph=True, backend="aot_eager")
    for batch in (2,) if backend == "triton" else (3, 5, 4):
        case = build(replace(MIXED, batch=batch), batch, device)
        arguments = (*case.member_logits, case.target["sampling"].temperature, case.target["ensemble"].weights)
        for own, expected in zip(compiled(*arguments), score(*arguments), strict=True):
            assert torch.equal(own, expected)
