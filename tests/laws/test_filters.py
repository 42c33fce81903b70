"""Filters of the target distribution against transformers' processors and against their definition."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from specens_kernels import LogitMixture, Mixture, Sampling, sample, target_logprobs

SETTINGS = [
    {"top_k": 5},
    {"top_p": 0.8},
    {"min_p": 0.1},
    {"top_k": 12, "top_p": 0.7},
    {"top_p": 0.9, "min_p": 0.05},
    {"top_k": 20, "top_p": 0.95, "min_p": 0.02},
]


def filtered(*logits: Tensor, ensemble=None, **settings) -> Tensor:
    sampling = Sampling(**settings)
    return target_logprobs(list(logits), ensemble=ensemble, sampling=sampling, backend="reference")


def by_transformers(scores: Tensor, temperature: float, settings: dict) -> Tensor:
    processors = LogitsProcessorList([TemperatureLogitsWarper(temperature)])
    if "top_k" in settings:
        processors.append(TopKLogitsWarper(settings["top_k"]))
    if "top_p" in settings:
        processors.append(TopPLogitsWarper(settings["top_p"]))
    if "min_p" in settings:
        processors.append(MinPLogitsWarper(settings["min_p"]))
    return torch.log_softmax(processors(None, scores.double()), -1).float()


def of(*probabilities: float) -> Tensor:
    return torch.tensor([probabilities]).log()


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_filters_are_those_of_transformers_where_no_tie_sits_on_the_edge(settings):
    logits = torch.randn(200, 50, generator=torch.Generator().manual_seed(1)) * 2
    torch.testing.assert_close(filtered(logits, temperature=0.7, **settings), by_transformers(logits, 0.7, settings))


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_filters_of_a_logit_mixture_act_on_the_mix(settings):
    first, second = torch.randn(2, 50, 40, generator=torch.Generator().manual_seed(2)).unbind(0)
    result = filtered(first, second, ensemble=LogitMixture((1.5, -0.5)), temperature=1.3, **settings)
    expected = by_transformers(1.5 * first.double() - 0.5 * second.double(), 1.3, settings)
    torch.testing.assert_close(result, expected)


def test_filters_of_a_mixture_act_on_the_mixture_or_on_its_members():
    first, second = of(0.5, 0.3, 0.2, 0.0), of(0.1, 0.2, 0.3, 0.4)
    mixed = filtered(first, second, ensemble=Mixture((0.6, 0.4)), top_k=2).exp()  # of (.34, .26, .24, .16)
    torch.testing.assert_close(mixed, torch.tensor([[0.34, 0.26, 0.0, 0.0]]) / 0.6)
    members = filtered(first, second, ensemble=Mixture((0.5, 0.5), filter="members"), top_k=2).exp()
    torch.testing.assert_close(members, torch.tensor([[0.5 / 0.8, 0.3 / 0.8, 0.3 / 0.7, 0.4 / 0.7]]) / 2)


def test_vllm_order_puts_min_p_first():
    probabilities = of(0.5, 0.2, 0.15, 0.1, 0.05)
    # min-p leaves (.5, .2, .15), whose mass .85 is then the whole for top-p
    vllm = filtered(probabilities, min_p=0.25, top_p=0.8, filter_order="vllm").exp()
    torch.testing.assert_close(vllm, torch.tensor([[0.5, 0.2, 0.0, 0.0, 0.0]]) / 0.7)
    transformers = filtered(probabilities, min_p=0.25, top_p=0.8).exp()
    torch.testing.assert_close(transformers, torch.tensor([[0.5, 0.2, 0.15, 0.0, 0.0]]) / 0.85)


def test_ties_at_a_threshold_are_kept():
    tied = of(0.4, 0.3, 0.3, 0.0)
    torch.testing.assert_close(filtered(tied, top_k=2).exp(), torch.tensor([[0.4, 0.3, 0.3, 0.0]]))
    torch.testing.assert_close(filtered(tied, top_p=0.5).exp(), torch.tensor([[0.4, 0.3, 0.3, 0.0]]))
    torch.testing.assert_close(filtered(tied, min_p=0.7).exp(), torch.tensor([[0.4, 0.3, 0.3, 0.0]]))


@pytest.mark.parametrize(
    "off", [{}, {"top_k": 0}, {"top_k": -1}, {"top_k": 10**6}, {"top_p": 1.0}, {"min_p": 0.0}], ids=str
)
def test_off_values_filter_nothing(off):
    logits = torch.randn(5, 30, generator=torch.Generator().manual_seed(3))
    assert torch.equal(filtered(logits, **off), filtered(logits))


def test_a_tiny_top_p_keeps_the_largest_and_top_k_one_is_greedy():
    logits = torch.randn(5, 30, generator=torch.Generator().manual_seed(4))
    for settings in ({"top_p": 1e-9}, {"top_k": 1}, {"min_p": 1.0}):
        assert torch.equal(filtered(logits, **settings).argmax(-1), logits.argmax(-1))
        assert torch.equal(filtered(logits, **settings).amax(-1), torch.zeros(5))


def test_filters_belong_to_their_request():
    logits = torch.randn(1, 30, generator=torch.Generator().manual_seed(5)).expand(4, 30)
    top_k, top_p = torch.tensor([3, 0, 7, -1]), torch.tensor([1.0, 0.5, 0.6, 1.0])
    together = filtered(logits, top_k=top_k, top_p=top_p)
    for index in range(4):
        alone = filtered(logits[:1], top_k=int(top_k[index]), top_p=float(top_p[index]))
        torch.testing.assert_close(together[index], alone[0])


def test_greedy_requests_are_not_filtered():
    logits = of(0.5, 0.3, 0.2)
    draw = sample(logits, sampling=Sampling(temperature=0.0, top_k=1), logprobs=True, backend="reference")
    assert draw.tokens.tolist() == [0]
    assert math.isclose(float(draw.logprobs), math.log(0.5), rel_tol=1e-6)


@pytest.mark.parametrize(
    ("settings", "name"),
    [
        ({"top_k": -2}, "top_k"),
        ({"top_k": 1.5}, "top_k"),
        ({"top_k": True}, "top_k"),
        ({"top_k": torch.tensor([1.0])}, "top_k"),
        ({"top_k": torch.tensor([-5])}, "top_k"),
        ({"top_p": 0.0}, "top_p"),
        ({"top_p": 1.1}, "top_p"),
        ({"top_p": math.nan}, "top_p"),
        ({"top_p": torch.tensor([0.5, 0.0])}, "top_p"),
        ({"min_p": -0.1}, "min_p"),
        ({"min_p": 1.5}, "min_p"),
        ({"min_p": torch.tensor([[0.5]])}, "min_p"),
        ({"filter_order": "sglang"}, "filter_order"),
    ],
    ids=str,
)
def test_filters_out_of_range_are_refused_by_name(settings, name):
    with pytest.raises(ValueError, match=rf"^{name}: expected"):
        Sampling(**settings)


def test_a_mixture_refuses_to_filter_something_else():
    with pytest.raises(ValueError, match=r"^filter: expected"):
        Mixture((1.0,), filter="draft")
