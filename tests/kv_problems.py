"""Random caches with paths to keep in them, and what must come out: slot by slot, from a copy."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

import torch
from cases import lay_out
from torch import Tensor

from specens_kernels import Compaction, Status, compact_kv

LARGEST = 2**63 - 1
DTYPES = (torch.float32, torch.bfloat16, torch.uint8, torch.int8, torch.float8_e4m3fn, torch.float64)
INTEGERS = (torch.int64, torch.int32)
REFUSED = int(Status.INVALID_PARAMETER)


@dataclass
class Problem:
    """caches: views of `memory`, whose bytes are random. paging: block_table or slot_mapping, or nothing."""

    memory: list[Tensor]
    caches: list[Tensor]
    kept: Tensor
    prefix_lens: Tensor
    num_kept: Tensor | None
    batch_dim: int
    slot_dim: int
    paging: dict[str, Tensor] = field(default_factory=dict)

    def run(self, backend: str) -> Compaction:
        dims = {"batch_dim": self.batch_dim, "slot_dim": self.slot_dim}
        return compact_kv(
            self.caches, self.kept, self.prefix_lens, num_kept=self.num_kept, **self.paging, **dims, backend=backend
        )

    def copy(self, device: str = "cpu") -> Problem:
        """The same problem in memory of its own."""
        memory = [whole.clone().to(device) for whole in self.memory]
        views = zip(memory, self.caches, strict=True)
        caches = [
            whole.view(cache.dtype).as_strided(cache.shape, cache.stride(), cache.storage_offset())
            for whole, cache in views
        ]
        rest = {name: table.to(device) for name, table in self.paging.items()}
        num_kept = None if self.num_kept is None else self.num_kept.to(device)
        index = (self.kept.to(device), self.prefix_lens.to(device), num_kept)
        return Problem(memory, caches, *index, self.batch_dim, self.slot_dim, rest)

    def expected(self) -> tuple[list[Tensor], list[int], list[int]]:
        """The memory after the compaction, lengths and status."""
        before, after = self.copy(), self.copy()
        lengths, status = [], []
        for request, nodes in enumerate(self._nodes()):
            prefix_len = int(self.prefix_lens[request])
            moves = None if nodes is None else self._moves(request, prefix_len, nodes)
            status.append(REFUSED if moves is None else 0)
            lengths.append(prefix_len + (0 if moves is None else len(moves)))
            for source, target in moves or []:
                for old, new in zip(before.caches, after.caches, strict=True):
                    self._slot(new, target).copy_(self._slot(old, source))
        return after.memory, lengths, status

    def _nodes(self) -> list[list[int] | None]:
        """What each request keeps; None where that is not a path."""
        rows: list[list[int] | None] = []
        for request, row in enumerate(self.kept.tolist()):
            count = next((index for index, node in enumerate(row) if node < 0), len(row))
            if self.num_kept is not None:
                count = int(self.num_kept[request])
            nodes = row[: max(count, 0)]
            ascending = all(node > before for before, node in zip([-1, *nodes], nodes, strict=False))
            rows.append(nodes if 0 <= count <= len(row) and ascending else None)
        return rows

    def _moves(self, request: int, prefix_len: int, nodes: list[int]) -> list[tuple[Any, Any]] | None:
        """(from, to) of each kept node, as (block, offset); None where one has no place."""
        indices = [
            (self._index(request, prefix_len, a), self._index(request, prefix_len, b)) for b, a in enumerate(nodes)
        ]
        sound = 0 <= prefix_len <= 2**62 and all(index is not None for pair in indices for index in pair)
        return indices if sound else None

    def _index(self, request: int, prefix_len: int, node: int) -> tuple[int, int] | None:
        blocks = min(cache.shape[self.batch_dim] for cache in self.caches)
        size = min(cache.shape[self.slot_dim] for cache in self.caches)
        position = prefix_len + node
        if "slot_mapping" in self.paging:
            row = self.paging["slot_mapping"][request].tolist()
            slot = row[node] if node < len(row) else -1
            return divmod(slot, size) if 0 <= slot < blocks * size else None
        if "block_table" in self.paging:
            row = self.paging["block_table"][request].tolist()
            block = row[position // size] if 0 <= position < len(row) * size else -1
            return (block, position % size) if 0 <= block < blocks else None
        return (request, position) if position < size else None

    def _slot(self, cache: Tensor, index: tuple[int, int]) -> Tensor:
        block, offset = index
        return cache.movedim((self.batch_dim, self.slot_dim), (0, 1))[block, offset].view(torch.uint8)


def random_problem(seed: int, *, faults: float = 0.0, paging: str | None = None, big: bool = False) -> Problem:
    """paging: "dense", "block_table", "slot_mapping" or None, for any. faults: the share of numbers that are wrong."""
    rng = random.Random(seed)
    generator = torch.Generator().manual_seed(seed)
    batch, nodes = rng.choice([0, 1, 2, 5]), rng.choice([0, 1, 7, 9, 33, 150 if big else 20])
    prefix_lens = [rng.randint(0, 12) for _ in range(batch)]
    paging = paging or rng.choice(["dense", "block_table", "slot_mapping"])
    block_size = (
        max(prefix_lens, default=0) + nodes + rng.randint(0, 3) if paging == "dense" else rng.choice([1, 4, 16])
    )
    columns = -(-(12 + nodes) // block_size) if block_size else 0
    blocks = batch if paging == "dense" else batch * columns + rng.randint(1, 3)
    batch_dim, slot_dim = rng.choice([(-4, -2), (-4, -3), (-3, -2), (-2, -4), (-5, -3), (-5, -2)])
    memory, caches = [], []
    for _ in range(rng.choice([1, 2, 5])):
        shape = [rng.choice([1, 2, 3]) for _ in range(-min(batch_dim, slot_dim, -4) + rng.choice([0, 0, 1]))]
        shape[batch_dim], shape[slot_dim], shape[-1] = blocks, block_size, rng.choice([1, 2, 5, 8, 32])
        whole, cache = _strided(shape, rng, generator)
        memory.append(whole)
        caches.append(cache)
    kept = [_path(nodes, rng) for _ in range(batch)]
    num_kept = [sum(node >= 0 for node in row) for row in kept] if rng.random() < 0.4 else None
    tables = {}
    if paging == "block_table":
        ids = rng.sample(range(blocks), batch * columns)
        tables["block_table"] = [ids[request * columns : (request + 1) * columns] for request in range(batch)]
    elif paging == "slot_mapping":
        slots = rng.sample(range(blocks * block_size), batch * nodes)
        tables["slot_mapping"] = [slots[request * nodes : (request + 1) * nodes] for request in range(batch)]

    def integers(values: Any, *shape: int) -> Tensor:
        dtype = rng.choice(INTEGERS)
        tensor = torch.tensor(values, dtype=torch.int64).reshape(shape)
        wrong = torch.rand(shape, generator=generator) < faults
        bad = [
            -1,
            -7,
            2**30,
            2**31 - 1,
            0,
            blocks,
            nodes,
            block_size,
            *([LARGEST, -LARGEST - 1] * (dtype == INTEGERS[0])),
        ]
        picks = torch.tensor(bad)[torch.randint(len(bad), shape, generator=generator)]
        return lay_out(torch.where(wrong, picks, tensor).to(dtype), rng.choice(["contiguous", "sliced"]))

    widths = {"block_table": columns, "slot_mapping": nodes}
    return Problem(
        memory,
        caches,
        integers(kept, batch, len(_path(nodes, rng))),
        integers(prefix_lens, batch),
        None if num_kept is None else integers(num_kept, batch),
        batch_dim,
        slot_dim,
        {name: integers(table, batch, widths[name]) for name, table in tables.items()},
    )


def _path(nodes: int, rng: random.Random) -> list[int]:
    """Some nodes in order, all or none of them, then -1."""
    count = rng.choice([0, nodes, rng.randint(0, nodes), min(nodes, 3)])
    return (sorted(rng.sample(range(nodes), count)) + [-1] * nodes)[:nodes]


def _strided(shape: list[int], rng: random.Random, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Random bytes, and a view of this shape into them: the dimensions but the last in any order, with gaps or not."""
    dtype = rng.choice(DTYPES)
    order = [*rng.sample(range(len(shape) - 1), len(shape) - 1), len(shape) - 1]
    gap = rng.choice([0, 0, 1, 3])
    sizes = [shape[dim] + gap for dim in order]
    bytes_each = torch.empty((), dtype=dtype).element_size()
    whole = torch.randint(256, (*sizes[:-1], sizes[-1] * bytes_each), generator=generator, dtype=torch.uint8)
    view = whole.view(dtype)
    for index, dim in enumerate(order):
        view = view.narrow(index, gap // 2, shape[dim])
    return whole, view.permute([order.index(dim) for dim in range(len(shape))])
