"""An ensemble inside vLLM's engine: what it writes has the law of the ensemble, and not that of a member."""

from __future__ import annotations

import itertools

import pytest
import torch
from engines.vllm.exact_law import exact_law, p_value
from engines.vllm.test_engine import ALLOWED, BIASED, FILTERED, LENGTH, PENALISED, PLAIN, PROMPT, request

from specens_kernels import Contrastive, LogitMixture, Mixture, Sampling

TEXTS = 1200
FILTERS = ("temperature", "top_k", "top_p", "min_p")
# An ensemble by its entry in the config, the weights of requests, and what they make of it.
KINDS = {
    "mixture": (
        {"kind": "mixture", "weights": [0.5, 0.5]},
        [{}, {"specens_weights": [0.2, 0.8]}],
        [Mixture((0.5, 0.5)), Mixture((0.2, 0.8))],
    ),
    "filtered by member": (
        {"kind": "mixture", "weights": [0.7, 0.3], "filter": "members"},
        [{}, {"specens_weights": [0.4, 0.6]}],
        [Mixture((0.7, 0.3), "members"), Mixture((0.4, 0.6), "members")],
    ),
    "logit mixture": (
        {"kind": "logit_mixture", "weights": [1.3, -0.4]},
        [{}, {"specens_weights": [0.3, 0.7]}],
        [LogitMixture((1.3, -0.4)), LogitMixture((0.3, 0.7))],
    ),
    "contrastive": (
        {"kind": "contrastive", "amateur_weight": 0.3, "plausibility": 0.05},
        [{}, {"specens_amateur_weight": 0.6}],
        [Contrastive(0.3, 0.05), Contrastive(0.6, 0.05)],
    ),
}


def law_of(folders, ensemble, settings):
    """Of texts under PLAIN, FILTERED, PENALISED or BIASED."""
    edits = {name: settings[name] for name in settings if "penalty" in name}
    if bias := settings.get("logit_bias"):
        edits |= {"logit_bias": (torch.tensor(list(bias)), torch.tensor(list(bias.values()))), "allowed": ALLOWED}
    sampling = Sampling(**{name: settings[name] for name in FILTERS if name in settings}, filter_order="vllm")
    return exact_law(folders, PROMPT, LENGTH, sampling, ensemble=ensemble, **edits)


def serving(folders, kind):
    """Settings of an engine that serves the ensemble of these members."""
    entry = {"members": [str(folder) for folder in folders], **KINDS[kind][0]}
    return {"skip_tokenizer_init": True, "hf_overrides": {"architectures": ["SpecensEnsemble"], "specens": entry}}


def assert_laws(folders, kind, cases, drawn):
    """Texts [cases, TEXTS] fit the law of their ensemble; those without processing do not fit a member's."""
    groups = [drawn[start : start + TEXTS] for start in range(0, len(drawn), TEXTS)]
    ensembles = KINDS[kind][2]
    fits = [p_value(law_of(folders, ensembles[own], settings), group) for (settings, own), group in zip(cases, groups)]
    assert min(fits) > 1e-4, fits
    for (settings, own), group in zip(cases, groups):
        wrong = [law_of(folder, None, settings) for folder in folders]
        wrong.append(law_of(folders, ensembles[1 - own], settings))  # another request's weights
        assert max(p_value(law, group) for law in wrong) < 1e-9


@pytest.mark.parametrize(
    ("kind", "drafter", "seed"),
    [
        ("mixture", "none", 0),
        ("mixture", "n-gram", 1),
        ("mixture", "member", 2),
        ("mixture", "member, drawn", 3),
        ("filtered by member", "outsider, drawn", 4),
        ("logit mixture", "member, drawn", 5),
        ("contrastive", "n-gram", 6),
    ],
)
def test_texts_have_the_law_of_the_ensemble(texts, target, draft_model, drafters, kind, drafter, seed):
    folders, asked = [target, draft_model], KINDS[kind][1]
    settings = [PLAIN, FILTERED, PENALISED, BIASED]
    cases = [*zip(settings, itertools.cycle((0, 1))), (PLAIN, 1)]
    batch = [request(settings, TEXTS, extra_args=asked[own]) for settings, own in cases]
    result = texts(target, [batch], drafters[drafter], seed=seed, **serving(folders, kind))
    assert_laws(folders, kind, cases, [completion["tokens"] for completion in result["batches"][0]])
    if drafter != "none":
        assert 0 < result["accepted"] < result["drafts"]
