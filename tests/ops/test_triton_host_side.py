"""The host's side of GPU calls, in processes where a stub stands for the GPU: see tests/gpu_stub."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from cases import FULL

TESTS = Path(__file__).parents[1]
LIMIT = 600  # seconds


QUICK = ("ops/test_gumbel.py", "ops/test_triton_reports.py")


def run_under_stub(plugin: str, *arguments: str) -> str:
    """What pytest says of tests that run there."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", f"gpu_stub.{plugin}", "-p", "no:xdist", *arguments]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    result = subprocess.run(
        command, cwd=TESTS, env=environment, capture_output=True, text=True, timeout=LIMIT, check=False
    )
    if result.returncode != 0:
        pytest.fail(result.stdout[-8000:] + result.stderr[-2000:], pytrace=False)
    return result.stdout


def test_calls_are_keyed_replayed_and_compiled_as_seldom_as_they_should_be():
    assert " passed" in run_under_stub("plugin", "gpu_stub/check_host_side.py")


def test_the_front_end_of_the_jit_compiles_what_tests_launch():
    """Interpreted kernels never see it: it refuses, for one, len(None), which a branch not taken hides there."""
    chosen, variants = (("ops",), 300) if FULL else (QUICK, 40)
    assert "compiled to TTIR" in run_under_stub("front_end", *chosen, "-k", "triton", f"--variants={variants}")


@pytest.mark.skipif(not FULL, reason="times, after SPECENS_TEST_FULL: whole compilations of six kernels")
def test_a_call_costs_the_host_a_few_launches_of_the_jit():
    code = (
        "from bench.gpu import host_time; host_time.use_stub(); "
        "print([time for time in host_time.measure() if time.missed])"
    )
    result = subprocess.run([sys.executable, "-c", code], cwd=TESTS.parent, capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"
