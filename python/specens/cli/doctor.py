"""What is installed here, what works, and why the rest does not."""

from __future__ import annotations

import importlib
import os
import platform
from dataclasses import asdict, dataclass
from importlib import metadata
from typing import TYPE_CHECKING, Any

from specens.cli import DRIVER, INSTALL_DRIVER
from specens.cli.openmp import chosen

if TYPE_CHECKING:
    from rich.table import Table

OPTIONAL = ("flash-attn", "peft", "gguf", "llama-cpp-python", "llguidance", "lm-eval")
PACKAGES = ("specens-kernels", "torch", "triton", *DRIVER, *OPTIONAL)
# Left out here: packages that are only needed at times, and without which nothing is wrong.
PURPOSES = {
    "triton": "kernels on GPUs, pip install 'specens-kernels[triton]'",
    **dict.fromkeys(DRIVER, f"the driver, {INSTALL_DRIVER}"),
    "flash-attn": "faster attention of some models on GPUs",
    "peft": "adapters, pip install peft",
    "gguf": "GGUF files run by transformers, pip install gguf",
    "llama-cpp-python": "GGUF files run by llama.cpp, pip install 'specens-kernels[llama-cpp]'",
    "llguidance": "grammars, pip install 'specens-kernels[grammar]'",
    "lm-eval": "evaluation, pip install 'specens-kernels[evaluation]'",
}


@dataclass
class Fact:
    """One line of the report. ok: whether it is there and usable; None where it is only worth knowing."""

    name: str
    value: str
    ok: bool | None = None


def examine() -> list[Fact]:
    """Look at versions, backends, the GPU, the processor and threads; a part that fails is reported, not raised."""
    facts = [Fact("python", platform.python_version()), *(_version(name) for name in PACKAGES)]
    return facts + _backends() + _hardware()


def report_table(facts: list[Fact]) -> Table:
    """The report for a terminal."""
    from rich.markup import escape
    from rich.table import Table

    table = Table(show_header=False)
    marks = {True: "[green]yes[/]", False: "[red]no[/]", None: ""}
    for fact in facts:
        table.add_row(fact.name, marks[fact.ok], escape(fact.value))
    return table


def report_dict(facts: list[Fact]) -> dict[str, Any]:
    """The report as plain values for JSON."""
    return {"facts": [asdict(fact) for fact in facts]}


def report_markdown(facts: list[Fact]) -> str:
    """The report as an issue takes it: one fenced block, without names of users, paths or machines."""
    marks = {True: "yes", False: "no", None: ""}
    width = max(len(fact.name) for fact in facts)
    home = os.path.expanduser("~")
    lines = [f"{fact.name:{width}}  {marks[fact.ok]:3}  {fact.value.replace(home, '~')}" for fact in facts]
    return "\n".join(["```text", platform.platform(), *lines, *_variables(), "```"])


def _variables() -> list[str]:
    """The environment variables that change what is computed, as they are set."""
    names = sorted(name for name in os.environ if name.startswith(("SPECENS_", "OMP_", "TRITON_")))
    return [f"{name}={os.environ[name]}" for name in names]


def _version(name: str) -> Fact:
    try:
        return Fact(name, metadata.version(name), True)
    except metadata.PackageNotFoundError:
        purpose = PURPOSES.get(name)
        return Fact(name, "not installed" + (f" (for {purpose})" if purpose else ""), False)


def _backends() -> list[Fact]:
    kernels, failure = _import("specens_kernels")
    if failure is not None:
        return [failure]
    return [
        Fact(f"backend {name}", info.reason or _use(info), info.reason is None)
        for name, info in kernels.backends().items()
    ]


def _use(info: Any) -> str:
    """Where a backend can be used, and how."""
    where = f"usable on {', '.join(info.devices)}"
    return f"{where}, with {info.instruction_set}" if info.instruction_set is not None else where


def _hardware() -> list[Fact]:
    torch, failure = _import("torch")
    if failure is not None:
        return [failure]
    if torch.cuda.is_available():
        names = {torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())}
        gpu = Fact("GPU", f"{torch.cuda.device_count()} x {', '.join(sorted(names))}", True)
    elif torch.version.cuda is None:
        gpu = Fact("GPU", f"torch {torch.__version__} is built without CUDA", False)
    else:
        gpu = Fact("GPU", f"none found, though torch is built for CUDA {torch.version.cuda}", False)
    return [
        gpu,
        Fact("processor", f"{platform.machine()}, instruction set {torch.backends.cpu.get_cpu_capability()}"),
        Fact("threads", f"{torch.get_num_threads()} in torch, {os.cpu_count()} processors"),
        Fact("waiting threads", chosen()),
    ]


def _import(name: str) -> tuple[Any, Fact | None]:
    """A module, or the fact that and why it cannot be imported."""
    try:
        return importlib.import_module(name), None
    except (ImportError, OSError, RuntimeError, ValueError) as error:
        reason = str(error).strip().splitlines()
        return None, Fact(f"import {name}", f"{type(error).__name__}: {reason[0] if reason else ''}", False)
