"""Groups of ranks: torch.distributed's, or any object that gathers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from specens_kernels.values import fail


class Exchange:
    """Brings what every rank tells to every rank, one `all_gather` a call.

    group: None (torch.distributed's default group), a ProcessGroup, or an object whose `all_gather(tensor)` gives the
    tensors of all ranks, stacked or one after the other, in the same order on every rank. Numbers come in the order of
    the shards, which each rank's first number tells, so that the order of ranks changes no sum.
    """

    def __init__(self, group: Any, vocab_start: int) -> None:
        self.vocab_start = vocab_start
        self.gather: Callable[[Tensor], Tensor] = _gather_of(group)

    def __call__(self, told: Tensor) -> Tensor:
        start = torch.full((1,), float(self.vocab_start), dtype=torch.float64, device=told.device)
        heard = self.gather(torch.cat([start, told.reshape(-1)]))
        order = heard[:, 0].argsort(stable=True)
        return heard[order, 1:].view(len(heard), *told.shape)


def _gather_of(group: Any) -> Callable[[Tensor], Tensor]:
    if callable(getattr(group, "all_gather", None)):
        return lambda told: _stacked(group.all_gather(told), told)
    if not torch.distributed.is_available() or not torch.distributed.is_initialized():
        fail("group", "an object with all_gather, or an initialised torch.distributed", type(group).__name__)
    if group is not None and not isinstance(group, torch.distributed.ProcessGroup):
        fail("group", "None, a ProcessGroup or an object with all_gather", type(group).__name__)
    ranks = torch.distributed.get_world_size(group)
    names = ("all_gather_single", "all_gather_into_tensor")  # of torch 2.13, and before
    gather_into = next(function for name in names if (function := getattr(torch.distributed, name, None)) is not None)

    def gather(told: Tensor) -> Tensor:
        heard = told.new_empty(ranks * told.numel())
        gather_into(heard, told, group=group)
        return heard.view(ranks, -1)

    return gather


def _stacked(heard: Any, told: Tensor) -> Tensor:
    heard = torch.stack(list(heard)) if isinstance(heard, list | tuple) else heard
    if not isinstance(heard, Tensor) or heard.numel() % told.numel() != 0 or heard.numel() == 0:
        fail("group.all_gather", f"[ranks, {told.numel()}] numbers", getattr(heard, "shape", type(heard).__name__))
    return heard.reshape(-1, told.numel())
