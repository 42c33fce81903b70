"""Numbers that papers and other libraries define, each stated with its source and not with a number of our own."""

from __future__ import annotations

import inspect
import math

import pytest
import torch
from specens.adapters.sglang import tree_speculative_sampling_target_only
from specens.decoding.draft_lens import ByConfidence
from specens.decoding.ideal import fixed_speedup_without_bonus, outside_speedup
from specens.drafters import Lookahead
from specens.presets import PRESETS
from transformers import GenerationConfig
from transformers.generation import PromptLookupCandidateGenerator

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
    token, random_numbers = torch.zeros(1, 1, dtype=torch.int64), torch.full((1, 2), 0.5)
    assert (
        int(verify_chain(logits, token, rule="typical", uniforms=random_numbers, backend=backend).num_accepted)
        == accepted
    )
    if backend != "triton":
        tree = TokenTree([-1])
        verdict = verify_tree(logits, token, tree, rule="typical", uniforms=random_numbers, backend=backend)
        assert int(verdict.num_accepted) == accepted


def test_the_replacement_rule_has_the_settings_of_cosd():
    assert (Replacement().alpha, Replacement().beta) == COSD_RULE


def settings_of(name):
    return PRESETS[name].settings


# Total draft tokens of a 7B model, depth and width: Li et al., EAGLE-2, EMNLP 2024, section 5; EAGLE's code has
# total_token=60, depth=5 below a first level, top_k=10. Expansions: Miao et al., SpecInfer, ASPLOS 2024, section 6.
@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("dynamic-trees", {"nodes": 60, "levels": 6, "width": 10, "children": "top"}),
        ("specinfer", {"branches": (1, 1, 3, 1, 1, 1, 1, 1), "children": "independent"}),
    ],
)
def test_trees_have_the_sizes_of_their_papers(name, expected):
    tree = settings_of(name)["tree"]
    assert {field: getattr(tree, field) for field in expected} == expected


# mu = .1 and draft lengths 5 and 1: Fu et al., ICML 2025, section 4. 1 + beta, -beta with beta = .5, and alpha = .1:
# O'Brien and Lewis, 2023. 1.5: gamma of Sanchez et al., 2023, and 1 + alpha of Shi et al., NAACL 2024. 1, 1, -1: Liu et
# al., proxy tuning, COLM 2024.
@pytest.mark.parametrize(
    ("name", "weights", "plausibility"),
    [
        ("speculative-contrastive-ensemble", (1.0, -0.1), None),
        ("contrastive-decoding", (1.5, -0.5), 0.1),
        ("speculative-contrastive-decoding", (1.5, -0.5), 0.1),
        ("guidance", (1.5, -0.5), None),
        ("experts", (1.0, 1.0, -1.0), None),
    ],
)
def test_weights_are_those_of_the_papers(name, weights, plausibility):
    ensemble = settings_of(name)["ensemble"]
    assert ensemble.weights == weights
    assert ensemble.plausibility == plausibility


def test_draft_lengths_and_drafters_are_those_of_their_sources():
    assert settings_of("speculative-contrastive-ensemble")["draft_lens"] == (1, 5)
    assisted = GenerationConfig()._get_default_generation_params()  # transformers' own
    confident = ByConfidence(assisted["assistant_confidence_threshold"], most=assisted["num_assistant_tokens"])
    assert settings_of("confident-drafts")["draft_lens"] == confident
    lookup = inspect.signature(PromptLookupCandidateGenerator.__init__).parameters
    assert settings_of("prompt-lookup")["draft_lens"] == lookup["num_output_tokens"].default == 10
    assert settings_of("prompt-lookup")["drafter"].max_match == 3  # max_ngram_size of Saxena, 2023
    assert Lookahead().ngram == 5  # N of Fu et al., Lookahead Decoding, ICML 2024
    assert settings_of("lookahead-ngrams")["draft_lens"] == 5 - 1  # the rest of an n-gram
    assert settings_of("typical-acceptance")["rule"] == Typical(*TYPICAL)
    assert settings_of("cosd")["rule"] == Replacement(*COSD_RULE)


def test_what_the_first_theorem_of_collaborative_decoding_says():
    """Fu et al., ICML 2025, theorem 3.1: (1 - a^g) (1 + c) / ((1 - a) (1 + c g))."""
    for acceptance, draft_len, cost in ((0.8, 5, 0.2), (0.5, 3, 1.0), (0.9, 1, 0.05)):
        expected = (1 - acceptance**draft_len) * (1 + cost) / ((1 - acceptance) * (1 + cost * draft_len))
        assert fixed_speedup_without_bonus(draft_len, acceptance, cost) == pytest.approx(expected)


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
