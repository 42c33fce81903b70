"""Every Triton kernel compiles for sm_90, in the variant that does the most; by make test-full each for all GPUs."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest
from cases import FULL

import specens_kernels.ops
from bench.gpu.static import ARCHITECTURES, OPERATIONS, compile_operations, report

OPS = Path(specens_kernels.ops.__file__).parent
COMPILED_FOR, MOST_VARIANTS = (ARCHITECTURES, None) if FULL else ((90,), 1)


def test_operations_with_triton_kernels_are_found():
    assert sorted(path.parent.name for path in OPS.glob("*/triton_kernel.py")) == sorted(OPERATIONS)
    assert importlib.util.find_spec("triton") is not None, "Triton is not installed"


@pytest.fixture(scope="module")
def binaries():
    """All operations at once: a process that can compile takes seconds to begin."""
    return compile_operations(OPERATIONS, COMPILED_FOR, MOST_VARIANTS)


@pytest.mark.parametrize("operation", OPERATIONS)
def test_the_kernels_of_an_operation_compile_within_the_bars(binaries, operation):
    own = [binary for binary in binaries if binary.operation == operation]
    assert {binary.architecture for binary in own} == set(COMPILED_FOR)
    _, missed = report(own)
    assert missed == []


def test_every_kernel_that_is_written_is_compiled_by_some_operation(binaries):
    source = "".join(path.read_text() for operation in OPERATIONS for path in (OPS / operation).glob("triton_*.py"))
    written = set(re.findall(r"def (\w+_kernel)\(", source))
    assert written <= {binary.kernel for binary in binaries}, "bench/gpu/variants leaves out a kernel"
