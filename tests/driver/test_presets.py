"""Every method that is listed, run on small models; the lossless ones against plain sampling from their target."""

import itertools

import pytest
import torch
from driver.test_schedules import GREEDY
from driver.tiny_models import PROMPT, relative_of, tiny_llama, tiny_tokenizer
from specens import SpeculativeEnsemble, TreePlan
from specens.drafters import DraftModel, Heads, LayerSkip, OtherTokenizer, PromptLookup, Several
from specens.presets import PRESETS

from specens_kernels import DecisionTree, TokenTree

NEVER_REPLACES = DecisionTree(feature=(-1,), threshold=(0.0,), left=(-1,), right=(-1,), replace=(False,))

GIVEN = {
    "cosd-tree": lambda: NEVER_REPLACES,
    "cosd-tokenizers": lambda: OtherTokenizer(relative_of(tiny_llama(0), 1, 0.2), tiny_tokenizer(), probabilities=True),
    "retrieval-chain": lambda: PromptLookup(store=[STORED]),
    "specinfer-draft-models": lambda: Several([DraftModel(relative_of(tiny_llama(0), seed, 0.2)) for seed in (1, 2)]),
    "early-exit": lambda: LayerSkip(exit_layer=1),
    "self-speculation": lambda: LayerSkip([0]),
    "medusa-heads": lambda: Heads(lambda hidden: torch.stack([hidden @ HEAD, hidden.flip(-1) @ HEAD], dim=1)),
    "medusa": lambda: Heads(lambda hidden: torch.stack([hidden @ HEAD, hidden.flip(-1) @ HEAD], dim=1)),
    "rest": lambda: PromptLookup(store=[STORED], choose="frequent"),
    "sequoia": lambda: TreePlan(shape=TokenTree.best_for_acceptance((0.5, 0.2, 0.1), 9), children="sampled"),
}
STORED = (
    SpeculativeEnsemble([tiny_llama(0)], schedule="standard")
    .generate(PROMPT, max_new_tokens=40, sampling=GREEDY)
    .tokens
)
UNTRAINED = (
    "early-exit",
    "jacobi",
    "lookahead",
    "lookahead-ngrams",
    "medusa",
    "medusa-heads",
)  # what they draft is nothing for random weights
HEAD = torch.randn(32, 61, generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="module")
def family():
    first = tiny_llama(0)
    return [first, relative_of(first, 1, noise=0.2), relative_of(first, 2, noise=0.2)]


def build(name, family):
    method = PRESETS[name]
    members = family[: len(method.members)]
    given = {} if method.needs is None else {method.needs: GIVEN[name]()}
    return SpeculativeEnsemble.from_preset(name, members, tokenizer=tiny_tokenizer(), **given)


@pytest.mark.parametrize("name", PRESETS)
def test_a_method_writes_the_greedy_text_of_its_target(family, name):
    length = 40 if name == "self-speculation" else 24  # its drafts are rarely right
    ensemble = build(name, family)
    result = ensemble.generate(PROMPT, max_new_tokens=length, sampling=GREEDY)
    assert len(result.tokens) == length
    if PRESETS[name].lossless:
        plain = SpeculativeEnsemble(ensemble.models, ensemble=ensemble.ensemble, schedule="standard")
        assert result.tokens == plain.generate(PROMPT, max_new_tokens=length, sampling=GREEDY).tokens
    if ensemble.schedule.speculates:
        assert sum(result.statistics.tested) > 0
        assert sum(result.statistics.accepted) > 0 or name in UNTRAINED


@pytest.mark.parametrize("name", PRESETS)
def test_a_method_reports_probabilities_of_its_target(family, name):
    ensemble = build(name, family)
    result = ensemble.generate(PROMPT, max_new_tokens=20, seed=1, logprobs=True)
    again = ensemble.generate(PROMPT, max_new_tokens=20, seed=1)
    assert result.tokens == again.tokens
    values = torch.tensor(result.logprobs)
    assert (values <= 1e-5).all()
    if PRESETS[name].lossless:  # nothing that the target excludes
        assert torch.isfinite(values).all()


def test_arguments_take_the_place_of_what_a_method_chooses(family):
    ensemble = SpeculativeEnsemble.from_preset("speculative-decoding", family[:2], draft_lens=2, drafter=0)
    assert ensemble.plan.draft_lens == (2, 2)
    assert ensemble.plan.drafter == 0


@pytest.mark.parametrize(
    ("name", "schedule"),
    [
        *itertools.product(
            ["speculative-decoding", "block-verification", "specinfer", "speculative-ensemble"], ["standard"]
        ),
        *itertools.product(
            ["speculative-decoding", "block-verification", "speculative-ensemble", "guidance"], ["tree"]
        ),
        *itertools.product(["block-verification", "specinfer", "traversal-verification"], ["alternate", "parallel"]),
    ],
)
def test_another_schedule_takes_no_drafts_of_the_preset_and_warns_of_none(name, schedule, family, recwarn):
    ensemble = SpeculativeEnsemble.from_preset(name, family[:2], schedule=schedule)
    trees = schedule == "tree" or (schedule == "alternate" and PRESETS[name].topology != "chain")
    assert (ensemble.schedule_name, ensemble.uses_trees) == ("fixed" if schedule == "tree" else schedule, trees)
    assert not recwarn.list


def test_wrong_presets_are_named(family):
    with pytest.raises(ValueError, match=r"preset: expected one of speculative-decoding, .*; got 'magic'"):
        SpeculativeEnsemble.from_preset("magic", family)
    with pytest.raises(ValueError, match="members: expected target, draft model for dyspec, got 3 of them"):
        SpeculativeEnsemble.from_preset("dyspec", family)
    with pytest.raises(ValueError, match=r"members: expected member, member, \.\.\. for speculative-ensemble, got 1"):
        SpeculativeEnsemble.from_preset("speculative-ensemble", family[:1])
    with pytest.raises(ValueError, match="rule: expected one for cosd-tree, got none"):
        SpeculativeEnsemble.from_preset("cosd-tree", family[:2])
