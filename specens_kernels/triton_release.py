"""Triton as it is installed: whether it can compile the kernels, and what its interpreter needs.

It is loaded when it is first needed: that takes longer than all of this package, and callers on CPUs never need it.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from collections.abc import Callable
from functools import cache
from typing import Any

OLDEST_TRITON = (3, 6)  # what torch 2.11 brings
INSTALL = "pip install 'specens-kernels[triton]'"  # the release that fits the torch that is there
INTERPRET = ("1", "true", "on", "yes", "y")  # what Triton takes for a yes
NOT_INSTALLED = f"Triton is not installed: {INSTALL}"


def find_triton() -> tuple[str | None, bool]:
    """As `import_triton`, as far as that can be told without loading Triton."""
    if "triton" in sys.modules:
        return import_triton()
    try:
        if importlib.util.find_spec("triton") is None:
            return NOT_INSTALLED, False
    except ImportError as error:
        return f"Triton could not be imported: {error}", False
    return None, os.environ.get("TRITON_INTERPRET", "").lower() in INTERPRET


def loaded_when_called(name: str, load: Callable[[], Callable[..., Any]]) -> Callable[..., Any]:
    """A function that needs Triton. load: gives it, once Triton is loaded; name: of the operation, for the error."""
    kernel: Callable[..., Any] | None = None

    def call(*arguments: Any, **options: Any) -> Any:
        nonlocal kernel
        if kernel is None:
            if (reason := import_triton()[0]) is not None:
                raise RuntimeError(f"{name}: {reason}")
            kernel = load()
        return kernel(*arguments, **options)

    return call


@cache
def import_triton() -> tuple[str | None, bool]:
    """Return why Triton cannot be used (None: it can), and whether its interpreter runs the kernels."""
    try:
        triton = importlib.import_module("triton")
    except ModuleNotFoundError as error:
        if error.name == "triton":
            return NOT_INSTALLED, False
        return f"Triton could not be imported: {error}", False
    except (ImportError, OSError, RuntimeError) as error:
        return f"Triton could not be imported: {error}", False
    version = tuple(map(int, triton.__version__.split(".")[:2]))
    if version < OLDEST_TRITON:
        return f"Triton {triton.__version__} cannot compile the kernels: {INSTALL}", False
    interpreted = bool(triton.knobs.runtime.interpret)
    # interpreter: only that of Triton 3.6 needs it
    if interpreted and version == (3, 6):
        _let_interpreter_loop()
    return None, interpreted


def _let_interpreter_loop() -> None:
    """Triton 3.6 reads a loop's bound as int(array of one element), which NumPy refuses from 2.4 on."""
    interpreter: Any = importlib.import_module("triton.runtime.interpreter")
    patch_tensor = interpreter._patch_lang_tensor

    def patch_tensor_with_index(tensor: Any, scope: Any) -> None:
        patch_tensor(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    interpreter._patch_lang_tensor = patch_tensor_with_index
