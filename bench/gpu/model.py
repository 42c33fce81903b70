"""What calls take on a GPU, predicted without one: `python -m bench model`.

A kernel takes its start, and what takes longest of its bytes over the bandwidth, its instructions over the rate of all
multiprocessors, and its waves of programs, each of which waits for its loads and issues its own instructions. Bytes,
operations and loads are counted in Triton's interpreter. A number here is a prediction; what was measured is beside it.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from bench.gpu import traffic  # which has kernels interpreted

# isort: split
import torch
import typer
from rich.console import Console
from rich.table import Table

from bench.gpu import times

RESULTS = Path(__file__).parents[1] / "results"
COUNTED_BATCH, VOCAB = 2, 128256
MICROSECOND = 1e-6


@dataclass(frozen=True)
class Device:
    """The coefficients of a model of time."""

    name: str
    multiprocessors: int
    issue_rate: float  # instructions of a warp a second, of one multiprocessor
    instructions: float  # of a warp for an operation that the interpreter counts on 32 lanes
    warps: int  # of one multiprocessor at once
    bandwidth: float  # bytes a second
    load: float  # seconds that a program waits for one load and what depends on it
    start: float  # seconds of a kernel that does nothing
    between: float  # seconds between two kernels of a graph


DEVICES = {
    "h200": Device(
        name="NVIDIA H200",
        multiprocessors=132,  # as torch tells
        issue_rate=4 * 1.98e9 * 0.63,  # schedulers, clock, and the share of cycles in which one issues: Nsight Compute
        instructions=2.0,  # statistics_kernel: 6 operations a token counted, about 12 instructions in its SASS
        warps=32,  # Nsight Compute: 30 of the statistics kernel, which registers limit to 32
        bandwidth=3.5e12,  # the fastest torch.amax of h200.jsonl
        load=0.23e-6,  # next_token_kernel and tree_kernel at batch 8 in h200-kernels.jsonl, by their 15 and 35 loads
        start=2e-6,  # statistics_kernel of `sample` at batch 8, ibid.
        between=1e-6,  # graphs of h200.jsonl over the sum of their kernels, by the number of launches
    )
}


def kernel_time(device: Device, kernel: traffic.Kernel, scale: float) -> float:
    """Seconds of a kernel of which one of a smaller batch was counted."""
    programs = kernel.programs * scale
    own = kernel.operations / kernel.programs / 32 * device.instructions / device.issue_rate
    at_once = device.multiprocessors * max(device.warps // kernel.num_warps, 1)
    wave = max(kernel.loads * device.load, own)
    issue = own * programs / device.multiprocessors
    return device.start + max(kernel.bytes * scale / device.bandwidth, issue, math.ceil(programs / at_once) * wave)


def call_time(device: Device, kernels: list[traffic.Kernel], scale: float) -> float:
    """Seconds of a call from a graph."""
    return sum(kernel_time(device, kernel, scale) + device.between for kernel in kernels)


def counts(vocab: int) -> Iterator[tuple[str, bool, int, list[traffic.Kernel]]]:
    """Operation, whether it is filtered, the bytes that it has to read a request, and its kernels."""
    for filtered in (False, True):
        inputs = times.make_inputs(COUNTED_BATCH, vocab, 1, filtered, torch.device("cpu"), 0)
        for operation in times.operations(inputs, backend="triton"):
            if operation.name == "compact_kv":  # moved by CUDA C++
                continue
            with traffic.counted() as counted:
                operation.call()
            size = sum(values.numel() * values.element_size() for values in operation.read)
            yield operation.name, filtered, size // COUNTED_BATCH, counted.kernels


def measured(name: str) -> dict[tuple[str, bool, int], float]:
    """Seconds from graphs at VOCAB with one member, by operation, filters and batch; empty where no file has them."""
    path = RESULTS / f"{name}.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    wanted = [row for row in rows if (row["way"], row["vocab"], row["members"]) == ("graph", VOCAB, 1)]
    return {(row["operation"], row["filtered"], row["batch"]): row["seconds"] for row in wanted if row["seconds"]}


def main(
    device: Annotated[str, typer.Option(help=f"One of {', '.join(DEVICES)}.")] = "h200",
    vocab: Annotated[int, typer.Option(min=1000, help="Tokens of the vocabulary.")] = VOCAB,
) -> None:
    """Print predicted microseconds a call, bfloat16, five drafts of an outside model, from a graph."""
    if device not in DEVICES:
        raise typer.BadParameter(f"expected one of {', '.join(DEVICES)}, got {device}", param_hint="--device")
    model, before = DEVICES[device], measured(device) if vocab == VOCAB else {}
    title = (
        f"{model.name}: predicted microseconds (times a read at {model.bandwidth / 1e12:.1f} TB/s) [measured earlier]"
    )
    table = Table(title=title, title_justify="left")
    for column in ("operation", "filtered", "launches", *(f"batch {batch}" for batch in times.BATCHES)):
        table.add_column(column)
    for name, filtered, size, kernels in counts(vocab):
        cells = []
        for batch in times.BATCHES:
            seconds = call_time(model, kernels, batch / COUNTED_BATCH)
            known = before.get((name, filtered, batch))
            cell = f"{seconds / MICROSECOND:.0f} ({seconds * model.bandwidth / (size * batch):.1f})"
            cells.append(cell + (f" [{known / MICROSECOND:.0f}]" if known else ""))
        table.add_row(name, "yes" if filtered else "no", str(len(kernels)), *cells)
    Console(width=times.TABLE_WIDTH, file=sys.stdout, markup=False).print(table)


if __name__ == "__main__":
    typer.run(main)
