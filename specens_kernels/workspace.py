"""Scratch memory of the caller's, for calls on a GPU."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from itertools import accumulate
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from specens_kernels.values import fail

ALIGNMENT = 256  # bytes, of each tensor
Step = Callable[[list[Any]], None]  # of a call: takes what there is so far, and puts in what it makes


class Layout(NamedTuple):
    """Of a tensor that a call makes."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    nbytes: int
    make: Callable[[], Tensor]  # one in memory of its own

    def within(self, memory: Tensor) -> Tensor:
        """One at the start of this memory, uint8."""
        return memory[: self.nbytes].view(self.dtype).as_strided(self.shape, self.stride)


class Scratch(NamedTuple):
    """A step that makes a tensor which lives no longer than the call, by an operation of torch."""

    at: tuple[int, int]  # the indices where it and its address are put
    layout: Layout
    make: Callable[[list[Any]], Tensor]
    write: Callable[..., Any]  # (made, out): writes the same into a tensor

    def __call__(self, made: list[Any]) -> None:
        """Make it."""
        index, address = self.at
        made[index] = tensor = self.make(made)
        made[address] = tensor.data_ptr()


class Plan(NamedTuple):
    """What a call does besides the Python that led to it.

    It works on a list: what it is given, then its constants, among them None where something is yet to be made, then
    addresses in scratch memory.
    """

    constants: list[Any]
    nbytes: int  # of its scratch memory
    distances: tuple[int, ...]  # of these addresses from the start of that memory, also of those that a step puts
    new: dict[tuple[int, int], Layout]  # where new tensors and their addresses are put
    steps: list[Step]


class Current(threading.local):
    """Of the call that this thread is in."""

    workspace: Workspace | None = None
    check: Callable[[], None] | None = None  # what is left to be done unless such a call was there before


CURRENT = Current()


class Workspace:
    """Scratch memory that calls on a GPU share: with `out=`, a call whose like was there before allocates nothing.

    Alike are calls of the same settings, shapes, strides, dtypes and alignments. The first one allocates what it needs,
    where the largest before it needed less. Nothing is freed before the workspace and all CUDA graphs that were
    captured with it are gone, so keep it as long as these.

    Calls that share one follow each other on one stream, as the calls of an engine's step do. Not shared by threads:
    raises ValueError where two are in it at once. On a CPU it is taken and not needed: there each thread keeps scratch
    memory of its own.
    """

    def __init__(self) -> None:
        self._memory: list[Tensor] = []  # uint8, the newest last; what older ones hold stays where it is
        self._plans: WeakKeyDictionary[Any, Plan] = WeakKeyDictionary()
        self._used = threading.Lock()

    @property
    def nbytes(self) -> int:
        """The memory it holds."""
        return sum(memory.nbytes for memory in self._memory)

    def run(self, operator: Callable[..., Any], *given: Any, **options: Any) -> Any:
        """Call an operator with this scratch memory."""
        if not self._used.acquire(blocking=False):
            fail("workspace", "one that no other thread is in", "one in use")
        CURRENT.workspace = self
        try:
            return operator(*given, **options)
        finally:
            CURRENT.workspace = None
            self._used.release()

    def plan_of(self, recording: Any) -> Plan:
        """That of a recorded call, with this memory where it would make some for itself."""
        plan = self._plans.get(recording)
        if plan is None:
            plan = self._plans[recording] = self._placed(recording)
        return plan

    def _placed(self, recording: Any) -> Plan:
        plan, first = recording.plan, recording.num_given
        made = plan.new | {step.at: step.layout for step in plan.steps if isinstance(step, Scratch)}
        lent = {place: layout for place, layout in made.items() if place[0] not in recording.results}
        ends = list(accumulate((rounded(layout.nbytes) for layout in lent.values()), initial=plan.nbytes))
        if ends[-1] == 0:
            return plan
        memory = self._memory_of(ends[-1], recording.device)
        constants = [*plan.constants, *map(memory.data_ptr().__add__, plan.distances)]
        for ((index, address), layout), begin in zip(lent.items(), ends, strict=False):
            constants[index - first] = tensor = layout.within(memory[begin:])
            if address < 0:  # else it is empty
                constants[address] = tensor.data_ptr()
        steps = [
            partial(step.write, out=constants[step.at[0] - first])
            if isinstance(step, Scratch) and step.at in lent
            else step
            for step in plan.steps
        ]
        return Plan(constants, 0, (), {place: own for place, own in plan.new.items() if place not in lent}, steps)

    def _memory_of(self, nbytes: int, device: torch.device) -> Tensor:
        memory = next((own for own in self._memory if own.device == device and own.nbytes >= nbytes), None)
        if memory is None:
            if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
                fail("workspace", "one that such a call was made with before the graph's capture", "one without memory")
            memory = torch.empty(nbytes, dtype=torch.uint8, device=device)
            self._memory.append(memory)
        return memory


def rounded(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def in_workspace(workspace: Workspace, backend: str, operator: Callable[..., Any]) -> Callable[..., Any]:
    """The operator, which takes its scratch memory from there. Raises ValueError where it cannot."""
    if not isinstance(workspace, Workspace):
        fail("workspace", "a Workspace", type(workspace).__name__)
    if backend == "reference":
        fail("workspace", "None with the backend 'reference', which PyTorch gives memory to", "a Workspace")
    if torch.compiler.is_compiling():
        fail("workspace", "None in code that torch.compile traces", "a Workspace")
    return lambda *given, **options: workspace.run(operator, *given, **options)
