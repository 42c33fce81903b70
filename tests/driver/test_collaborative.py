"""Training decision trees for replacement: labels, what is learned, and what is refused."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch
from specens.analysis.collaborative import replacement_labels, train_decision_tree

from specens_kernels import DecisionTree, Replacement, verify_chain


def test_labels_take_the_model_that_is_right():
    reference = torch.tensor([[1, 2, 3], [4, 5, 6]])
    drafts, others = torch.tensor([[1, 9, 3], [9, 5, 9]]), torch.tensor([[9, 2, 9], [8, 9, 6]])
    assert replacement_labels(drafts, others, reference).tolist() == [[0, 1, 0], [-1, 0, 1]]


def test_where_both_are_right_a_uniform_decides_or_the_position_is_left_out():
    tokens = torch.arange(4000)
    labels = replacement_labels(tokens, tokens, tokens)
    assert torch.equal(labels, replacement_labels(tokens, tokens, tokens, seed=0))
    assert not torch.equal(labels, replacement_labels(tokens, tokens, tokens, seed=1))
    assert abs(float(labels.double().mean()) - 0.5) < 0.05
    assert replacement_labels(tokens, tokens, tokens, seed=None).unique().tolist() == [-1]
    with pytest.raises(ValueError, match=r"^draft_tokens, assistant_tokens, reference_tokens: expected one shape"):
        replacement_labels(tokens[:1], tokens, tokens)


def samples() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Probabilities of both models and what the replacement rule makes of them."""
    draft, assistant = torch.rand(2, 3000, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    return draft, assistant, ((draft < 0.5) & (assistant > 0.5 * draft)).long()


def test_a_tree_learns_a_rule_and_decides_alike(tmp_path):
    draft, assistant, labels = samples()
    labels[::10] = -1
    path = tmp_path / "tree.json"
    tree = train_decision_tree(draft, assistant.tolist(), labels, max_depth=None, path=path)
    assert DecisionTree.from_json(path.read_text()) == tree
    kept = labels >= 0
    decided = [tree.replaces(*point) for point in zip(draft.tolist(), assistant.tolist(), strict=True)]
    assert torch.equal(torch.tensor(decided)[kept], labels[kept] == 1)
    small = train_decision_tree(draft, assistant, labels, max_depth=2, min_leaf=20)
    assert len(small.feature) <= 7

    logits = torch.randn(200, 2, 20, generator=torch.Generator().manual_seed(1)) * 2
    outside = logits + torch.randn(200, 2, 20, generator=torch.Generator().manual_seed(2))
    tokens = outside.argmax(-1)
    verdicts = [
        verify_chain(logits, tokens, draft_logits=outside, rule=rule, backend="reference").num_accepted
        for rule in (tree, Replacement())
    ]
    assert (verdicts[0] == verdicts[1]).double().mean() > 0.97
    assert (verdicts[0] < 2).any()


def test_a_tree_of_scikit_learn_decides_as_scikit_learn():
    from sklearn.tree import DecisionTreeClassifier

    draft, assistant, labels = samples()
    noisy = torch.where(torch.arange(len(labels)) % 7 == 0, 1 - labels, labels)
    points = torch.stack([draft, assistant], -1).float().numpy()
    for settings in ({"max_depth": 6}, {"max_leaf_nodes": 128}):
        estimator = DecisionTreeClassifier(random_state=0, **settings).fit(points, noisy.numpy())
        tree = DecisionTree.from_sklearn(estimator)
        decided = [tree.replaces(*map(float, point)) for point in points]
        assert decided == [label == 1 for label in estimator.predict(points).tolist()]


def test_labels_of_one_kind_make_a_leaf():
    assert train_decision_tree([0.1, 0.2], [0.3, 0.4], [1, 1]).replace == (True,)


WRONG: list[tuple[str, Any, Any, Any]] = [
    ("draft_probabilities", [1.5], [0.5], [1]),
    ("assistant_probabilities", [0.5], [float("nan")], [1]),
    ("assistant_probabilities", [0.5], [0.5, 0.5], [1]),
    ("labels", [0.5], [0.5], [2]),
    ("labels", [0.5], [0.5], [1, 1]),
    ("labels", [0.5], [0.5], [-1]),
]


@pytest.mark.parametrize(("name", "draft", "assistant", "labels"), WRONG)
def test_what_cannot_be_learned_from_is_refused_by_name(name, draft, assistant, labels):
    with pytest.raises(ValueError, match=rf"^{name}: expected"):
        train_decision_tree(draft, assistant, labels)


def test_training_without_scikit_learn_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "sklearn.tree", None)
    with pytest.raises(ImportError, match=r"specens-kernels\[collaborative\]"):
        train_decision_tree([0.1], [0.2], [1])
