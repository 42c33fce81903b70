"""Attention in two parts, over the prefix and over the tree, and what both need."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from specens_kernels.backend import backend_for
from specens_kernels.ops.tree_mask import tree_mask


class Part(NamedTuple):
    """Attention over some of the keys.

    output: [batch, heads, rows, dim]. log_sum_exp: float32 [batch, heads, rows], of the scores.
    """

    output: Tensor
    log_sum_exp: Tensor


class Tree(NamedTuple):
    """follows_prefix: bool [batch, nodes], False for padding. sees_node: bool [batch, nodes, nodes]. depth: int64
    [batch, nodes]."""

    follows_prefix: Tensor
    sees_node: Tensor
    depth: Tensor


def read_tree(parents: Tensor, num_nodes: Tensor | None, window: int) -> Tree:
    """What holds for the nodes whatever the prefix: they are taken to follow a prefix of one token."""
    one = torch.ones_like(parents[:, 0])
    backend = backend_for("tree_mask", parents)
    all_keys = tree_mask(parents, one, max_prefix=1, num_nodes=num_nodes, backend=backend)
    sees_node = all_keys.mask[:, :, 1:]
    depth = all_keys.positions - 1
    if window > 0:
        sees_node = sees_node & (depth[:, :, None] - depth[:, None, :] < window)
    return Tree(all_keys.mask[:, :, 0], sees_node, depth)


def merge(prefix: Part, tree: Part, sees_prefix: Tensor) -> Tensor:
    """Attention over both; rows that do not see the prefix (sees_prefix [batch, 1, rows]) keep that over the tree."""
    share = torch.sigmoid(prefix.log_sum_exp.float() - tree.log_sum_exp)[..., None]
    both = torch.lerp(tree.output.float(), prefix.output.float(), share).to(tree.output.dtype)
    return torch.where(sees_prefix[..., None], both, tree.output)


def fold(query: Tensor, kv_heads: int) -> Tensor:
    """Queries as rows of the head whose keys they share: [batch, heads, nodes, dim] to [batch, kv_heads, rows, dim].

    So the keys are read once for all of them, and not repeated. Rows are nodes, for each query head of the group.
    """
    batch, heads, nodes, dim = query.shape
    return query.reshape(batch, kv_heads, heads // kv_heads * nodes, dim)


def repeat_rows(values: Tensor, group: int) -> Tensor:
    """[batch, nodes, ...] to [batch, 1, group * nodes, ...], as `fold` lays the rows out."""
    return values[:, None].expand(-1, group, *values.shape[1:]).flatten(1, 2)[:, None]
