"""The tests of the C ABI, with a workspace and every call made twice: what does the second one allocate?

Run with ops/count_allocations.c preloaded and its path as the argument; prints JSON: of each function the number of
calls, and the allocations of each that made some.
"""

from __future__ import annotations

import ctypes
import json
import sys
from typing import Any

import c_abi
from ops import test_c_abi
from torch import Tensor

from specens_kernels import instruction_set

MOST_WORDS = 6
TESTS = (
    test_c_abi.test_chains_are_verified_as_by_the_operator,
    test_c_abi.test_trees_are_verified_as_by_the_operator,
    test_c_abi.test_draws_are_those_of_the_operator,
    test_c_abi.test_distributions_are_those_of_the_operator,
    test_c_abi.test_random_numbers_are_those_of_the_operator,
    test_c_abi.test_caches_are_moved_as_slot_by_slot,
)


class Counted(c_abi.Here):
    """Calls in this process; those that take a workspace are made twice, in one workspace for all."""

    def __init__(self, library: str) -> None:
        self.workspace = c_abi.Workspace()
        self.counted = ctypes.CDLL(library).counted
        self.found: dict[str, dict[str, Any]] = {}

    def call(self, name: str, words: list[Any], memory: list[Any]) -> tuple[Any, str]:
        kinds = c_abi.FUNCTIONS[name][1]
        if not kinds or "specens_workspace" not in kinds[-1] or name.startswith("specens_workspace"):
            return super().call(name, words, memory)
        before = [(tensor, tensor.clone()) for tensor in _caches(name, memory)]
        given = (*words[:-1], self.workspace.handle)
        returned, message = super().call(name, list(given), memory)
        for tensor, copy in before:
            tensor.copy_(copy)
        if returned == 0:
            own = self.found.setdefault(name, {"calls": 0, "allocations": []})
            own["calls"] += 1
            own["allocations"] += self._count(name, given)
        return returned, message

    def _count(self, name: str, words: tuple[Any, ...]) -> list[int]:
        numbers = [getattr(word, "value", word) or 0 for word in words]
        padded = (ctypes.c_uint64 * MOST_WORDS)(*numbers, *[0] * (MOST_WORDS - len(numbers)))
        counts = (ctypes.c_int64 * 2)()
        assert self.counted(ctypes.cast(getattr(c_abi.LIBRARY, name), ctypes.c_void_p), padded, counts) == 0
        return [counts[0]] if counts[0] else []


def _caches(name: str, memory: list[Any]) -> list[Tensor]:
    """What a call changes in place."""
    if name != "specens_compact_kv":
        return []
    return [value for values in memory if isinstance(values, list) for value in values if isinstance(value, Tensor)]


if __name__ == "__main__":
    library, name = sys.argv[1:]
    instruction_set.use(name)
    c_abi.CALLER = Counted(library)
    for test in TESTS:
        test()
    test_c_abi.test_masks_are_those_of_the_operator("full")
    print(json.dumps(c_abi.CALLER.found))
