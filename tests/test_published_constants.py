"""Numbers that papers and other libraries define, each stated with its source and not with a number of our own."""

from __future__ import annotations

import inspect
import math

import pytest
import torch
from specens.adapters.sglang import tree_speculative_sampling_target_only
from specens.ideal import outside_speedup

from specens_kernels import Replacement, Sampling, TokenTree, Typical, target_logprobs, verify_chain, verify_tree

TYPICAL = (
    0.09,
    0.3,
)  # epsilon and delta: medusa_generate of Cai et al., ICML 2024, and vLLM's typical acceptance sampler
COSD_RULE = (0.5, 0.5)  # alpha and beta: Wang et al., ICML 2025, section 4


def test_typical_acceptance_has_the_settings_of_medusa():
    assert (Typical().threshold, Typical().alpha) == TYPICAL
    assert math.isclose(TYPICAL[1], math.sqrt(TYPICAL[0]))  # delta is to be the root of epsilon


@pytest.mark.parametrize("backend", ["reference", "cpp", "triton"])
@pytest.mark.parametrize(
    ("others", "draft", "accepted"),
    [
        ([0.9, 0.02], 0.08, 0),  # a sure target: epsilon binds, .09
        ([0.88, 0.02], 0.10, 1),
        ([0.195] * 5, 0.025, 0),  # an unsure one: delta * exp(-entropy), less than epsilon
        ([0.188] * 5, 0.06, 1),
        ([1 / 32] * 31, 1 / 32, 1),
    ],
)
def test_the_rule_typical_accepts_by_the_settings_of_medusa(backend, others, draft, accepted):
    probabilities = torch.tensor([draft, *others], dtype=torch.float64)
    limit = min(TYPICAL[0], TYPICAL[1] * math.exp(-float(torch.special.entr(probabilities).sum())))
    assert (draft > limit) == bool(accepted)
    logits = probabilities.log().float().expand(1, 2, -1).contiguous()
    token, coins = torch.zeros(1, 1, dtype=torch.int64), torch.full((1, 2), 0.5)
    assert int(verify_chain(logits, token, rule="typical", uniforms=coins, backend=backend).num_accepted) == accepted
    if backend != "triton":
        tree = TokenTree([-1])
        verdict = verify_tree(logits, token, tree, rule="typical", uniforms=coins, backend=backend)
        assert int(verdict.num_accepted) == accepted


def test_the_replacement_rule_has_the_settings_of_cosd():
    assert (Replacement().alpha, Replacement().beta) == COSD_RULE


def test_thresholds_of_sglang_are_off_by_default():
    parameters = inspect.signature(tree_speculative_sampling_target_only).parameters
    assert parameters["threshold_single"].default == parameters["threshold_acc"].default == 1.0


# transformers: GenerationMixin._get_logits_processor warps by top-k, top-p, min-p; vLLM's Sampler applies min-p, an
# argmax-invariant processor, before top-k and top-p.
@pytest.mark.parametrize(("order", "kept"), [("transformers", [0, 1]), ("vllm", [0])])
def test_filters_come_in_the_order_of_transformers_or_vllm(order, kept):
    probabilities = torch.tensor([[0.5, 0.2, 0.1, 0.1, 0.1]])
    sampling = Sampling(top_p=0.69, min_p=0.3, filter_order=order)
    left = target_logprobs(probabilities.log(), sampling=sampling)[0]
    assert torch.isfinite(left).nonzero()[:, 0].tolist() == kept


@pytest.mark.parametrize(
    ("acceptance", "draft_len", "speedup"),
    [(0.6, 2, 1.96), (0.7, 3, 2.53), (0.8, 5, 3.69), (0.9, 2, 2.71), (0.9, 10, 6.86)],
)
def test_the_speedup_of_speculative_decoding_is_that_of_its_paper(acceptance, draft_len, speedup):
    """Leviathan et al., ICML 2023, table 1: a drafter without cost."""
    assert outside_speedup(draft_len, acceptance, 0.0) == pytest.approx(speedup, abs=0.005)
