"""The whole V2 model runner on a CPU, vLLM's kernels in Triton's interpreter: laws, seeds and reports of ensembles.

Interpreted kernels take milliseconds for each request of a step, so that batches are small here.
"""

from __future__ import annotations

import pytest
from engines.vllm.exact_law import p_value
from engines.vllm.test_engine import BIASED, FILTERED, PENALISED, PLAIN, request
from engines.vllm.test_ensemble import KINDS, greedy_requests, law_of, serving

TEXTS, LENGTH = 150, 2
SMALL = {"max_num_seqs": 32, "max_model_len": 64}


@pytest.mark.parametrize(("kind", "drafter"), [("mixture", "member, drawn"), ("contrastive", "outsider, drawn")])
def test_texts_have_the_law_of_the_ensemble(texts, target, draft_model, drafters, kind, drafter):
    folders, asked, ensembles = [target, draft_model], *KINDS[kind][1:]
    cases = [(PLAIN, 0), (FILTERED, 0), (PENALISED, 1)]
    batch = [request(settings, TEXTS, LENGTH, extra_args=asked[own]) for settings, own in cases]
    result = texts(target, [batch], drafters[drafter], v2=True, **SMALL, **serving(folders, kind))
    assert 0 < result["accepted"] < result["drafts"]
    drawn = [completion["tokens"] for completion in result["batches"][0]]
    groups = [drawn[index * TEXTS :][:TEXTS] for index in range(len(cases))]
    for (settings, own), group in zip(cases, groups):
        assert p_value(law_of(folders, ensembles[own], settings).sum(2), group) > 1e-4, (settings, own)
    for folder in folders:  # whose law would have to fit everywhere
        fits = [p_value(law_of(folder, None, settings).sum(2), group) for (settings, _), group in zip(cases, groups)]
        assert min(fits) < 1e-6, fits


def test_by_gumbel_a_seed_is_its_text_of_v1_with_speculation_and_without(texts, target, draft_model, drafters):
    folders, asked = [target, draft_model], KINDS["mixture"][1]
    seeded = [
        request(settings, length=12, seed=5, extra_args=asked[own])
        for settings in (PLAIN, FILTERED, PENALISED, BIASED)
        for own in (0, 1)
    ]
    results = [
        texts(target, [seeded, greedy_requests()], drafters[drafter], v2=v2, rule="gumbel", **SMALL, **settings)
        for drafter, v2, settings in [
            ("none", False, serving(folders, "mixture")),
            ("none", True, serving(folders, "mixture")),
            ("member, drawn", True, serving(folders, "mixture")),
        ]
    ]
    assert results[2]["accepted"] > 0
    for result in results[1:]:
        for batch, expected in zip(result["batches"], results[0]["batches"]):
            assert [text["tokens"] for text in batch] == [text["tokens"] for text in expected]
            for text, wanted in zip(batch, expected):
                assert_same_report(text["report"], wanted["report"])
                assert_same_report(text["prompt_report"], wanted["prompt_report"])


def assert_same_report(report, expected):
    """The same tokens with the same ranks, and log-probabilities that differ by rounding alone."""
    assert (report is None) == (expected is None)
    for step, wanted in zip(report or [], expected or [], strict=True):
        assert [(token, rank) for token, _, rank in step] == [(token, rank) for token, _, rank in wanted]
        assert [entry[1] for entry in step] == pytest.approx([entry[1] for entry in wanted], abs=2e-4)
