"""Check, then time: the operation, its bound and its rivals, side by side."""

from __future__ import annotations

import importlib
import pkgutil
from types import ModuleType

from rich.console import Console

from bench import ops, peers
from bench.case import Case, Options, Run
from bench.check import WrongResultError
from bench.report import JsonLines, Row, print_missing_peers, print_summary, print_tables
from bench.timing import FULL, QUICK, interleave


def operations() -> dict[str, str]:
    """The operations that have a bench file, and the first line of its docstring."""
    names = sorted(module.name for module in pkgutil.iter_modules(ops.__path__))
    return {name: (_bench_file(name).__doc__ or "").partition("\n")[0] for name in names}


def run_operation(name: str, options: Options, console: Console, lines: JsonLines) -> None:
    """Measure all cases of an operation; print the table, also of what was measured before an error or Ctrl-C."""
    rows: list[Row] = []
    try:
        with Console(stderr=True).status(name) as status:
            for case in _bench_file(name).cases(options):
                sizes = ", ".join(f"{key} {value}" for key, value in (case.shape | case.setting).items())
                status.update(f"{name}: {sizes}, {case.dtype}")
                rows.append(measure(case, options))
                lines.write(name, rows[-1])
    finally:
        print_tables(console, name, rows)
    print_summary(console, rows)
    print_missing_peers(console, peers.missing_peers(options))


def measure(case: Case, options: Options) -> Row:
    """Raises WrongResultError where the operation's result is not the reference's."""
    near_ties = {options.backend: case.check(case.result(case.run()))}
    runs: dict[str, Run] = {**case.bounds, options.backend: case.run}
    faults: dict[str, str] = {}
    for name, rival in case.rivals.items():
        try:
            result = rival.run()
        except (RuntimeError, LookupError, TypeError, ValueError) as error:  # torch.compile without a compiler, for one
            reason, *_ = str(error).splitlines() or [type(error).__name__]
            faults[name] = f"failed: {reason}"
            continue
        runs[name] = rival.run
        if rival.fault is not None:
            faults[name] = f"wrong result: {rival.fault}"
        try:
            near_ties |= {name: case.check(result)} if rival.checked else {}
        except WrongResultError as error:
            faults[name] = f"wrong result: {error}"
    return Row(
        shape=case.shape,
        setting=case.setting,
        dtype=case.dtype,
        bounds=tuple(case.bounds),
        operation=options.backend,
        bytes_needed=case.bytes_needed,
        near_ties=near_ties,
        faults=faults,
        bars=case.bars,
        table=case.table,
        timings=interleave(runs, QUICK if options.quick else FULL),
    )


def _bench_file(name: str) -> ModuleType:
    return importlib.import_module(f"bench.ops.{name}")
