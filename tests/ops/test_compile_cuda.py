"""Every Triton kernel compiles for the GPUs that are supported, on a machine that has none."""

from __future__ import annotations

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


@pytest.mark.parametrize("room", ROOMS)
def test_the_kernels_of_a_room_compile_for_every_architecture_within_the_bars(room):
    binaries = compile_rooms([room])
    assert {binary.architecture for binary in binaries} == set(ARCHITECTURES)
    source = "".join(path.read_text() for path in (OPS / room).glob("triton_*.py"))
    written = set(re.findall(r"def (\w+_kernel)\(", source))
    assert written <= {binary.kernel for binary in binaries}, "aot_variants leaves out a kernel of the room"
    _, missed = report(binaries)
    assert missed == []
