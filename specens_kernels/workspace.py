"""Scratch memory of the caller's, for calls on a GPU."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from specens_kernels.values import fail

ALIGNMENT = 256  # bytes, of each tensor
Step = Callable[[list[Any]], None]  # of a call: takes the tensors so far, and adds those that it makes


class Scratch(NamedTuple):
    """A tensor of a call that lives no longer than it. Without a workspace a call makes it anew."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    nbytes: int
    make: Callable[[list[Any]], Tensor]  # from the tensors so far
    fill: Callable[[list[Any], Tensor], Any] | None  # writes the same into a tensor; None: kernels write it

    def __call__(self, made: list[Any]) -> None:
        """Make it."""
        made.append(self.make(made))

    def take(self, made: list[Any], tensor: Tensor) -> None:
        """Take this tensor for it."""
        if self.fill is not None:
            self.fill(made, tensor)
        made.append(tensor)


class Current(threading.local):
    """The workspace of the call that this thread is in."""

    workspace: Workspace | None = None


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
        self._steps: WeakKeyDictionary[Any, list[Step]] = WeakKeyDictionary()
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

    def steps_of(self, recording: Any) -> list[Step]:
        """Those of a recorded call, with tensors of this memory where it makes some for itself."""
        steps = self._steps.get(recording)
        if steps is None:
            steps = self._steps[recording] = self._placed(recording.steps)
        return steps

    def _placed(self, steps: Sequence[Step]) -> list[Step]:
        placed, scratch = list(steps), {index: step for index, step in enumerate(steps) if isinstance(step, Scratch)}
        if not scratch:
            return placed
        first, (some, *_) = 0, scratch.values()
        memory = self._memory_of(sum(_rounded(step.nbytes) for step in scratch.values()), some.device)
        for index, step in scratch.items():
            own = memory[first : first + step.nbytes].view(step.dtype).as_strided(step.shape, step.stride)
            placed[index] = partial(step.take, tensor=own)
            first += _rounded(step.nbytes)
        return placed

    def _memory_of(self, nbytes: int, device: torch.device) -> Tensor:
        memory = next((own for own in self._memory if own.device == device and own.nbytes >= nbytes), None)
        if memory is None:
            if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
                fail("workspace", "one that such a call was made with before the graph's capture", "one without memory")
            memory = torch.empty(nbytes, dtype=torch.uint8, device=device)
            self._memory.append(memory)
        return memory


def _rounded(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def in_workspace(workspace: Workspace | None, backend: str, operator: Callable[..., Any]) -> Callable[..., Any]:
    """The operator, which takes its scratch memory from there. Raises ValueError where it cannot."""
    if workspace is None:
        return operator
    if not isinstance(workspace, Workspace):
        fail("workspace", "a Workspace", type(workspace).__name__)
    if backend == "reference":
        fail("workspace", "None with the backend 'reference', which PyTorch gives memory to", "a Workspace")
    if torch.compiler.is_compiling():
        fail("workspace", "None in code that torch.compile traces", "a Workspace")
    return lambda *given, **options: workspace.run(operator, *given, **options)
