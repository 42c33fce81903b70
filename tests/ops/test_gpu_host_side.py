"""The host's side of GPU calls, in processes where a stub stands for the GPU: see tests/gpu_stub."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
LIMIT = 600  # seconds


def run_under_stub(*arguments: str) -> str:
    """What pytest says of tests that run there."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "gpu_stub.plugin", "-p", "no:xdist", *arguments]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    result = subprocess.run(
        command, cwd=TESTS, env=environment, capture_output=True, text=True, timeout=LIMIT, check=False
    )
    if result.returncode != 0:
        pytest.fail(result.stdout[-8000:] + result.stderr[-2000:], pytrace=False)
    return result.stdout


def test_calls_are_keyed_replayed_and_compiled_as_seldom_as_they_should_be():
    assert " passed" in run_under_stub("gpu_stub/check_host_side.py")
