"""The decision tree by which an assistant replaces draft tokens: a rule by which two models write one text.

Source: Wang et al., Speculate, then Collaborate: Fusing Knowledge of Language Models during Decoding, ICML 2025 (CoSD).
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from specens_kernels.values import fail, is_integer, is_number

LEAF = -1
FEATURES = ("draft_probability", "assistant_probability")
MOST_NODES = 255
FIELDS = ("feature", "threshold", "left", "right", "replace")
NODE_FIELDS = len(FIELDS)  # numbers of a node in `DecisionTree.table`
JSON_KIND = "specens decision tree"


@dataclass(frozen=True)
class DecisionTree:
    """A decision tree says whether the assistant's token replaces a draft token that differs from it.

    It looks at two probabilities: feature 0, the draft token's under the drafter, and feature 1, that of the
    assistant's own token, the most likely of the target, under the target. The fields have one entry a node, at most
    255 of them; node 0 is the root.
    feature: 0 or 1, or -1 for a leaf.
    threshold: a finite number; probabilities up to it go left, those above it right. Of leaves any.
    left, right: the children, which have greater indices than the node itself; -1 for a leaf.
    replace: what a leaf decides; of other nodes any.
    table: made of these, one node after the other, as operators take them; there a leaf is its own child.
    Sequences are kept as tuples. Raises ValueError naming a field that is not so.
    Source: Wang et al., Speculate, then Collaborate, ICML 2025 (CoSD-Tree).
    """

    feature: tuple[int, ...]
    threshold: tuple[float, ...]
    left: tuple[int, ...]
    right: tuple[int, ...]
    replace: tuple[bool, ...]
    table: tuple[float, ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        for name in FIELDS:
            object.__setattr__(self, name, _as_tuple(name, getattr(self, name)))
        nodes = len(self.feature)
        if not 0 < nodes <= MOST_NODES:
            fail("feature", f"1 to {MOST_NODES} nodes", nodes)
        for name in FIELDS[1:]:
            if len(getattr(self, name)) != nodes:
                fail(name, f"an entry for each of {nodes} nodes", len(getattr(self, name)))
        for node in range(nodes):
            self._check_node(node, nodes)
        object.__setattr__(self, "table", tuple(number for node in range(nodes) for number in self._numbers(node)))

    def numbers(self, _draft_len: int) -> tuple[float, ...]:
        """What operators take after the rule's code."""
        return self.table

    def _check_node(self, node: int, nodes: int) -> None:
        feature, threshold, replace = self.feature[node], self.threshold[node], self.replace[node]
        if not is_integer(feature) or feature not in (LEAF, 0, 1):
            fail(f"feature[{node}]", "0, 1, or -1 for a leaf", repr(feature))
        if not is_number(threshold) or not math.isfinite(threshold):
            fail(f"threshold[{node}]", "a finite number", repr(threshold))
        if not isinstance(replace, bool):
            fail(f"replace[{node}]", "True or False", repr(replace))
        for name in ("left", "right"):
            child = getattr(self, name)[node]
            if feature == LEAF and (not is_integer(child) or child != LEAF):
                fail(f"{name}[{node}]", "-1, as the node is a leaf", repr(child))
            if feature != LEAF and (not is_integer(child) or not node < child < nodes):
                fail(f"{name}[{node}]", f"a node from {node + 1} to {nodes - 1}", repr(child))

    def _numbers(self, node: int) -> tuple[float, ...]:
        """The fields of a node as the table has them."""
        leaf = self.feature[node] == LEAF
        left, right = (node, node) if leaf else (self.left[node], self.right[node])
        own = (self.feature[node], self.threshold[node], left, right, self.replace[node])
        return tuple(map(float, own))

    def replaces(self, draft_probability: float, assistant_probability: float) -> bool:
        """What the tree decides of two probabilities."""
        node = 0
        while self.feature[node] != LEAF:
            value = (draft_probability, assistant_probability)[self.feature[node]]
            node = self.left[node] if value <= self.threshold[node] else self.right[node]
        return self.replace[node]

    def to_json(self) -> str:
        """The tree as a JSON object, which `from_json` reads."""
        fields = {name: list(getattr(self, name)) for name in FIELDS}
        return json.dumps({"kind": JSON_KIND, "features": list(FEATURES)} | fields, allow_nan=False)

    @classmethod
    def from_json(cls, text: str) -> DecisionTree:
        """The tree that `to_json` wrote. Raises ValueError for anything else."""
        try:
            found = json.loads(text)
        except json.JSONDecodeError as error:
            fail("text", "JSON", error)
        known = {"kind", "features", *FIELDS}
        if not isinstance(found, dict) or set(found) != known:
            names = sorted(found) if isinstance(found, dict) else type(found).__name__
            fail("text", f"an object with {', '.join(sorted(known))}", names)
        if found["kind"] != JSON_KIND or found["features"] != list(FEATURES):
            fail("text", f"a {JSON_KIND} of {list(FEATURES)}", f"{found['kind']!r} of {found['features']!r}")
        return cls(*(found[name] for name in FIELDS))

    @classmethod
    def from_sklearn(cls, estimator: Any) -> DecisionTree:
        """The tree of a fitted scikit-learn DecisionTreeClassifier, whose classes are 0 (keep) and 1 (replace).

        Its two features are the probabilities in the order above. A leaf decides as `estimator.predict` does.
        """
        tree, classes = getattr(estimator, "tree_", None), getattr(estimator, "classes_", None)
        if tree is None or classes is None:
            fail("estimator", "a fitted decision tree classifier", type(estimator).__name__)
        labels = [int(label) for label in classes]
        if not set(labels) <= {0, 1}:
            fail("estimator", "the classes 0 (keep) and 1 (replace)", labels)
        if int(tree.n_features) != len(FEATURES):
            fail("estimator", f"the features {', '.join(FEATURES)}", f"{int(tree.n_features)} features")
        leaf = [int(child) == LEAF for child in tree.children_left]
        feature = [LEAF if own else int(index) for own, index in zip(leaf, tree.feature, strict=True)]
        threshold = [0.0 if own else float(value) for own, value in zip(leaf, tree.threshold, strict=True)]
        left, right = ([int(child) for child in children] for children in (tree.children_left, tree.children_right))
        counts = [[float(count) for count in value[0]] for value in tree.value]  # of each class
        replace = [labels[count.index(max(count))] == 1 for count in counts]
        return cls(*map(tuple, (feature, threshold, left, right, replace)))  # type: ignore[arg-type]


@lru_cache
def longest_path(table: tuple[float, ...]) -> int:
    """The most decisions on the way to a leaf of `DecisionTree.table`."""
    steps = [0] * (len(table) // NODE_FIELDS)
    for node in reversed(range(len(steps))):
        left, right = (int(child) for child in table[node * NODE_FIELDS + 2 : node * NODE_FIELDS + 4])
        steps[node] = 0 if left == node else 1 + max(steps[left], steps[right])
    return steps[0]


def _as_tuple(name: str, values: Any) -> tuple:
    if not isinstance(values, Iterable) or isinstance(values, str):
        fail(name, "an entry for each node", repr(values))
    return tuple(values)
