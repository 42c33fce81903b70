"""Triton's interpreter, made fit for many small launches."""

from __future__ import annotations

from typing import Any

from triton.runtime import interpreter


def patch_the_language_once_a_launch() -> None:
    """The interpreter patches triton.language anew in every call of a device function, for more than half of its time.

    What a launch has patched holds until it ends, so once is enough for all functions of a module.
    """
    patch = interpreter._patch_lang
    patched: set[int] = set()  # the modules of this launch, by their globals

    def patch_once(function: Any) -> Any:
        module = id(function.__globals__)
        if module in patched:
            return None
        patched.add(module)
        scope = patch(function)
        restore = scope.restore

        def restore_and_forget() -> None:  # of the launch's own scope, at its end: nobody restores the others
            patched.clear()
            restore()

        scope.restore = restore_and_forget
        return scope

    interpreter._patch_lang = patch_once
