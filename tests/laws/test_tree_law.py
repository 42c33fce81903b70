"""The text law of trees by exact enumeration: what is emitted is distributed as the target alone would be."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace

import pytest
import torch
from laws.enumeration import enumerate_rounds, target_law, text_law
from laws.tiny_targets import TARGETS, VOCAB, Model, build, own_distribution
from laws.tree_enumeration import Plan, drawn_trees, enumerate_trees, plan

from specens_kernels import TokenTree

EXACT = 1e-12
TREES = {
    "two branches": TokenTree([-1, -1, 0, 1]),
    "a fork below the second": TokenTree([-1, -1, 1, 1]),
    "three children": TokenTree([-1, -1, -1, 0]),
    "a chain of three beside a leaf": TokenTree([-1, 0, 1, -1]),
}
WIDE = TokenTree([-1, -1, 0, 0, 1, 1])
DEEP = TokenTree([-1, -1, 0, 1, 1, 3])
ENSEMBLES = ("single", "mixture", "logit mixture", "contrastive, amateur drafts")
LOSSLESS = ("token", "traversal")
DRAWN = ("with_replacement", "without_replacement")
TESTED = [*itertools.product(LOSSLESS, DRAWN), ("k_seq", "with_replacement")]


def model_for(target: str, drafter: str, tree: TokenTree, seed: int) -> Model:
    return build(target, drafter, rows=tree.num_levels + 1, draft_len=tree.num_levels, seed=seed)


def assert_the_law_is_the_targets(own: Plan, trees=None) -> float:
    """Returns the expected number of accepted drafts."""
    rounds = enumerate_trees(own, trees)
    assert float(rounds.weights.sum()) == pytest.approx(1, abs=EXACT)
    length = own.tree.num_levels + 1
    law, expected = text_law(own.model, rounds, length), target_law(own.model.target, length)
    torch.testing.assert_close(law, expected, rtol=0, atol=EXACT)
    return float((rounds.weights * rounds.verdict.num_accepted).sum())


@pytest.mark.parametrize(("rule", "siblings"), TESTED)
@pytest.mark.parametrize("tree", TREES)
@pytest.mark.parametrize("target", ENSEMBLES)
def test_drawn_trees_emit_the_product_of_the_target_distributions(target, tree, rule, siblings):
    for seed in (1, 2, 3, 4):
        model = model_for(target, "outside", TREES[tree], seed)
        assert_the_law_is_the_targets(plan(model, TREES[tree], rule, siblings))


@pytest.mark.parametrize(("rule", "siblings"), TESTED)
@pytest.mark.parametrize("target", TARGETS)
def test_the_law_holds_for_every_ensemble_and_members_that_draft(target, rule, siblings):
    tree = TREES["two branches"]
    for drafter in ("member", "member a token"):
        chosen = drafter == "member a token"  # with a level of one-hot drafts, whose siblings are the same token
        if chosen and siblings == "without_replacement":
            continue
        assert_the_law_is_the_targets(plan(model_for(target, drafter, tree, 3), tree, rule, siblings))


@pytest.mark.parametrize(("rule", "siblings"), TESTED)
@pytest.mark.parametrize("tree", [WIDE, DEEP], ids=["wide", "deep"])
def test_the_law_holds_for_larger_trees(tree, rule, siblings):
    assert_the_law_is_the_targets(plan(model_for("mixture", "outside", tree, 5), tree, rule, siblings))


@pytest.mark.parametrize(("rule", "siblings"), TESTED)
def test_the_law_holds_for_a_drafter_with_a_wider_vocabulary(rule, siblings):
    tree = TokenTree([-1, -1, -1])
    for seed in (1, 2, 3):
        model = model_for("single", "outside of four tokens", tree, seed)
        assert model.draft[0, 0, 3] > 0, "the drafter never draws the token that the target lacks"
        assert_the_law_is_the_targets(plan(model, tree, rule, siblings))


@pytest.mark.parametrize(("rule", "siblings"), TESTED)
def test_the_law_holds_where_each_child_has_a_drafter_of_its_own(rule, siblings):
    tree, members = TREES["two branches"], torch.tensor([[0, 1, 1, 0]])
    for seed in (1, 2):
        model = model_for("mixture", "member", tree, seed)
        own = plan(model, tree, rule, siblings)
        temperature = model.arguments["sampling"].temperature
        tables = [own_distribution(logits, temperature) for logits in model.member_logits]
        drafts = [tables[member][depth] for member, depth in zip(members[0], own.depth)]
        assert_the_law_is_the_targets(replace(own, drafts=drafts, arguments=own.arguments | {"drafter": members}))


@pytest.mark.parametrize("rule", [*LOSSLESS, "k_seq"])
@pytest.mark.parametrize("target", ENSEMBLES)
def test_chosen_children_leave_the_law_as_it_is_whatever_they_are(target, rule):
    choice = random.Random(9)
    for shape in (*TREES.values(), WIDE):
        model = model_for(target, "one-hot", shape, 4)
        for _ in range(4):
            tokens = tuple(choice.randrange(VOCAB) for _ in range(len(shape)))
            assert_the_law_is_the_targets(plan(model, shape, rule, None), [(tokens, 1.0)])


@pytest.mark.parametrize("rule", LOSSLESS)
def test_the_law_would_show_siblings_that_are_not_drawn_as_it_is_said(rule):
    tree = TokenTree([-1, -1])
    for seed in (0, 6):
        plans = [plan(model_for("single", "outside", tree, seed), tree, rule, siblings) for siblings in DRAWN]
        for told, drawn in (plans, plans[::-1]):
            assert_the_law_is_the_targets(told)
            with pytest.raises(AssertionError, match="not close"):
                assert_the_law_is_the_targets(told, list(drawn_trees(drawn)))


@pytest.mark.parametrize("target", ENSEMBLES)
def test_traversal_accepts_more_than_token_and_trees_more_than_a_chain(target):
    tree = TREES["two branches"]
    lengths = {"chain": 0.0, "token": 0.0, "traversal": 0.0}
    for seed in range(6):
        model = model_for(target, "outside", tree, seed)
        rounds = {name: enumerate_trees(plan(model, tree, name, "without_replacement")) for name in LOSSLESS}
        rounds["chain"] = enumerate_trees(plan(model, TokenTree([-1, 0]), "token", "without_replacement"))
        means = {name: float((own.weights * own.verdict.num_accepted).sum()) for name, own in rounds.items()}
        assert means["traversal"] >= means["token"] - EXACT
        assert means["token"] >= means["chain"] - EXACT
        lengths = {name: lengths[name] + means[name] for name in lengths}
    assert lengths["traversal"] > lengths["token"] + 0.01
    assert lengths["token"] > lengths["chain"] + 0.1


def test_a_chain_has_the_law_of_verify_chain():
    model = build("single", "outside", rows=2, draft_len=1, seed=6)
    expected = enumerate_rounds(model, bonus=True, draft_len_used=1)
    own = enumerate_trees(plan(model, TokenTree([-1]), "token", "with_replacement"))
    torch.testing.assert_close(text_law(model, own, 2), text_law(model, expected, 2), rtol=0, atol=EXACT)
    accepted = [float((rounds.weights * rounds.verdict.num_accepted).sum()) for rounds in (own, expected)]
    assert accepted[0] == pytest.approx(accepted[1], abs=EXACT)
