"""Decision trees by which an assistant replaces draft tokens, learned from texts whose right tokens are known.

    labels = replacement_labels(draft_tokens, assistant_tokens, reference_tokens)
    tree = train_decision_tree(draft_probabilities, assistant_probabilities, labels, path="tree.json")
    verify_chain(..., rule=DecisionTree.from_json(Path("tree.json").read_text()))

Source: Wang et al., Speculate, then Collaborate: Fusing Knowledge of Language Models during Decoding, ICML 2025.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from specens_kernels import DecisionTree

LEFT_OUT, KEEP, REPLACE = -1, 0, 1
MOST_LEAVES = 128  # with which a tree has 255 nodes


def replacement_labels(
    draft_tokens: Tensor, assistant_tokens: Tensor, reference_tokens: Tensor, *, seed: int | None = 0
) -> Tensor:
    """What is right at each position of a reference text: 1 to replace the draft token, 0 to keep it, -1: left out.

    draft_tokens, assistant_tokens: int64 of any one shape: the most likely token of each model after the same text.
    reference_tokens: the tokens that the text has there.
    Where one model is right, its token is taken. Where none is, the position is left out. Where both are, the label is
    a uniform of `seed`, as in the paper; with None such positions are left out too, since a rule never asks about them.
    Returns int64 of the same shape.
    """
    if draft_tokens.shape != reference_tokens.shape or assistant_tokens.shape != reference_tokens.shape:
        shapes = [list(tokens.shape) for tokens in (draft_tokens, assistant_tokens, reference_tokens)]
        raise ValueError(f"draft_tokens, assistant_tokens, reference_tokens: expected one shape, got {shapes}")
    drafter, assistant = draft_tokens == reference_tokens, assistant_tokens == reference_tokens
    both = torch.full_like(reference_tokens, LEFT_OUT)
    if seed is not None:
        random_numbers = torch.randint(KEEP, REPLACE + 1, both.shape, generator=torch.Generator().manual_seed(seed))
        both = random_numbers.to(both.device)
    labels = torch.where(assistant, REPLACE, torch.where(drafter, KEEP, LEFT_OUT))
    return torch.where(drafter & assistant, both, labels)


def train_decision_tree(
    draft_probabilities: Tensor | Sequence[float],
    assistant_probabilities: Tensor | Sequence[float],
    labels: Tensor | Sequence[int],
    *,
    max_depth: int | None = 4,
    min_leaf: int = 1,
    seed: int = 0,
    path: str | Path | None = None,
) -> DecisionTree:
    """Learn when the assistant's token is to replace the draft token, by scikit-learn (the extra `collaborative`).

    draft_probabilities: of the draft token under the drafter, in [0, 1]. assistant_probabilities: of the assistant's
        own token under the assistant. Both at the temperature at which the tree will be used.
    labels: 1 to replace, 0 to keep, -1 to leave out; all three of one shape, see `replacement_labels`.
    max_depth: the most decisions on the way to a leaf; None: as many as 128 leaves allow.
    min_leaf: the fewest positions that a leaf stands for. seed: of the order in which equal splits are tried.
    path: where the tree is written to as JSON, if it is to be.

    Raises ValueError naming an argument that is wrong, ImportError where scikit-learn is not installed.
    """
    features = torch.stack(
        [
            _probabilities("draft_probabilities", draft_probabilities),
            _probabilities("assistant_probabilities", assistant_probabilities, draft_probabilities),
        ],
        -1,
    )
    wanted = torch.as_tensor(labels).flatten().cpu()
    if len(wanted) != len(features) or not torch.isin(wanted, torch.tensor([LEFT_OUT, KEEP, REPLACE])).all():
        raise ValueError(f"labels: expected -1, 0 or 1 for each of {len(features)} positions, got {wanted}")
    kept = wanted != LEFT_OUT
    if not kept.any():
        raise ValueError("labels: expected a position that is not left out, got none")
    estimator = _classifier()(
        max_depth=max_depth, min_samples_leaf=min_leaf, max_leaf_nodes=MOST_LEAVES, random_state=seed
    )
    tree = DecisionTree.from_sklearn(estimator.fit(features[kept].numpy(), wanted[kept].numpy()))
    if path is not None:
        Path(path).write_text(tree.to_json())
    return tree


def _probabilities(name: str, values: Any, like: Any = None) -> Tensor:
    """float64 [positions] on the CPU, as many as `like` has."""
    numbers = torch.as_tensor(values, dtype=torch.float64).flatten().cpu()
    if not ((numbers >= 0) & (numbers <= 1)).all():
        raise ValueError(f"{name}: expected numbers in [0, 1], got {numbers}")
    if like is not None and len(numbers) != (count := torch.as_tensor(like).numel()):
        raise ValueError(f"{name}: expected {count} numbers, as many as draft_probabilities, got {len(numbers)}")
    return numbers


def _classifier() -> Any:
    try:
        from sklearn.tree import DecisionTreeClassifier
    except ImportError as error:
        message = "training a decision tree needs scikit-learn: pip install 'specens-kernels[collaborative]'"
        raise ImportError(message) from error
    return DecisionTreeClassifier
