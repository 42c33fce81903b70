"""The server: libspecens for 64-bit ARM, run by qemu; or this machine's, compiled with a sanitizer."""

from __future__ import annotations

import ctypes
import fcntl
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import c_abi
import pytest
from ops.test_row_kernels import RowKernels
from remote.remote import Server

from specens_kernels import instruction_set

ROOT = Path(__file__).parents[2]
SANITIZER = os.environ.get("SPECENS_TEST_SANITIZER")  # "thread": what several threads share is watched
SETS = [instruction_set.in_use()] if SANITIZER else ["neon", "plain"]
NATIVE = bool(SANITIZER) or platform.machine() == "aarch64"
THREADS = 4 if SANITIZER else 2


def _tool(*names: str) -> str:
    """The first of these programs that is installed, or beside this Python."""
    folders = os.pathsep.join([os.environ.get("PATH", ""), str(Path(sys.executable).parent)])
    found = next((path for name in names if (path := shutil.which(name, path=folders))), None)
    if found is None:
        pytest.skip(f"not installed: {' or '.join(names)} (Debian: g++-aarch64-linux-gnu, qemu-user)")
    return found


def build_library(folder: Path, options: dict[str, str]) -> Path:
    """Build libspecens.a in this folder."""
    cmake, settings = _tool("cmake"), [part for name, value in options.items() for part in ("-D", f"{name}={value}")]
    ninja = ["-G", "Ninja", "-D", f"CMAKE_MAKE_PROGRAM={_tool('ninja')}"]
    subprocess.run([cmake, *ninja, "-S", str(ROOT), "-B", str(folder), *settings], check=True)
    subprocess.run([cmake, "--build", str(folder), "--target", "specens_static"], check=True)
    return folder


@pytest.fixture(scope="session")
def program() -> list[str]:
    """The command that runs the server, but for its arguments."""
    compiler = _tool(os.environ.get("CXX", "c++") if NATIVE else "aarch64-linux-gnu-g++")
    emulator = [] if NATIVE else [_tool("qemu-aarch64", "qemu-aarch64-static")]
    options = {"CMAKE_CXX_COMPILER": compiler, "SPECENS_SANITIZE": SANITIZER or ""}
    options |= {} if NATIVE else {"CMAKE_SYSTEM_NAME": "Linux", "CMAKE_SYSTEM_PROCESSOR": "aarch64"}
    folder = ROOT / "build" / f"remote-{SANITIZER or 'aarch64'}"
    folder.mkdir(parents=True, exist_ok=True)
    run = os.environ.get("PYTEST_XDIST_TESTRUNUID", "")
    with (folder / "lock").open("a+") as lock:  # the first worker of a run builds it, and leaves the run's name
        fcntl.flock(lock, fcntl.LOCK_EX)
        lock.seek(0)
        if not run or lock.read() != run:
            _build_server(compiler, folder, options)
            lock.truncate(0)
            lock.write(run)
    return [*emulator, str(folder / "server")]


def _build_server(compiler: str, folder: Path, options: dict[str, str]) -> None:
    """With the library in it, in this folder."""
    build_library(folder, options)
    (folder / "functions.inc").write_text(
        "".join(f"SPECENS_FUNCTION({name})\n" for name in c_abi.FUNCTIONS)
        + "".join(f"SPECENS_ROW_KERNEL({name})\n" for name, _ in RowKernels._fields_)
    )
    flags = ["-std=c++20", "-O1", "-g", "-Wall", "-Wextra", "-Werror", "-pthread", f"-I{ROOT / 'csrc'}", f"-I{folder}"]
    flags += [f"-fsanitize={SANITIZER}"] if SANITIZER else ["-static"]
    server = str(folder / "server")
    source, library = str(Path(__file__).with_name("server.cpp")), str(folder / "libspecens.a")
    subprocess.run([compiler, *flags, source, library, "-o", server], check=True)


@pytest.fixture(scope="session", params=SETS)
def server(program: list[str], request: pytest.FixtureRequest) -> Iterator[Server]:
    """A running server, of each instruction set of its processor."""
    row_kernels = [
        f"{name}[{index}]" if issubclass(kind, ctypes.Array) else name
        for name, kind in RowKernels._fields_
        for index in range(getattr(kind, "_length_", 1))
    ]
    own = Server([*program, request.param, str(THREADS)], [*c_abi.FUNCTIONS, *row_kernels])
    yield own
    assert own.close() == ""
