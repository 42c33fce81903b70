"""compact_kv: the accepted path of a draft tree, kept in place in the caches of all layers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

import specens_kernels
from bench.case import DTYPES, Bars, Case, Options, Rival, Run, chosen_shapes
from bench.check import check_equal

SHAPES = ((30, 1, 3, 2048), (2, 1, 3, 128), (30, 8, 3, 512))  # layers, batch, heads, slots
SIZE, NODES, BLOCK_SIZE, HOLE_EVERY = 64, 64, 16, 16
PATH = (0, 2, 5, 9, 20, 33, 41, 63)  # of a tree of 64 nodes at the end of the cache
LAYOUTS = ("list", "stacked", "paged", "holes")
BARS = Bars(speedup=10, over=("index_select",))


@dataclass(frozen=True)
class Problem:
    """cache: keys and values of all layers [2 * layers, batch, heads, slots, size]. kept: slots that stay, of every
    request. first: the first slot that changes."""

    cache: Tensor
    kept: Tensor
    first: int

    def changed(self, caches: list[Tensor]) -> Tensor:
        """The slots that were moved to, of caches [batch, heads, slots, size]."""
        return torch.stack([cache[:, :, self.first : len(self.kept)] for cache in caches])


def cases(options: Options) -> Iterator[Case]:
    """A tensor for keys and values of each layer, all in one tensor, in blocks, and a mask with a hole in 16 slots."""
    for layers, batch, heads, slots in chosen_shapes(options, SHAPES):
        shape = {"layers": layers, "batch": batch, "heads": heads, "slots": slots}
        for dtype in options.dtypes:
            for layout in LAYOUTS:
                yield _case(options, shape, layout, dtype)


def _case(options: Options, shape: dict[str, int], layout: str, dtype: str) -> Case:
    problem = _problem(shape, layout, DTYPES[dtype])
    run, result = _operation(options, problem, layout)
    expected = problem.changed([cache[:, :, problem.kept] for cache in problem.cache])
    moved = expected[:, :, :, problem.kept[problem.first :] != torch.arange(problem.first, len(problem.kept))]
    from_memory, to_memory = torch.ones(2, moved.nbytes, dtype=torch.uint8)
    return Case(
        shape=shape,
        setting={"layout": layout},
        dtype=dtype,
        run=run,
        result=lambda _: result(),
        check=lambda caches: check_equal(problem.changed(caches), expected),
        bounds={"copy": lambda: to_memory.copy_(from_memory)},
        bytes_needed=2 * moved.nbytes,
        rivals=_rivals(problem),
        bars=BARS if shape["slots"] > NODES * 2 and layout != "holes" else Bars(),
    )


def _problem(shape: dict[str, int], layout: str, dtype: torch.dtype) -> Problem:
    layers, batch, heads, slots = shape.values()
    generator = torch.Generator().manual_seed(0)
    cache = torch.randn(2 * layers, batch, heads, slots, SIZE, generator=generator).to(dtype)
    every = torch.arange(slots)
    if layout == "holes":
        return Problem(cache, every[every % HOLE_EVERY != HOLE_EVERY - 1], HOLE_EVERY - 1)
    prefix = slots - NODES
    return Problem(cache, torch.cat([every[:prefix], prefix + torch.tensor(PATH)]), prefix)


def _operation(options: Options, problem: Problem, layout: str) -> tuple[Run, Callable[[], list[Tensor]]]:
    """The call, on a cache of its own, and how to look at that cache as [batch, heads, slots, size]."""
    own, batch, slots = problem.cache.clone(), problem.cache.shape[1], problem.cache.shape[3]
    caches = list(own)
    path, prefix_lens = torch.tensor([PATH] * batch), torch.full((batch,), problem.first)
    backend = options.backend
    if layout == "holes":
        mask = torch.zeros(batch, slots, dtype=torch.bool).index_fill_(1, problem.kept, True)
        return lambda: specens_kernels.compact_kv(caches, mask, backend=backend), lambda: caches
    if layout == "paged":
        table = torch.randperm(batch * slots // BLOCK_SIZE, dtype=torch.int32).reshape(batch, -1)
        paged = torch.empty(len(own), table.numel(), BLOCK_SIZE, *own.shape[2::2], dtype=own.dtype)
        paged[:, table.long()] = own.transpose(2, 3).unflatten(2, (-1, BLOCK_SIZE))
        pages = list(paged)
        return (
            lambda: specens_kernels.compact_kv(pages, path, prefix_lens, block_table=table, backend=backend),
            lambda: list(paged[:, table.long()].flatten(2, 3).transpose(2, 3)),
        )
    given = own if layout == "stacked" else caches
    return lambda: specens_kernels.compact_kv(given, path, prefix_lens, backend=backend), lambda: caches


def _rivals(problem: Problem) -> dict[str, Rival]:
    """PyTorch, tensor by tensor: a new cache of what is kept, as transformers selects, and a copy within the cache."""
    caches, own = list(problem.cache), list(problem.cache.clone())
    moved = problem.kept[problem.first :]

    def select() -> list[Tensor]:
        return [cache.index_select(2, problem.kept) for cache in caches]

    def move() -> list[Tensor]:
        for cache in own:
            cache.narrow(2, problem.first, len(moved)).copy_(cache.index_select(2, moved))
        return own

    return {"index_select": Rival(select, checked=True), "index_select of the path, copy_": Rival(move, checked=True)}
