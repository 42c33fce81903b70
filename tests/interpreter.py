"""Triton's interpreter, made fit for many small launches: nine tenths of its time are bookkeeping in Python.

The results are the same; what is computed again for each operation, or for nothing, is computed once or not at all.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import triton.language as tl
from triton.runtime import interpreter

STAYS = SimpleNamespace(restore=lambda: None)


def patch_the_interpreter() -> None:
    """All of the below."""
    patch_the_language_once()
    pass_on_the_semantic()
    remember_what_follows_from_a_type()
    # Each sum of integers is done again in 64 bits for an assertion that only a debugging builder would make.
    builder = interpreter.interpreter_builder
    builder.options = dataclasses.replace(builder.options, sanitize_overflow=False)


def patch_the_language_once() -> None:
    """The interpreter patches triton.language anew in every call of a device function, for most of its time.

    Nothing else uses the language in a process that interprets, so what the first launch has patched stays.
    """
    patch = interpreter._patch_lang
    modules: set[int] = set()  # whose language is patched, by their globals
    languages: set[int] = set()

    def patch_once(function: Any) -> Any:
        module = id(function.__globals__)
        if module not in modules:
            modules.add(module)
            seen = {id(value) for value in function.__globals__.values() if value is tl or value is tl.core}
            if not seen <= languages:
                languages.update(seen)
                patch(function)
        return STAYS

    interpreter._patch_lang = patch_once


def pass_on_the_semantic() -> None:
    """A builtin gets the interpreter's semantic in the keywords that it was called with, not in a copy of them."""
    semantic = interpreter.TritonSemantic(interpreter.interpreter_builder)

    def patch_attr(obj: Any, name: str, member: Callable[..., Any], builder: Any, scope: Any) -> None:  # noqa: ARG001
        def call(*args: Any, **kwargs: Any) -> Any:
            kwargs["_semantic"] = semantic
            return member(*args, **kwargs)

        scope.set_attr(obj, name, call)

    interpreter._patch_attr = patch_attr


def remember_what_follows_from_a_type() -> None:
    """The shape of a tensor, the name of a block and NumPy's type follow from a type, which now holds them."""
    of_tensor, of_block, np_dtype, equal = (
        tl.tensor.__init__,
        tl.block_type.__init__,
        interpreter._get_np_dtype,
        tl.dtype.__eq__,
    )

    def init_tensor(self: Any, handle: Any, type: Any) -> None:
        known = type.__dict__.get("_of_tensors")
        if known:
            self.__dict__.update(known)
            self.handle, self.type = handle, type
            return
        of_tensor(self, handle, type)
        if known is None:
            known = type._of_tensors = {}
        known.update(self.__dict__, handle=None)

    def init_block(self: Any, element_ty: Any, shape: Any) -> None:
        sizes = tuple([size.value if isinstance(size, tl.constexpr) else size for size in shape])
        known = element_ty.__dict__.setdefault("_of_blocks", {})
        if sizes not in known:
            of_block(self, element_ty, shape)
            self._of_tensors = {}  # shared by all blocks of this type
            known[sizes] = self.__dict__
        self.__dict__.update(known[sizes])

    def get_np_dtype(type: Any) -> Any:
        scalar = type.scalar
        known = scalar.__dict__.get("_np_dtype")
        if known is None:
            known = scalar._np_dtype = np_dtype(scalar)
        return known

    tl.tensor.__init__, tl.block_type.__init__, interpreter._get_np_dtype = init_tensor, init_block, get_np_dtype
    tl.dtype.__eq__ = lambda self, other: self is other or equal(self, other)
