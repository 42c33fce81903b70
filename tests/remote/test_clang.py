"""libspecens and torch's operators as compilers for 64-bit ARM see them, on Linux and macOS: GCC, and the Clang that
comes with Zig, whose PyPI package has the headers of both."""

from __future__ import annotations

import os
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest
import torch
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
        "CMAKE_BUILD_TYPE": "Debug",  # what Clang warns of does not depend on optimization
        "CMAKE_TRY_COMPILE_TARGET_TYPE": "STATIC_LIBRARY",  # to link a program Zig would compile its C++ library first
        "CMAKE_AR": tool(tmp_path, "ar"),
        "CMAKE_RANLIB": tool(tmp_path, "ranlib"),
        "CMAKE_OSX_SYSROOT": "",
        "CMAKE_OSX_DEPLOYMENT_TARGET": "",
    }
    library = build_library(tmp_path / "build", options) / "libspecens.a"
    members = subprocess.run([tool(tmp_path, "ar"), "t", library], capture_output=True, text=True, check=True).stdout
    assert "rows_neon.cpp.o" in members


@pytest.mark.parametrize("compiler", ["aarch64-linux-gnu-g++", "aarch64-linux-gnu", "aarch64-macos"])
def test_the_operators_of_torch_compile_without_a_warning(tmp_path, compiler):
    """By the headers of the torch that is here: those of its stable ABI are the same for all processors."""
    command = [compiler] if "g++" in compiler else [tool(tmp_path, "c++"), "-target", compiler]
    if "g++" in compiler and shutil.which(compiler) is None:
        pytest.skip(f"{compiler} is not installed: Debian's g++-aarch64-linux-gnu")
    if "g++" not in compiler and not ZIG.is_file():
        pytest.skip("Zig is not in build/zig: make test-arm installs it")
    flags = [
        "-std=c++20",
        "-c",  # Zig takes no -fsyntax-only
        "-fvisibility=hidden",
        "-Wall",
        "-Wextra",
        "-Werror",
        "-DTORCH_TARGET_VERSION=0x020b000000000000ULL",
    ]
    headers = ["-DTORCH_STABLE_ONLY", "-I", ROOT / "csrc", "-isystem", Path(torch.__file__).parent / "include"]
    sources = sorted((ROOT / "csrc" / "operators").glob("*.cpp"))
    assert len(sources) >= 8
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        runs = [[*command, *flags, *headers, source, "-o", tmp_path / f"{source.stem}.o"] for source in sources]
        list(pool.map(partial(subprocess.run, check=True), runs))
