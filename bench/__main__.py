"""The command line: which operations to measure, with what, and where the results go."""

from __future__ import annotations

import os
import subprocess
import sys

os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # read once, when torch loads: spinning threads disturb timings

from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console

import specens_kernels
from bench import runner
from bench.case import DTYPES, Options
from bench.check import WrongResultError
from bench.environment import environment
from bench.report import JsonLines, list_operations, print_environment

EVERYTHING = "all"
COUNTS = {
    "distributed": "bench.distributed",
    "traffic": "bench.gpu.traffic",
    "static": "bench.gpu.static",
    "host_time": "bench.gpu.host_time",
    "model": "bench.gpu.model",
}  # processes of their own
CONSOLE_WIDTH = 240  # of a table that goes to a file or a pipe
OWN_OPTIONS = ("model",)  # counts that have options
INTERRUPTED = 130


def main(
    name: Annotated[str | None, typer.Argument(help="An operation, 'all', or a count. Without it: a list.")] = None,
    peers: Annotated[bool, typer.Option("--peers", help="Time all peers that are installed.")] = False,
    threads: Annotated[int, typer.Option(min=1, help="Threads of everything that is timed.")] = 1,
    backend: Annotated[str, typer.Option(help="The backend to time.")] = "cpp",
    dtype: Annotated[
        list[str] | None, typer.Option(help="fp32, bf16 or fp16; may be repeated. [default: fp32]")
    ] = None,
    json: Annotated[Path | None, typer.Option(help="Write one JSON line for each time measured.")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Only small shapes, and few repetitions.")] = False,
) -> None:
    """Check an operation against its reference, then time it beside its bound and its peers."""
    console = Console()
    if not console.is_terminal:
        console = Console(width=CONSOLE_WIDTH)
    operations = runner.operations()
    if name is None:
        list_operations(console, operations)
        console.print(f"counts, without a GPU: {', '.join(COUNTS)}")
        return
    if name in COUNTS:
        raise typer.BadParameter(f"{name} counts, and takes no option of the benches", param_hint="NAME")
    if name != EVERYTHING and name not in operations:
        raise typer.BadParameter(f"expected {', '.join(operations)} or {EVERYTHING}, got {name}", param_hint="NAME")
    dtypes = tuple(dtype or ["fp32"])
    for wanted in dtypes:
        if wanted not in DTYPES:
            raise typer.BadParameter(f"expected {', '.join(DTYPES)}, got {wanted}", param_hint="--dtype")
    _check_backend(backend)
    torch.set_num_threads(threads)
    options = Options(backend=backend, dtypes=dtypes, peers=peers, quick=quick)
    _run(console, list(operations) if name == EVERYTHING else [name], options, json)


def _check_backend(backend: str) -> None:
    known = specens_kernels.backends()
    if backend not in known:
        raise typer.BadParameter(f"expected {', '.join(known)}, got {backend}", param_hint="--backend")
    info = known[backend]
    if "cpu" not in info.devices:
        reason = info.reason or f"it runs on {', '.join(info.devices)}, and these benches time CPU tensors"
        raise typer.BadParameter(f"{backend} cannot be timed here: {reason}", param_hint="--backend")


def _run(console: Console, names: list[str], options: Options, json: Path | None) -> None:
    facts = environment()
    print_environment(console, facts)
    with JsonLines(json, facts) as lines:
        try:
            for name in names:
                runner.run_operation(name, options, console, lines)
        except KeyboardInterrupt:
            raise typer.Exit(INTERRUPTED) from None
        except WrongResultError as error:
            console.print(f"{name}: not the reference's result: {error}", style="red", markup=False)
            raise typer.Exit(1) from None


if __name__ == "__main__":
    count, own = sys.argv[1:2], sys.argv[2:]
    if count and count[0] in COUNTS and (not own or count[0] in OWN_OPTIONS):
        sys.exit(subprocess.run([sys.executable, "-m", COUNTS[count[0]], *own], check=False).returncode)
    typer.run(main)
