"""An operator's launches, done again for arguments of the same shapes without the Python that made them.

What a launcher does follows from what can be seen of its arguments without reading a tensor: shapes, strides, dtypes,
alignment, and all numbers. The second call with the same of it is recorded: which tensors it made, by which operation
of torch, and which compiled kernels it started on which tensors. Later calls do just that.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from operator import itemgetter
from typing import Any

import torch
import triton
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from specens_kernels.parts.launches import ACTIVITY, ALIGNMENT, Launch
from specens_kernels.parts.rules import KEPT_NODES
from specens_kernels.workspace import CURRENT, Scratch, Step

UNSEEN = object()
MOST_RECORDINGS = 512  # of an operator; the oldest makes way. They hold no memory of a GPU
UNWRITTEN = (torch.ops.aten.empty.memory_format, torch.ops.aten.empty_like.default)
COPIES = (torch.ops.aten._to_copy.default, torch.ops.aten.clone.default)
OF_NEW_TENSORS = ("dtype", "layout", "device", "pin_memory")


class Slot(int):
    """The place of a tensor among those of a call: its arguments, then what it makes."""


class Recording(TorchDispatchMode):
    """What a launcher did, to be done again."""

    def __init__(self, inputs: Sequence[Tensor]) -> None:
        super().__init__()
        self.steps: list[Step] = []
        self._alive: list[Any] = []  # so that no identity is used twice
        self._scratch: dict[int, Tensor] = {}  # by the index of the step that makes it
        self._slots: dict[int, Slot] = {}
        self._num_inputs, self._num_slots = len(inputs), 0
        for tensor in inputs:
            self._add(tensor)

    def _add(self, value: Any) -> None:
        self._slots[id(value)] = Slot(self._num_slots)
        self._num_slots += 1
        self._alive.append(value)

    def record(self, launch: Callable[..., Any], given: Sequence[Any], options: dict[str, Any]) -> Any:
        """Call a launcher, and return what it does."""
        ACTIVITY.record = self._launched
        try:
            with self:
                result = launch(*given, **options)
        finally:
            ACTIVITY.record = None
        results = list(result) if isinstance(result, (list, tuple)) else result
        self._fill_result = filler(self._template(results))
        self._keep_apart(results)
        self._alive.clear()
        return result

    def _keep_apart(self, results: Any) -> None:
        """Make what results are, or lie in, anew each time: no workspace lends memory for it."""
        given = results if isinstance(results, list) else [results]
        kept = {_storage_of(tensor) for tensor in given if tensor is not None}
        for index, tensor in self._scratch.items():
            if _storage_of(tensor) in kept:
                self.steps[index] = self.steps[index].__call__
        self._scratch.clear()

    def replay(self, tensors: list[Any], steps: Sequence[Step]) -> Any:
        """Do it again for other arguments. steps: its own, or a workspace's."""
        for step in steps:
            step(tensors)
        return self._fill_result(tensors)

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Record an operation of torch."""
        assert function is not torch.ops.aten.as_strided.default, "its offset is that of a storage, not of an argument"
        assert function is not torch.ops.aten._local_scalar_dense.default, "a launcher waits for the device"
        template, named = self._template(list(args)), kwargs or {}
        fill = filler(template)
        assert not any(isinstance(value, Tensor) for value in named.values()), "a tensor by name"
        ACTIVITY.record = None  # of an operator of ours the launches are its own
        result = function(*args, **named)
        ACTIVITY.record = self._launched
        if function is torch.ops.aten.detach.default and self._slots.get(id(args[0]), -1) >= self._num_inputs:
            self._slots[id(result)] = self._slots[id(args[0])]  # what torch.empty ends with
            self._alive.append(result)
            return result
        several = not isinstance(result, Tensor)
        for tensor in result if several else (result,):
            self._add(tensor)

        if several:
            self.steps.append(lambda made: made.extend(function(*fill(made), **named)))
        elif _shares(result, args):
            self.steps.append(lambda made: made.append(function(*fill(made), **named)))
        else:
            self._scratch[len(self.steps)] = result
            self.steps.append(_scratch_of(result, function, fill, named))
        return result

    def _launched(self, compiled: Any, launch: Launch) -> None:
        arguments = [launch.arguments[parameter.name] for parameter in launch.kernel.params]
        fill = filler([self._view(argument) for argument in arguments])
        start = compiled[(*launch.grid, 1, 1)[:3]]
        self.steps.append(lambda made: start(*fill(made)))

    def _view(self, argument: Any) -> Any:
        """The template of an argument: where it has tensors, the slot of a step that fills it for all launches."""
        if id(argument) not in self._slots:
            template = self._template(argument)
            if template is argument:
                return argument
            fill = filler(template)
            self.steps.append(lambda made: made.append(fill(made)))
            self._add(argument)
        return self._slots[id(argument)]

    def _template(self, value: Any) -> Any:
        """A value with slots for tensors, in lists where there are any; constants as they are."""
        if isinstance(value, Tensor):
            slot = self._slots.get(id(value))
            kept = slot is None and any(value is nodes for nodes in KEPT_NODES.values())
            assert slot is not None or kept, "a tensor of unknown origin"
            return value if slot is None else slot
        if isinstance(value, (tuple, list)):
            items = [self._template(item) for item in value]
            return value if all(new is old for new, old in zip(items, value, strict=True)) else items
        return value


def _scratch_of(result: Tensor, function: Any, fill: Callable[[list[Any]], Any], named: dict[str, Any]) -> Scratch:
    """The step that makes a new tensor by an operation of torch."""
    layout, like = (tuple(result.shape), result.stride()), {"dtype": result.dtype, "device": result.device}
    own = (*layout, *like.values(), result.untyped_storage().nbytes())
    if function in UNWRITTEN:  # four times as fast as the operation itself
        return Scratch(*own, lambda _: torch.empty_strided(*layout, **like), None)
    writing, rest = writing_form(function), {name: value for name, value in named.items() if name not in OF_NEW_TENSORS}

    def write(made: list[Any], out: Tensor) -> None:
        if function in COPIES:  # whose writing forms allocate
            out.copy_(fill(made)[0])
        elif writing is not None:
            writing(*fill(made), **rest, out=out)
        else:
            out.copy_(function(*fill(made), **named))

    return Scratch(*own, lambda made: function(*fill(made), **named), write)


@cache
def writing_form(function: Any) -> Any:
    """The overload of an operation of torch that writes the same into `out`; None where there is none."""
    wanted = [(own.name, str(own.type)) for own in function._schema.arguments if own.name not in OF_NEW_TENSORS]
    for name in function.overloadpacket.overloads():
        other = getattr(function.overloadpacket, name)
        *own, out = other._schema.arguments or [None]
        if out is not None and out.name == "out" and [(given.name, str(given.type)) for given in own] == wanted:
            return other
    return None


def _storage_of(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _shares(result: Tensor, given: Sequence[Any]) -> bool:
    """Whether a result is a view of an argument, or one."""
    return any(isinstance(own, Tensor) and _storage_of(own) == _storage_of(result) for own in given)


def filler(template: Any) -> Callable[[list[Any]], Any]:
    """A function that puts tensors into the slots of a template."""
    if type(template) is Slot:
        return itemgetter(template)
    if type(template) is not list:
        return lambda _: template
    slots = [(index, item) for index, item in enumerate(template) if type(item) is Slot]
    inner = [(index, filler(item)) for index, item in enumerate(template) if type(item) is list]

    def fill(made: list[Any]) -> list[Any]:
        filled = template.copy()
        for index, slot in slots:
            filled[index] = made[slot]
        for index, fill_item in inner:
            filled[index] = fill_item(made)
        return filled

    return fill


def describe(given: Sequence[Any], options: dict[str, Any]) -> tuple[Hashable, list[Tensor]]:
    """What a launcher can see of arguments without reading tensors, and the tensors, each as often as it is there."""
    tensors: list[Tensor] = []
    seen: list[Hashable] = [*options]
    for argument in (*given, *options.values()):
        for value in argument if isinstance(argument, (list, tuple)) else (argument,):
            if isinstance(value, Tensor):
                tensors.append(value)
                seen.append(_seen(value))
            else:
                seen.append(value)
        seen.append(UNSEEN)  # where an argument ends
    indices = {id(tensor): index for index, tensor in enumerate(tensors)}
    if len(indices) < len(tensors):  # a tensor that is there twice
        seen.append(tuple(indices[id(tensor)] for tensor in tensors))
    return tuple(seen), tensors


def _seen(tensor: Tensor) -> Hashable:
    return tensor.shape, tensor.stride(), tensor.dtype, tensor.data_ptr() % ALIGNMENT, tensor.get_device()


@contextmanager
def off() -> Iterator[None]:
    """Every call of this thread launches as one of new shapes does."""
    ACTIVITY.direct = True
    try:
        yield
    finally:
        ACTIVITY.direct = False


def replayed(launch: Callable[..., Any]) -> Callable[..., Any]:
    """A launcher whose calls are recorded and replayed."""
    # interpreter: it has no compiled kernels to call directly
    if triton.knobs.runtime.interpret:
        return launch
    recordings: dict[Hashable, Any] = {}  # a Recording, or None of what was seen once
    lock = threading.Lock()

    def call(*given: Any, **options: Any) -> Any:
        if ACTIVITY.direct or ACTIVITY.collected is not None or ACTIVITY.record is not None:
            return launch(*given, **options)
        seen, tensors = describe(given, options)
        key = seen, ACTIVITY.dependent
        recording, workspace = recordings.get(key, UNSEEN), CURRENT.workspace
        if recording is UNSEEN:
            with lock:
                if len(recordings) >= MOST_RECORDINGS:
                    del recordings[next(iter(recordings))]
                recordings[key] = None
            if workspace is None:
                return launch(*given, **options)
            recording = None
        if recording is None:
            recording = Recording(tensors)
            result = recording.record(launch, given, options)
            with lock:
                recordings[key] = recording
            if workspace is not None:
                workspace.steps_of(recording)
            return result
        with torch.cuda.device_of(tensors[0]):
            return recording.replay(tensors, recording.steps if workspace is None else workspace.steps_of(recording))

    return call
