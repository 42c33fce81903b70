"""What went wrong in other systems, by symptom: small inputs whose right answer is known, on every backend."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from specens_kernels import (
    Contrastive,
    Mixture,
    Sampling,
    Status,
    Verdict,
    sample,
    target_logprobs,
    verify_chain,
)

pytestmark = pytest.mark.parametrize("backend", ["reference", "cpp", "triton"])
GREEDY = Sampling(temperature=0.0)
BELOW_ONE = 1 - 2.0**-24
LAST_UNIFORM = 1 - 2.0**-53


def rows(*probabilities: tuple[float, ...], device: torch.device) -> Tensor:
    """Logits [1, rows, vocab] of these distributions."""
    return torch.tensor([probabilities], dtype=torch.float32, device=device).log()


def each(logits: Tensor, batch: int) -> Tensor:
    return logits.expand(batch, -1, -1)


def random_numbers(*values: float | tuple[float, ...], device: torch.device) -> Tensor:
    """uniforms [batch, 2]: one for the test of each request, and 0.5 for its next token where only one is given."""
    pairs = [value if isinstance(value, tuple) else (value, 0.5) for value in values]
    return torch.tensor(pairs, dtype=torch.float64, device=device)


def drafts(*tokens: int, device: torch.device) -> Tensor:
    return torch.tensor(tokens, device=device)[:, None]


def emitted(verdict: Verdict) -> list[list[int]]:
    return [row[: int(count)].tolist() for row, count in zip(verdict.tokens, verdict.num_tokens)]


def test_the_temperature_is_part_of_the_acceptance_test(backend, device):
    target = each(rows((2.0, 1.0, 0.5), device=device), 2)
    likely = (2.0**2 / (2.0**2 + 1 + 0.5**2), 1 / (2.0**2 + 1 + 0.5**2))
    verdict = verify_chain(
        target,
        drafts(1, 1, device=device),
        sampling=Sampling(temperature=0.5),
        uniforms=random_numbers(likely[1] - 1e-3, likely[1] + 1e-3, device=device),
        backend=backend,
    )
    assert verdict.num_accepted.tolist() == [1, 0]


def test_a_temperature_belongs_to_its_request(backend, device):
    target = each(rows((0.8, 0.2), device=device), 3)
    temperatures = torch.tensor([1.0, 2.0, 0.0], device=device)
    verdict = verify_chain(
        target,
        drafts(1, 1, 1, device=device),
        sampling=Sampling(temperature=temperatures),
        uniforms=random_numbers(0.3, 0.3, 0.0, device=device),
        backend=backend,
    )
    assert verdict.num_accepted.tolist() == [0, 1, 0]  # at temperature 2 the probabilities are (2/3, 1/3)


def test_a_draft_of_probability_zero_is_rejected_by_uniform_zero(backend, device):
    target = each(rows((0.5, 0.5, 0.0), device=device), 3)
    outside = each(rows((0.2, 0.2, 0.6), device=device), 3)
    tokens, zeros = drafts(0, 1, 2, device=device), random_numbers(0.0, 0.0, 0.0, device=device)
    for arguments in ({}, {"draft_logits": outside}):
        verdict = verify_chain(target, tokens, uniforms=zeros, backend=backend, **arguments)
        assert verdict.num_accepted.tolist() == [1, 1, 0]


def test_an_improbable_draft_is_accepted_by_uniform_zero(backend, device):
    target = torch.tensor([[[0.0, math.log(1e-30)]]], device=device)
    verdict = verify_chain(
        target, drafts(1, device=device), uniforms=random_numbers(0.0, device=device), backend=backend
    )
    assert verdict.num_accepted.tolist() == [1]


@pytest.mark.parametrize("uniform", [BELOW_ONE, LAST_UNIFORM])
def test_the_last_uniform_never_emits_a_token_of_probability_zero(backend, device, uniform):
    logits = rows((0.5, 0.5 - 2.0**-24, 0.0, 0.0), device=device)
    uniform_row = torch.tensor([uniform], dtype=torch.float64, device=device)
    assert sample(logits[:, 0], uniforms=uniform_row, backend=backend).tokens.item() in (0, 1)
    verdict = verify_chain(
        logits, drafts(3, device=device), uniforms=random_numbers((uniform, uniform), device=device), backend=backend
    )
    assert verdict.next_token.item() in (0, 1)


def test_greedy_takes_the_lowest_of_equal_tokens_for_every_seed(backend, device):
    logits = torch.tensor([[5.0, 5.0, 1.0]], device=device).expand(8, -1)
    seeds = torch.arange(8, device=device)
    drawn = sample(logits, sampling=GREEDY, seeds=seeds, positions=seeds, backend=backend)
    assert drawn.tokens.tolist() == [0] * 8


def test_the_seed_has_no_effect_at_temperature_zero(backend, device):
    logits = torch.randn(1, 3, 33, generator=torch.Generator().manual_seed(0)).to(device).expand(4, -1, -1)
    tokens = torch.stack([logits[:, 0].argmax(-1), torch.zeros(4, dtype=torch.int64, device=device)], 1)
    seeds = torch.arange(4, device=device)
    seeded = verify_chain(logits, tokens, sampling=GREEDY, seeds=seeds, positions=seeds, backend=backend)
    bare = verify_chain(logits, tokens, sampling=GREEDY, backend=backend)
    assert torch.equal(seeded.tokens, bare.tokens)
    assert (seeded.tokens == seeded.tokens[0]).all()


def test_acceptance_is_neither_always_nor_by_comparing_two_draws(backend, device):
    """A grid of uniforms accepts the share min(1, target / draft) of each draft token."""
    target, outside = (0.25, 0.5, 0.25), (0.5, 0.25, 0.25)
    grid = random_numbers(*((index + 0.5) / 8 for index in range(8)), device=device)
    for token, share in enumerate((0.5, 1.0, 1.0)):
        verdict = verify_chain(
            each(rows(target, device=device), 8),
            drafts(*[token] * 8, device=device),
            draft_logits=each(rows(outside, device=device), 8),
            uniforms=grid,
            backend=backend,
        )
        assert verdict.num_accepted.sum().item() == 8 * share


def test_a_greedy_draft_counts_as_certain_whatever_its_model_says(backend, device):
    target = each(rows((0.3, 0.7), device=device), 2)
    for arguments in ({"drafter": 0, "draft_sampling": GREEDY}, {}):
        verdict = verify_chain(
            target,
            drafts(0, 0, device=device),
            uniforms=random_numbers(0.29, 0.31, device=device),
            backend=backend,
            **arguments,
        )
        assert verdict.num_accepted.tolist() == [1, 0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_draft_from_the_target_itself_is_accepted_in_every_dtype(backend, device, dtype):
    logits = torch.randn(4, 1, 33, generator=torch.Generator().manual_seed(0)).to(dtype).to(device)
    almost_one = random_numbers(*[1 - 1e-6] * 4, device=device)
    tokens = torch.tensor([[0], [7], [15], [32]], device=device)
    for arguments in ({"drafter": 0}, {"draft_logits": logits.clone()}):
        verdict = verify_chain(logits, tokens, uniforms=almost_one, backend=backend, **arguments)
        assert verdict.num_accepted.tolist() == [1] * 4


def test_greedy_requests_reject_a_draft_that_is_not_the_argmax(backend, device):
    target, outside = rows((0.3, 0.5, 0.2), device=device), rows((0.2, 0.2, 0.6), device=device)
    verdict = verify_chain(target, drafts(0, device=device), draft_logits=outside, sampling=GREEDY, backend=backend)
    assert emitted(verdict) == [[1]]


def test_nothing_follows_the_token_after_a_rejection(backend, device):
    target = rows(*[(0.5, 0.5, 0.0)] * 4, device=device)
    uniforms = torch.full((1, 4), 0.25, dtype=torch.float64, device=device)
    tokens = torch.tensor([[0, 2, 1]], device=device)
    verdict = verify_chain(target, tokens, uniforms=uniforms, logprobs=True, backend=backend)
    assert verdict.tokens.tolist() == [[0, 0, -1, -1]]
    assert (verdict.num_accepted.item(), verdict.num_tokens.item(), verdict.next_token.item()) == (1, 2, 0)
    torch.testing.assert_close(verdict.logprobs.cpu(), torch.tensor([[math.log(0.5), math.log(0.5), 0.0, 0.0]]))


def test_a_draft_distribution_of_nan_does_not_leak_token_zero(backend, device):
    target = rows((0.0,) * 7 + (1.0,), device=device)
    verdict = verify_chain(
        target,
        drafts(3, device=device),
        draft_logits=torch.full((1, 1, 8), math.nan, device=device),
        uniforms=random_numbers(0.5, device=device),
        backend=backend,
    )
    assert emitted(verdict) == [[7]]
    assert verdict.status.item() == Status.INVALID_DRAFT_DISTRIBUTION | Status.NAN_LOGITS


def test_a_draft_of_minus_one_ends_the_chain_and_is_not_counted(backend, device):
    target = rows(*[(0.5, 0.5)] * 4, device=device)
    outside = rows(*[(0.5, 0.5)] * 3, device=device)
    uniforms = torch.full((1, 4), 0.75, dtype=torch.float64, device=device)
    tokens = torch.tensor([[1, -1, 1]], device=device)
    verdict = verify_chain(target, tokens, draft_logits=outside, uniforms=uniforms, backend=backend)
    assert verdict.tokens.tolist() == [[1, 1, -1, -1]]
    assert verdict.status.item() == Status.INVALID_DRAFT_TOKEN


def test_the_output_is_as_wide_as_the_longest_possible_chain(backend, device):
    target = torch.zeros(2, 4, 5, device=device)
    tokens, lens = torch.zeros(2, 3, dtype=torch.int64, device=device), torch.tensor([0, 1], device=device)
    uniforms = torch.full((2, 4), 0.1, dtype=torch.float64, device=device)
    verdict = verify_chain(target, tokens, draft_lens=lens, uniforms=uniforms, logprobs=True, backend=backend)
    assert verdict.tokens.tolist() == [[0, -1, -1, -1], [0, 0, -1, -1]]
    assert (verdict.logprobs != 0).cpu().tolist() == [[True, False, False, False], [True, True, False, False]]


def test_tokens_that_only_the_target_knows_can_be_recovered(backend, device):
    target = each(rows((0.1,) * 10, device=device), 4)
    outside = each(rows((0.125,) * 8, device=device), 4)
    next_uniforms = random_numbers(*((BELOW_ONE, uniform) for uniform in (0.0, 0.49, 0.51, 0.99)), device=device)
    verdict = verify_chain(
        target, drafts(0, 1, 2, 7, device=device), draft_logits=outside, uniforms=next_uniforms, backend=backend
    )
    assert emitted(verdict) == [[8], [8], [9], [9]]


def test_a_mixture_accepts_and_recovers_by_the_mean_of_its_members(backend, device):
    """Members (.8, .2) and (.4, .6) make (.6, .4); a draft 0 of the first is accepted at 3/4, else 1 is emitted."""
    members = [each(rows(values, device=device), 3) for values in ((0.8, 0.2), (0.4, 0.6))]
    verdict = verify_chain(
        members,
        drafts(0, 0, 0, device=device),
        ensemble=Mixture((0.5, 0.5)),
        drafter=0,
        uniforms=random_numbers(0.74, 0.76, 0.99, device=device),
        logprobs=True,
        backend=backend,
    )
    assert emitted(verdict) == [[0], [1], [1]]
    expected = torch.tensor([0.6, 0.4, 0.4]).log()
    torch.testing.assert_close(verdict.logprobs[:, 0].cpu(), expected)


def test_contrastive_decoding_scores_expert_minus_amateur(backend, device):
    expert, amateur = torch.tensor([[2.0, 1.0]], device=device), torch.tensor([[1.0, 1.0]], device=device)
    result = target_logprobs([expert, amateur], ensemble=Contrastive(0.1), backend=backend)
    torch.testing.assert_close(result.cpu(), torch.tensor([[1.9, 0.9]]).log_softmax(-1))


def test_emitted_log_probabilities_are_the_ensembles_not_the_first_models(backend, device):
    generator = torch.Generator().manual_seed(0)
    members = [torch.randn(3, 1, vocab, generator=generator).to(device) for vocab in (33, 40)]
    uniforms = torch.rand(3, 2, dtype=torch.float64, generator=generator).to(device)
    verdict = verify_chain(
        members,
        torch.zeros(3, 1, dtype=torch.int64, device=device),
        ensemble=Mixture((0.5, 0.5)),
        uniforms=uniforms,
        logprobs=True,
        backend=backend,
    )
    softmax = [torch.nn.functional.pad(logits.softmax(-1), (0, 40 - logits.shape[-1])) for logits in members]
    expected = (0.5 * softmax[0] + 0.5 * softmax[1])[:, 0].gather(1, verdict.tokens[:, :1]).log()
    torch.testing.assert_close(verdict.logprobs[:, :1], expected)


def test_requests_with_other_seeds_draw_other_tokens(backend, device):
    logits = torch.zeros(5, 1000, device=device)
    positions = torch.full((5,), 5, device=device)
    seeds = torch.arange(5, device=device)
    first = sample(logits, seeds=seeds, positions=positions, backend=backend).tokens
    assert first.unique().numel() >= 4
    assert not torch.equal(first, sample(logits, seeds=seeds, positions=positions + 1, backend=backend).tokens)
    assert torch.equal(first, sample(logits, seeds=seeds, positions=positions, backend=backend).tokens)
