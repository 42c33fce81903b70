"""libspecens in another process, which may be one of another processor: calls with the memory that they point to.

What server.cpp does at the other end of the pipe is told there.
"""

from __future__ import annotations

import ctypes
import struct
import subprocess
import tempfile
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor

PEEK = -1
STRUCTS, DATA, HANDLE = range(3)  # kinds of blobs
NUMBER, IN_BLOB = range(2)  # kinds of arguments


class Region(NamedTuple):
    """Memory that a call may read or write. pointers: where in it pointers to other regions lie."""

    address: int
    size: int
    kind: int
    pointers: list[int]


class Pointer(NamedTuple):
    """An argument that points into a region."""

    address: int


class Server:
    """The process, and the calls to it. command: how it is started; functions: their names, in the server's order."""

    def __init__(self, command: Sequence[str], functions: Sequence[str]) -> None:
        self.instruction_set = command[-2]
        self.numbers = {name: number for number, name in enumerate(functions)}
        self.errors = tempfile.TemporaryFile()  # noqa: SIM115 - as long as the process
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self.errors)

    def call(self, name: str, arguments: Sequence[int | float | Pointer], memory: Sequence[Any]) -> tuple[bytes, str]:
        """The bytes of a result, and what specens_last_error says. memory: all that the arguments lead to."""
        return self._exchange(self.numbers[name], arguments, memory)

    def bytes_at(self, address: int, size: int) -> bytes:
        """What lies at an address of the server's."""
        return self._exchange(PEEK, [address, size], [])[0]

    def close(self) -> str:
        """End the process; what it wrote to its standard error."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait(60)
        return self._errors()

    def _exchange(
        self, function: int, arguments: Sequence[int | float | Pointer], memory: Sequence[Any]
    ) -> tuple[bytes, str]:
        regions = list({region.address: region for value in memory for region in regions_of(value)}.values())
        words, pointers = [], []
        for value in arguments:
            if isinstance(value, Pointer):
                words.append((IN_BLOB, *_index(regions, value.address)))
            else:
                words.append((NUMBER, _bits(value), 0))
        for blob, region in enumerate(regions):
            for offset in region.pointers:
                address = ctypes.c_int64.from_address(region.address + offset).value
                if address:
                    pointers.append((blob, offset, *_index(regions, address)))
        self._write(function, len(regions), len(pointers), len(words))
        self._write(*(number for region in regions for number in (region.size, region.kind)))
        for region in regions:
            self.process.stdin.write(ctypes.string_at(region.address, region.size))  # type: ignore[union-attr]
        self._write(*(number for row in (*pointers, *words) for number in row))
        return self._answer(regions)

    def _answer(self, regions: list[Region]) -> tuple[bytes, str]:
        self.process.stdin.flush()  # type: ignore[union-attr]
        wrong, result, message = (self._read() for _ in range(3))
        for region in regions:
            if region.kind != STRUCTS:
                ctypes.memmove(region.address, self._read(), region.size)
        assert not wrong, wrong.decode()
        return result, message.decode()

    def _write(self, *numbers: int) -> None:
        self.process.stdin.write(struct.pack(f"<{len(numbers)}q", *numbers))  # type: ignore[union-attr]

    def _read(self) -> bytes:
        assert self.process.stdout is not None
        head = self.process.stdout.read(8)
        if len(head) < 8:
            raise RuntimeError(f"the server has ended, with {self.process.wait()}: {self._errors()}")
        return self.process.stdout.read(struct.unpack("<q", head)[0])

    def _errors(self) -> str:
        self.errors.seek(0)
        return self.errors.read().decode()


def regions_of(value: Any) -> list[Region]:
    """Of a tensor or array what it is a view of; of a ctypes object itself, whose void pointers are followed."""
    if isinstance(value, Tensor):
        storage = value.untyped_storage()
        return [Region(storage.data_ptr(), storage.nbytes(), DATA, [])]
    if isinstance(value, np.ndarray):
        return [Region(value.ctypes.data, value.nbytes, DATA, [])]
    if isinstance(value, ctypes.c_void_p):
        return [Region(ctypes.addressof(value), 8, HANDLE, [])]
    if isinstance(value, (ctypes.Structure, ctypes.Array)):
        return [Region(ctypes.addressof(value), ctypes.sizeof(value), STRUCTS, _pointers_of(value))]
    if isinstance(value, list):
        return [region for one in value for region in regions_of(one)]
    return []


def _pointers_of(value: ctypes.Structure | ctypes.Array[Any]) -> list[int]:
    if isinstance(value, ctypes.Structure):
        return [getattr(type(value), name).offset for name, kind, *_ in value._fields_ if kind is ctypes.c_void_p]
    if not issubclass(value._type_, ctypes.Structure):
        return []
    size = ctypes.sizeof(value._type_)
    return [index * size + offset for index, one in enumerate(value) for offset in _pointers_of(one)]


def _index(regions: list[Region], address: int) -> tuple[int, int]:
    """The region that an address lies in, or ends, and where."""
    for blob, region in enumerate(regions):
        if region.address <= address < region.address + max(region.size, 1):
            return blob, address - region.address
    raise LookupError(f"{address:#x} lies in no memory that was handed over: a tensor or struct was not kept")


def _bits(value: int | float) -> int:
    if isinstance(value, float):
        return struct.unpack("<q", struct.pack("<d", value))[0]
    return int(value)
