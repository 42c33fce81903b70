"""verify_chain, sample and the copies of tree nodes timed on a GPU: `python -m bench.gpu.times --json FILE`.

Each case is held against a device copy of the same bytes, the least that reading the logits once can take, and against
plain PyTorch, eager and compiled. Inputs are made on the device; where they fit into the last cache several sets are
taken in turn. `--dry` runs everything on the CPU at tiny sizes, to see that the program works.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.table import Table
from torch import Tensor

from bench.environment import environment
from bench.peers import plain_pytorch
from specens_kernels import Mixture, Sampling, Verdict, sample, verify_chain

DRAFT_LEN = 5
BATCHES, VOCABS, MEMBERS = (1, 8, 32, 128, 512), (32000, 128256, 262144), (1, 2, 3)
FILTERED = Sampling(temperature=0.7, top_k=50, top_p=0.95)
CACHE_BYTES, MOST_SETS = 200e6, 8  # more than a last cache holds, over all sets of inputs
ROUNDS, SECONDS_A_CASE = 20, 0.5
BUDGET = 300.0  # seconds; cases behind it are left out, and named
TABLE_WIDTH = 200
PEERS = (1, 128256)  # members and vocabulary of the cases that compiled PyTorch is timed at


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
    seconds: float
    spread: float  # of the middle half of the rounds
    ratio: float  # to the copy of the same bytes


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
    coins = torch.rand(batch, DRAFT_LEN + 1, generator=generator, device=device, dtype=torch.float64)
    draws = torch.rand(batch, DRAFT_LEN, generator=generator, device=device, dtype=torch.float64)
    rows = range(DRAFT_LEN)
    tokens = [sample(drafter[:, row], sampling=sampling, uniforms=draws[:, row].contiguous()).tokens for row in rows]
    return Inputs([first, *others], outside, torch.stack(tokens, 1), coins, sampling)


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
    place = -1

    def run() -> Any:
        nonlocal place
        place = (place + 1) % len(runs)
        return runs[place]()

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


def ways(inputs: list[Inputs], graphs: bool, peers: bool) -> Iterator[tuple[str, str, Callable[[], Any]]]:
    """operation, way and call; the copy is first."""
    copies = [torch.empty_like(values) for values in inputs[0].logits]
    yield "verify_chain", "copy", in_turn([lambda i=i: [c.copy_(v) for c, v in zip(copies, i.logits)] for i in inputs])
    outs = [buffers(i) for i in inputs]
    calls = [
        lambda i=i, out=out: verify_chain(i.members, i.draft_tokens, out=out, **i.arguments())
        for i, out in zip(inputs, outs)
    ]
    yield "verify_chain", "eager", in_turn(calls)
    if graphs:
        yield "verify_chain", "graph", graphed(calls)
    if inputs[0].sampling is not FILTERED:
        weights = (1 / len(inputs[0].members),) * len(inputs[0].members)
        plain = [
            lambda i=i: plain_pytorch.verify(i.members, weights, i.draft_logits, i.draft_tokens, i.uniforms)
            for i in inputs
        ]
        yield "verify_chain", "PyTorch", in_turn(plain)
        if peers:
            verify = torch.compile(plain_pytorch.verify, dynamic=True)
            compiled = [
                lambda i=i: verify(i.members, weights, i.draft_logits, i.draft_tokens, i.uniforms) for i in inputs
            ]
            yield "verify_chain", "torch.compile", in_turn(compiled)
    rows = [[values[:, 0].contiguous() for values in i.members[:1]] for i in inputs]
    row_copy = torch.empty_like(rows[0][0])
    yield "sample", "copy", in_turn([lambda r=r: row_copy.copy_(r[0]) for r in rows])
    coins = [i.uniforms[:, 0].contiguous() for i in inputs]
    draws = [lambda r=r, i=i, c=c: sample(r, sampling=i.sampling, uniforms=c) for r, i, c in zip(rows, inputs, coins)]
    yield "sample", "eager", in_turn(draws)
    if graphs:
        yield "sample", "graph", graphed(draws)


def check(inputs: Inputs) -> None:
    """Raise where the tokens are not the reference's, but for one request in fifty, which may be a near tie."""
    calls = [
        verify_chain(inputs.members, inputs.draft_tokens, backend=backend, **inputs.arguments()).tokens
        for backend in (None, "reference")
    ]
    different = int((calls[0] != calls[1]).any(1).sum())
    if different > max(1, len(calls[0]) // 50):
        raise RuntimeError(f"{different} of {len(calls[0])} requests differ from the reference")


def cases(dry: bool) -> Iterator[tuple[int, int, int, bool]]:
    """batch, vocab, members, filtered; what matters most first."""
    if dry:
        yield from ((1, 500, 1, False), (2, 700, 2, True), (2, 700, 3, False))
        return
    order = sorted(VOCABS, key=lambda vocab: vocab != 128256)
    yield from ((batch, vocab, 1, filtered) for vocab in order for filtered in (False, True) for batch in BATCHES)
    yield from ((batch, vocab, members, False) for members in MEMBERS[1:] for vocab in order for batch in BATCHES)
    yield from ((batch, 128256, members, True) for members in MEMBERS[1:] for batch in BATCHES)


def time_case(clock: Clock, batch: int, vocab: int, members: int, filtered: bool, dry: bool) -> Iterator[Row]:
    first = make_inputs(batch, vocab, members, filtered, clock.device, 0)
    if batch <= 8:
        check(first)
    size = sum(values.numel() * values.element_size() for values in first.logits)
    sets = 1 if dry else max(1, min(MOST_SETS, int(CACHE_BYTES / size)))
    inputs = [first, *[make_inputs(batch, vocab, members, filtered, clock.device, seed) for seed in range(1, sets)]]
    bound = 1.0
    peers = (members, vocab) == PEERS
    for operation, way, run in ways(inputs, not dry and clock.device.type == "cuda", peers and not dry):
        seconds, spread = clock.measure(run)
        bound = seconds if way == "copy" else bound
        yield Row(operation, way, batch, vocab, members, filtered, seconds, spread, seconds / bound)


def table_of(rows: list[Row], card: str) -> Table:
    table = Table(title=f"{card}: microseconds a call (times the copy of the same bytes)", title_justify="left")
    names = ["copy", "eager", "graph", "PyTorch", "torch.compile"]
    for column in ("operation", "batch", "vocabulary", "members", "filtered", *names):
        table.add_column(column, justify="right" if column in names else "left")
    groups: dict[tuple, dict[str, Row]] = {}
    for row in rows:
        groups.setdefault((row.operation, row.batch, row.vocab, row.members, row.filtered), {})[row.way] = row
    for key, found in groups.items():
        cells = [f"{r.seconds * 1e6:.1f} ({r.ratio:.2f})" if (r := found.get(name)) else "-" for name in names]
        table.add_row(*(str(part) for part in key), *cells)
    return table


def main(
    json_path: Annotated[Path | None, typer.Option("--json", help="Write one JSON line for each time.")] = None,
    dry: Annotated[bool, typer.Option("--dry", help="On the CPU, at tiny sizes.")] = False,
    budget: Annotated[float, typer.Option(help="Seconds after which no case is begun.")] = BUDGET,
) -> None:
    """Time the operations on the GPU and print a table."""
    if not dry and not torch.cuda.is_available():
        raise typer.BadParameter("no GPU: torch sees no CUDA device")
    clock = Clock(torch.device("cpu" if dry else "cuda"))
    card = "dry run" if dry else torch.cuda.get_device_name()
    facts = environment() | {"card": card}
    begin, rows, left_out = time.monotonic(), [], []
    out = json_path.open("w", encoding="utf-8") if json_path is not None else None
    for case in cases(dry):
        if time.monotonic() - begin > budget:
            left_out.append(case)
            continue
        for row in time_case(clock, *case, dry):
            rows.append(row)
            if out is not None:
                out.write(json.dumps(asdict(row) | {"environment": facts}) + "\n")
                out.flush()
    if out is not None:
        out.close()
    Console(width=TABLE_WIDTH, file=sys.stdout).print(table_of(rows, card))
    if left_out:
        print(f"left out after {budget:.0f} s (batch, vocabulary, members, filtered): {left_out}")


if __name__ == "__main__":
    typer.run(main)
