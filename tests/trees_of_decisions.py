"""Random decision trees."""

from __future__ import annotations

import random

from specens_kernels import DecisionTree


def random_decision_tree(seed: int, nodes: int) -> DecisionTree:
    """A tree of so many nodes, an odd number, whose leaves decide by chance."""
    choice = random.Random(seed)
    feature, left, right = [-1], [-1], [-1]
    while len(feature) < nodes:
        leaf = choice.choice([node for node, own in enumerate(feature) if own == -1][:8])
        feature[leaf], left[leaf], right[leaf] = choice.randrange(2), len(feature), len(feature) + 1
        for table in (feature, left, right):
            table += [-1, -1]
    threshold = [round(choice.random(), 3) for _ in feature]
    return DecisionTree(feature, threshold, left, right, [choice.random() < 0.5 for _ in feature])
