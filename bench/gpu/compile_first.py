"""Compiles what checks and times launch, before they run: `python -m bench.gpu.compile_first --part 3/16`.

Triton keeps what it compiles on disk, so processes that share the work leave the kernels to those that follow.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Annotated, Any

import torch
import typer

from bench.gpu import checks, times
from specens_kernels import warmup
from specens_kernels.parts.launches import dependent_launches


def calls(device: torch.device, dry: bool, quick: bool) -> Iterator[Callable[[], Any]]:
    """What is launched, of small batches; last what the quick run of times launches dependently."""
    for case in checks.cases():
        arguments = checks.mapped(checks.arguments_of(case, 0), lambda tensor: tensor.to(device))
        yield partial(checks.outcome, case, arguments, None)
    yield from times.calls_to_compile(device, dry, quick)
    yield from map(dependently, times.calls_to_compile(device, dry, True))


def dependently(call: Callable[[], Any]) -> Callable[[], Any]:
    """The call, by programmatic dependent launches."""

    def run() -> Any:
        with dependent_launches():
            return call()

    return run


def main(
    part: Annotated[str, typer.Option(help="i/n: every n-th call from the i-th.")] = "0/1",
    dry: Annotated[bool, typer.Option("--dry", help="Sizes of the dry run of times.")] = False,
    quick: Annotated[bool, typer.Option("--quick", help="Sizes of the quick run of times.")] = False,
) -> None:
    """Compile one part."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    index, count = map(int, part.split("/"))
    compiled = sum(warmup(call, workers=1) for call in list(calls(device, dry, quick))[index::count])
    print(f"{compiled} kernels")


if __name__ == "__main__":
    typer.run(main)
