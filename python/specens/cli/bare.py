"""The command where packages of the extra `driver` are missing: doctor works, all else says what to install."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from importlib.metadata import version
from importlib.util import find_spec

from specens.cli import DRIVER, INSTALL_DRIVER

FAILED = 1


def missing_packages() -> list[str]:
    """Those of the extra `driver` that are not installed; looks, and imports nothing."""
    return [name for name in DRIVER if find_spec(name) is None]


def run(arguments: Sequence[str], missing: Sequence[str]) -> int:
    """Do what can be done without them; the exit code."""
    if list(arguments) == ["--version"]:
        print(version("specens-kernels"))
        return 0
    if list(arguments) in (["doctor"], ["doctor", "--json"], ["doctor", "--report"]):
        _doctor(arguments[1:])
        return 0
    sys.stderr.write(
        f"specens: not installed: {', '.join(missing)}. {INSTALL_DRIVER} installs what the command needs; "
        "the operations of specens_kernels need none of it. specens doctor shows what is here.\n"
    )
    return FAILED


def _doctor(options: Sequence[str]) -> None:
    from specens.cli.doctor import examine, report_dict, report_markdown
    from specens.cli.openmp import wait_briefly

    wait_briefly()
    facts = examine()
    if "--json" in options:
        print(json.dumps(report_dict(facts)))
        return
    if "--report" in options:
        print(report_markdown(facts))
        return
    width = max(len(fact.name) for fact in facts)
    for fact in facts:
        mark = {True: "yes", False: "no", None: ""}[fact.ok]
        print(f"{fact.name:{width}}  {mark:3}  {fact.value}")
