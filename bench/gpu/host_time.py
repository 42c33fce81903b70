"""Host time of an eager call: `python -m bench host_time`.

Without a GPU a stub stands for it (tests/gpu_stub), which launches nothing; with one, nothing waits for the kernels.
Times are of the processor, medians. Each is also told as a multiple of what Triton's own JIT takes to launch one
kernel with ten tensors and two numbers, in the same run, since machines differ and are busy.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from rich.console import Console
from rich.table import Table

BATCH, DRAFT_LEN, VOCAB = 8, 5, 128256
CALLS, ROUNDS = 100, 9
CACHES = 16  # keys and values of eight layers
TESTS = Path(__file__).parents[2] / "tests"


class Case(NamedTuple):
    """A call, and the most microseconds that it may take of the host, or of launches by the JIT."""

    name: str
    call: Callable[[], Any]
    microseconds: float
    launches: float


class Time(NamedTuple):
    """Of a case, in microseconds."""

    case: Case
    first_seen: float  # with its kernels, but of new shapes
    seen: float
    launches: float  # `seen` over that of a launch by the JIT


def use_stub() -> None:
    """Where torch sees no GPU."""
    if not torch.cuda.is_available():
        sys.path.insert(0, str(TESTS))
        import gpu_stub

        gpu_stub.install()


def cases(device: str) -> list[Case]:
    """An outside drafter's chains, by several rules; the draw from a lone model; a tree; the caches of eight layers."""
    from specens_kernels import Sampling, Verdict, compact_kv, sample, verify_chain, verify_tree

    def tensor(*shape: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
        return torch.zeros(shape, dtype=dtype, device=device)

    logits = tensor(BATCH, DRAFT_LEN + 1, VOCAB, dtype=torch.bfloat16)
    tokens, draft = tensor(BATCH, DRAFT_LEN), logits[:, 1:].contiguous()
    random_numbers = {"seeds": tensor(BATCH), "positions": tensor(BATCH), "backend": "triton"}
    numbers = tensor(BATCH, dtype=torch.float32)
    filters = Sampling(numbers + 1, tensor(BATCH) + 50, numbers + 0.95)
    integers = [tensor(BATCH) for _ in range(3)]
    parents = torch.tensor([[-1, -1, 0, 1, 2]] * BATCH, device=device)
    caches = [tensor(BATCH, 8, 64, 128, dtype=torch.bfloat16) for _ in range(CACHES)]
    path, prefix_lens = torch.tensor([[0, 2, 4]] * BATCH, device=device), tensor(BATCH)
    out = Verdict(tensor(BATCH, DRAFT_LEN + 1), *integers, None, tensor(BATCH, dtype=torch.int32))
    return [
        Case("chain", lambda: verify_chain(logits, tokens, draft_logits=draft, **random_numbers), 120, 8),
        Case(
            "chain, out=", lambda: verify_chain(logits, tokens, draft_logits=draft, out=out, **random_numbers), 120, 13
        ),
        Case(
            "filtered",
            lambda: verify_chain(logits, tokens, draft_logits=draft, sampling=filters, **random_numbers),
            160,
            12,
        ),
        Case("sample", lambda: sample(logits[:, 0], **random_numbers), 80, 8),
        Case(
            "block", lambda: verify_chain(logits, tokens, draft_logits=draft, rule="block", **random_numbers), 120, 12
        ),
        Case("typical", lambda: verify_chain(logits, tokens, rule="typical", **random_numbers), 120, 12),
        Case("tree", lambda: verify_tree(logits, tokens, parents, **random_numbers), 120, 10),
        Case("compact_kv", lambda: compact_kv(caches, path, prefix_lens, backend="triton"), 120, 10),
    ]


def jit_launch(device: str) -> Callable[[], Any]:
    """What is compared with."""
    from bench.gpu.flat_kernel import flat_kernel

    tensors = [torch.zeros(64, device=device) for _ in range(10)]
    return lambda: flat_kernel[(1,)](*tensors, 5, 7, BLOCK=64)


def microseconds(call: Callable[[], Any]) -> float:
    """Of the processor, a call."""
    for _ in range(5):
        call()
    times = []
    for _ in range(ROUNDS):
        begin = time.process_time()
        for _ in range(CALLS):
            call()
        times.append((time.process_time() - begin) / CALLS * 1e6)
    return statistics.median(times)


def measure() -> list[Time]:
    """All cases; the stub or a GPU is there."""
    from specens_kernels.parts import replays

    device = "cuda" if torch.cuda.is_available() else "cpu"
    launch, found = jit_launch(device), []
    for case in cases(device):
        with replays.off():
            new = microseconds(case.call)
        seen, unit = microseconds(case.call), microseconds(launch)
        found.append(Time(case, new, seen, seen / unit))
    return found


def main() -> None:
    """Print a table; exit with 1 where a bar is missed."""
    use_stub()
    torch.set_num_threads(1)
    table = Table(title=f"host time of a call, batch {BATCH}, {DRAFT_LEN} drafts", title_justify="left")
    for column in ("case", "us", "bar", "launches by the JIT", "bar", "us of new shapes"):
        table.add_column(column, justify="left" if column == "case" else "right")
    missed = []
    for found in measure():
        case, bars = found.case, (found.seen > found.case.microseconds, found.launches > found.case.launches)
        numbers = (found.seen, case.microseconds, found.launches, case.launches, found.first_seen)
        table.add_row(case.name, *(f"{number:.3g}" for number in numbers))
        missed += [case.name] * any(bars)
    Console().print(table)
    if missed:
        print(f"missed: {', '.join(missed)}")
        raise SystemExit(1)


if __name__ == "__main__":
    main()
