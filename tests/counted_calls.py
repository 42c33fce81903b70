"""The tests of the C ABI, each call in a workspace that was told its sizes: what does it allocate?

Run with ops/count_allocations.c preloaded and its path as the argument; prints JSON: of each function the number of
calls, on which instruction sets, which problems take in turn, and the allocations of each that made some; then the
same of a call in a workspace that was told nothing.
"""

from __future__ import annotations

import ctypes
import json
import sys
from collections.abc import Iterator
from functools import partial
from typing import Any

import c_abi
import torch
from cases import operator_arguments
from ops import test_c_abi

from specens_kernels import Contrastive, LogitMixture, Mixture, Processing, Sampling, instruction_set, verify_chain
from specens_kernels.arguments import ChainArguments
from specens_kernels.ops import verify_chain as chain_operation

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
    """Calls in this process; those that take a workspace get one of their sizes."""

    def __init__(self, library: str, reserves: bool = True) -> None:
        self.reserves = reserves
        self.counted = ctypes.CDLL(library).counted
        self.found: dict[str, dict[str, Any]] = {}

    def call(self, name: str, words: list[Any], memory: list[Any]) -> tuple[Any, str]:
        kinds = c_abi.FUNCTIONS[name][1]
        if not kinds or "specens_workspace" not in kinds[-1] or name.startswith("specens_workspace"):
            return super().call(name, words, memory)
        workspace = c_abi.Workspace()
        if self.reserves:
            workspace.reserve(**sizes_of(name, words))
        super().call("specens_abi_version", [], [])  # takes the instruction set
        returned, allocations = self._count(name, (*words[:-1], workspace.handle))
        if returned == 0:  # a message may be allocated
            own = self.found.setdefault(name, {"calls": 0, "allocations": [], "sets": []})
            own["calls"] += 1
            own["sets"] = sorted({*own["sets"], instruction_set.in_use()})
            own["allocations"] += [allocations] * (allocations > 0)
        return returned, c_abi.LIBRARY.specens_last_error().decode()

    def _count(self, name: str, words: tuple[Any, ...]) -> tuple[int, int]:
        numbers = [getattr(word, "value", word) or 0 for word in words]
        padded = (ctypes.c_uint64 * MOST_WORDS)(*numbers, *[0] * (MOST_WORDS - len(numbers)))
        counts = (ctypes.c_int64 * 2)()
        function = ctypes.cast(getattr(c_abi.LIBRARY, name), ctypes.c_void_p)
        return self.counted(function, padded, counts), counts[0]


def at(kind: str, address: int | None) -> Any:
    return c_abi.STRUCTS[f"specens_{kind}"].from_address(address) if address else None


def shape(address: int | None, index: int = 0) -> list[int]:
    if not address:
        return [0]
    tensor = at("tensor", address + index * ctypes.sizeof(c_abi.STRUCTS["specens_tensor"]))
    return list((ctypes.c_int64 * tensor.ndim).from_address(tensor.sizes)) if tensor.ndim else [1]


def sizes_of(name: str, words: list[Any]) -> dict[str, int]:
    """Just those of a call."""
    if name == "specens_compact_kv":
        moves = at("kv_moves", words[0])
        return {"batch": shape(moves.prefix_lens)[0], "kept": shape(moves.kept)[-1]}
    if name in ("specens_uniforms", "specens_tree_mask"):
        return {}
    if name == "specens_target_logprobs":
        target, call = at("target", words[0]), None
        sizes = {"draft_len": shape(target.member_logits)[1]}
    else:
        call = at({"specens_verify_chain": "chain", "specens_verify_tree": "tree"}.get(name, "draw"), words[0])
        target, sizes = at("target", call.target), {"top": call.top_logprobs}
    members = range(target.num_members)
    sizes |= {"members": len(members), "vocab": max(shape(target.member_logits, index)[-1] for index in members)}
    if edits := at("processing", target.processing):
        tables = (edits.bias_tokens, edits.end_tokens, edits.prompt_tokens, edits.output_tokens)
        sizes["edits"] = sum(shape(table)[-1] for table in tables)
    if draft := at("draft", getattr(call, "draft", None)):
        sizes["vocab"] = max(sizes["vocab"], shape(draft.logits)[-1])
        length = draft.max_draft_len if draft.max_draft_len >= 0 else shape(draft.tokens)[-1]
        sizes["nodes" if name == "specens_verify_tree" else "draft_len"] = length
    return sizes


def flat_rounds() -> Iterator[ChainArguments]:
    """Of rows where no token is better than another, so that none is left away early."""
    logits, tokens = torch.zeros(3, 2, 4, 5000), torch.zeros(2, 3, dtype=torch.int64)
    numbers = {"seeds": torch.arange(2), "positions": torch.arange(2), "top_logprobs": 3}
    ensembles = (None, Mixture((0.5, 0.3, 0.2)), Mixture((0.5, 0.3, 0.2), filter="members"), LogitMixture((1, 1, -1)))
    for ensemble in (*ensembles, Contrastive(0.5, plausibility=0.1)):
        own = [logits[0]] if ensemble is None else list(logits)[: 2 if isinstance(ensemble, Contrastive) else 3]
        for settings in ({}, {"top_p": 0.99}, {"top_k": 4900, "min_p": 0.1}, {"temperature": 0.0}):
            for more in ({"drafter": 0}, {"drafter": 0, "rule": "block"}, {"rule": "gumbel"}, {"rule": "typical"}):
                edits = Processing(repetition_penalty=1.0, output_tokens=torch.arange(40).expand(2, -1))
                given = {"ensemble": ensemble, "sampling": Sampling(**settings), "processing": edits, **more, **numbers}
                call = partial(verify_chain, own, tokens, **given)
                arguments, options = operator_arguments(
                    chain_operation, lambda backend, call=call: call(backend=backend)
                )
                yield ChainArguments.of(*arguments, **options)


if __name__ == "__main__":
    (library,) = sys.argv[1:]
    c_abi.CALLER = Counted(library)
    for test in TESTS:
        test()
    test_c_abi.test_masks_are_those_of_the_operator("full")
    for name in instruction_set.available():
        instruction_set.use(name)
        for arguments in flat_rounds():
            c_abi.verify(arguments)
    found = c_abi.CALLER.found
    c_abi.CALLER = Counted(library, reserves=False)
    c_abi.verify(next(flat_rounds()))
    print(json.dumps([found, c_abi.CALLER.found]))
