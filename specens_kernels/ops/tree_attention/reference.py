"""Definition of the attention of draft trees."""

from __future__ import annotations

import torch
from torch import Tensor

from specens_kernels.ops.tree_mask.reference import Layout, tree_mask


def tree_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    parents: Tensor,
    prefix_lens: Tensor,
    num_nodes: Tensor | None,
    prefix_starts: Tensor | None,
    window: int,
    scale: float,
) -> Tensor:
    """Of each node, the values of the slots it sees, weighted by the softmax of its scores; a window of 0 is none."""
    slots, group = key.shape[2], query.shape[1] // key.shape[1]
    mask, _ = tree_mask(parents, prefix_lens, num_nodes, Layout.FULL, slots, window, torch.float32)
    sees = seen_slots(mask, prefix_lens, prefix_starts, slots)[:, None]  # [batch, 1, nodes, slots]
    scores = scale * query.double() @ key.double().repeat_interleave(group, 1).mT
    weights = scores.masked_fill(~sees, -torch.inf).softmax(-1)
    seen_values = value.double().masked_fill(~sees.any(2)[..., None], 0)
    return (weights @ seen_values.repeat_interleave(group, 1)).to(query.dtype)


def seen_slots(mask: Tensor, prefix_lens: Tensor, prefix_starts: Tensor | None, slots: int) -> Tensor:
    """Which slots of the cache each node sees, bool [batch, nodes, slots].

    mask: [batch, nodes, slots + nodes], of the layout "full". In the cache the nodes lie right after the prefix.
    """
    nodes = mask.shape[1]
    node = torch.arange(slots, device=mask.device) - prefix_lens[:, None]  # of each slot, [batch, slots]
    is_node = (node >= 0) & (node < nodes)
    column = (slots + node).clamp(slots, slots + nodes - 1)[:, None].expand(-1, nodes, -1)
    sees_prefix = mask[:, :, :slots]
    if prefix_starts is not None:
        sees_prefix = sees_prefix & (torch.arange(slots, device=mask.device) >= prefix_starts[:, None, None])
    return sees_prefix | (mask.gather(2, column) & is_node[:, None])
