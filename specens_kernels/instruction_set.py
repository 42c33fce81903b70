"""The instruction set that the C++ kernels use on the CPU: the best that the processor has, unless told otherwise."""

from __future__ import annotations

import os

import torch

VARIABLE = "SPECENS_INSTRUCTION_SET"
NAMES = ("plain", "avx2", "avx512", "neon")  # as C++'s InstructionSet


def available() -> tuple[str, ...]:
    """The instruction sets that this processor has, the best last; none where the extension is not loaded."""
    usable = torch.ops.specens.instruction_set(-1)[1] if _loaded() else 0
    return tuple(name for code, name in enumerate(NAMES) if usable >> code & 1)


def in_use() -> str | None:
    """The one that is used; None where the extension is not loaded."""
    return NAMES[torch.ops.specens.instruction_set(-1)[0]] if _loaded() else None


def use(name: str) -> None:
    """Use this one from now on, in all threads. For tests: a running call may take either."""
    if name not in NAMES:
        raise ValueError(f"{VARIABLE}: expected one of {', '.join(NAMES)}, got {name!r}")
    if not _loaded():
        return  # there is no C++ that could use it, and `backends` says why
    if name not in available():
        raise RuntimeError(f"{VARIABLE}: this processor has {', '.join(available())}, not {name}")
    torch.ops.specens.instruction_set(NAMES.index(name))


def use_chosen() -> None:
    """Use what the environment variable names, if it is set."""
    if name := os.environ.get(VARIABLE):
        use(name)


def _loaded() -> bool:
    return hasattr(torch.ops.specens, "instruction_set")
