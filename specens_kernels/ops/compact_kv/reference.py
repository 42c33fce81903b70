"""Definition of the compaction of KV caches: every slot takes what its source held before."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from specens_kernels.results import Status

MAX_PREFIX_LEN = 2**62


def compact_kv(
    caches: Sequence[Tensor],
    kept: Tensor,
    prefix_lens: Tensor,
    num_kept: Tensor | None,
    block_table: Tensor | None,
    slot_mapping: Tensor | None,
    batch_dim: int,
    slot_dim: int,
) -> tuple[Tensor, Tensor]:
    """Move the kept nodes of each request to the front of its nodes, in place; return lengths and status."""
    views = [_by_slot(cache, batch_dim, slot_dim) for cache in caches]
    blocks, block_size = (min(view.shape[dim] for view in views) for dim in (0, 1))
    kept, prefix_lens = kept.to(torch.int64), prefix_lens.to(torch.int64)
    count = _leading(kept) if num_kept is None else num_kept.to(torch.int64)
    target = torch.arange(kept.shape[1], device=kept.device).expand(kept.shape)
    moved = target < count[:, None]
    indices = [_indices(nodes, prefix_lens, block_table, slot_mapping, block_size) for nodes in (kept, target)]
    sound = (count >= 0) & (count <= kept.shape[1]) & (prefix_lens >= 0) & (prefix_lens <= MAX_PREFIX_LEN)
    sound = sound & (~moved | _ascending(kept)).all(1)
    for block, _, known in indices:
        sound = sound & (~moved | (known & (block >= 0) & (block < blocks))).all(1)
    moved = moved & sound[:, None]
    for view in views:
        source, into = (block * view.shape[1] + offset for block, offset, _ in indices)
        _move(view, source, into, moved)
    status = torch.where(sound, int(Status.OK), int(Status.INVALID_PARAMETER)).to(torch.int32)
    return prefix_lens + torch.where(sound, count, 0), status


def _by_slot(cache: Tensor, batch_dim: int, slot_dim: int) -> Tensor:
    """The bytes of a cache as [blocks, block_size, ...]; in a dense cache a request is a block."""
    return cache.view(torch.uint8).movedim((batch_dim, slot_dim), (0, 1))


def _leading(kept: Tensor) -> Tensor:
    """How many nodes stand before the first padding."""
    return (kept >= 0).to(torch.int64).cumprod(1).sum(1)


def _ascending(kept: Tensor) -> Tensor:
    """Whether a node lies after the one before it."""
    before = torch.nn.functional.pad(kept, (1, 0), value=-1)[:, :-1]
    return kept > before


def _indices(
    nodes: Tensor, prefix_lens: Tensor, block_table: Tensor | None, slot_mapping: Tensor | None, block_size: int
) -> tuple[Tensor, Tensor, Tensor]:
    """The block and the offset of nodes [batch, width], and whether they have a place at all."""
    size = max(block_size, 1)
    if slot_mapping is not None:
        slot, known = _look_up(slot_mapping, nodes)
        return slot.div(size, rounding_mode="floor"), slot % size, known & (slot >= 0)
    columns = 1 if block_table is None else block_table.shape[1]
    prefix = prefix_lens[:, None].clamp(0, columns * block_size)
    position = prefix + nodes.clamp(max=columns * block_size)
    known = (nodes >= 0) & (position < columns * block_size) & (prefix == prefix_lens[:, None])
    if block_table is None:
        request = torch.arange(len(nodes), device=nodes.device)[:, None]
        return request.expand(nodes.shape), position, known
    block, in_table = _look_up(block_table, position.div(size, rounding_mode="floor"))
    return block, position % size, known & in_table


def _look_up(table: Tensor, columns: Tensor) -> tuple[Tensor, Tensor]:
    """table[request, column] for columns [batch, width], and whether the table has that column."""
    padded = torch.nn.functional.pad(table.to(torch.int64), (0, 1), value=-1)
    known = (columns >= 0) & (columns < table.shape[1])
    return padded.gather(1, torch.where(known, columns, table.shape[1])), known


def _move(view: Tensor, source: Tensor, into: Tensor, moved: Tensor) -> None:
    """view[into] = view[source] where moved; source and into count the slots of all blocks."""
    slots = view.shape[0] * view.shape[1]
    origin = torch.arange(slots + 1, device=view.device)  # the last one takes what is not moved
    into, source = torch.where(moved, into, slots), torch.where(moved, source, slots)
    origin = origin.scatter(0, into.flatten(), source.flatten())[:slots]
    view.copy_(view.flatten(0, 1)[origin].unflatten(0, view.shape[:2]))
