"""Definition of the attention mask of draft trees."""

from __future__ import annotations

import enum

import torch
from torch import Tensor

MAX_NODES = 2**14


class Layout(enum.IntEnum):
    """What the mask looks like; the code that operators carry."""

    FULL = 0
    TREE = 1
    PACKED = 2
    ADDITIVE = 3


def tree_mask(
    parents: Tensor,
    prefix_lens: Tensor,
    num_nodes: Tensor | None,
    layout: int,
    max_prefix: int,
    window: int,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    """The mask and the positions of the nodes of each tree; a window of 0 is none."""
    descends, used = descent(parents, num_nodes)
    depth = torch.where(used, descends.sum(2) - 1, 0)
    prefix_lens = prefix_lens.to(torch.int64)
    positions = prefix_lens[:, None] + depth
    sees_node = torch.where(used[:, :, None], descends, _itself(parents))
    if window > 0:
        sees_node = sees_node & (depth[:, :, None] - depth[:, None, :] < window)
    if layout == Layout.TREE:
        return sees_node, positions
    if layout == Layout.PACKED:
        return _packed(sees_node), positions
    key = torch.arange(max_prefix, device=parents.device)
    sees_prefix = used[:, :, None] & (key < prefix_lens[:, None, None])
    if window > 0:
        sees_prefix = sees_prefix & (key > positions[:, :, None] - window)
    sees = torch.cat([sees_prefix, sees_node], 2)
    if layout == Layout.FULL:
        return sees, positions
    nothing = torch.zeros(sees.shape, dtype=dtype, device=sees.device)
    return nothing.masked_fill(~sees, -torch.inf)[:, None], positions


def _itself(parents: Tensor) -> Tensor:
    return torch.eye(parents.shape[1], dtype=torch.bool, device=parents.device)


def descent(parents: Tensor, num_nodes: Tensor | None) -> tuple[Tensor, Tensor]:
    """Whether node i is node j or below it, bool [batch, i, j], and whether the way up from i ends at the root."""
    node = torch.arange(parents.shape[1], device=parents.device)
    descends = (parents[:, :, None] == node) | _itself(parents)
    for _ in range(MAX_NODES.bit_length() - 1):  # each turn doubles the generations
        descends = descends.float() @ descends.float() > 0
    lost = (parents < -1) | (parents >= node)
    if num_nodes is not None:
        lost = lost | (node >= num_nodes[:, None])
    return descends, ~(descends & lost[:, None, :]).any(2)


def _packed(bits: Tensor) -> Tensor:
    """Eight bits a byte, the first one lowest."""
    columns = bits.shape[2]
    padded = torch.nn.functional.pad(bits.to(torch.uint8), (0, -columns % 8))
    values = 2 ** torch.arange(8, device=bits.device)
    return (padded.unflatten(2, ((columns + 7) // 8, 8)) * values).sum(3).to(torch.uint8)
