"""For pytest: `-p gpu_stub.front_end` sends every launch of the tests through the JIT's front end, from AST to TTIR.

What a test expects of results is not looked at, since nothing computes them; the run fails where a kernel does not
compile, where a launch fails, or where fewer variants were compiled than --variants.
"""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

import gpu_stub

gpu_stub.install()
compiled: list[str] = []
failed: dict[str, str] = {}  # what went wrong: the first test in which it did


def compile_to_ttir(kernel: Any, signature: Any, constexprs: Any, options: Any, attributes: Any) -> None:
    """As the JIT does it, up to the backend's passes."""
    from triton._C.libtriton import ir

    compiled.append(kernel.__name__)
    _, _, target, backend, _ = kernel.device_caches[0]
    source = kernel.ASTSource(kernel, signature, constexprs, attributes)
    context = ir.context()
    ir.load_dialects(context)
    backend.load_dialects(context)
    codegen, modules = backend.get_codegen_implementation(options), backend.get_module_map()
    try:
        source.make_ir(target, options, codegen, modules, context)
    except Exception as error:  # noqa: BLE001 -- every error is told at the end
        innermost: BaseException = error
        while innermost.__cause__ is not None:
            innermost = innermost.__cause__
        note(f"{kernel.__name__}: {innermost}")


gpu_stub.replace_compiler(compile_to_ttir)
TRITON = str(Path(find_spec("triton").origin).parent)
running = ""


def note(message: str) -> None:
    failed.setdefault(message, running)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--variants", type=int, default=1, help="the fewest variants of kernels that are to be compiled")


@pytest.hookimpl(wrapper=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> Iterator[None]:
    global running
    running = pyfuncitem.nodeid
    try:
        return (yield)
    except Exception as error:  # noqa: BLE001 -- results are not there to be compared
        raised_in = traceback.extract_tb(error.__traceback__)[-1].filename
        if raised_in.endswith(("parts/launches.py", "parts/replays.py")) or raised_in.startswith(TRITON):
            note(f"{type(error).__name__}: {error}")
        return True


def pytest_sessionfinish(session: pytest.Session) -> None:
    if failed or len(compiled) < session.config.getoption("--variants"):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: Any) -> None:
    terminalreporter.write_line(f"compiled to TTIR: {len(compiled)} variants of {len(set(compiled))} kernels")
    for message, test in failed.items():
        terminalreporter.write_line(f"{test}: {message}")
