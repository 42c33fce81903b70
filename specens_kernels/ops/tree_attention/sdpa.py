"""By the attention kernels of PyTorch: on the CPU request by request, elsewhere with one mask for all."""

from __future__ import annotations

from itertools import groupby

import torch
from torch import Tensor

from specens_kernels.backend import backend_for
from specens_kernels.ops.tree_attention.parts import Part, fold, merge, read_tree, repeat_rows
from specens_kernels.ops.tree_attention.reference import seen_slots
from specens_kernels.ops.tree_mask import tree_mask
from specens_kernels.values import fail

# Elements of a mask, of all rows that share keys. Below, one call with a mask over prefix and tree is as fast as two
# and their merge; above, it no longer stays in the cache.
SMALL_MASK = 2**19


def read_lengths(
    prefix_lens: Tensor, prefix_starts: Tensor | None, nodes: int, slots: int
) -> tuple[list[int], list[int]]:
    """The numbers in both. Raises ValueError unless the slots hold every prefix and the nodes after it."""
    lengths = prefix_lens.tolist()
    starts = [0] * len(lengths) if prefix_starts is None else prefix_starts.tolist()
    if lengths and (min(lengths) < 0 or max(lengths) + nodes > slots):
        fail("prefix_lens", f"lengths from 0 to slots - nodes, {slots - nodes}", lengths)
    if any(not 0 <= start <= length for start, length in zip(starts, lengths, strict=True)):
        fail("prefix_starts", f"slots from 0 to prefix_lens, {lengths}", starts)
    return lengths, starts


def unsuited(query: Tensor) -> str | None:
    """Why PyTorch's kernels do not take it, or None."""
    if query.device.type in ("cpu", "cuda"):
        return None
    return f"it has kernels for cpu and cuda, not for {query.device.type}"


def by_request(
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
    """On the CPU: the slots in use alone are read, and a long prefix needs no mask. Equal prefixes share a call."""
    nodes = query.shape[2]
    lengths, starts = read_lengths(prefix_lens, prefix_starts, nodes, key.shape[2])
    prefixes = list(zip(starts, lengths, strict=True))
    query, key, value = (_rows_contiguous(tensor) for tensor in (query, key, value))
    results = []
    for (start, length), members in groupby(range(len(prefixes)), key=prefixes.__getitem__):
        first, *others = members
        requests = slice(first, first + 1 + len(others))
        used = slice(max(start, length - window + 1) if window > 0 else start, length + nodes)
        counts = None if num_nodes is None else num_nodes[requests]
        cache = key[requests, :, used], value[requests, :, used]
        results.append(_attend(query[requests], *cache, parents[requests], counts, window, scale))
    return (results[0] if len(results) == 1 else torch.cat(results)).contiguous()


def _attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    parents: Tensor,
    num_nodes: Tensor | None,
    window: int,
    scale: float,
) -> Tensor:
    """Attention over equal prefixes and the nodes after them, which are all that key and value hold."""
    rows, nodes, slots = fold(query, key.shape[1]), query.shape[2], key.shape[2]
    group, prefix_len = rows.shape[2] // nodes, slots - nodes
    if window > 0 or prefix_len == 0 or rows.shape[2] * slots <= SMALL_MASK:
        prefix_lens = torch.full(parents.shape[:1], prefix_len)
        mask = tree_mask(
            parents,
            prefix_lens,
            layout="additive",
            max_prefix=prefix_len,
            num_nodes=num_nodes,
            window=window or None,
            dtype=query.dtype,
        ).mask
        output = _flash(rows, key, value, scale, repeat_rows(mask[:, 0], group)).output
        return output.reshape(query.shape)
    tree = read_tree(parents, num_nodes, window)
    mask = torch.zeros(tree.sees_node.shape, dtype=query.dtype).masked_fill(~tree.sees_node, -torch.inf)
    prefix = _flash(rows, key[:, :, :prefix_len], value[:, :, :prefix_len], scale)
    own = _flash(rows, key[:, :, prefix_len:], value[:, :, prefix_len:], scale, repeat_rows(mask, group))
    return merge(prefix, own, repeat_rows(tree.follows_prefix, group)).reshape(query.shape)


def _flash(query: Tensor, key: Tensor, value: Tensor, scale: float, mask: Tensor | None = None) -> Part:
    """PyTorch's kernel for the CPU, called by name since scaled_dot_product_attention keeps the log-sum-exp."""
    attend = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    return Part(*attend(query, key, value, attn_mask=mask, scale=scale))


def _rows_contiguous(tensor: Tensor) -> Tensor:
    """The kernel takes a stride of 1 in the last dimension for granted."""
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


def with_mask(
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
    """Where the lengths cannot be read without waiting for the device: all slots, those not seen masked."""
    slots, group = key.shape[2], query.shape[1] // key.shape[1]
    backend = backend_for("tree_mask", parents)
    keys = tree_mask(
        parents, prefix_lens, max_prefix=slots, num_nodes=num_nodes, window=window or None, backend=backend
    )
    sees = repeat_rows(seen_slots(keys.mask, prefix_lens, prefix_starts, slots), group)
    attend = torch.nn.functional.scaled_dot_product_attention
    rows = attend(fold(query, key.shape[1]), key, value, attn_mask=sees, scale=scale)
    return rows.reshape(query.shape).contiguous()
