"""Every Triton kernel compiles for the GPUs that are supported, on a machine that has none."""

from __future__ import annotations

import functools
import importlib.util
import re
from pathlib import Path

import pytest

import specens_kernels.ops
from bench.gpu.static import ARCHITECTURES, ROOMS, compile_rooms, report

OPS = Path(specens_kernels.ops.__file__).parent


def test_rooms_with_triton_kernels_are_found():
    assert sorted(path.parent.name for path in OPS.glob("*/triton_kernel.py")) == sorted(ROOMS)
    assert importlib.util.find_spec("triton") is not None, "Triton is not installed"


@functools.cache
def compiled(room):
    return compile_rooms([room])


@pytest.mark.parametrize("room", ROOMS)
def test_the_kernels_of_a_room_compile_for_every_architecture_within_the_bars(room):
    assert {binary.architecture for binary in compiled(room)} == set(ARCHITECTURES)
    _, missed = report(compiled(room))
    assert missed == []


def test_every_kernel_that_is_written_is_compiled_by_some_room():
    source = "".join(path.read_text() for room in ROOMS for path in (OPS / room).glob("triton_*.py"))
    written = set(re.findall(r"def (\w+_kernel)\(", source))
    assert written <= {binary.kernel for room in ROOMS for binary in compiled(room)}, "aot_variants leaves out a kernel"
