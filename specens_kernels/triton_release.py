"""Triton as it is installed: whether it can compile the kernels, and what its interpreter needs."""

from __future__ import annotations

import importlib
from typing import Any

OLDEST_TRITON = (3, 6)  # what torch 2.11 brings
INSTALL = "pip install 'specens-kernels[triton]'"  # the release that fits the torch that is there


def import_triton() -> tuple[str | None, bool]:
    """Return why Triton cannot be used (None: it can), and whether its interpreter runs the kernels."""
    try:
        triton = importlib.import_module("triton")
    except ModuleNotFoundError as error:
        if error.name == "triton":
            return f"Triton is not installed: {INSTALL}", False
        return f"Triton could not be imported: {error}", False
    except (ImportError, OSError, RuntimeError) as error:
        return f"Triton could not be imported: {error}", False
    version = tuple(map(int, triton.__version__.split(".")[:2]))
    if version < OLDEST_TRITON:
        return f"Triton {triton.__version__} cannot compile the kernels: {INSTALL}", False
    interpreted = bool(triton.knobs.runtime.interpret)
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
