"""Every Triton kernel compiles for sm_90, and by make test-full for all GPUs that are supported, without a GPU."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest
from cases import FULL

import specens_kernels.ops
from bench.gpu.static import ARCHITECTURES, ROOMS, compile_rooms, report

OPS = Path(specens_kernels.ops.__file__).parent
COMPILED_FOR = ARCHITECTURES if FULL else (90,)


def test_rooms_with_triton_kernels_are_found():
    assert sorted(path.parent.name for path in OPS.glob("*/triton_kernel.py")) == sorted(ROOMS)
    assert importlib.util.find_spec("triton") is not None, "Triton is not installed"


@pytest.fixture(scope="module")
def binaries():
    """All rooms at once: a process that can compile takes seconds to begin."""
    return compile_rooms(ROOMS, COMPILED_FOR)


@pytest.mark.parametrize("room", ROOMS)
def test_the_kernels_of_a_room_compile_within_the_bars(binaries, room):
    own = [binary for binary in binaries if binary.room == room]
    assert {binary.architecture for binary in own} == set(COMPILED_FOR)
    _, missed = report(own)
    assert missed == []


def test_every_kernel_that_is_written_is_compiled_by_some_room(binaries):
    source = "".join(path.read_text() for room in ROOMS for path in (OPS / room).glob("triton_*.py"))
    written = set(re.findall(r"def (\w+_kernel)\(", source))
    assert written <= {binary.kernel for binary in binaries}, "aot_variants leaves out a kernel"
