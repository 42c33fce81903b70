"""compact_kv: keeps the accepted path of a draft in a KV cache, in place."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from specens_kernels.backend import checked_where_new, count_changes, implementations, select_for
from specens_kernels.buffers import check_out
from specens_kernels.checks import check_integers
from specens_kernels.ops.compact_kv import reference
from specens_kernels.ops.compact_kv.checks import check, check_choice, check_distinct
from specens_kernels.results import Compaction
from specens_kernels.values import fail, is_number
from specens_kernels.workspace import Workspace

# The CUDA C++ judges and moves all caches in one launch, several slots at a time; Triton takes one for 16 caches.
IMPLEMENTATIONS = implementations("compact_kv", reference.compact_kv, cuda=True, cuda_first=True)
DENSE_SLOT_DIM, PAGED_SLOT_DIM = -2, -3


def compact_kv(
    caches: Tensor | Sequence[Tensor],
    kept: Tensor,
    prefix_lens: Tensor | None = None,
    *,
    num_kept: Tensor | None = None,
    block_table: Tensor | None = None,
    slot_mapping: Tensor | None = None,
    batch_dim: int = -4,
    slot_dim: int | None = None,
    out: Compaction | None = None,
    workspace: Workspace | None = None,
    backend: str | None = None,
) -> Compaction:
    """Keep the accepted nodes of each request's draft in its KV cache, in place, and drop the others.

    Node i of a request lies at slot prefix_lens + i, as the nodes of a chain or of a `TokenTree` do after a forward.
    Afterwards the kept nodes lie in order from slot prefix_lens on; what lies after them is free, and undefined. All
    caches are moved by one call, without host synchronisation, and keep their address; nothing is copied but the slots
    that change their place. On a GPU that is one launch for up to 240 tensors, or by Triton, without the CUDA library,
    one for the requests and one for 16 tensors that are alike. Slots before prefix_lens are never touched.

    caches: keys and values of all layers: a tensor, or a sequence whose tensors may differ in heads, sizes and dtype;
        bytes are moved, so quantised ones and their scales are served too. Any strides but in the last dimension, which
        is contiguous (append one where slots come last). No two may share memory.
        Dense: [batch, heads, slots, dim], also with layers or keys and values before: [layers, 2, batch, heads, slots,
        dim]. With slot_dim=-3: [batch, slots, heads, dim].
        With block_table or slot_mapping, paged: [blocks, block_size, heads, dim], also stacked likewise;
        [blocks, 2, block_size, heads, dim] with batch_dim=-5, [blocks, heads, block_size, dim] with slot_dim=-2,
        [blocks, block_size, dim] with batch_dim=-3, slot_dim=-2.
    kept: int64 or int32 [batch, width]: the nodes to keep, ascending (a path is: a parent comes before its children),
        up to the first negative one, which is padding. Or bool [batch, width]: node i is kept where True.
    prefix_lens: int64 or int32 [batch], committed slots; None: 0, and `kept` tells slots themselves. So the holes of a
        ragged batch go: `compact_kv(caches, attention_mask.bool())`.
    num_kept: int64 or int32 [batch]: only so many entries of `kept` count, none of which may be padding.
    block_table: int32 or int64 [batch, columns]: position i of a request lies in block block_table[request,
        i // block_size]. A block that requests share must not be among those that nodes lie in.
    slot_mapping: int64 or int32 [batch, nodes]: instead, the slot of each node, block * block_size + offset, as engines
        hand it to the forward; -1 is none.
    batch_dim, slot_dim: the dimension of requests (blocks) and of slots (offsets in a block), counted from the end.
        slot_dim None: -2, or -3 for paged caches.
    out: a Compaction of contiguous tensors to write into.
    workspace: a Workspace to take scratch memory on a GPU from, as in `verify_chain`.
    backend: "reference", "cpp", "triton" or None (the fastest for the device).

    Autograd is told that the caches have changed, as by PyTorch's own in-place operations. A cache that requires grad
    is a ValueError but in torch.no_grad().

    Returns a Compaction. A request is refused, and nothing of it moved, where its nodes do not ascend or have no slot,
    block or entry in slot_mapping, or where its length or num_kept is out of range: no number makes this write outside
    the caches. Raises ValueError for an argument of another type, shape, dtype or device, RuntimeError for a backend
    that cannot run here.
    """
    tensors = [caches] if isinstance(caches, Tensor) else caches
    paged = block_table is not None or slot_mapping is not None
    slot_dim = slot_dim if slot_dim is not None else PAGED_SLOT_DIM if paged else DENSE_SLOT_DIM
    check_choice(tensors, kept, num_kept, batch_dim, slot_dim)
    nodes = _nodes_of(kept) if kept.dtype == torch.bool else kept
    prefix_lens = kept.new_zeros(len(kept), dtype=torch.int64) if prefix_lens is None else prefix_lens
    arguments = (nodes, prefix_lens, num_kept, block_table, slot_mapping, batch_dim, slot_dim)
    name, function = select_for(IMPLEMENTATIONS, backend, tensors[0], "compact_kv", out, workspace)
    if name == "reference" or torch.compiler.is_compiling():
        check(tensors, *arguments)
    elif name == "triton":
        function = partial(checked_where_new, function, partial(check, tensors, *arguments))
    if out is not None:
        _check_out(out, tensors, arguments)
    try:
        if torch.is_grad_enabled() and True in [cache.requires_grad for cache in tensors]:
            fail("caches", "tensors that need no gradient, or a call in torch.no_grad()", "one that requires grad")
        if name == "triton":
            check_distinct(tensors)
        if out is None:
            lengths, status = function(tensors, *arguments)
        else:
            lengths, status = out.lengths, out.status
            function([lengths, status], tensors, *arguments)
    except Exception:
        check(tensors, *arguments)  # the C++ has checked for itself: this finds the name of what was wrong
        raise
    count_changes(tensors)
    if block_table is None:
        return Compaction(lengths, None, status)
    block_size = max(tensors[0].shape[slot_dim], 1)
    num_blocks = torch.add(lengths, block_size - 1, out=None if out is None else out.num_blocks)
    return Compaction(lengths, num_blocks.div_(block_size, rounding_mode="floor"), status)


def _check_out(out: Any, tensors: Sequence[Tensor], arguments: Sequence[Any]) -> None:
    names = ("kept", "prefix_lens", "num_kept", "block_table", "slot_mapping")
    given = {"caches": list(tensors), **dict(zip(names, arguments, strict=False))}
    batch, kinds = given["prefix_lens"].shape[0], {"lengths": torch.int64, "status": torch.int32}
    if given["block_table"] is not None:
        kinds["num_blocks"] = torch.int64
    shapes = {name: ((batch,), dtype) for name, dtype in kinds.items()}
    check_out(out, Compaction, shapes, given, given["prefix_lens"].device)


def _nodes_of(mask: Tensor) -> Tensor:
    """The places where a mask [batch, width] is True, in order, then -1."""
    width = mask.shape[1]
    index = torch.where(mask, mask.cumsum(1) - 1, width)
    nodes = mask.new_full((len(mask), width + 1), -1, dtype=torch.int64)
    return nodes.scatter(1, index, torch.arange(width, device=mask.device).expand(mask.shape))[:, :width]


def freed_blocks(block_table: Tensor, num_blocks_before: Tensor, num_blocks: Tensor) -> list[list[int]]:
    """Return the ids of the blocks that each request needs no more, for the host's block manager.

    block_table: integers [batch, columns]. num_blocks_before, num_blocks: integers [batch], the blocks of each request
    before the compaction and after it (`Compaction.num_blocks`). Blocks before num_blocks, shared prefixes among them,
    are never returned. Reads tensors of a GPU, and so waits for it.
    Raises ValueError for another shape or dtype, and for a count that is no number of columns.
    """
    given = {"block_table": block_table, "num_blocks_before": num_blocks_before, "num_blocks": num_blocks}
    for name, values in given.items():
        if not isinstance(values, Tensor):
            fail(name, "a tensor", type(values).__name__)
        check_integers(name, values, (None, None) if name == "block_table" else (len(block_table),), values.device)
    columns = block_table.shape[1]
    counts: dict[str, list[int]] = {}
    for name, values in (("num_blocks_before", num_blocks_before), ("num_blocks", num_blocks)):
        counts[name] = values.tolist()
        if any(not 0 <= count <= columns for count in counts[name]):
            fail(name, f"counts from 0 to {columns}", counts[name])
    rows = zip(block_table.tolist(), counts["num_blocks_before"], counts["num_blocks"], strict=True)
    return [row[after:before] for row, before, after in rows]


def compaction_pays(holes_read: int, moved_slots: int, move_cost: float = 2.0) -> bool:
    """Whether holes have cost as much as their removal: buy once the rent has reached the price.

    A hole costs attention as much as any slot, in every forward; a compaction costs a move of each slot after the
    first hole, once. How long a text goes on is not known, so the past decides.

    holes_read: the sum, over the forwards since the last compaction, of the slots that attention read in vain. In a
        padded batch those are what its longest request would be shorter by, times the requests.
    moved_slots: slots that a compaction would move now. move_cost: the time to move a slot over the time in which
        attention reads one, as measured; 2 is what the bytes say, which are read and written.
    Raises ValueError for a negative number.
    """
    for name, value in {"holes_read": holes_read, "moved_slots": moved_slots, "move_cost": move_cost}.items():
        if not is_number(value) or not value >= 0:
            fail(name, "a number >= 0", repr(value))
    return holes_read > 0 and holes_read >= move_cost * moved_slots
