"""What went wrong in other systems with sampling parameters, penalties and seeds, by symptom."""

from __future__ import annotations

import math

import pytest
import torch
from laws.test_failures_of_peers import drafts, each, emitted, random_numbers, rows
from torch import Tensor

from specens_kernels import Processing, Sampling, sample, target_logprobs, uniforms, verify_chain

pytestmark = pytest.mark.parametrize("backend", ["reference", "cpp"])
CPU = torch.device("cpu")
LAST_UNIFORM = 1 - 2.0**-53


def of(*distributions: tuple[float, ...]) -> Tensor:
    return rows(*distributions, device=CPU)


def tokens_of(*tokens: int) -> Tensor:
    return torch.tensor([tokens])


def all_uniforms(value: float, count: int) -> Tensor:
    return torch.full((1, count), value, dtype=torch.float64)


def test_temperature_and_top_k_are_part_of_the_acceptance_test(backend):
    logits = torch.tensor([[[2.0, 1.0, 0.0]]]).expand(3, 1, -1)
    sampling = Sampling(temperature=0.5, top_k=2)  # (.8808, .1192, 0)
    zeros = random_numbers(0.0, 0.1191, 0.1193, device=CPU)
    verdict = verify_chain(logits, drafts(2, 1, 1, device=CPU), sampling=sampling, uniforms=zeros, backend=backend)
    assert verdict.num_accepted.tolist() == [0, 1, 0]


def test_a_draft_from_filtered_logits_is_tested_against_what_it_was_drawn_from(backend):
    """Top-k makes (.5, .3, .2) into (.625, .375): a draft 0 of target probability .4 is accepted at .64, not at .8."""
    verdict = verify_chain(
        each(of((0.4, 0.3, 0.3)), 2),
        drafts(0, 0, device=CPU),
        draft_logits=each(of((0.5, 0.3, 0.2)), 2),
        draft_sampling=Sampling(top_k=2),
        uniforms=random_numbers(0.63, 0.65, device=CPU),
        backend=backend,
    )
    assert verdict.num_accepted.tolist() == [1, 0]


def test_block_verification_accepts_a_later_prefix_after_a_uniform_that_refuses_an_earlier_one(backend):
    """Of drafts (2/3, 1/3) and targets (1/3, 2/3), the chain (0, 1) has chances 1/2 and 1: the last counts."""
    target, draft = of(*[(1 / 3, 2 / 3)] * 3), of(*[(2 / 3, 1 / 3)] * 2)
    for first, second in ((LAST_UNIFORM, 0.9), (0.0, 0.9), (LAST_UNIFORM, 1 - 1e-6)):
        pair = torch.tensor([[first, second, 0.5]], dtype=torch.float64)
        arguments = {"draft_logits": draft, "uniforms": pair, "backend": backend}
        assert verify_chain(target, tokens_of(0, 1), rule="block", **arguments).num_accepted.item() == 2
        assert verify_chain(target, tokens_of(0, 1), **arguments).num_accepted.item() == (2 if first == 0 else 0)
    for uniform, accepted in ((0.24, 2), (0.26, 0)):  # the chain (0, 0) as a whole is kept at 1/4
        pair = torch.tensor([[LAST_UNIFORM, uniform, 0.5]], dtype=torch.float64)
        arguments = {"draft_logits": draft, "uniforms": pair, "rule": "block", "backend": backend}
        assert verify_chain(target, tokens_of(0, 0), **arguments).num_accepted.item() == accepted


def test_the_acceptance_rate_is_the_overlap_of_target_and_draft(backend):
    """Within four standard deviations; a uniform that is always 0 would accept everything."""
    count, target, draft = 20_000, (0.1, 0.6, 0.3), (0.5, 0.2, 0.3)
    seeds, positions = torch.arange(count), torch.full((count,), 5)
    outside = each(of(draft), count)
    drawn = sample(outside[:, 0], seeds=seeds, positions=positions, backend=backend).tokens
    verdict = verify_chain(
        each(of(target), count),
        drawn[:, None],
        draft_logits=outside,
        seeds=seeds,
        positions=positions,
        backend=backend,
    )
    overlap = sum(map(min, target, draft))
    share = float(verdict.num_accepted.double().mean())
    assert abs(share - overlap) < 4 * math.sqrt(overlap * (1 - overlap) / count)
    counts = torch.bincount(verdict.tokens[:, 0], minlength=3) / count
    assert (counts - torch.tensor(target)).abs().max() < 4 * math.sqrt(0.25 / count)


def test_min_p_acts_on_every_row_and_not_on_the_bonus_row_alone(backend):
    logits = of(*[(0.6, 0.25, 0.15)] * 4)
    result = target_logprobs(logits, sampling=Sampling(min_p=0.5), backend=backend).exp()
    torch.testing.assert_close(result, torch.tensor([1.0, 0.0, 0.0]).expand(1, 4, 3))
    for token, accepted in ((0, 3), (1, 0)):
        verdict = verify_chain(
            logits,
            tokens_of(token, token, token),
            sampling=Sampling(min_p=0.5),
            uniforms=all_uniforms(0.0, 4),
            backend=backend,
        )
        assert verdict.num_accepted.item() == accepted
        assert verdict.next_token.item() == 0


def test_a_logit_bias_acts_on_every_row_and_rejects_a_draft_that_it_forbids(backend):
    logits = of(*[(0.5, 0.5)] * 4)
    for value in (-100.0, -math.inf):
        processing = Processing(logit_bias=(tokens_of(1), torch.tensor([[value]])))
        for index in range(3):
            chain = [0, 0, 0]
            chain[index] = 1
            arguments = {"processing": processing, "uniforms": all_uniforms(1e-9, 4), "backend": backend}
            verdict = verify_chain(logits, tokens_of(*chain), **arguments)
            assert emitted(verdict) == [[0] * (index + 1)]
        verdict = verify_chain(logits, tokens_of(0, 0, 0), **(arguments | {"uniforms": all_uniforms(LAST_UNIFORM, 4)}))
        assert emitted(verdict) == [[0, 0, 0, 0]]


@pytest.mark.parametrize("name", ["frequency_penalty", "presence_penalty"])
def test_penalties_count_the_drafts_before_each_row(backend, name):
    """Of equal tokens the draft is 0 three times: its logit is 0, -2, -4 (or -2) and -6 (or -2)."""
    logits, chain = torch.zeros(1, 4, 2), tokens_of(0, 0, 0)
    processing = Processing(**{name: 2.0})
    counts = torch.tensor([0.0, 1.0, 2.0, 3.0]).clamp(max=3 if name == "frequency_penalty" else 1)
    result = target_logprobs(logits, processing=processing, draft_tokens=chain, backend=backend)
    torch.testing.assert_close(result[0, :, 0], torch.stack([-2 * counts, 0 * counts], -1).log_softmax(-1)[:, 0])
    second = float(result[0, 1, 0].exp())
    for uniform, accepted in ((second - 1e-4, 2), (second + 1e-4, 1)):
        uniform_row = torch.tensor([[0.0, uniform, 0.99, 0.5]], dtype=torch.float64)
        verdict = verify_chain(logits, chain, processing=processing, uniforms=uniform_row, backend=backend)
        assert verdict.num_accepted.item() == accepted


def test_every_accepted_token_counts_in_the_next_round(backend):
    """A row after three drafts is the first row of a round after them as output."""
    logits = torch.randn(1, 4, 9, generator=torch.Generator().manual_seed(0))
    chain, before = tokens_of(3, 3, 5), tokens_of(1, 3)
    settings = {"repetition_penalty": 1.2, "frequency_penalty": 0.7, "presence_penalty": 0.1}
    settings |= {"end_tokens": torch.tensor([2])}
    first = Processing(**settings, output_tokens=before, min_tokens=4)
    later = Processing(**settings, output_tokens=torch.cat([before, chain], 1), min_tokens=1)
    result = target_logprobs(logits, processing=first, draft_tokens=chain, backend=backend)
    assert torch.equal(result[:, 3], target_logprobs(logits[:, 3], processing=later, backend=backend))


def test_the_repetition_penalty_divides_a_positive_logit_and_multiplies_a_negative_one(backend):
    logits, seen = torch.tensor([[2.0, -2.0, 0.5]]), tokens_of(0, 1)
    for table in ("prompt_tokens", "output_tokens"):
        processing = Processing(repetition_penalty=1.3, **{table: seen})
        result = target_logprobs(logits, processing=processing, backend=backend)
        expected = torch.tensor([[2.0 / 1.3, -2.6, 0.5]])  # 1.538
        torch.testing.assert_close(result, expected.log_softmax(-1))


def test_the_end_is_held_back_for_as_many_rows_as_tokens_are_missing(backend):
    """With one of three tokens missing it is masked in the first row only."""
    logits, processing = of(*[(0.5, 0.5)] * 3), Processing(min_tokens=1, end_tokens=torch.tensor([1]))
    result = target_logprobs(logits, processing=processing, backend=backend).exp()
    assert result[0, :, 1].tolist() == [0.0, 0.5, 0.5]
    arguments = {"processing": processing, "uniforms": all_uniforms(0.1, 3), "backend": backend}
    assert emitted(verify_chain(logits, tokens_of(1, 1), **arguments)) == [[0]]
    assert emitted(verify_chain(logits, tokens_of(0, 1), **arguments)) == [[0, 1, 0]]


def test_greedy_rows_user_seeds_filters_and_log_probabilities_go_together(backend):
    logits = torch.randn(4, 3, 33, generator=torch.Generator().manual_seed(0))
    temperatures, top_k = torch.tensor([0.0, 1.0, 0.0, 0.7]), torch.tensor([0, 5, 3, 1])
    seeds = torch.arange(4)
    arguments = {"seeds": seeds, "positions": seeds, "logprobs": True, "top_logprobs": 2, "backend": backend}
    verdict = verify_chain(
        logits, logits[:, :2].argmax(-1), sampling=Sampling(temperatures, top_k=top_k, top_p=0.9), **arguments
    )
    assert verdict.status.tolist() == [0] * 4
    assert verdict.num_tokens.tolist()[0] == verdict.num_tokens.tolist()[2] == 3
    assert torch.equal(verdict.tokens[0], logits[0].argmax(-1))
    assert verdict.logprobs[3, : int(verdict.num_tokens[3])].abs().max() < 1e-6  # top-k 1 leaves one token
    greedy = logits[0].log_softmax(-1).amax(-1)
    torch.testing.assert_close(verdict.logprobs[0], greedy)


def test_a_round_uses_the_same_random_numbers_however_many_drafts_are_accepted(backend):
    """Draft j is tested with the uniform of step j, whatever came before; the next token has its own by its step."""
    seeds, positions = torch.tensor([11]), torch.tensor([40])
    accept = [float(uniforms(seeds, positions, step=step, stream=0)) for step in range(3)]
    for cut in range(4):
        probabilities = [
            min(1.0, uniform + 1e-3) if step != cut else uniform - 1e-3 for step, uniform in enumerate(accept)
        ]
        logits = of(*[(value, *[(1 - value) / 50] * 50) for value in [*probabilities, 0.5]])
        verdict = verify_chain(logits, tokens_of(0, 0, 0), seeds=seeds, positions=positions, backend=backend)
        assert verdict.num_accepted.item() == cut
        uniform = float(uniforms(seeds, positions, step=cut, stream=1))
        residual = logits[0, cut].exp()
        residual[0] = residual[0] if cut == 3 else 0
        expected = int((residual.double().cumsum(0) > uniform * residual.double().sum()).int().argmax())
        assert verdict.next_token.item() == expected


def test_tensors_a_token_are_refused_where_those_a_request_are_expected(backend):
    logits, tokens, offsets = torch.zeros(6, 5), torch.zeros(4, dtype=torch.int64), torch.tensor([0, 3, 6])
    good = {"seeds": torch.arange(2), "positions": torch.arange(2)}
    for name, value in (("seeds", torch.arange(6)), ("positions", torch.arange(4))):
        with pytest.raises(ValueError, match=rf"^{name}: expected shape \[2\]"):
            verify_chain(
                logits, tokens, row_offsets=offsets, max_draft_len=2, backend=backend, **(good | {name: value})
            )
    per_row = Sampling(torch.ones(6))
    with pytest.raises(ValueError, match=r"^temperature: expected shape \[2\]"):
        verify_chain(logits, tokens, row_offsets=offsets, max_draft_len=2, sampling=per_row, backend=backend, **good)
