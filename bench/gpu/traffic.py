"""What the Triton kernels move, counted in Triton's interpreter: `python -m bench traffic`.

Logits are bfloat16, and nothing else in the kernels is, so the type of a load says what it reads. A count is of lanes
that are not masked off. Reads are relative to the logits handed in, each once.
"""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

os.environ["TRITON_INTERPRET"] = "1"  # read when Triton is imported

import numpy as np
import torch
import triton.language as tl
from rich.table import Table
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from triton.runtime import interpreter

from bench.counts import print_counts
from specens_kernels import (
    Contrastive,
    LogitMixture,
    Mixture,
    Sampling,
    TokenTree,
    sample,
    target_logprobs,
    verify_chain,
    verify_tree,
)
from specens_kernels.backend import READY
from specens_kernels.ops.sample import triton_kernel as sample_kernel
from specens_kernels.ops.target_logprobs import triton_kernel as target_logprobs_kernel
from specens_kernels.ops.verify_chain import triton_kernel as verify_chain_kernel
from specens_kernels.ops.verify_tree import triton_kernel as verify_tree_kernel

BATCH, DRAFT_LEN, VOCAB = 1, 5, 131072
UNFILTERED_READS, UNFILTERED_LAUNCHES = 1.25, 4
FILTERED_READS, FILTERED_LAUNCHES = (
    1.25,
    5,
)  # all rows, groups that may be kept, and of the last row those that are
FILTERED_MIXTURE_READS = 1.5  # all blocks of the last row: what the filters keep of a mixture no group tells
FILTERED_DRAW_READS = 1.45  # of one row
TOP_READS, TOP_LAUNCHES = 1.4, 3  # and a block or two for each of the most likely tokens
GUMBEL_READS, GUMBEL_LAUNCHES = 1.1, 2  # the blocks that are looked at are read twice
TREE = TokenTree.branching([3, 2])
REJECTED = 3  # siblings: where they were drawn, so many rows are read once more
TREE_READS, TREE_LAUNCHES = 1.1, 2  # and a block for each rejected sibling that was chosen, and that of the next token
K_SEQ_REREADS = 5  # of a row whose children are rejected alike: up to 4 for their ratio, one for what they leave
FILTERED_TREE_READS, FILTERED_TREE_LAUNCHES = 1.4, 3
TEMPORARIES = 0.02  # of the logits; of filtered ones the maxima of groups of 128 take .8 %, and the lists as much
FILTERED = Sampling(temperature=0.7, top_k=50, top_p=0.95)
TABLE_WIDTH = 160
COUNTED = ("unary_op", "binary_op", "ternary_op")  # of the interpreter, on all lanes of a program
NUMBERS = ("float32", "float64", "uint32")  # of them; integers and truth values are mostly checks of the interpreter
OPERATIONS = {
    "verify_chain": verify_chain_kernel,
    "verify_tree": verify_tree_kernel,
    "sample": sample_kernel,
    "target_logprobs": target_logprobs_kernel,
}


@dataclass
class Kernel:
    """One launch."""

    name: str
    num_warps: int
    programs: int
    bytes: int = 0  # loaded and stored
    operations: int = 0  # on floating-point and random numbers, and loads, of all lanes
    loads: int = 0  # of the program that has the most, one after the other or not


@dataclass
class Traffic:
    """Bytes of one call."""

    logits: int = 0  # loaded
    others: int = 0  # loaded and stored, but for logits
    allocated: list[int] = field(default_factory=list)  # results included
    kernels: list[Kernel] = field(default_factory=list)

    @property
    def launches(self) -> int:
        return len(self.kernels)


class _Allocations(TorchDispatchMode):
    """Records the bytes of new tensors."""

    def __init__(self, traffic: Traffic) -> None:
        super().__init__()
        self.traffic = traffic

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        given = {value.untyped_storage().data_ptr() for value in args if isinstance(value, Tensor)}
        for value in result if isinstance(result, tuple | list) else [result]:
            if isinstance(value, Tensor) and value.untyped_storage().data_ptr() not in given:
                self.traffic.allocated.append(value.untyped_storage().nbytes())
        return result


@contextmanager
def counted() -> Iterator[Traffic]:
    """Count what is launched, loaded, stored and allocated inside."""
    traffic, loads = Traffic(), 0
    builder = interpreter.InterpreterBuilder
    load, store, run = builder.create_masked_load, builder.create_masked_store, interpreter.GridExecutor.__call__
    begin_program, operations = builder.set_grid_idx, {name: getattr(builder, name) for name in COUNTED}

    def counting_load(self: Any, ptrs: Any, mask: Any, *rest: Any) -> Any:
        nonlocal loads
        addresses = np.unique(ptrs.data[mask.data])  # lanes that share one read it once
        size = len(addresses) * ptrs.get_element_ty().primitive_bitwidth // 8
        if ptrs.get_element_ty() == tl.bfloat16:
            traffic.logits += size
        else:
            traffic.others += size
        loads += 1
        traffic.kernels[-1].bytes += size
        traffic.kernels[-1].operations += mask.data.size
        traffic.kernels[-1].loads = max(traffic.kernels[-1].loads, loads)
        return load(self, ptrs, mask, *rest)

    def counting_store(self: Any, ptrs: Any, value: Any, mask: Any, *rest: Any) -> Any:
        size = int(mask.data.sum()) * ptrs.get_element_ty().primitive_bitwidth // 8
        traffic.others += size
        traffic.kernels[-1].bytes += size
        return store(self, ptrs, value, mask, *rest)

    def counting_operation(name: str) -> Any:
        def operation(self: Any, *given: Any) -> Any:
            result = operations[name](self, *given)
            if result.data.dtype in NUMBERS:
                traffic.kernels[-1].operations += result.data.size
            return result

        return operation

    def counting_begin(self: Any, *index: Any) -> Any:
        nonlocal loads
        loads = 0
        return begin_program(self, *index)

    def counting_run(self: Any, *args: Any, **kwargs: Any) -> Any:
        traffic.kernels.append(Kernel(self.fn.__name__, kwargs.get("num_warps", 4), math.prod(self.grid)))
        return run(self, *args, **kwargs)

    with (
        patch.multiple(builder, **{name: counting_operation(name) for name in COUNTED}),
        patch.object(builder, "create_masked_load", counting_load),
        patch.object(builder, "create_masked_store", counting_store),
        patch.object(builder, "set_grid_idx", counting_begin),
        patch.object(interpreter.GridExecutor, "__call__", counting_run),
        _Allocations(traffic),
    ):
        yield traffic


@dataclass(frozen=True)
class Setting:
    """A call to count. run: hands the call to the operator it is given the place of."""

    operation: str
    name: str
    logits: list[Tensor]
    call: Callable[[], Any]
    reads: float | None  # the bars, or None
    launches: int | None


def _logits(*shape: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(shape, generator=generator) * 3).bfloat16()


def settings(vocab: int = VOCAB) -> list[Setting]:
    """Verification of one to three members and outside drafts, filtered and not, by every rule; draws and scores."""
    members = [_logits(BATCH, DRAFT_LEN + 1, vocab, seed=seed) for seed in range(3)]
    outside = members[0][:, :DRAFT_LEN] + _logits(BATCH, DRAFT_LEN, vocab, seed=9) / 16
    tokens = outside.argmax(-1)
    random_numbers = {"uniforms": torch.full((BATCH, DRAFT_LEN + 1), 0.4, dtype=torch.float64)}
    thirds = Mixture((1 / 3, 1 / 3, 1 / 3))
    plain, filtered = (UNFILTERED_READS, UNFILTERED_LAUNCHES), (FILTERED_READS, FILTERED_LAUNCHES)
    found = []

    def verify(name: str, logits: list[Tensor], bars: tuple, **arguments: Any) -> None:
        own = [values for values in logits if values.shape[1] == DRAFT_LEN + 1]
        call = lambda: verify_chain(own, tokens, **random_numbers, backend="triton", **arguments)  # noqa: E731
        found.append(Setting("verify_chain", name, logits, call, *bars))

    verify("one member, one-hot drafts", members[:1], plain)
    verify("one member, outside drafts", [members[0], outside], plain, draft_logits=outside)
    verify("one member, greedy", members[:1], plain, sampling=Sampling(temperature=0.0))
    verify("mixture of two, member 0 drafts", members[:2], plain, ensemble=Mixture((0.5, 0.5)), drafter=0)
    verify("mixture of three, member 0 drafts", members, plain, ensemble=thirds, drafter=0)
    mixed = LogitMixture((1.0, 0.5, -0.5))
    verify("logit mixture of three, outside drafts", [*members, outside], plain, ensemble=mixed, draft_logits=outside)
    contrast = Contrastive(0.5, plausibility=0.1)
    verify("contrastive with plausibility", members[:2], (None, None), ensemble=contrast, drafter=1)
    verify("one member, filtered, one-hot drafts", members[:1], filtered, sampling=FILTERED)
    arguments = {"sampling": FILTERED, "draft_logits": outside}
    verify("one member, filtered, outside drafts", [members[0], outside], filtered, **arguments)
    arguments = {"sampling": FILTERED, "ensemble": Mixture((0.5, 0.5)), "drafter": 0}
    verify("mixture of two, filtered", members[:2], (FILTERED_MIXTURE_READS, FILTERED_LAUNCHES), **arguments)
    for rule in ("block", "typical", "replacement"):
        verify(
            f"one member, outside drafts, {rule}", [members[0], outside], (None, None), rule=rule, draft_logits=outside
        )
    keys = {"seeds": torch.arange(BATCH), "positions": torch.full((BATCH,), 100)}
    for name, own, ensemble in (
        ("one member", members[:1], None),
        ("logit mixture of two", members[:2], LogitMixture((1.0, 0.5))),
    ):
        picked = lambda own=own, ensemble=ensemble: verify_chain(  # noqa: E731
            own, tokens, rule="gumbel", ensemble=ensemble, backend="triton", **keys
        )
        found.append(Setting("verify_chain", f"{name}, gumbel", own, picked, GUMBEL_READS, GUMBEL_LAUNCHES))
    row = [members[0][:, 0].contiguous()]
    uniform = random_numbers["uniforms"][:, 0].contiguous()
    narrow = (FILTERED_DRAW_READS, FILTERED_LAUNCHES)
    for name, sampling, bars in (("one member", Sampling(), plain), ("one member, filtered", FILTERED, narrow)):
        draw = lambda sampling=sampling: sample(row, sampling=sampling, uniforms=uniform, backend="triton")  # noqa: E731
        found.append(Setting("sample", name, row, draw, *bars))
    likely = lambda: sample(row, uniforms=uniform, top_logprobs=5, backend="triton")  # noqa: E731
    found.append(Setting("sample", "one member, five most likely", row, likely, TOP_READS, TOP_LAUNCHES))
    score = lambda: target_logprobs(members[0], backend="triton")  # noqa: E731
    found.append(Setting("target_logprobs", "one member", members[:1], score, None, None))
    return [*found, *tree_settings(vocab)]


def tree_settings(vocab: int) -> list[Setting]:
    """Trees of which two of the three children of the root are rejected, and then one of two; by k_seq all three are.

    Logits handed in are those of all rows, and the draft logits of the rows with children.
    """
    nodes = len(TREE)
    target = _logits(BATCH, nodes + 1, vocab, seed=20)
    outside = target + _logits(BATCH, nodes + 1, vocab, seed=21) / 16
    parents = torch.from_numpy(TREE.parents)[None]
    inner = sorted({int(parent) + 1 for parent in TREE.parents})
    ranked = target.float().argsort(-1, descending=True)[:, parents[0] + 1]  # [batch, nodes, vocab]
    alike, likely = outside.clone(), ranked[:, torch.arange(nodes), torch.tensor([0, 1, 2] + [0, 1] * 3)]
    rank = torch.tensor([vocab - 1, vocab - 2, 0] + [vocab - 1, 0] * 3)
    tokens = ranked[:, torch.arange(nodes), rank]
    for node in (rank > 0).nonzero()[:, 0].tolist():
        outside[:, parents[0, node] + 1, tokens[0, node]] = 20.0  # likely drawn, and rejected
    random_numbers = {"uniforms": torch.full((BATCH, nodes + 1), 0.05, dtype=torch.float64)}
    rejected = 2 * REJECTED / (nodes + 1 + len(inner))  # rows of the target and of the draft, of those handed in
    keys = {"seeds": torch.arange(BATCH), "positions": torch.full((BATCH,), 100)}
    drawn = {"draft_logits": outside, "siblings": "without_replacement"} | random_numbers
    bars = (TREE_READS, TREE_LAUNCHES)
    filtered = (FILTERED_TREE_READS, FILTERED_TREE_LAUNCHES)
    with_drafts = [target, outside[:, inner]]
    drawn_alike = {"draft_logits": alike, "siblings": "with_replacement", "rule": "k_seq", "draft_tokens": likely}
    last = {"uniforms": torch.full((BATCH, nodes + 1), 0.99, dtype=torch.float64)}
    reread = 2 * K_SEQ_REREADS / (nodes + 1 + len(inner))

    def setting(name: str, logits: list[Tensor], bars: tuple, **arguments: Any) -> Setting:
        given = {"draft_tokens": tokens, "parents": parents, "backend": "triton"} | arguments
        call = lambda: verify_tree(target, **given)  # noqa: E731
        return Setting("verify_tree", name, logits, call, *bars)

    return [
        setting("chosen children", [target], bars, **random_numbers),
        setting("chosen children, greedy", [target], bars, sampling=Sampling(0.0)),
        setting("chosen children, gumbel", [target], bars, rule="gumbel", **keys),
        setting("chosen children, filtered", [target], filtered, sampling=FILTERED, **random_numbers),
        setting("drawn children", with_drafts, (TREE_READS + rejected, TREE_LAUNCHES), **drawn),
        setting("drawn children, k_seq", with_drafts, (TREE_READS + reread, TREE_LAUNCHES), **drawn_alike, **last),
        setting("drawn children, traversal", with_drafts, (None, TREE_LAUNCHES), rule="traversal", **drawn),
    ]


def count(setting: Setting) -> tuple[Traffic, int]:
    """The traffic of a call, and the bytes of its temporaries: what it allocates, but for its results."""
    traffic: list[Traffic] = []
    temporaries = []

    def counting(*given: Any, **options: Any) -> Any:
        with counted() as counts:
            results = OPERATIONS[setting.operation].launch(*given, **options)
        kept = sum(value.untyped_storage().nbytes() for value in (results if isinstance(results, list) else [results]))
        traffic.append(counts)
        temporaries.append(sum(counts.allocated) - kept)
        return results

    with patch.dict(READY, {(setting.operation, "triton", "cpu"): ("triton", counting)}):
        setting.call()
    return traffic[0], temporaries[0]


def add_row(table: Table, setting: Setting) -> list[str]:
    """Count a setting; the bars that it misses."""
    traffic, temporaries = count(setting)
    whole = sum(values.numel() * values.element_size() for values in setting.logits)
    reads, share = traffic.logits / whole, temporaries / whole
    numbers = (str(traffic.launches), f"{reads:.2f}", f"{traffic.others / whole:.1%}", f"{share:.2%}")
    table.add_row(setting.operation, setting.name, *numbers)
    name = f"{setting.operation}, {setting.name}"
    missed = []
    if setting.reads is not None and reads > setting.reads:
        missed.append(f"{name}: {reads:.2f} logit reads, at most {setting.reads} expected")
    if setting.launches is not None and traffic.launches > setting.launches:
        missed.append(f"{name}: {traffic.launches} launches, at most {setting.launches} expected")
    if share > TEMPORARIES:
        missed.append(f"{name}: temporaries of {share:.2%} of the logits, at most {TEMPORARIES:.0%} expected")
    return missed


def main() -> int:
    """Print the table and the missed bars; the number of missed bars."""
    title = f"traffic: batch {BATCH}, draft_len {DRAFT_LEN}, vocabulary {VOCAB}, bfloat16"
    table = Table(title=title, title_justify="left")
    for column in ("operation", "setting", "launches", "logit reads", "other bytes", "temporaries"):
        table.add_column(column, justify="left" if column in ("operation", "setting") else "right")
    missed: list[str] = []
    for setting in settings():
        missed += add_row(table, setting)
    return print_counts(table, missed, TABLE_WIDTH)


if __name__ == "__main__":
    sys.exit(min(main(), 1))
