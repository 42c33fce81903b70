"""An ensemble inside vLLM's engine: what it writes has the law of the ensemble, and not that of a member."""

from __future__ import annotations

import itertools

import pytest
import torch
from engines.vllm.exact_law import exact_law, p_value
from engines.vllm.test_engine import ALLOWED, BIASED, FILTERED, LENGTH, PENALISED, PLAIN, PROMPT, request
from transformers import AutoModelForCausalLM

from specens_kernels import Contrastive, LogitMixture, Mixture, Sampling, target_logprobs

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
        ("filtered by member", "none", 8),
        ("logit mixture", "none", 9),
        ("contrastive", "none", 10),
        ("contrastive", "member, drawn", 11),
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


def test_members_may_differ_in_their_padding(texts, target, wider, drafters):
    """Texts drawn over the wider vocabulary; the smaller member gives what it does not know probability 0."""
    settings = serving([target, wider], "mixture")
    settings["hf_overrides"]["vocab_size"] = 14
    batch = [request(PLAIN, TEXTS), request(PLAIN, TEXTS, extra_args={"specens_weights": [0.2, 0.8]})]
    result = texts(target, [batch], drafters["n-gram"], **settings)
    drawn = [completion["tokens"] for completion in result["batches"][0]]
    assert any(max(text) >= 12 for text in drawn)
    for group, weights in ((drawn[:TEXTS], (0.5, 0.5)), (drawn[TEXTS:], (0.2, 0.8))):
        assert p_value(law_of([target, wider], Mixture(weights), PLAIN), group) > 1e-4
    assert result["accepted"] > 0


def test_the_law_stands_when_prompts_are_split_and_requests_are_cached_preempted_or_out_of_length(
    texts, target, draft_model, drafters
):
    prompt = [*PROMPT * 6, 1, 2, 3]
    longest = len(prompt) + 6
    budget = {"max_num_batched_tokens": 48, "max_num_seqs": 16, "max_model_len": longest, "block_size": 32}
    engine = serving([target, draft_model], "mixture") | budget | {"enable_prefix_caching": True}
    assert len(prompt) > budget["max_num_batched_tokens"]  # so that the first prompt takes two steps
    batch = [request(PLAIN, TEXTS, prompt=prompt), request(PLAIN, TEXTS // 8, length=6, prompt=prompt)]
    growing = [request(PLAIN, length=36, prompt=[index % 12] * 30) for index in range(40)]  # from one block to three
    batch = [*growing[:20], *batch, *growing[20:]]
    result = texts(target, [batch], drafters["member, drawn"], num_gpu_blocks_override=20, seed=7, **engine)
    drawn = [completion["tokens"] for completion in result["batches"][0]][20:-20]
    assert {len(text) for text in drawn[TEXTS:]} == {6}
    assert min(result[name] for name in ("cached", "preemptions", "accepted")) > 0
    folders, mixture = [target, draft_model], Mixture((0.5, 0.5))
    law = exact_law(folders, prompt, LENGTH, Sampling(), ensemble=mixture)
    assert p_value(law, drawn[:TEXTS]) > 1e-4
    for folder in folders:
        assert p_value(exact_law(folder, prompt, LENGTH, Sampling()), drawn[:TEXTS]) < 1e-9


def seeded_requests(kind="mixture"):
    """Requests with seeds that differ in settings and weights."""
    asked = KINDS[kind][1]
    return [
        request(settings, length=24, seed=5, extra_args=asked[own])
        for settings in (PLAIN, FILTERED, PENALISED, BIASED)
        for own in (0, 1)
    ]


def test_a_seeded_text_with_drawn_drafts_does_not_depend_on_the_batch(texts, target, draft_model, drafters):
    seeded = seeded_requests()
    others = [request(PLAIN, 13, length=20), request(FILTERED, 4, length=31, prompt=[5, 6, 7])]
    batches = [*[[one] for one in seeded], [*others, *seeded], seeded]
    result = texts(target, batches, drafters["member, drawn"], **serving([target, draft_model], "mixture"))
    found = [[completion["tokens"] for completion in batch] for batch in result["batches"]]
    alone = [batch[0] for batch in found[: len(seeded)]]
    assert found[-2][17:] == found[-1] == alone
    assert len(set(map(tuple, found[-2][:13]))) > 1


def greedy_requests(kind="mixture"):
    """Greedy ones that each ask for something else, with reports on texts and prompts."""
    greedy = {"temperature": 0.0}
    return [
        request(greedy, length=16, logprobs=3, prompt_logprobs=2),
        request(greedy, length=16, logprobs=2, extra_args=KINDS[kind][1][1]),
        request(greedy, length=16, logprobs=0, repetition_penalty=1.3),
        request(greedy, length=16, stop_token_ids=list(range(6)), min_tokens=9, ignore_eos=False),
    ]


def ensemble_report(folders, prompt, tokens, ensemble):
    """Log-probabilities [tokens, vocab] of what follows a prompt, by the ensemble."""
    text = torch.tensor([*prompt, *tokens])[None]
    models = [AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64) for folder in folders]
    with torch.no_grad():
        logits = [model(text).logits[0, :-1].float() for model in models]
    return target_logprobs(logits, ensemble=ensemble, backend="reference")


def assert_report(report, expected, tokens, most):
    """The token and the most likely ones, with the ensemble's log-probabilities and ranks."""
    for step, row, token in zip(report, expected, tokens, strict=True):
        entries = {entry[0]: entry[1:] for entry in step}
        likely = [own for own in row.topk(most).indices.tolist() if row[own] > -torch.inf]
        assert {token, *likely} <= set(entries)
        assert len(entries) <= most + 1
        for own, (logprob, rank) in entries.items():
            assert logprob == pytest.approx(float(row[own]), abs=2e-4)
            assert int((row > row[own]).sum()) < rank <= int((row >= row[own]).sum())


# So little room that long prompts are split, and growing texts preempted.
TIGHT = {"max_num_batched_tokens": 48, "max_num_seqs": 16, "max_model_len": 80, "block_size": 32}
TIGHT |= {"num_gpu_blocks_override": 20, "enable_prefix_caching": True}
PATTERN, MASKS = "[a-d][c-h]", torch.tensor([[0b1111], [0b11111100]], dtype=torch.int32)


@pytest.mark.parametrize("kind", KINDS)
def test_by_gumbel_a_seed_is_a_text_with_speculation_and_without_in_any_room(
    texts, target, draft_model, drafters, letters, kind
):
    folders, asked, ensembles = [target, draft_model], *KINDS[kind][1:]
    seeded, seeds = seeded_requests(kind), range(600)
    many = [request(settings, length=2, seed=seed) for settings in (PLAIN, FILTERED) for seed in seeds]
    many += [request(PLAIN, length=2, seed=seed, regex=PATTERN, extra_args=asked[1]) for seed in seeds]
    growing = [request(PLAIN, length=36, seed=index, prompt=[index % 12] * 30) for index in range(40)]
    long = [request(PLAIN, length=6, seed=seed, prompt=PROMPT * 6, extra_args=asked[seed % 2]) for seed in range(6)]
    batches, results = [seeded, [*growing, *long, *seeded[::-1]], many, greedy_requests(kind)], []
    served = serving(folders, kind) | {"skip_tokenizer_init": False, "tokenizer": str(letters)}
    for drafter, room in (("none", {}), ("member, drawn", TIGHT)):
        results.append(texts(target, batches, drafters[drafter], rule="gumbel", **served | room))
    expected, got = ([[text["tokens"] for text in batch] for batch in result["batches"]] for result in results)
    assert got == expected
    assert expected[1][-len(seeded) :] == expected[0][::-1]
    assert min(results[1][name] for name in ("cached", "preemptions", "accepted")) > 0
    cases = [(PLAIN, 0, None), (FILTERED, 0, None), (PLAIN, 1, MASKS)]
    for index, (settings, own, masks) in enumerate(cases):
        group = expected[2][index * len(seeds) :][: len(seeds)]
        sampling = Sampling(**settings, filter_order="vllm")
        law = exact_law(folders, PROMPT, 2, sampling, masks, ensemble=ensembles[own])
        assert p_value(law, group) > 1e-4, (settings, masks)
        for folder in folders:
            assert p_value(exact_law(folder, PROMPT, 2, sampling, masks), group) < 1e-9
    for result in results:
        first, weighted, penalised, _ = result["batches"][3]
        for completion, ensemble, most in ((first, ensembles[0], 3), (weighted, ensembles[1], 2)):
            rows = ensemble_report(folders, PROMPT, completion["tokens"], ensemble)
            assert_report(completion["report"], rows[len(PROMPT) - 1 :], completion["tokens"], most)
        rows = ensemble_report(folders, PROMPT, first["tokens"], ensembles[0])
        assert_report(first["prompt_report"][1:], rows[: len(PROMPT) - 1], PROMPT[1:], 2)
        assert len(penalised["report"]) == 16
