"""Host time of an eager call: `python -m bench host_time`.

Without a GPU a stub stands for it (tests/gpu_stub), which launches nothing; with one, nothing waits for the kernels.
Times are of the processor, the least of many short windows, which another job on the core disturbs least, and their
median. The least is also told as a multiple of what Triton's own JIT takes to launch one kernel with ten tensors and
two numbers, in windows between these. The functions that a call runs, of Python and built in, are the same each time.
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
CALLS, WINDOWS = 20, 100
CACHES = 16  # keys and values of eight layers
TESTS = Path(__file__).parents[2] / "tests"


class Case(NamedTuple):
    """A call, and the most that it may take of the host: microseconds, launches by the JIT, and functions."""

    name: str
    call: Callable[[], Any]
    microseconds: float
    launches: float
    functions: int


class Time(NamedTuple):
    """Of a case, in microseconds."""

    case: Case
    first_seen: float  # with its kernels, but of new shapes; this and the next are the least of windows
    seen: float
    median: float
    launches: float  # `seen` over that of a launch by the JIT
    functions: int

    @property
    def missed(self) -> bool:
        """Whether a bar is that other jobs on the machine leave alone."""
        return self.launches > self.case.launches or self.functions > self.case.functions


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

    def verify(**given: Any) -> Callable[[], Any]:
        return lambda: verify_chain(logits, tokens, **random_numbers, **given)

    return [
        Case("chain", verify(draft_logits=draft), 120, 6, 115),
        Case("chain, out=", verify(draft_logits=draft, out=out), 120, 6, 130),
        Case("filtered", verify(draft_logits=draft, sampling=filters), 160, 7, 175),
        Case("sample", lambda: sample(logits[:, 0], **random_numbers), 80, 5, 95),
        Case("block", verify(draft_logits=draft, rule="block"), 120, 6, 135),
        Case("typical", verify(rule="typical"), 120, 6, 135),
        Case("tree", lambda: verify_tree(logits, tokens, parents, **random_numbers), 120, 6, 120),
        Case("compact_kv", lambda: compact_kv(caches, path, prefix_lens, backend="triton"), 120, 6, 125),
    ]


def jit_launch(device: str) -> Callable[[], Any]:
    """What is compared with."""
    from bench.gpu.flat_kernel import flat_kernel

    tensors = [torch.zeros(64, device=device) for _ in range(10)]
    return lambda: flat_kernel[(1,)](*tensors, 5, 7, BLOCK=64)


def microseconds(*calls: Callable[[], Any]) -> list[list[float]]:
    """Of the processor, a call, in each of the windows that these take in turn."""
    for call in calls * 5:
        call()
    times: list[list[float]] = [[] for _ in calls]
    for _ in range(WINDOWS):
        for call, own in zip(calls, times, strict=True):
            begin = time.process_time()
            for _ in range(CALLS):
                call()
            own.append((time.process_time() - begin) / CALLS * 1e6)
    return times


def functions(call: Callable[[], Any]) -> int:
    """How many a call runs that was there before."""
    events: list[str] = []
    for _ in range(3):
        call()
    sys.setprofile(lambda _, event, __: events.append(event))
    call()
    sys.setprofile(None)
    return events.count("call") + events.count("c_call") - 1  # that of setprofile


def measure() -> list[Time]:
    """All cases; the stub or a GPU is there."""
    from specens_kernels.parts import replays

    device = "cuda" if torch.cuda.is_available() else "cpu"
    launch, found = jit_launch(device), []
    for case in cases(device):
        with replays.off():
            new = min(*microseconds(case.call))
        seen, unit = microseconds(case.call, launch)
        least = min(seen)
        found.append(Time(case, new, least, statistics.median(seen), least / min(unit), functions(case.call)))
    return found


def main() -> None:
    """Print a table; exit with 1 where a bar is missed."""
    use_stub()
    torch.set_num_threads(1)
    table = Table(title=f"host time of a call, batch {BATCH}, {DRAFT_LEN} drafts", title_justify="left")
    columns = ("case", "us", "bar", "median", "launches by the JIT", "bar", "functions", "bar", "us of new shapes")
    for column in columns:
        table.add_column(column, justify="left" if column == "case" else "right")
    missed = []
    for found in measure():
        case = found.case
        numbers = (found.seen, case.microseconds, found.median, found.launches, case.launches)
        rest = (found.functions, case.functions, found.first_seen)
        table.add_row(case.name, *(f"{number:.3g}" for number in (*numbers, *rest)))
        missed += [case.name] * (found.missed or found.seen > case.microseconds)
    Console().print(table)
    if missed:
        print(f"missed: {', '.join(missed)}")
        raise SystemExit(1)


if __name__ == "__main__":
    main()
