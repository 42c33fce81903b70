"""The attention mask of draft trees on a GPU: a program for some keys of a node, which walks up from the node."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from specens_kernels.ops.tree_mask.reference import Layout
from specens_kernels.parts.launches import Launch, run, wait_for_launch_before
from specens_kernels.parts.sampling import INFINITY, any_size, size_of

BLOCKS, WARPS = (128, 2048), 4  # keys of a program, of narrow and wide masks: up to 16 bytes a thread
LARGEST_WINDOW = 2**31 - 1


class MaskCall(NamedTuple):
    """What a mask is made of."""

    parents: Tensor  # integers [batch, nodes]
    prefix_lens: Tensor  # integers [batch]
    num_nodes: Tensor | None  # integers [batch]
    nodes: int
    max_prefix: int  # any_size
    window: int  # LARGEST_WINDOW: none
    positions: Tensor  # int64 [batch, nodes], written
    mask: Tensor  # [batch * nodes, width], written: bytes of keys or of bits, or floating-point numbers
    width: int
    PACKED: tl.constexpr  # a lane is eight keys
    ADDITIVE: tl.constexpr


@triton.jit
def _parent_of(call, request, node):
    """The node above one: -1 the root position, -2 where it has no parent in the tree."""
    parent = tl.load(call.parents + request * call.nodes + node).to(tl.int64)
    known = (parent >= -1) & (parent < node)
    if call.num_nodes is not None:
        known &= node < tl.load(call.num_nodes + request)
    return tl.where(known, parent, -2)


@triton.jit
def _tree_mask_kernel(
    call,  # MaskCall, its mask and positions written
    BLOCK: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    wait_for_launch_before(DEPENDENT)
    row = tl.program_id(0).to(tl.int64)
    request = row // call.nodes
    node = row % call.nodes
    depth = row * 0 - 1
    above = node
    while above >= 0:
        above = _parent_of(call, request, above)
        depth += 1
    in_tree = above == -1
    prefix_len = tl.load(call.prefix_lens + request).to(tl.int64)
    position = prefix_len + tl.where(in_tree, depth, 0)
    if tl.program_id(1) == 0:
        tl.store(call.positions + row, position)
    lane = tl.program_id(1).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    seen = lane.to(tl.int32) * 0
    if not call.PACKED:
        end = tl.where(in_tree, tl.minimum(prefix_len, size_of(call.max_prefix)), 0)
        seen = ((lane > position - call.window) & (lane < end)).to(tl.int32)
    reached = row * 0 + 1  # positions that are in the window
    above = node
    while above >= 0:
        if call.PACKED:
            seen |= tl.where(lane == above // 8, 1, 0) << (above % 8).to(tl.int32)
        else:
            seen |= (lane == size_of(call.max_prefix) + above).to(tl.int32)
        above = tl.where(in_tree & (reached < call.window), _parent_of(call, request, above), -1)
        reached += 1
    values = seen
    if call.ADDITIVE:
        values = tl.where(seen != 0, 0.0, -INFINITY)
    tl.store(call.mask + row * call.width + lane, values.to(call.mask.dtype.element_ty), mask=lane < call.width)


def mask_launch(call: MaskCall) -> Launch:
    """Keys of a row side by side."""
    block = BLOCKS[call.width > BLOCKS[0]]
    grid = (call.mask.shape[0], triton.cdiv(call.width, block))
    return Launch(_tree_mask_kernel, grid, {"call": call, "BLOCK": block}, WARPS)


def launch(
    parents: Tensor,
    prefix_lens: Tensor,
    num_nodes: Tensor | None,
    layout: int,
    max_prefix: int,
    window: int,
    dtype: torch.dtype,
    *,
    out: list[Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """The mask and the positions; see `tree_mask`. out: where to."""
    batch, nodes = parents.shape
    if layout in (Layout.TREE, Layout.PACKED):
        max_prefix = 0
    width = (nodes + 7) // 8 if layout == Layout.PACKED else max_prefix + nodes
    dtypes = {Layout.PACKED: torch.uint8, Layout.ADDITIVE: dtype}
    shape = (batch, 1, nodes, width) if layout == Layout.ADDITIVE else (batch, nodes, width)
    mask = parents.new_empty(shape, dtype=dtypes.get(Layout(layout), torch.bool)) if out is None else out[0]
    flat = mask.view(batch * nodes, width)
    call = MaskCall(
        parents=parents.contiguous(),
        prefix_lens=prefix_lens.contiguous(),
        num_nodes=None if num_nodes is None else num_nodes.contiguous(),
        nodes=nodes,
        max_prefix=any_size(max_prefix),
        window=min(window or LARGEST_WINDOW, LARGEST_WINDOW),
        positions=parents.new_empty(batch, nodes, dtype=torch.int64) if out is None else out[1],
        mask=flat if layout == Layout.ADDITIVE else flat.view(torch.int8),
        width=width,
        PACKED=tl.constexpr(layout == Layout.PACKED),
        ADDITIVE=tl.constexpr(layout == Layout.ADDITIVE),
    )
    run(iter([mask_launch(call)]), parents)
    return mask, call.positions
