"""What each kernel of a call takes on a GPU, by torch's profiler: `python -m bench.gpu.kernels`.

Beside bench.gpu.times, which times whole calls, this tells where their time goes. `--dry` runs on the CPU at tiny
sizes, where the profiler sees PyTorch's operators instead of kernels, to see that the program works.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.table import Table
from torch.profiler import ProfilerActivity, profile

from bench.environment import environment
from bench.gpu import times

CALLS = 20
BATCHES, VOCAB = (8, 128), 128256


def cases(dry: bool) -> Iterator[tuple[int, int, int, bool]]:
    """batch, vocab, members, filtered."""
    if dry:
        yield (2, 500, 1, False)
        return
    for batch in BATCHES:
        yield from ((batch, VOCAB, members, filtered) for members in (1, 2) for filtered in (False, True))


def profiled(run: Callable[[], Any], activity: ProfilerActivity) -> list[tuple[str, float, float]]:
    """Name, launches a call and microseconds a launch of each kernel, the longest first."""
    run()
    with profile(activities=[activity]) as found:
        for _ in range(CALLS):
            run()
        if activity is ProfilerActivity.CUDA:
            torch.cuda.synchronize()
    kernels = [
        (event.key, event.count / CALLS, event.device_time if event.device_time else event.cpu_time)
        for event in found.key_averages()
        if event.count >= CALLS and not event.key.startswith(("cuda", "cu", "Activity", "Lazy"))
    ]
    return sorted(kernels, key=lambda kernel: -kernel[1] * kernel[2])


def _line(operation: str, case: tuple[int, int, int, bool], kernel: tuple[str, float, float]) -> str:
    setting = dict(zip(("batch", "vocab", "members", "filtered"), case, strict=True))
    found = dict(zip(("kernel", "launches", "microseconds"), kernel, strict=True))
    return json.dumps({"operation": operation} | setting | found | {"environment": environment()})


def main(
    json_path: Annotated[Path | None, typer.Option("--json", help="Write one JSON line for each kernel.")] = None,
    dry: Annotated[bool, typer.Option("--dry", help="On the CPU, at tiny sizes.")] = False,
) -> None:
    """Print a table of the operations' kernels."""
    if not dry and not torch.cuda.is_available():
        raise typer.BadParameter("no GPU: torch sees no CUDA device")
    device = torch.device("cpu" if dry else "cuda")
    activity = ProfilerActivity.CPU if dry else ProfilerActivity.CUDA
    table = Table(title="microseconds a launch (launches a call)", title_justify="left")
    for column in ("operation", "batch", "members", "filtered", "kernels"):
        table.add_column(column, overflow="fold")
    lines: list[str] = []
    for case in cases(dry):
        sets = [times.make_inputs(*case, device=device, seed=seed) for seed in range(1 if dry else 2)]
        for same in zip(*(times.operations(inputs) for inputs in sets), strict=True):
            kernels = profiled(times.in_turn([operation.call for operation in same]), activity)
            cell = ", ".join(
                f"{name[:40]} {each:.1f}" + ("" if n == 1 else f" ({n:.1f})") for name, n, each in kernels[:9]
            )
            lines += [_line(same[0].name, case, kernel) for kernel in kernels]
            table.add_row(same[0].name, str(case[0]), str(case[2]), str(case[3]), cell)
    if json_path is not None:
        json_path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    Console(width=times.TABLE_WIDTH, file=sys.stdout).print(table)


if __name__ == "__main__":
    typer.run(main)
