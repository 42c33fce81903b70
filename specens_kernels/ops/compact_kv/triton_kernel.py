"""The compaction of KV caches on a GPU: a launch judges the requests, others move the slots of caches that are alike.

Nodes ascend, so that a move goes to a slot that is read no more: the order of the path is the order of safe moves.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from specens_kernels.ops.compact_kv.reference import MAX_PREFIX_LEN
from specens_kernels.parts.chain import INVALID_PARAMETER
from specens_kernels.parts.launches import Launch, run, wait_for_launch_before
from specens_kernels.parts.sampling import any_size, size_of

CACHES_A_LAUNCH = 16  # each is an argument
WORDS = {8: tl.int64, 4: tl.int32, 2: tl.int16, 1: tl.int8}  # by their bytes
DIMS = 4  # of rows, beside requests and slots
JUDGED, MOVED = 128, 1024  # nodes of a request, words of its slots
JUDGE_WARPS, MOVE_WARPS = 4, 4  # a node a thread; two 16-byte loads a thread
LARGEST_PREFIX = tl.constexpr(MAX_PREFIX_LEN)


class Moves(NamedTuple):
    """Which slots of a request move where. Tables are int64, and contiguous."""

    kept: Tensor  # [batch, width]
    width: int
    prefix_lens: Tensor  # [batch]
    num_kept: Tensor | None  # [batch]
    block_table: Tensor | None  # [batch, columns]
    slot_mapping: Tensor | None  # [batch, columns]
    columns: int  # any_size, like blocks and block_size
    blocks: int  # the least of all caches, 0 where they have no slots; in a dense cache a request is a block
    block_size: int  # at least 1
    lengths: Tensor  # int64 [batch], written
    status: Tensor  # int32 [batch], written


class Layout(NamedTuple):
    """What caches have in common, in words: a row is what a request has in all slots, but for the words of a slot that
    lie together."""

    stride_block: int
    stride_slot: int
    slot_words: int
    rows: int
    sizes: tuple[int, ...]  # of the rows, innermost first
    strides: tuple[int, ...]


class Slot(NamedTuple):
    """Where nodes lie, in a kernel."""

    block: Any  # int64
    offset: Any  # int64
    exists: Any


@triton.jit
def _slot_of(moves, request, prefix_len, node, used):
    """The Slot of nodes whose prefix_len is in range. No sum overflows."""
    known = used & (node >= 0)
    columns, block_size = size_of(moves.columns), size_of(moves.block_size)
    if moves.slot_mapping is not None:
        known &= node < columns
        slot = tl.load(moves.slot_mapping + request * columns + node, mask=known, other=-1)
        known &= slot >= 0
        block = slot // block_size
        offset = slot % block_size
    else:
        slots = tl.full([], 0, tl.int64) + block_size
        if moves.block_table is not None:
            slots *= columns
        known &= node < slots - prefix_len
        position = tl.where(known, prefix_len + node, 0)
        block = request + position * 0
        offset = position
        if moves.block_table is not None:
            column = position // block_size
            block = tl.load(moves.block_table + request * columns + column, mask=known, other=-1)
            offset = position % block_size
    return Slot(block, offset, known & (block >= 0) & (block < size_of(moves.blocks)))


@triton.jit
def _count_kept(moves, request, BLOCK: tl.constexpr):
    """The number of nodes to keep, int64."""
    if moves.num_kept is not None:
        return tl.load(moves.num_kept + request)
    else:
        count = tl.full([], 0, tl.int64) + moves.width
        for first in range(0, moves.width, BLOCK):
            index = first + tl.arange(0, BLOCK).to(tl.int64)
            node = tl.load(moves.kept + request * moves.width + index, mask=index < moves.width, other=-1)
            count = tl.minimum(count, tl.min(tl.where(node < 0, index, moves.width), 0))
        return count


@triton.jit
def _judge_kernel(
    moves,  # Moves, its lengths and status written
    BLOCK: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    wait_for_launch_before(DEPENDENT)
    request = tl.program_id(0).to(tl.int64)
    count = _count_kept(moves, request, BLOCK)
    prefix_len = tl.load(moves.prefix_lens + request)
    sound = (count >= 0) & (count <= moves.width) & (prefix_len >= 0) & (prefix_len <= LARGEST_PREFIX)
    inside = tl.where(sound, prefix_len, 0)
    wrong = tl.zeros([BLOCK], tl.int32)
    for first in range(0, moves.width, BLOCK):
        index = first + tl.arange(0, BLOCK).to(tl.int64)
        used = index < tl.where(sound, count, 0)
        node = tl.load(moves.kept + request * moves.width + index, mask=used, other=-1)
        before = tl.load(moves.kept + request * moves.width + index - 1, mask=used & (index > 0), other=-1)
        source = _slot_of(moves, request, inside, node, used)
        target = _slot_of(moves, request, inside, index, used)
        wrong |= (used & ((node <= before) | (source.exists == 0) | (target.exists == 0))).to(tl.int32)
    sound &= tl.max(wrong, 0) == 0
    tl.store(moves.lengths + request, prefix_len + tl.where(sound, count, 0))
    tl.store(moves.status + request, tl.where(sound, 0, INVALID_PARAMETER))


@triton.jit
def _move_kernel(
    caches,  # a tuple of caches as bytes, written
    layout,  # Layout
    moves,  # Moves
    WORD: tl.constexpr,
    BLOCK: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    wait_for_launch_before(DEPENDENT)
    request = tl.program_id(2).to(tl.int64)
    word = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    used = word < layout.rows * layout.slot_words
    position = word % layout.slot_words
    row = word // layout.slot_words
    for dim in tl.static_range(len(layout.sizes)):
        position += row % layout.sizes[dim] * layout.strides[dim]
        row = row // layout.sizes[dim]
    cache = caches[0]
    for index in tl.static_range(1, len(caches)):
        if tl.program_id(1) == index:
            cache = caches[index]
    cache = cache.to(tl.pointer_type(WORD))
    prefix_len = tl.load(moves.prefix_lens + request)
    count = tl.load(moves.lengths + request) - prefix_len  # 0 where the request is refused
    for index in range(count):
        node = tl.load(moves.kept + request * moves.width + index)
        source = _slot_of(moves, request, prefix_len, node, node >= 0)
        target = _slot_of(moves, request, prefix_len, request * 0 + index, node >= 0)
        first = source.block * layout.stride_block + source.offset * layout.stride_slot
        first_target = target.block * layout.stride_block + target.offset * layout.stride_slot
        if first != first_target:
            words = tl.load(cache + first + position, mask=used)
            tl.store(cache + first_target + position, words, mask=used)


def layout_of(cache: Tensor, batch_dim: int, slot_dim: int) -> tuple[int, Layout]:
    """The bytes of a word, as many as divide all sizes, strides and the address, and a cache's layout."""
    size = cache.element_size()
    strides = [stride * size for stride, length in zip(cache.stride(), cache.shape, strict=True) if length > 1]
    word = math.gcd(8, cache.data_ptr() if not cache.is_meta else 8, cache.shape[-1] * size, *strides[:-1])
    if cache.shape[-1] == 1:
        word = math.gcd(word, *strides)
    batch_dim, slot_dim = batch_dim + cache.dim(), slot_dim + cache.dim()
    dims = [
        (cache.shape[dim], cache.stride(dim) * size // word)
        for dim in reversed(range(cache.dim() - 1))
        if dim not in (batch_dim, slot_dim)
    ]
    slot_words = cache.shape[-1] * size // word
    while dims and (dims[0][0] == 1 or dims[0][1] == slot_words):  # what lies together is one
        slot_words *= dims.pop(0)[0]
    dims = [dim for dim in dims if dim[0] != 1]
    return word, Layout(
        stride_block=cache.stride(batch_dim) * size // word,
        stride_slot=cache.stride(slot_dim) * size // word,
        slot_words=slot_words,
        rows=math.prod(length for length, _ in dims),
        sizes=tuple(length for length, _ in dims),
        strides=tuple(stride for _, stride in dims),
    )


def launches(caches: Sequence[Tensor], moves: Moves, batch_dim: int, slot_dim: int) -> Iterator[Launch]:
    """One launch for the requests, and one for each so many caches of one layout."""
    batch = len(moves.prefix_lens)
    yield Launch(_judge_kernel, (batch,), {"moves": moves, "BLOCK": JUDGED}, JUDGE_WARPS)
    groups: dict[tuple[int, Layout], list[Tensor]] = {}
    for cache in caches:
        if cache.numel() > 0:
            groups.setdefault(layout_of(cache, batch_dim, slot_dim), []).append(cache)
    for (word, layout), alike in groups.items():
        for first in range(0, len(alike), CACHES_A_LAUNCH):
            part = [cache.view(torch.uint8) for cache in alike[first : first + CACHES_A_LAUNCH]]
            count = triton.next_power_of_2(len(part))  # few numbers are compiled
            arguments = {"caches": (*part, *part[:1] * (count - len(part))), "layout": layout, "moves": moves}
            grid = (triton.cdiv(layout.rows * layout.slot_words, MOVED), len(part), batch)
            yield Launch(_move_kernel, grid, arguments | {"WORD": WORDS[word], "BLOCK": MOVED}, MOVE_WARPS)


def launch(
    caches: Sequence[Tensor],
    kept: Tensor,
    prefix_lens: Tensor,
    num_kept: Tensor | None,
    block_table: Tensor | None,
    slot_mapping: Tensor | None,
    batch_dim: int,
    slot_dim: int,
    *,
    out: Sequence[Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """Lengths and status; see `compact_kv`. out: where to."""
    table = block_table if block_table is not None else slot_mapping
    blocks, block_size = (min(cache.shape[dim] for cache in caches) for dim in (batch_dim, slot_dim))
    moves = Moves(
        kept=_table(kept),
        width=kept.shape[1],
        prefix_lens=_table(prefix_lens),
        num_kept=_table(num_kept),
        block_table=_table(block_table),
        slot_mapping=_table(slot_mapping),
        columns=any_size(0 if table is None else table.shape[1]),
        blocks=any_size(blocks if block_size > 0 else 0),
        block_size=any_size(max(block_size, 1)),
        lengths=torch.empty(prefix_lens.shape, dtype=torch.int64, device=prefix_lens.device) if out is None else out[0],
        status=torch.empty(prefix_lens.shape, dtype=torch.int32, device=prefix_lens.device) if out is None else out[1],
    )
    run(launches(caches, moves, batch_dim, slot_dim), prefix_lens)
    return moves.lengths, moves.status


def _table(values: Any) -> Any:
    return None if values is None else values.to(torch.int64).contiguous()
