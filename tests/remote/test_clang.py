"""libspecens as Clang compiles it for 64-bit ARM, on Linux and macOS: the one that comes with Zig, whose PyPI package
has the headers of both."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from remote.conftest import ROOT, build_library

ZIG = ROOT / "build" / "zig" / "ziglang" / "zig"  # as `make test-arm` installs it


def tool(folder: Path, name: str) -> str:
    """A program of one word, for what `zig NAME` is."""
    program = folder / f"zig-{name}"
    program.write_text(f'#!/bin/sh\nexec "{ZIG}" {name} "$@"\n')
    program.chmod(0o755)
    return str(program)


@pytest.mark.skipif(not ZIG.is_file(), reason="Zig is not in build/zig: make test-arm installs it")
@pytest.mark.parametrize(("system", "target"), [("Linux", "aarch64-linux-gnu"), ("Darwin", "aarch64-macos")])
def test_the_library_compiles_without_a_warning(tmp_path, system, target):
    options = {
        "CMAKE_SYSTEM_NAME": system,
        "CMAKE_SYSTEM_PROCESSOR": "aarch64" if system == "Linux" else "arm64",
        "CMAKE_CXX_COMPILER": tool(tmp_path, "c++"),
        "CMAKE_CXX_COMPILER_TARGET": target,
        "CMAKE_CXX_FLAGS": "-Werror",
        "CMAKE_AR": tool(tmp_path, "ar"),
        "CMAKE_RANLIB": tool(tmp_path, "ranlib"),
        "CMAKE_OSX_SYSROOT": "",
        "CMAKE_OSX_DEPLOYMENT_TARGET": "",
    }
    library = build_library(tmp_path / "build", options) / "libspecens.a"
    members = subprocess.run([tool(tmp_path, "ar"), "t", library], capture_output=True, text=True, check=True).stdout
    assert "rows_neon.cpp.o" in members
