"""Tensors with no memory before or after them, and every C++ operation on such.

Run as a program it ends, or crashes; with the argument "touch" it reads after a tensor to show that it would.
"""

from __future__ import annotations

import ctypes
import dataclasses
import mmap
import sys
from typing import Any
from unittest.mock import patch

import torch
from problems import random_problem
from shards import on_shards
from torch import Tensor

import specens_kernels as kernels
from specens_kernels import Contrastive, LogitMixture, Mixture, Processing, Sampling, instruction_set
from specens_kernels.distributed import local, operations

PAGE = mmap.PAGESIZE
LIBC = ctypes.CDLL(None, use_errno=True)
KEPT: list[mmap.mmap] = []  # the memory of tensors, which do not own it


def guarded(values: Tensor, at_end: bool) -> Tensor:
    """A contiguous copy that ends, or begins, where a page begins or ends that must not be touched."""
    size = values.numel() * values.element_size()
    pages = max(1, -(-size // PAGE))
    memory = mmap.mmap(-1, (pages + 2) * PAGE)
    KEPT.append(memory)
    begin = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    for wall in (begin, begin + (pages + 1) * PAGE):
        if LIBC.mprotect(ctypes.c_void_p(wall), ctypes.c_size_t(PAGE), 0) != 0:
            raise OSError(ctypes.get_errno(), "mprotect")
    offset = PAGE + (pages * PAGE - size if at_end else 0)
    if size == 0:
        return torch.empty(values.shape, dtype=values.dtype)
    copy = torch.frombuffer(memory, dtype=values.dtype, count=values.numel(), offset=offset).view(values.shape)
    return copy.copy_(values)


def all_guarded(value: Any, at_end: bool) -> Any:
    """Arguments with each of their tensors guarded."""
    if isinstance(value, Tensor):
        return guarded(value, at_end)
    if isinstance(value, list | tuple) and not hasattr(value, "_fields"):
        return type(value)(all_guarded(part, at_end) for part in value)
    if isinstance(value, dict):
        return {name: all_guarded(part, at_end) for name, part in value.items()}
    if isinstance(value, Mixture | LogitMixture):
        return dataclasses.replace(value, weights=all_guarded(value.weights, at_end))
    if dataclasses.is_dataclass(value):
        parts = {part.name: getattr(value, part.name) for part in dataclasses.fields(value) if part.init}
        return dataclasses.replace(value, **all_guarded(parts, at_end))
    return value


def chains(at_end: bool) -> None:
    for seed in range(40):
        problem = random_problem(seed, [1, 15, 17, 33, 65, 2047, 2049])
        logits, tokens, arguments = all_guarded((problem.logits, problem.tokens, problem.arguments), at_end)
        verdict = kernels.verify_chain(logits, tokens, backend="cpp", **arguments)
        out = kernels.Verdict(*all_guarded(tuple(verdict), at_end))
        kernels.verify_chain(logits, tokens, backend="cpp", out=out, **arguments)
        target = all_guarded(problem.target(), at_end)
        kernels.target_logprobs(logits, draft_tokens=tokens, backend="cpp", **target)
        if logits[0].shape[1] > 0:
            target = {
                name: value[:, 0] if name == "allowed" and value is not None else value
                for name, value in target.items()
            }
            first = [all_guarded(values[:, 0], at_end) for values in logits]
            kernels.sample(first, uniforms=arguments["uniforms"][:, 0], logprobs="raw", backend="cpp", **target)


def members_of_several_vocabularies(at_end: bool) -> None:
    """Members of weight 0 too, which plausibility may read all the same."""
    for vocabs in ((1000, 1500), (1500, 1000), (33, 2049), (2049, 33)):
        for ensemble in (
            LogitMixture((0.0, 1.0), 0.5),
            LogitMixture((1.0, 0.0), 0.5),
            Contrastive(0.3, 0.1),
            Mixture((0.0, 1.0)),
            Mixture((0.5, 0.5)),
        ):
            for sampling in (Sampling(), Sampling(temperature=0.0), Sampling(top_k=5, top_p=0.9, min_p=0.01)):
                logits = [guarded(torch.randn(2, vocab), at_end) for vocab in vocabs]
                random_numbers = guarded(torch.rand(2), at_end)
                kernels.sample(
                    logits, ensemble=ensemble, sampling=sampling, uniforms=random_numbers, top_logprobs=3, backend="cpp"
                )


def packed_rows(at_end: bool) -> None:
    offsets = torch.tensor([0, 3, 3, 4, 6])
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        arguments = all_guarded(
            {
                "member_logits": torch.randn(6, 2049).to(dtype),
                "draft_tokens": torch.randint(0, 2049, (6,)),
                "draft_logits": torch.randn(6, 2049).to(dtype),
                "uniforms": torch.rand(4, 4),
                "row_offsets": offsets,
                "allowed": torch.full((6, 64), -1, dtype=torch.int32),
            },
            at_end,
        )
        kernels.verify_chain(max_draft_len=3, backend="cpp", **arguments)
        slots = all_guarded(
            {
                "member_logits": torch.randn(2, 3, 33).to(dtype),
                "draft_tokens": torch.randint(0, 33, (2, 2)),
                "draft_logits": torch.randn(5, 2, 33).to(dtype),
                "draft_slots": torch.tensor([4, 5]),
                "uniforms": torch.rand(2, 3),
            },
            at_end,
        )
        kernels.verify_chain(backend="cpp", **slots)


def trees(at_end: bool) -> None:
    parents = torch.tensor([[-1, -1, 0, 0, 2, 5, -2], [-1, 0, 1, 2, 3, 4, 5]])
    for vocab in (1, 33, 2049):
        for rule in ("token", "traversal", "typical"):
            for origin in (
                {},
                {"drafter": 0, "siblings": "without_replacement"},
                {"draft_logits": torch.randn(2, 8, vocab + 3), "siblings": "with_replacement"},
            ):
                arguments = all_guarded(
                    {
                        "member_logits": torch.randn(2, 8, vocab),
                        "draft_tokens": torch.randint(0, vocab, (2, 7)),
                        "parents": parents,
                        "uniforms": torch.rand(2, 8),
                        "num_nodes": torch.tensor([7, 4]),
                        **origin,
                        "allowed": torch.full((2, 8, max(1, vocab // 32)), -1, dtype=torch.int32),
                    },
                    at_end,
                )
                kernels.verify_tree(rule=rule, top_logprobs=2, backend="cpp", **arguments)
                if origin.get("siblings") == "with_replacement" and rule == "token":
                    kernels.verify_tree(rule="k_seq", backend="cpp", **arguments)
    for layout in ("full", "tree", "packed", "additive"):
        lengths = guarded(torch.tensor([3, 0]), at_end)
        kernels.tree_mask(guarded(parents, at_end), lengths, layout=layout, max_prefix=5, window=2, backend="cpp")


def caches(at_end: bool) -> None:
    kept = torch.tensor([[0, 2, -1], [1, 2, 3]])
    for dtype in (torch.float32, torch.bfloat16, torch.uint8):
        cache = guarded(torch.zeros(2, 3, 9, 5).to(dtype), at_end)
        kernels.compact_kv(cache, *all_guarded((kept, torch.tensor([4, 5])), at_end), backend="cpp")
        kernels.compact_kv(cache, *all_guarded((kept, torch.tensor([7, 2**40])), at_end), backend="cpp")
        blocks, table = guarded(torch.zeros(4, 2, 3, 5).to(dtype), at_end), torch.tensor([[0, 1], [3, 9]])
        kernels.compact_kv(
            blocks,
            *all_guarded((kept, torch.tensor([0, 1])), at_end),
            block_table=guarded(table, at_end),
            backend="cpp",
        )
        slots = guarded(torch.tensor([[0, 1, 2, 5], [-1, 7, 99, 3]]), at_end)
        kernels.compact_kv(blocks, guarded(kept, at_end), slot_mapping=slots, backend="cpp")
    seeds = guarded(torch.arange(5), at_end)
    kernels.uniforms(seeds, seeds, step=seeds, backend="cpp")


def slices(at_end: bool) -> None:
    """Of a vocabulary on two ranks: chains, trees, draws, with filters and reports."""
    operators, seeds, parents = local.operator_for, torch.arange(2), torch.tensor([[-1, -1, 0, 0], [-1, 0, -1, -2]])

    def operator_for(name: str, like: Tensor) -> Any:
        operator = operators(name, like)
        assert operator is not None
        return lambda *given, **options: operator(*all_guarded(given, at_end), **all_guarded(options, at_end))

    filters = [Sampling(0.8), Sampling(top_k=5), Sampling(top_p=0.9), Sampling(top_k=1100, top_p=0.9)]
    ensembles = [None, LogitMixture((1.0, -0.3)), Mixture((0.4, 0.6)), Contrastive(0.3, 0.1)]
    processing = Processing(repetition_penalty=1.2, output_tokens=torch.tensor([[0, 2]]).expand(2, -1))
    with patch.object(local, "operator_for", operator_for):
        for index, (sampling, ensemble) in enumerate(zip(filters, ensembles)):
            vocab = (2069, 35)[index % 2]
            dtype = (torch.float32, torch.bfloat16, torch.float16)[index % 3]
            logits = [torch.randn(2, 5, vocab + extra).to(dtype) for extra in ((0,) if ensemble is None else (0, 7))]
            given = {"ensemble": ensemble, "sampling": sampling, "seeds": seeds, "positions": seeds}
            given |= {"logprobs": ("raw", True)[index % 2], "top_logprobs": 2, "bounds": [0, 17, vocab + 7]}
            rows, drafts = [own[:, 0] for own in logits], torch.randint(0, vocab, (2, 4))
            on_shards(operations.draw_of, rows, method="gumbel", count=3, **given)
            for rule in ("block", "typical", "gumbel"):
                origin = {"draft_logits": torch.randn(2, 4, vocab)} if rule == "block" else {}
                on_shards(operations.chain_of, logits, drafts, rule=rule, processing=processing, **origin, **given)
            for rule, siblings in (("traversal", "without_replacement"), ("k_seq", "with_replacement")):
                origin = {"drafter": 0, "siblings": siblings}
                on_shards(operations.tree_of, logits, drafts, parents, rule=rule, **origin, **given)
            given = {name: value for name, value in given.items() if "logprobs" not in name}
            for own in (sampling, Sampling(temperature=0.0)):
                own_given = given | {"sampling": own, "rule": "gumbel", "processing": processing}
                on_shards(operations.tree_of, logits, drafts, parents, **own_given)


if __name__ == "__main__":
    if sys.argv[1:] == ["touch"]:
        ctypes.string_at(guarded(torch.zeros(5), at_end=True).data_ptr() + 20, 1)
    for name in instruction_set.available():
        instruction_set.use(name)
        for run in (chains, members_of_several_vocabularies, packed_rows, trees, caches, slices):
            for at_end in (True, False):
                print(name, run.__name__, "at the end" if at_end else "at the begin", flush=True)
                torch.manual_seed(0)
                run(at_end)
                KEPT.clear()  # a process may have so many pieces of memory
    print("done")
