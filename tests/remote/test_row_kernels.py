"""The tile functions of the server's instruction sets."""

from __future__ import annotations

import ctypes
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
from ops.test_row_kernels import *  # noqa: F403 - its tests, of other kernels
from ops.test_row_kernels import Address, RowKernels
from remote.remote import Pointer, Server


def _call(server: Server, name: str, kind: Any, *arguments: Any) -> Any:
    """kind: of the function, as ctypes has it."""
    types = zip(arguments, kind._argtypes_, strict=True)
    words = [_word(value, own) for value, own in types]
    kept = [value.memory for value in arguments if isinstance(value, Address)]
    result, _ = server.call(name, words, kept)
    if kind._restype_ is None:
        return None
    returned = kind._restype_.from_buffer_copy(result)
    return returned if isinstance(returned, ctypes.Structure) else returned.value


def _word(value: Any, kind: Any) -> int | float | Pointer:
    if isinstance(value, Address):
        return Pointer(value)
    return float(value) if kind is ctypes.c_float else int(value or 0)


@pytest.fixture
def kernels(server: Server) -> SimpleNamespace:
    """As the table of functions of this process."""
    table: dict[str, Any] = {}
    for name, kind in RowKernels._fields_:
        if issubclass(kind, ctypes.Array):
            own = [partial(_call, server, f"{name}[{index}]", kind._type_) for index in range(kind._length_)]
            table[name] = own
        else:
            table[name] = partial(_call, server, name, kind)
    return SimpleNamespace(**table)
