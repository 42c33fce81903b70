"""Verification, draws and cache compaction timed on a GPU: `python -m bench.gpu.times --json FILE`.

Each case is held against a read of the same bytes (torch.amax), the least that reading the logits once can take, and
against plain PyTorch, eager and compiled. Inputs are made on the device; where they fit into the last
cache several sets are taken in turn. A row is written as soon as it is measured, and a case that fails leaves the
others. `--quick` times few cases, for tuning; `--dry` runs on the CPU at tiny sizes, to see that the program works.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import torch
import typer
from rich.console import Console
from rich.table import Table
from torch import Tensor

from bench.environment import environment
from bench.peers import plain_pytorch
from specens_kernels import Mixture, Sampling, Verdict, compact_kv, sample, verify_chain, verify_tree
from specens_kernels.parts.launches import dependent_launches

DRAFT_LEN = 5
BATCHES, VOCABS, MEMBERS = (1, 8, 32, 128, 512), (32000, 128256, 262144), (1, 2, 3)
FILTERED = Sampling(temperature=0.7, top_k=50, top_p=0.95)
CACHE_BYTES, MOST_SETS = 200e6, 8  # more than a last cache holds, over all sets of inputs
ROUNDS, SECONDS_A_CASE = 20, 0.2
QUICK_BATCHES = (8, 128)
NODES = (-1, -1, 0, 1, 2)  # the parents of a tree of DRAFT_LEN nodes
LAYERS, HEADS, SLOTS, DIM = 8, 8, 256, 128  # of a KV cache
KEPT = (0, 2, 4)  # the slots that a path keeps, of those after the prefix
BUDGET = 300.0  # seconds; cases after it are left out, and named
TABLE_WIDTH = 200
PEERS = (128256, 1)  # vocabulary and members of the cases that compiled PyTorch is timed at


@dataclass(frozen=True)
class Inputs:
    """A batch of rounds on the device, bfloat16."""

    members: list[Tensor]  # [batch, draft_len + 1, vocab]
    draft_logits: Tensor | None  # [batch, draft_len, vocab] of an outside drafter, with one member
    draft_tokens: Tensor
    uniforms: Tensor
    sampling: Sampling

    @property
    def logits(self) -> list[Tensor]:
        return self.members if self.draft_logits is None else [*self.members, self.draft_logits]

    def arguments(self) -> dict[str, Any]:
        """What follows the tensors in a call."""
        shared = {"sampling": self.sampling, "uniforms": self.uniforms}
        if self.draft_logits is not None:
            return shared | {"draft_logits": self.draft_logits}
        return shared | {"ensemble": Mixture([1 / len(self.members)] * len(self.members)), "drafter": 0}


@dataclass(frozen=True)
class Row:
    """One timed way of one case; seconds a call."""

    operation: str
    way: str
    batch: int
    vocab: int
    members: int
    filtered: bool
    seconds: float | None
    spread: float | None  # of the middle half of the rounds
    ratio: float | None  # to the read of the same bytes
    problem: str | None = None  # why there is no time


def make_inputs(batch: int, vocab: int, members: int, filtered: bool, device: torch.device, seed: int) -> Inputs:
    """Rounds of which about seven of ten drafts are accepted."""
    generator = torch.Generator(device).manual_seed(seed)

    def noise(rows: int) -> Tensor:
        return torch.randn(batch, rows, vocab, generator=generator, device=device, dtype=torch.bfloat16)

    first = noise(DRAFT_LEN + 1) * 3
    others = [first + noise(DRAFT_LEN + 1) * 0.7 for _ in range(members - 1)]
    outside = first[:, :DRAFT_LEN] + noise(DRAFT_LEN) * 0.7 if members == 1 else None
    drafter = first[:, :DRAFT_LEN] if outside is None else outside
    sampling = FILTERED if filtered else Sampling()
    random_numbers = torch.rand(batch, DRAFT_LEN + 1, generator=generator, device=device, dtype=torch.float64)
    draws = torch.rand(batch, DRAFT_LEN, generator=generator, device=device, dtype=torch.float64)
    rows = range(DRAFT_LEN)
    tokens = [sample(drafter[:, row], sampling=sampling, uniforms=draws[:, row].contiguous()).tokens for row in rows]
    return Inputs([first, *others], outside, torch.stack(tokens, 1), random_numbers, sampling)


class Clock:
    """Times calls by device events, or by the wall clock on a CPU."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def once(self, run: Callable[[], Any], repetitions: int) -> float:
        """Seconds a call."""
        if self.device.type != "cuda":
            begin = time.perf_counter()
            for _ in range(repetitions):
                run()
            return (time.perf_counter() - begin) / repetitions
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(repetitions):
            run()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) / 1e3 / repetitions

    def measure(self, run: Callable[[], Any]) -> tuple[float, float]:
        """Median, and the width of the middle half, of several rounds."""
        run()
        estimate = max(self.once(run, 2), 1e-7)
        repetitions = max(1, min(50, int(SECONDS_A_CASE / ROUNDS / estimate)))
        times = [self.once(run, repetitions) for _ in range(ROUNDS)]
        first, median, third = statistics.quantiles(times, n=4)
        return median, third - first


def in_turn(runs: list[Callable[[], Any]]) -> Callable[[], Any]:
    """A call that takes the next of several."""
    index = -1

    def run() -> Any:
        nonlocal index
        index = (index + 1) % len(runs)
        return runs[index]()

    return run


def graphed(runs: list[Callable[[], Any]]) -> Callable[[], Any]:
    """The same from CUDA graphs, one for each."""
    graphs = []
    for run in runs:
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            run()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            run()
        graphs.append(graph)
    return in_turn([graph.replay for graph in graphs])


def buffers(inputs: Inputs) -> Verdict:
    """Where a verdict goes."""
    batch, device = inputs.draft_tokens.shape[0], inputs.draft_tokens.device
    numbers = [torch.empty(batch, dtype=torch.int64, device=device) for _ in range(3)]
    tokens = torch.empty(batch, DRAFT_LEN + 1, dtype=torch.int64, device=device)
    return Verdict(tokens, *numbers, None, torch.empty(batch, dtype=torch.int32, device=device))


def read(values: list[Tensor]) -> None:
    """Each once, for its maximum."""
    for value in values:
        value.amax()


class Operation(NamedTuple):
    """A call, and what it has to read."""

    name: str
    read: list[Tensor]
    call: Callable[[], Any]


def operations(inputs: Inputs, backend: str | None = None) -> Iterator[Operation]:
    """Those that a case times."""
    i, out, arguments = inputs, buffers(inputs), inputs.arguments() | {"backend": backend}
    yield Operation("verify_chain", i.logits, lambda: verify_chain(i.members, i.draft_tokens, out=out, **arguments))
    rows = i.members[0][:, 0].contiguous()
    random_numbers = i.uniforms[:, 0].contiguous()
    yield Operation(
        "sample", [rows], lambda: sample(rows, sampling=i.sampling, uniforms=random_numbers, backend=backend)
    )
    if i.draft_logits is None or i.sampling is FILTERED:
        return
    numbers = torch.arange(len(rows), device=rows.device)
    seeds = {"seeds": numbers, "positions": numbers, "backend": backend}
    yield Operation(
        "verify_chain, gumbel", i.members, lambda: verify_chain(i.members, i.draft_tokens, rule="gumbel", **seeds)
    )
    parents = torch.tensor(NODES, device=rows.device).repeat(len(rows), 1)
    yield Operation("verify_tree", i.members, lambda: verify_tree(i.members, i.draft_tokens, parents, **seeds))
    yield cache_operation(len(rows), rows.device, backend)


def cache_operation(batch: int, device: torch.device, backend: str | None) -> Operation:
    """Of all layers; the slots that move are read."""
    shape = (batch, HEADS, SLOTS, DIM)
    caches = [torch.zeros(shape, dtype=torch.bfloat16, device=device) for _ in range(2 * LAYERS)]
    kept, first = torch.tensor(KEPT, device=device).repeat(batch, 1), SLOTS - DRAFT_LEN
    prefix = torch.full((batch,), first, device=device)
    moved = [values[:, :, first + 1 : first + len(KEPT)] for values in caches]
    return Operation("compact_kv", moved, lambda: compact_kv(caches, kept, prefix, backend=backend))


def own_ways(sets: list[Inputs], graphs: bool) -> Iterator[tuple[str, str, Callable[[], Any]]]:
    """operation, way and call; a read comes before what is held against it."""
    for same in zip(*(operations(inputs) for inputs in sets), strict=True):
        name, reads = same[0].name, [partial(read, operation.read) for operation in same]
        yield name, "read", graphed(reads) if graphs else in_turn(reads)
        yield name, "eager", in_turn([o.call for o in same])
        if graphs:
            yield name, "graph", graphed([o.call for o in same])


def peer_ways(sets: list[Inputs], compiled: bool) -> Iterator[tuple[str, str, Callable[[], Any]]]:
    """The read, and plain PyTorch."""
    if sets[0].sampling is FILTERED:
        return
    yield "verify_chain", "read", in_turn([partial(read, inputs.logits) for inputs in sets])
    weights = (1 / len(sets[0].members),) * len(sets[0].members)
    # of each batch alone: with a dynamic one torch 2.11 raises an InductorError
    verify = torch.compile(plain_pytorch.verify, dynamic=False) if compiled else plain_pytorch.verify
    calls = [lambda i=i: verify(i.members, weights, i.draft_logits, i.draft_tokens, i.uniforms) for i in sets]
    yield "verify_chain", "torch.compile" if compiled else "PyTorch", in_turn(calls)


def check(inputs: Inputs) -> None:
    """Raise where the tokens are not the reference's, but for one request in fifty, which may be a near tie."""
    calls = [
        verify_chain(inputs.members, inputs.draft_tokens, backend=backend, **inputs.arguments()).tokens
        for backend in (None, "reference")
    ]
    different = int((calls[0] != calls[1]).any(1).sum())
    if different > max(1, len(calls[0]) // 50):
        raise RuntimeError(f"{different} of {len(calls[0])} requests differ from the reference")


def cases(dry: bool, quick: bool) -> Iterator[tuple[int, int, int, bool]]:
    """batch, vocab, members, filtered; what matters most first."""
    if dry:
        yield from ((1, 500, 1, False), (2, 700, 2, True), (2, 700, 3, False))
        return
    if quick:
        yield from ((batch, 128256, 1, filtered) for batch in QUICK_BATCHES for filtered in (False, True))
        return
    order = sorted(VOCABS, key=lambda vocab: vocab != 128256)
    yield from ((batch, vocab, 1, filtered) for vocab in order for filtered in (False, True) for batch in BATCHES)
    yield from ((batch, vocab, members, False) for members in MEMBERS[1:] for vocab in order for batch in BATCHES)
    yield from ((batch, 128256, members, True) for members in MEMBERS[1:] for batch in BATCHES)


def calls_to_compile(device: torch.device, dry: bool, quick: bool) -> list[Callable[[], Any]]:
    """A call for each kernel that is timed; none is compiled for a batch."""
    kinds = dict.fromkeys(case[1:] for case in cases(dry, quick))
    return [operation.call for kind in kinds for operation in operations(make_inputs(2, *kind, device=device, seed=0))]


def time_case(clock: Clock, case: tuple[int, int, int, bool], phase: str, dry: bool) -> Iterator[Row]:
    """phase: "own", "PyTorch" or "torch.compile"."""
    first = make_inputs(*case, clock.device, 0)
    if case[0] <= 8 and phase == "own":
        check(first)
    size = sum(values.numel() * values.element_size() for values in first.logits)
    sets = [first, *[make_inputs(*case, clock.device, seed) for seed in range(1, sets_of(size, dry))]]
    graphs = not dry and clock.device.type == "cuda"
    ways = own_ways(sets, graphs) if phase == "own" else peer_ways(sets, phase == "torch.compile")
    bound = 1.0
    for operation, way, run in ways:
        try:
            seconds, spread = clock.measure(run)
        except Exception as error:  # noqa: BLE001 -- the other cases are timed whatever it is
            yield Row(operation, way, *case, None, None, None, f"{type(error).__name__}: {error}")
            continue
        bound = seconds if way == "read" else bound
        if way != "read" or phase == "own":
            yield Row(operation, way, *case, seconds, spread, seconds / bound)


def sets_of(size: int, dry: bool) -> int:
    """So many sets of inputs of that many bytes are more than a last cache holds."""
    return 1 if dry else max(1, min(MOST_SETS, int(CACHE_BYTES / size) + 1))


def table_of(rows: list[Row], card: str) -> Table:
    table = Table(title=f"{card}: microseconds a call (times the read of the same bytes)", title_justify="left")
    names = ["read", "eager", "graph", "PyTorch", "torch.compile"]
    for column in ("operation", "batch", "vocabulary", "members", "filtered", *names):
        table.add_column(column, justify="right" if column in names else "left")
    groups: dict[tuple, dict[str, Row]] = {}
    for row in rows:
        groups.setdefault((row.operation, row.batch, row.vocab, row.members, row.filtered), {})[row.way] = row
    for key, found in groups.items():
        cells = [_cell(found.get(name)) for name in names]
        table.add_row(*(str(part) for part in key), *cells)
    return table


def _cell(row: Row | None) -> str:
    if row is None:
        return "-"
    return "failed" if row.seconds is None else f"{row.seconds * 1e6:.1f} ({row.ratio:.2f})"


def phases(dry: bool, quick: bool) -> Iterator[tuple[str, tuple[int, int, int, bool]]]:
    """The cases that peers are timed at come first, since the budget may end before the others."""
    every = list(cases(dry, quick))
    shared = [case for case in every if case[1:3] == PEERS]
    others = [case for case in every if case not in shared]
    yield from (("own", case) for case in shared)
    if not quick:
        yield from ((peer, case) for peer in ("PyTorch", "torch.compile") for case in shared)
    yield from (("own", case) for case in others)
    if not quick:
        yield from (("PyTorch", case) for case in others)


def rows_of(clock: Clock, phase: str, case: tuple[int, int, int, bool], dry: bool) -> Iterator[Row]:
    """Of a case; what fails before its first call is a row too."""
    try:
        yield from time_case(clock, case, phase, dry)
    except Exception as error:  # noqa: BLE001 -- likewise
        yield Row("verify_chain", phase, *case, None, None, None, f"{type(error).__name__}: {error}")


def main(
    json_path: Annotated[Path | None, typer.Option("--json", help="Write one JSON line for each time.")] = None,
    dry: Annotated[bool, typer.Option("--dry", help="On the CPU, at tiny sizes.")] = False,
    quick: Annotated[bool, typer.Option("--quick", help="Few cases and no peers, for tuning.")] = False,
    budget: Annotated[float, typer.Option(help="Seconds after which no case is begun.")] = BUDGET,
    dependent: Annotated[bool, typer.Option("--dependent", help="By programmatic dependent launches.")] = False,
) -> None:
    """Time the operations on the GPU and print a table; exit with 1 where one failed."""
    if not dry and not torch.cuda.is_available():
        raise typer.BadParameter("no GPU: torch sees no CUDA device")
    clock = Clock(torch.device("cpu" if dry else "cuda"))
    card = "dry run" if dry else torch.cuda.get_device_name()
    facts = environment() | {"card": card, "dependent_launches": dependent}
    begin, rows, left_out = time.monotonic(), [], []
    out = json_path.open("w", encoding="utf-8") if json_path is not None else None
    for phase, case in phases(dry, quick):
        if time.monotonic() - begin > budget:
            left_out.append((phase, *case))
            continue
        with dependent_launches(dependent):
            for row in rows_of(clock, phase, case, dry):
                rows.append(row)
                if out is not None:
                    out.write(json.dumps(asdict(row) | {"environment": facts}) + "\n")
                    out.flush()
    if out is not None:
        out.close()
    Console(width=TABLE_WIDTH, file=sys.stdout).print(table_of(rows, card))
    if left_out:
        print(f"left out after {budget:.0f} s (phase, batch, vocabulary, members, filtered): {left_out}")
    problems = [row for row in rows if row.problem is not None]
    for row in problems:
        print(f"failed: {row.operation}, {row.way}, batch {row.batch}, vocabulary {row.vocab}: {row.problem}")
    if problems:
        raise SystemExit(1)


if __name__ == "__main__":
    typer.run(main)
