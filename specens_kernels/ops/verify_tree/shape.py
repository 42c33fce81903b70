"""The shape of draft trees as tensors: who is below whom, and which nodes are drafts."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from specens_kernels.arguments import Draft, Tree
from specens_kernels.ops.target_logprobs.processing import Paths
from specens_kernels.ops.tree_mask.reference import descent


class Shape(NamedTuple):
    """Row 0 is the position after the committed text, row i + 1 that after node i."""

    parent_row: Tensor  # int64 [batch, nodes], 0 for padding
    used: Tensor  # bool [batch, nodes], False: padding
    above: Tensor  # bool [batch, rows, nodes], whether a node is on the way to a row
    depth: Tensor  # int64 [batch, rows], how many nodes are
    invalid: Tensor  # bool [batch], the number of nodes is out of range


def tree_shape(tree: Tree, draft: Draft) -> Shape:
    """Padding is what `tree_mask` takes for it, and what lies deeper than the levels of the tree."""
    batch, nodes = tree.parents.shape
    parents = tree.parents.long()
    num_nodes = torch.full((batch,), nodes, dtype=torch.int64, device=parents.device)
    num_nodes = num_nodes if draft.lens is None else draft.lens.long()
    descends, used = descent(parents, num_nodes)
    above = torch.nn.functional.pad(descends & used[:, :, None], (0, 0, 1, 0))
    depth = above.sum(2)
    used = used & (depth[:, 1:] <= tree.levels)
    return Shape(torch.where(used, parents + 1, 0), used, above, depth, (num_nodes < 0) | (num_nodes > nodes))


def rows_of_parents(values: Tensor, shape: Shape) -> Tensor:
    """[batch, nodes, ...]: the row that each node was drawn at, of values [batch, rows, ...]."""
    return values[torch.arange(values.shape[0], device=values.device)[:, None], shape.parent_row]


def paths(tokens: Tensor, shape: Shape) -> Paths:
    """The tokens before each row."""
    return Paths(tokens, shape.above)


def path_to(last: Tensor, shape: Shape, levels: int) -> tuple[Tensor, Tensor]:
    """The nodes on the way to a row [batch]: int64 [batch, levels], then -1; and bool [batch, nodes]."""
    batch, nodes = shape.used.shape
    on_path = shape.above[torch.arange(batch, device=last.device), last]
    index = torch.where(on_path, shape.depth[:, 1:] - 1, levels)
    path = torch.full((batch, levels + 1), -1, dtype=torch.int64, device=last.device)
    path = path.scatter(1, index, torch.arange(nodes, device=last.device).expand(batch, -1))
    return path[:, :levels], on_path
