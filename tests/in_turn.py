"""Tests of operations run on every instruction set that the processor has: each test, and each problem in it, on one.

So all of them are tested as widely, at the cost of one. Where the environment chooses one, all tests run on that.
"""

from __future__ import annotations

import os
import zlib

from specens_kernels import instruction_set

SETS = instruction_set.available()
_of_test = [0]  # what the name of the running test adds


def begin_test(name: str) -> None:
    """A test takes the set that its name says."""
    _of_test[0] = zlib.crc32(name.encode())
    use_next(0)


def use_next(seed: int) -> None:
    """A problem of this seed is about to be tried; the same seed takes the same set throughout a test."""
    if SETS and instruction_set.VARIABLE not in os.environ:
        instruction_set.use(SETS[(seed + _of_test[0]) % len(SETS)])
