"""Target distributions against formulas written another way, and draws from them: their law and their extremes."""

from __future__ import annotations

import math

import pytest
import torch
from laws.enumeration import grid
from laws.tiny_targets import TARGETS, build
from scipy import stats
from torch import Tensor

from specens_kernels import Contrastive, LogitMixture, Mixture, Sampling, sample, target_logprobs, verify_chain

LAST_UNIFORM = 1 - 2.0**-53
GREEDY = Sampling(temperature=0.0)


def random_logits(*shape: int, seed: int = 0) -> Tensor:
    return 3 * torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def widened(probabilities: Tensor, vocab: int) -> Tensor:
    return torch.nn.functional.pad(probabilities, (0, vocab - probabilities.shape[-1]))


def logprobs(*members: Tensor, **arguments) -> Tensor:
    return target_logprobs(list(members), backend="reference", **arguments)


def test_a_lone_model_is_its_softmax_at_the_temperature():
    logits = random_logits(3, 2, 33)
    for temperature in (0.3, 1.0, 2.0):
        result = logprobs(logits, sampling=Sampling(temperature=temperature))
        torch.testing.assert_close(result, torch.log_softmax(logits / temperature, -1))


def test_a_mixture_is_the_weighted_mean_of_probabilities():
    first, second, third = random_logits(3, 33, seed=1), random_logits(3, 33, seed=2), random_logits(3, 20, seed=3)
    result = logprobs(first, second, third, ensemble=Mixture((0.5, 0.2, 0.3)), sampling=Sampling(temperature=0.7))
    softmax = [widened((logits.double() / 0.7).softmax(-1), 33) for logits in (first, second, third)]
    mean = 0.5 * softmax[0] + 0.2 * softmax[1] + 0.3 * softmax[2]
    torch.testing.assert_close(result, mean.log().float())


def test_weights_in_a_tensor_belong_to_their_requests():
    first, second = random_logits(2, 3, 9, seed=1), random_logits(2, 3, 9, seed=2)
    weights = torch.tensor([[1.0, 0.0], [0.25, 0.75]])
    result = logprobs(first, second, ensemble=Mixture(weights), sampling=Sampling(temperature=torch.tensor([1.0, 0.5])))
    torch.testing.assert_close(result[0], first[0].log_softmax(-1))
    mean = 0.25 * (2 * first[1]).softmax(-1) + 0.75 * (2 * second[1]).softmax(-1)
    torch.testing.assert_close(result[1], mean.log())


def test_a_logit_mixture_is_the_softmax_of_the_weighted_sum():
    first, second = random_logits(3, 33, seed=1), random_logits(3, 33, seed=2)
    result = logprobs(first, second, ensemble=LogitMixture((1.5, -0.4)), sampling=Sampling(temperature=0.7))
    expected = ((1.5 * first.double() - 0.4 * second.double()) / 0.7).log_softmax(-1)
    torch.testing.assert_close(result, expected.float())


def test_a_token_that_a_weighted_member_excludes_or_lacks_is_excluded_from_a_logit_mixture():
    first, second, idle = torch.zeros(1, 4), torch.tensor([[0.0, -math.inf, 1.0]]), torch.full((1, 4), -math.inf)
    result = logprobs(first, second, idle, ensemble=LogitMixture((1.0, -0.5, 0.0))).exp()
    kept = torch.tensor([0.0, -0.5]).softmax(-1)
    torch.testing.assert_close(result, torch.tensor([[kept[0], 0.0, kept[1], 0.0]]))


def test_contrastive_decoding_subtracts_the_amateur_and_keeps_what_is_plausible():
    expert, amateur = random_logits(5, 33, seed=1), random_logits(5, 33, seed=2)
    sampling = Sampling(temperature=0.7)
    contrast = (expert.double() - 0.1 * amateur.double()) / 0.7
    torch.testing.assert_close(
        logprobs(expert, amateur, ensemble=Contrastive(0.1), sampling=sampling), contrast.log_softmax(-1).float()
    )
    probabilities = expert.softmax(-1)
    implausible = probabilities < 0.2 * probabilities.amax(-1, keepdim=True)
    assert implausible.any(-1).all()
    result = logprobs(expert, amateur, ensemble=Contrastive(0.1, plausibility=0.2), sampling=sampling)
    torch.testing.assert_close(result, contrast.masked_fill(implausible, -math.inf).log_softmax(-1).float())


def test_equal_logits_stay_plausible_where_only_the_most_likely_token_is():
    expert, amateur = torch.tensor([[5.0, 5.0, 1.0]]), torch.tensor([[0.0, 1.0, -9.0]])
    result = logprobs(expert, amateur, ensemble=Contrastive(1.0, plausibility=1.0))
    torch.testing.assert_close(result, torch.tensor([[5.0, 4.0, -math.inf]]).log_softmax(-1))


def test_the_greedy_distribution_is_one_hot_at_the_largest_lowest_token():
    logits = torch.tensor([[1.0, 5.0, 5.0], [2.0, 2.0, 2.0], [-math.inf, -1.0, -2.0]])
    result = logprobs(logits, sampling=GREEDY).exp()
    assert torch.equal(result, torch.tensor([[0.0, 1.0, 0.0], [1.0, 0.0, 0.0], [0.0, 1.0, 0.0]]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_greedy_tokens_are_the_argmax(dtype):
    logits = random_logits(500, 33).to(dtype)
    drawn = sample(logits, sampling=GREEDY, backend="reference").tokens
    assert torch.equal(drawn, (logits == logits.amax(-1, keepdim=True)).int().argmax(-1))


def test_the_greedy_token_is_the_largest_logit_however_small_the_gap():
    logits = torch.tensor([[0.0, 1e-20], [-1e-30, 0.0], [1.0, 1.0 + 2.0**-23]])
    assert sample(logits, sampling=GREEDY, backend="reference").tokens.tolist() == [1, 1, 1]


@pytest.mark.parametrize("target", TARGETS)
def test_a_grid_of_uniforms_draws_every_token_as_often_as_its_probability_says(target):
    model = build(target, "one-hot", rows=1, draft_len=1, seed=5)
    random_numbers = grid(400, 1)[:, 0]
    for before in range(3):
        logits = [member[0, before].expand(len(random_numbers), -1) for member in model.member_logits]
        drawn = sample(logits, **model.arguments, uniforms=random_numbers, backend="reference")
        assert torch.equal(torch.bincount(drawn.tokens, minlength=3) / 400.0, model.target[0, before].float())
        assert (drawn.tokens.diff() >= 0).all(), "a larger uniform drew a lower token"


@pytest.mark.parametrize("target", TARGETS)
def test_draws_with_seeds_follow_the_target_distribution(target):
    model = build(target, "one-hot", rows=1, draft_len=1, seed=6)
    count = 100_000
    logits = [member[0, 0].expand(count, -1) for member in model.member_logits]
    seeds, positions = torch.arange(count), torch.full((count,), 7)
    drawn = sample(logits, **model.arguments, seeds=seeds, positions=positions, backend="reference")
    counts, expected = torch.bincount(drawn.tokens, minlength=3), model.target[0, 0] * count
    assert counts[expected == 0].sum() == 0
    possible = expected > 0
    assert possible.sum() == 1 or stats.chisquare(counts[possible].numpy(), expected[possible].numpy()).pvalue > 1e-4


@pytest.mark.parametrize("uniform", [0.0, 2.0**-53, 0.5, LAST_UNIFORM])
def test_a_drawn_token_always_has_positive_probability(uniform):
    logits = random_logits(2000, 5)
    logits[torch.rand(logits.shape, generator=torch.Generator().manual_seed(1)) < 0.6] = -math.inf
    alive = (logits > -math.inf).any(-1)
    drawn = sample(logits, uniforms=torch.full((2000,), uniform, dtype=torch.float64), backend="reference").tokens
    assert torch.equal(drawn >= 0, alive)
    assert (logits[alive].gather(1, drawn[alive, None]) > -math.inf).all()


def test_the_first_and_the_last_uniform_draw_the_first_and_the_last_possible_token():
    logits = torch.tensor([[-math.inf, 0.0, 1.0, 0.0, -math.inf]]).expand(2, -1)
    drawn = sample(logits, uniforms=torch.tensor([0.0, LAST_UNIFORM], dtype=torch.float64), backend="reference").tokens
    assert drawn.tolist() == [1, 3]


def test_a_uniform_on_a_boundary_draws_the_token_above_it():
    random_numbers = torch.tensor([0.5 - 2.0**-53, 0.5, 0.75], dtype=torch.float64)
    drawn = sample(torch.zeros(3, 4), uniforms=random_numbers, backend="reference").tokens
    assert drawn.tolist() == [1, 2, 3]


def test_uniform_zero_accepts_what_is_possible_and_nothing_else():
    target = torch.tensor([[[0.0, -69.0, -math.inf]]]).expand(3, -1, -1)
    drafts = torch.tensor([[0], [1], [2]])
    random_numbers = torch.zeros(3, 2, dtype=torch.float64)
    for arguments in ({}, {"draft_logits": torch.zeros(3, 1, 3)}):
        verdict = verify_chain(target, drafts, uniforms=random_numbers, backend="reference", **arguments)
        assert verdict.num_accepted.tolist() == [1, 1, 0]


def test_the_last_uniform_accepts_only_what_the_target_likes_at_least_as_much():
    target, draft = (torch.tensor([[values]]).log() for values in ([0.5, 0.25, 0.25], [0.25, 0.5, 0.25]))
    random_numbers = torch.full((3, 2), LAST_UNIFORM, dtype=torch.float64)
    verdict = verify_chain(
        target.expand(3, -1, -1),
        torch.tensor([[0], [1], [2]]),
        draft_logits=draft.expand(3, -1, -1),
        uniforms=random_numbers,
        backend="reference",
    )
    assert verdict.num_accepted[:2].tolist() == [1, 0]
    assert verdict.next_token[1] == 0  # the only token of the residual


def test_the_token_after_the_chain_is_drawn_from_the_bonus_row_alone():
    logits = torch.full((1, 3, 4), -math.inf)
    logits[0, torch.arange(3), torch.tensor([1, 2, 3])] = 0.0
    random_numbers = torch.full((1, 3), 0.5)
    verdict = verify_chain(logits, torch.tensor([[1, 2]]), uniforms=random_numbers, backend="reference")
    assert (verdict.tokens.tolist(), verdict.num_tokens.item(), verdict.next_token.item()) == ([[1, 2, 3]], 3, 3)
    verdict = verify_chain(logits[:, :2], torch.tensor([[1, 2]]), uniforms=random_numbers, backend="reference")
    assert (verdict.tokens.tolist(), verdict.num_tokens.item(), verdict.next_token.item()) == ([[1, 2, -1]], 2, -1)
