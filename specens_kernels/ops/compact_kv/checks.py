"""What a call of `compact_kv` must be like; the names of what is wrong."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from specens_kernels.checks import check_integers, check_tensor
from specens_kernels.values import INTEGER_DTYPES, fail, is_integer


def check_choice(tensors: Any, kept: Any, num_kept: Any, batch_dim: Any, slot_dim: Any) -> None:
    """Raise ValueError unless there are caches, dimensions of them and something that says what to keep of them."""
    if not isinstance(tensors, list | tuple):
        fail("caches", "a tensor or a sequence of tensors", type(tensors).__name__)
    if not tensors or not isinstance(tensors[0], Tensor):
        fail("caches", "at least one tensor", f"{[type(cache).__name__ for cache in tensors[:1]]}")
    if not isinstance(kept, Tensor) or kept.dim() != 2:
        check_tensor("kept", kept, (None, None), (*INTEGER_DTYPES, torch.bool), tensors[0].device)
    if kept.dtype == torch.bool and num_kept is not None:
        fail("num_kept", "None, as the mask says how many are kept", "a tensor")
    for name, dim in {"batch_dim": batch_dim, "slot_dim": slot_dim}.items():
        if not is_integer(dim) or dim > -2:
            fail(name, "a dimension before the last, counted from the end: -2, -3, ...", repr(dim))
    if batch_dim == slot_dim:
        fail("slot_dim", "another dimension than batch_dim", slot_dim)


def check(
    tensors: Sequence[Tensor],
    kept: Tensor,
    prefix_lens: Tensor,
    num_kept: Tensor | None,
    block_table: Tensor | None,
    slot_mapping: Tensor | None,
    batch_dim: int,
    slot_dim: int,
) -> None:
    """Raise ValueError naming an argument that is wrong; `check_choice` has been called."""
    device, batch = tensors[0].device, len(kept)
    check_integers("kept", kept, (None, None), device)
    check_integers("prefix_lens", prefix_lens, (batch,), device)
    if num_kept is not None:
        check_integers("num_kept", num_kept, (batch,), device)
    if block_table is not None and slot_mapping is not None:
        fail("slot_mapping", "None, as block_table is given", "a tensor")
    for name, table in {"block_table": block_table, "slot_mapping": slot_mapping}.items():
        if table is not None:
            check_integers(name, table, (batch, None), device)
    paged = block_table is not None or slot_mapping is not None
    for index, cache in enumerate(tensors):
        _check_cache(f"caches[{index}]", cache, tensors[0], batch_dim, slot_dim)
        if not paged and cache.shape[batch_dim] != batch:
            fail(f"caches[{index}]", f"{batch} requests in dimension {batch_dim}", list(cache.shape))
        if paged and cache.shape[slot_dim] != tensors[0].shape[slot_dim]:
            fail(f"caches[{index}]", f"blocks of {tensors[0].shape[slot_dim]} slots", list(cache.shape))
    check_distinct(tensors)


def _check_cache(name: str, cache: Any, first: Tensor, batch_dim: int, slot_dim: int) -> None:
    if not isinstance(cache, Tensor):
        fail(name, "a tensor", type(cache).__name__)
    if cache.device != first.device:
        fail(name, f"device {first.device}", cache.device)
    if cache.dim() < -min(batch_dim, slot_dim):
        fail(name, f"at least {-min(batch_dim, slot_dim)} dimensions", list(cache.shape))
    if cache.numel() == 0:
        return
    if cache.stride(-1) != 1:
        fail(name, "a contiguous last dimension", f"strides {cache.stride()}")
    if any(size > 1 and stride == 0 for size, stride in zip(cache.shape, cache.stride(), strict=True)):
        fail(name, "a tensor that is not expanded", f"strides {cache.stride()}")


def check_distinct(tensors: Sequence[Tensor]) -> None:
    """Raise ValueError where two caches begin at one address."""
    if torch.compiler.is_compiling():
        return  # a traced tensor has no address
    if len({*map(Tensor.data_ptr, tensors)}) == len(tensors):
        return
    addresses = [cache.data_ptr() for cache in tensors if cache.numel() > 0]
    if len(set(addresses)) < len(addresses):
        index = next(index for index, address in enumerate(addresses) if address in addresses[:index])
        fail("caches", "tensors that share no memory", f"one that begins where another begins, number {index}")
