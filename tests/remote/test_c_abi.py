"""Every operation of specens.h in the server: the torch operators' results of this process, token by token."""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Iterator
from typing import Any

import c_abi
import in_turn
import pytest
from ops.test_c_abi import (  # noqa: F401
    test_a_struct_of_a_later_version_is_refused_and_one_of_an_earlier_gets_defaults,
    test_an_argument_that_is_wrong_is_named_and_nothing_is_thrown,
    test_an_n_gram_index_drafts_as_the_python_object_does,
    test_caches_are_moved_as_slot_by_slot,
    test_chains_are_verified_as_by_the_operator,
    test_distributions_are_those_of_the_operator,
    test_draws_are_those_of_the_operator,
    test_masks_are_those_of_the_operator,
    test_random_numbers_are_those_of_the_operator,
    test_trees_are_built_as_by_token_tree,
    test_trees_are_verified_as_by_the_operator,
    test_trees_grow_as_tree_growth_does,
)
from remote.remote import Pointer, Server

from specens_kernels import instruction_set


class There:
    """As `c_abi.Here`, in the server."""

    def __init__(self, server: Server) -> None:
        self.server = server

    def call(self, name: str, words: list[Any], memory: list[Any]) -> tuple[int, str]:
        arguments = [_argument(word, kind) for word, kind in zip(words, c_abi.FUNCTIONS[name][1], strict=True)]
        memory = [value for value in memory if not any(value is word for word in words)]  # no handles by value
        result, message = self.server.call(name, arguments, memory)
        return int.from_bytes(result, "little", signed=True), message

    def integers(self, address: int, count: int) -> list[int]:
        return list(struct.unpack(f"<{count}q", self.server.bytes_at(address, 8 * count)))


def _argument(word: Any, kind: str) -> int | Pointer:
    if isinstance(word, ctypes.c_void_p):  # a handle, which the server has given
        return word.value or 0
    return Pointer(word) if word and "*" in kind else word or 0


@pytest.fixture(autouse=True)
def in_the_server(server: Server, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Expected is what this process gives with the same instruction set, or with AVX2, whose numbers are NEON's."""
    monkeypatch.setattr(c_abi, "CALLER", There(server))
    same = "avx2" if server.instruction_set == "neon" else server.instruction_set
    if same not in in_turn.SETS:
        pytest.skip(f"this processor has no {same}, to compare with")
    before = instruction_set.in_use()
    monkeypatch.setattr(in_turn, "SETS", (same,))
    in_turn.use_next(0)
    yield
    instruction_set.use(before)
