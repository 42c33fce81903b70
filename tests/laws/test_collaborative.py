"""Rules by which two models write one text against the paper, read plainly; threshold acceptance; decision trees."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from trees_of_decisions import random_decision_tree

from specens_kernels import DecisionTree, Mixture, Replacement, Sampling, Threshold, Verdict, sample, verify_chain
from specens_kernels.ops.verify_chain.rules import walk_tree

BATCH, DRAFT_LEN, VOCAB = 200, 4, 20
UNSURE_DRAFTER = DecisionTree((0, -1, -1), (0.4, 0.0, 0.0), (1, -1, -1), (2, -1, -1), (False, True, False))
RULES = [Replacement(), Replacement(0.9, 0.2), Replacement(0.3, 1.5), UNSURE_DRAFTER, random_decision_tree(0, 31)]


def models(seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Logits of an assistant and of a drafter that is much like it, and tokens that the drafter drew."""
    generator = torch.Generator().manual_seed(seed)
    assistant = torch.randn(BATCH, DRAFT_LEN + 1, VOCAB, generator=generator) * 2
    drafter = assistant[:, :DRAFT_LEN] + torch.randn(BATCH, DRAFT_LEN, VOCAB, generator=generator)
    drawn = torch.multinomial(drafter.softmax(-1).flatten(0, 1), 1, generator=generator)
    return assistant, drafter, drawn.reshape(BATCH, DRAFT_LEN)


def decision_of(rule: Replacement | DecisionTree) -> Callable[[float, float], bool]:
    if isinstance(rule, DecisionTree):
        return rule.replaces
    return lambda draft, assistant: draft < rule.alpha and assistant > rule.beta * draft


def by_the_paper(assistant: list, drafter: list, drafts: list[int], replaces: Callable[[float, float], bool]) -> list:
    """What a round emits, of the probabilities of each position: kept drafts, then perhaps a replacement."""
    emitted = []
    for own, other, draft in zip(assistant, drafter, drafts):
        token = own.index(max(own))
        if draft != token and replaces(other[draft], own[token]):
            return [*emitted, token]
        emitted.append(draft)
    return emitted


def emitted_by(verdict: Verdict) -> list[list[int]]:
    return [row[:count] for row, count in zip(verdict.tokens.tolist(), verdict.num_tokens.tolist(), strict=True)]


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: type(rule).__name__)
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_a_round_without_a_bonus_row_emits_what_the_paper_says(rule, temperature):
    assistant, drafter, drafts = models()
    own, other = ((logits.double() / temperature).softmax(-1).tolist() for logits in (assistant, drafter))
    expected = [by_the_paper(*row, decision_of(rule)) for row in zip(own, other, drafts.tolist(), strict=True)]
    arguments = {"draft_logits": drafter, "sampling": Sampling(temperature), "rule": rule, "backend": "reference"}
    verdict = verify_chain(assistant[:, :DRAFT_LEN], drafts, **arguments)
    assert emitted_by(verdict) == expected
    lengths = {len(row) for row in expected}
    assert lengths == set(range(1, DRAFT_LEN + 1))
    assert not verdict.status.any()

    with_bonus = emitted_by(verify_chain(assistant, drafts, **arguments))
    for row, longer, tokens, last in zip(expected, with_bonus, drafts.tolist(), assistant[:, -1], strict=True):
        assert longer == (row if row != tokens else [*row, int(last.argmax())])


@pytest.mark.parametrize("rule", RULES[:4:3], ids=lambda rule: type(rule).__name__)
def test_temperature_0_counts_as_1_for_both_models(rule):
    assistant, drafter, drafts = models(1)
    arguments = {"draft_logits": drafter, "rule": rule, "backend": "reference"}
    expected = verify_chain(assistant, drafts, **arguments)
    some = torch.where(torch.arange(BATCH) % 2 == 0, 0.0, 1.0)
    for greedy in (0.0, some):
        for own in ({}, {"draft_sampling": Sampling(greedy)}):
            verdict = verify_chain(assistant, drafts, sampling=Sampling(greedy), **own, **arguments)
            assert torch.equal(verdict.tokens, expected.tokens)
    assert (expected.num_accepted < DRAFT_LEN).any()


def test_uniforms_are_not_looked_at():
    assistant, drafter, drafts = models(2)
    arguments = {"draft_logits": drafter, "rule": "replacement", "backend": "reference"}
    expected = verify_chain(assistant, drafts, **arguments)
    for value in (0.0, 0.99, torch.nan):
        uniforms = torch.full((BATCH, DRAFT_LEN + 1), value)
        assert torch.equal(verify_chain(assistant, drafts, uniforms=uniforms, **arguments).tokens, expected.tokens)


def test_a_draft_that_the_assistant_excludes_is_replaced_however_sure_the_drafter_is():
    assistant = torch.tensor([[[2.0, 1.0, 0.0]]])
    drafter = torch.tensor([[[-50.0, 0.0, 50.0]]])
    arguments = {"draft_logits": drafter, "rule": Replacement(), "backend": "reference"}
    assert verify_chain(assistant, torch.tensor([[2]]), **arguments).tokens.tolist() == [[2, -1]]
    for excluding in (
        {"sampling": Sampling(top_k=2)},
        {"allowed": torch.tensor([[[0b011]]], dtype=torch.int32), "process_drafts": False},
    ):
        assert verify_chain(assistant, torch.tensor([[2]]), **excluding, **arguments).tokens.tolist() == [[0, -1]]


def test_a_draft_of_no_distribution_has_probability_1_and_is_kept():
    assistant, _, drafts = models(3)
    drafters = torch.full_like(drafts, -1)
    for alpha in (0.0, 1.0):
        verdict = verify_chain(assistant, drafts, drafter=drafters, rule=Replacement(alpha, 0.0), backend="reference")
        assert (verdict.num_accepted == DRAFT_LEN).all()


def test_the_assistant_may_be_an_ensemble():
    """Of which the drafter is a member, as the probabilities after mixing and after drafting tell."""
    members = [torch.randn(50, 2, 9, generator=torch.Generator().manual_seed(seed)) * 2 for seed in range(2)]
    drafts = members[0].argmax(-1)
    mixed = 0.4 * members[0].double().softmax(-1) + 0.6 * members[1].double().softmax(-1)
    own = members[0].double().softmax(-1)
    expected = [
        by_the_paper(*row, decision_of(Replacement(0.7, 0.8)))
        for row in zip(mixed.tolist(), own.tolist(), drafts.tolist(), strict=True)
    ]
    arguments = {"ensemble": Mixture((0.4, 0.6)), "drafter": 0, "rule": Replacement(0.7, 0.8)}
    assert emitted_by(verify_chain(members, drafts, backend="reference", **arguments)) == expected


@pytest.mark.parametrize("probability", [0.2, 0.5, 1.0])
def test_a_threshold_accepts_what_is_likely_enough_and_draws_from_the_target(probability):
    logits, _, drafts = models(4)
    logits[::5, 0, 1:], drafts[::5, 0] = -torch.inf, 0  # probability 1
    logits[1::5, 0, 2:], logits[1::5, 0, :2], drafts[1::5, 0] = -torch.inf, 3.0, 1  # probability 0.5
    uniforms = torch.rand(BATCH, DRAFT_LEN + 1, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    verdict = verify_chain(logits, drafts, uniforms=uniforms, rule=Threshold(probability), backend="reference")
    own = logits[:, :DRAFT_LEN].double().softmax(-1).gather(2, drafts[..., None])[..., 0]
    assert torch.equal(verdict.num_accepted, (own >= probability).int().cumprod(1).sum(1))
    row = logits[torch.arange(BATCH), verdict.num_accepted]
    assert torch.equal(verdict.next_token, sample(row, uniforms=uniforms[:, -1], backend="reference").tokens)


def test_greedy_requests_ignore_a_threshold():
    logits, _, drafts = models(6)
    drafts = torch.where(torch.arange(DRAFT_LEN) < 2, logits[:, :DRAFT_LEN].argmax(-1), drafts)
    arguments = {"sampling": Sampling(temperature=0.0), "backend": "reference"}
    expected = verify_chain(logits, drafts, **arguments)
    assert torch.equal(verify_chain(logits, drafts, rule=Threshold(0.9), **arguments).tokens, expected.tokens)


def test_a_decision_tree_is_what_its_json_says():
    tree = random_decision_tree(7, 63)
    text = tree.to_json()
    assert DecisionTree.from_json(text) == tree
    assert json.loads(text)["features"] == ["draft_probability", "assistant_probability"]
    assert DecisionTree.from_json(UNSURE_DRAFTER.to_json()) == UNSURE_DRAFTER


def changed(**changes: Any) -> str:
    return json.dumps(json.loads(UNSURE_DRAFTER.to_json()) | changes)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("text", "{"),
        ("text", "[]"),
        ("text", "{}"),
        ("text", changed(more=1)),
        ("text", changed(kind="forest")),
        ("text", changed(features=["assistant_probability", "draft_probability"])),
        ("feature", changed(feature=1)),
        (r"feature\[0\]", changed(feature=[2, -1, -1])),
        (r"feature\[0\]", changed(feature=[True, -1, -1])),
        (r"threshold\[0\]", changed(threshold=[None, 0, 0])),
        (r"threshold\[0\]", changed(threshold=[float("nan"), 0, 0])),
        (r"left\[0\]", changed(left=[0, -1, -1])),
        (r"right\[0\]", changed(right=[3, -1, -1])),
        (r"left\[1\]", changed(left=[1, 2, -1])),
        (r"replace\[1\]", changed(replace=[False, 1, False])),
        ("right", changed(right=[2, -1])),
        ("feature", changed(feature=[])),
    ],
)
def test_a_decision_tree_that_cannot_be_walked_is_refused_by_name(name, text):
    with pytest.raises(ValueError, match=rf"^{name}: expected .*got"):
        DecisionTree.from_json(text)


def test_a_decision_tree_has_at_most_255_nodes():
    random_decision_tree(8, 255)
    with pytest.raises(ValueError, match=r"^feature: expected 1 to 255 nodes, got 257"):
        random_decision_tree(8, 257)


def fitted(**changes: Any) -> SimpleNamespace:
    """What scikit-learn keeps of a fitted tree: two inner nodes and three leaves."""
    tree = SimpleNamespace(
        n_features=2,
        feature=np.array([1, -2, 0, -2, -2]),
        threshold=np.array([0.5, -2.0, 0.25, -2.0, -2.0]),
        children_left=np.array([1, -1, 3, -1, -1]),
        children_right=np.array([2, -1, 4, -1, -1]),
        value=np.array([[[0.6, 0.4]], [[1.0, 0.0]], [[0.3, 0.7]], [[0.1, 0.9]], [[0.5, 0.5]]]),
    )
    return SimpleNamespace(tree_=tree, classes_=np.array([0, 1])) if not changes else SimpleNamespace(**changes)


def test_a_tree_of_scikit_learn_decides_as_there():
    tree = DecisionTree.from_sklearn(fitted())
    assert tree.feature == (1, -1, 0, -1, -1)
    expected = {(0.1, 0.5): False, (0.1, 0.9): True, (0.25, 0.9): True, (0.3, 0.9): False}  # a tie is the first class
    assert {point: tree.replaces(*point) for point in expected} == expected


def test_what_is_no_fitted_decision_tree_is_refused():
    own = fitted().tree_
    three = SimpleNamespace(**(vars(own) | {"n_features": 3}))
    for estimator in (
        object(),
        fitted(tree_=own),
        fitted(tree_=own, classes_=np.array([0, 2])),
        fitted(tree_=three, classes_=np.array([0, 1])),
    ):
        with pytest.raises(ValueError, match=r"^estimator: expected"):
            DecisionTree.from_sklearn(estimator)


@pytest.mark.parametrize("nodes", [1, 3, 17, 255])
def test_the_reference_walks_a_tree_as_it_says(nodes):
    tree, points = random_decision_tree(nodes, nodes), random.Random(nodes)
    grid = [(points.random(), points.random()) for _ in range(100)]
    grid += [(threshold, threshold) for threshold in tree.threshold if 0 < threshold < 1]  # they go left
    draft, assistant = (torch.tensor(values, dtype=torch.float64) for values in zip(*grid, strict=True))
    assert walk_tree(tree.table, draft, assistant).tolist() == [tree.replaces(*point) for point in grid]


@pytest.mark.parametrize(
    ("name", "make"),
    [
        ("alpha", lambda: Replacement(1.5)),
        ("alpha", lambda: Replacement(None)),
        ("alpha", lambda: Replacement(True)),
        ("beta", lambda: Replacement(0.5, -0.1)),
        ("beta", lambda: Replacement(0.5, float("inf"))),
        ("probability", lambda: Threshold(0.0)),
        ("probability", lambda: Threshold(1.5)),
        ("probability", lambda: Threshold(torch.tensor([0.5]))),
        ("feature", lambda: DecisionTree(3, (), (), (), ())),
        ("threshold", lambda: DecisionTree((-1,), "a", (-1,), (-1,), (True,))),
    ],
)
def test_settings_out_of_range_are_refused_by_name(name, make):
    with pytest.raises(ValueError, match=rf"^{name}: expected"):
        make()
