"""Every Triton kernel compiles for the GPUs that are supported, on a machine that has none."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest
from compile_triton import ARCHITECTURES, compile_rooms

import specens_kernels.ops

OPS = Path(specens_kernels.ops.__file__).parent
ROOMS = sorted(path.parent.name for path in OPS.glob("*/triton_kernel.py"))


def test_rooms_with_triton_kernels_are_found():
    assert "uniforms" in ROOMS
    assert importlib.util.find_spec("triton") is not None, "Triton is not installed"


@pytest.mark.parametrize("room", ROOMS)
def test_the_kernels_of_a_room_compile_for_every_architecture(room):
    binaries = compile_rooms([room])
    assert {binary["architecture"] for binary in binaries} == set(ARCHITECTURES)
    assert all(binary["ptx_bytes"] > 0 and binary["cubin_bytes"] > 0 for binary in binaries)
    source = "".join(path.read_text() for path in (OPS / room).glob("triton_*.py"))
    written = set(re.findall(r"def (\w+_kernel)\(", source))
    assert written <= {binary["kernel"] for binary in binaries}, "aot_variants leaves out a kernel of the room"
