"""Rule "gumbel": a seed is a text, whatever the drafter, its lengths, the tree, the schedule and the batch are."""

from __future__ import annotations

import functools

import pytest
import torch
from cases import FULL, many
from driver.text_law import TEXTS, fit_of_texts
from driver.tiny_models import PROMPT, Bigram, relative_of, tiny_llama, tiny_tokenizer
from hypothesis import given, settings
from hypothesis import strategies as st
from specens import SpeculativeEnsemble, TreePlan
from specens.drafters import DraftModel, PromptLookup
from specens.targets import Cascade

from specens_kernels import Contrastive, LogitMixture, Mixture, Processing, Sampling

TARGETS = {
    "mixture": Mixture((0.5, 0.3, 0.2)),
    "lone target": Mixture((0.0, 1.0, 0.0)),
    "logits": LogitMixture((1.0, 1.0, -0.5)),
    "mixture of filtered members": Mixture((0.2, 0.2, 0.6), filter="members"),
}
WAYS = {
    "fixed": {"schedule": "fixed", "draft_lens": 3},
    "fixed, drafter 2": {"schedule": "fixed", "draft_lens": 1, "drafter": 2},
    "alternate": {"schedule": "alternate"},
    "alternate, long chains": {"schedule": "alternate", "draft_lens": (3, 1, 2)},
    "parallel": {"schedule": "parallel", "draft_lens": 3, "drafter": 1},
    "lookup": {"schedule": "fixed", "draft_lens": 5, "drafter": PromptLookup()},
    "tree": {"schedule": "tree", "tree": (2, 2)},
    "alternate, tree": {"schedule": "alternate", "tree": (2, 2)},
    "grown tree": {"schedule": "tree", "tree": TreePlan(nodes=6, width=2, levels=3)},
}
SAMPLINGS = st.builds(
    Sampling,
    st.sampled_from([0.0, 0.6, 1.0, 1.7]),
    top_k=st.sampled_from([None, 5, 40]),
    top_p=st.sampled_from([None, 0.5, 0.95]),
    min_p=st.sampled_from([None, 0.05]),
    filter_order=st.sampled_from(["transformers", "vllm"]),
)


@pytest.fixture(scope="module")
def members():
    first = tiny_llama(0)
    return [first, relative_of(first, 1, noise=0.2), relative_of(first, 2, noise=0.2)]


@settings(max_examples=400 if FULL else 25, deadline=None, derandomize=not FULL)
@given(st.data())
def test_every_way_of_speculating_writes_the_text_of_standard(members, data):
    target = TARGETS[data.draw(st.sampled_from(sorted(TARGETS)))]
    way = data.draw(st.sampled_from(sorted(WAYS)))
    texts = {"seed": data.draw(st.integers(-(2**63), 2**63 - 1)), "sampling": data.draw(SAMPLINGS)}
    texts |= {"max_new_tokens": 14, "logprobs": data.draw(st.booleans())}
    if not way.endswith("tree") and data.draw(st.booleans()):
        texts |= {"min_new_tokens": 6, "stop_tokens": [7, 11, 23]}
        texts |= {"processing": Processing(repetition_penalty=1.3, frequency_penalty=0.2)}
    one, other = (
        SpeculativeEnsemble(members, ensemble=target, rule="gumbel", **how).generate(PROMPT, **texts)
        for how in ({"schedule": "standard"}, WAYS[way])
    )
    assert one.tokens == other.tokens, way
    assert other.statistics.accepted != [0] * 4 or way == "lookup" or len(other.tokens) < 5
    if texts["logprobs"]:
        assert one.logprobs == pytest.approx(other.logprobs, abs=1e-3)


@pytest.fixture(scope="module")
def alone(members):
    """What `standard` writes of a prompt and a seed, once for all ways."""
    standard = SpeculativeEnsemble(members, rule="gumbel", schedule="standard")
    return functools.cache(lambda prompt, seed: standard.generate(prompt, seed=seed, max_new_tokens=12).tokens)


@pytest.mark.parametrize("way", sorted(WAYS))
def test_a_batch_writes_the_texts_of_its_seeds_alone(members, alone, way):
    ensemble = SpeculativeEnsemble(members, rule="gumbel", **WAYS[way])
    prompts = [tuple(PROMPT), (1, 2), (7,) * 20, (60,)]
    together = sorted(ensemble.generate_many(prompts, batch_size=3, seed=9, max_new_tokens=12), key=lambda g: g.index)
    assert [text.tokens for text in together] == [alone(prompts[text.index], text.seed) for text in together]


def test_drafters_that_are_no_members_and_contrastive_targets(members):
    target, drafter = members[:2]
    for ensemble, models in ((None, [target]), (Contrastive(0.3, plausibility=0.1), [target, members[2]])):
        standard = SpeculativeEnsemble(models, ensemble=ensemble, rule="gumbel", schedule="standard")
        expected = standard.generate(PROMPT, seed=3, max_new_tokens=20).tokens
        for schedule in ("fixed", "parallel"):
            how = {"schedule": schedule, "draft_lens": 3, "drafter": DraftModel(drafter)}
            speculating = SpeculativeEnsemble(models, ensemble=ensemble, rule="gumbel", **how)
            text = speculating.generate(PROMPT, seed=3, max_new_tokens=20)
            assert text.tokens == expected
            assert sum(text.statistics.accepted) > 0


def test_cascades_draw_by_gumbel_too(members):
    ways = ({"schedule": "standard"}, {"schedule": "fixed", "draft_lens": 3})
    ensembles = [SpeculativeEnsemble(members[:2], ensemble=Cascade("chow", 0.3), rule="gumbel", **how) for how in ways]
    texts = [[each.generate(PROMPT, seed=seed, max_new_tokens=12).tokens for seed in range(5)] for each in ensembles]
    assert texts[0] == texts[1]


QUESTIONS = ["What does the with statement do in Python?"]
FILTERS = [Sampling(top_k=50, top_p=0.95)]
if FULL:
    QUESTIONS += ["Write a poem about rain.", "List the planets, then list the planets again."]
    FILTERS += [Sampling(), Sampling(top_p=0.9), Sampling(min_p=0.02, filter_order="vllm"), Sampling(1.3, top_k=20)]
OF_A_PAIR = ["alternate", "tree", *["fixed", "lookup", "grown tree"] * FULL]


@pytest.mark.parametrize("sampling", FILTERS, ids=str)
@pytest.mark.parametrize("question", QUESTIONS)
def test_every_way_writes_one_text_with_real_models(shallow, tokenizer, question, sampling):
    job = {"chat": True, "seed": 5, "max_new_tokens": 48 if FULL else 12, "sampling": sampling}
    for members, ways in ((shallow, OF_A_PAIR), *[(shallow[:1], ["lookup"])] * FULL):
        texts = {
            way: SpeculativeEnsemble(members, tokenizer, rule="gumbel", **how).generate(question, **job)
            for way, how in [("standard", {"schedule": "standard"}), *((way, WAYS[way]) for way in ways)]
        }
        assert {way: text.tokens for way, text in texts.items()} == dict.fromkeys(texts, texts["standard"].tokens)
        drafting = [way for way in ways if way != "lookup"]  # which may find nothing to copy
        assert all(sum(texts[way].statistics.accepted) > 0 for way in drafting)


def test_texts_follow_the_mixture():
    tables = [torch.randn(5, 5, generator=torch.Generator().manual_seed(seed)) * 2 for seed in range(2)]
    ensemble = SpeculativeEnsemble([Bigram(table) for table in tables], rule="gumbel", ensemble=Mixture((0.4, 0.6)))
    rows = 0.4 * tables[0].softmax(-1) + 0.6 * tables[1].softmax(-1)
    assert fit_of_texts(ensemble, rows.double(), many(TEXTS))[0] > 1e-3


def test_the_rule_says_what_it_does_not_go_with(members):
    with pytest.raises(ValueError, match="rule: expected draft trees, tree=, beside 'traversal'"):
        SpeculativeEnsemble(members, rule="traversal")
    assert SpeculativeEnsemble(members[:1], tiny_tokenizer(), rule="gumbel").generate("w5 w3", seed=0).tokens
