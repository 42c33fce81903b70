"""An operator's launches, done again for arguments of the same shapes without the Python that made them.

What a launcher does follows from what can be seen of its arguments without reading a tensor: shapes, strides, dtypes,
alignment, and all numbers. The second call with the same of it is recorded: which tensors it made, by which operation
of torch, and which compiled kernels it started on which tensors. Later calls do just that.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import cache
from operator import itemgetter
from typing import Any

import torch
import triton
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from specens_kernels.backend import NOT_SEEN
from specens_kernels.parts.launches import ACTIVITY, ALIGNMENT, Launch, starter, stream_of
from specens_kernels.parts.rules import KEPT_NODES
from specens_kernels.workspace import CURRENT, Layout, Plan, Scratch, Step, rounded

NOTHING = nullcontext()
MOST_RECORDINGS = 512  # of an operator; the oldest makes way. They hold no memory of a GPU
UNWRITTEN = (torch.ops.aten.empty.memory_format, torch.ops.aten.empty_like.default, torch.ops.aten.new_empty.default)
COPIES = (torch.ops.aten._to_copy.default, torch.ops.aten.clone.default)
OF_NEW_TENSORS = ("dtype", "layout", "device", "pin_memory")


class Recording(TorchDispatchMode):
    """What a launcher did, to be done again.

    A tensor has two indices in the list that a plan works on: its own, and after it that of its address, which is what
    kernels are launched with. Of tensors that kernels alone read and write nothing but the address is ever made.
    """

    def __init__(self, inputs: Sequence[Tensor]) -> None:
        super().__init__()
        self.num_given = 1 + 2 * len(inputs)  # a stream comes first
        self.device = inputs[0].device
        self.computes = False  # whether anything is done besides launching, by torch
        self.results: set[int] = set()  # indices of what results are, or lie in
        self.plan = Plan([], 0, {}, {}, [])
        self._alive: list[Any] = []  # so that no identity is used twice
        self._indices: dict[int, int] = {}  # by identity: tensors, and arguments of kernels
        self._addresses: dict[int, int] = {}  # of a tensor's index: that of its address
        self._unwritten: dict[int, Layout] = {}  # tensors that were made, of which addresses are all that is needed yet
        self._views: dict[int, Callable[[], Step]] = {}  # likewise; what makes the step that makes one
        self._storages: dict[int, int] = {}  # of tensors that were made, by index
        for index, tensor in enumerate(inputs):
            self._know(tensor, 1 + 2 * index)

    def _know(self, value: Any, index: int) -> int:
        self._indices[id(value)] = index
        self._addresses.setdefault(index, index + 1)
        self._alive.append(value)
        return index

    def _add(self, *constants: Any) -> int:
        """The index of the first of what a plan holds besides what it is given."""
        self.plan.constants.extend(constants)
        return self.num_given + len(self.plan.constants) - len(constants)

    def record(self, launch: Callable[..., Any], given: Sequence[Any], options: dict[str, Any]) -> Any:
        """Call a launcher, and return what it does."""
        ACTIVITY.record = self._launched
        try:
            with self:
                result = launch(*given, **options)
        finally:
            ACTIVITY.record = None
        results = list(result) if isinstance(result, (list, tuple)) else result
        self._result_of = self._getter(results)
        kept = {_storage_of(own) for own in (results if isinstance(results, list) else [results]) if own is not None}
        self.results = {index for index, storage in self._storages.items() if storage in kept}
        self._place()
        self._alive.clear()
        return result

    def _place(self) -> None:
        """Give scratch memory to what has no tensor of its own."""
        begin = 0
        for index, layout in self._unwritten.items():
            if layout.nbytes == 0:
                self.plan.constants[index + 1 - self.num_given] = 0
            else:
                self.plan.scratch[index + 1] = begin
                begin += rounded(layout.nbytes)
        self.plan = self.plan._replace(nbytes=begin)

    def replay(self, given: list[Any], plan: Plan) -> Any:
        """Do it again for other arguments. plan: its own, or a workspace's."""
        made = given + plan.constants
        if plan.nbytes > 0:
            memory = torch.empty(plan.nbytes, dtype=torch.uint8, device=self.device)
            begin = memory.data_ptr()
            for index, distance in plan.scratch.items():
                made[index] = begin + distance
        for index, layout in plan.new.items():
            made[index] = tensor = layout.new()
            made[index + 1] = tensor.data_ptr()
        for step in plan.steps:
            step(made)
        return self._result_of(made)

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Record an operation of torch."""
        assert function is not torch.ops.aten.as_strided.default, "its offset is that of a storage, not of an argument"
        assert function is not torch.ops.aten._local_scalar_dense.default, "a launcher waits for the device"
        named = kwargs or {}
        assert not any(isinstance(value, Tensor) for value in named.values()), "a tensor by name"
        ACTIVITY.record = None  # of an operator of ours the launches are its own
        result = function(*args, **named)
        ACTIVITY.record = self._launched
        if function is torch.ops.aten.detach.default and self._indices[id(args[0])] >= self.num_given:
            self._know(result, self._indices[id(args[0])])  # what torch.empty ends with
        elif function in UNWRITTEN:
            self._unwritten[self._new(result)] = _layout_of(result)
        elif isinstance(result, Tensor) and _shares(result, args) and not function._schema.is_mutable:
            if any(result is own for own in args):
                return result
            self._record_view(function, list(args), named, result)
        elif isinstance(result, Tensor) and not _shares(result, args):
            fill = self._getter(list(args))
            index, self.computes = self._new(result), True
            self.plan.steps.append(_scratch_of(index, result, function, fill, named))
        else:
            fill, several, self.computes = self._getter(list(args)), not isinstance(result, Tensor), True
            indices = [self._new(tensor) for tensor in (result if several else (result,))]
            self.plan.steps.append(_step_of(indices, lambda made: function(*fill(made), **named), several))
        return result

    def _new(self, tensor: Tensor) -> int:
        index = self._know(tensor, self._add(None, None))
        self._storages[index] = _storage_of(tensor)
        return index

    def _record_view(self, function: Any, args: list[Any], named: dict[str, Any], result: Tensor) -> None:
        base = next(own for own in args if isinstance(own, Tensor) and _shares(result, [own]))
        address, distance = self._address_of(base), result.data_ptr() - base.data_ptr()
        index = self._new(result)
        if result.numel() == 0:
            self.plan.constants[index + 1 - self.num_given] = 0
        elif distance == 0:
            self._addresses[index] = address
        else:
            self.plan.steps.append(lambda made: made.__setitem__(index + 1, made[address] + distance))

        def step() -> Step:
            fill = self._getter(args)
            return lambda made: made.__setitem__(index, function(*fill(made), **named))

        self._views[index] = step

    def _index_of(self, tensor: Tensor) -> int:
        """Where a tensor is, which something other than a kernel needs."""
        index = self._indices[id(tensor)]
        if index in self._unwritten:
            self.plan.new[index] = self._unwritten.pop(index)
        elif index in self._views:
            self.plan.steps.append(self._views.pop(index)())
            self.computes = True
        return index

    def _address_of(self, tensor: Tensor) -> int:
        """Where the address of a tensor is, which is all that kernels need."""
        index = self._indices.get(id(tensor))
        if index is not None:
            return self._addresses[index]
        assert any(tensor is nodes for nodes in KEPT_NODES.values()), "a tensor of unknown origin"
        return self._add(tensor.data_ptr())

    def _launched(self, compiled: Any, launch: Launch) -> None:
        arguments = [self._argument(launch.arguments[parameter.name]) for parameter in launch.kernel.params]
        start, given = starter(compiled, launch.grid), _tuple_of(arguments)
        self.plan.steps.append(lambda made: start(made[0], given(made)))

    def _argument(self, argument: Any) -> int:
        """Where an argument of a kernel is; one with tensors is made once for all launches."""
        if isinstance(argument, Tensor):
            return self._address_of(argument)
        if not _has_tensors(argument):
            return self._add(argument)
        if id(argument) not in self._indices:
            fill = _tuple_of([self._argument(item) for item in argument])
            index = self._know(argument, self._add(None))
            self.plan.steps.append(lambda made: made.__setitem__(index, fill(made)))
        return self._indices[id(argument)]

    def _getter(self, value: Any) -> Callable[[list[Any]], Any]:
        """What gives a value of an operation of torch, in which tensors are looked for, or results."""
        if isinstance(value, Tensor):
            return itemgetter(self._index_of(value))
        if not _has_tensors(value):
            return lambda _: value
        getters = [self._getter(item) for item in value]
        return lambda made: [get(made) for get in getters]


def _tuple_of(indices: Sequence[int]) -> Callable[[list[Any]], tuple[Any, ...]]:
    if len(indices) == 1:
        (index,) = indices
        return lambda made: (made[index],)
    return itemgetter(*indices)


def _has_tensors(value: Any) -> bool:
    return isinstance(value, Tensor) or (isinstance(value, (tuple, list)) and any(map(_has_tensors, value)))


def _layout_of(tensor: Tensor) -> Layout:
    nbytes = tensor.untyped_storage().nbytes()
    return Layout(tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.device, nbytes)


def _step_of(indices: Sequence[int], make: Callable[[list[Any]], Any], several: bool) -> Step:
    """The step that puts what an operation of torch gives."""

    def put(made: list[Any]) -> None:
        result = make(made)
        for index, tensor in zip(indices, result if several else (result,), strict=True):
            made[index], made[index + 1] = tensor, tensor.data_ptr()

    return put


def _scratch_of(index: int, result: Tensor, function: Any, fill: Callable[..., Any], named: dict[str, Any]) -> Scratch:
    """The step that makes a new tensor by an operation of torch."""
    writing, rest = writing_form(function), {name: value for name, value in named.items() if name not in OF_NEW_TENSORS}

    def write(made: list[Any], out: Tensor) -> None:
        if function in COPIES:  # whose writing forms allocate
            out.copy_(fill(made)[0])
        elif writing is not None:
            writing(*fill(made), **rest, out=out)
        else:
            out.copy_(function(*fill(made), **named))

    return Scratch(index, _layout_of(result), lambda made: function(*fill(made), **named), write)


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


def describe(given: Sequence[Any], options: dict[str, Any]) -> tuple[Hashable, list[Any]]:
    """What a launcher can see of arguments without reading tensors, and the list that a plan begins with.

    That is None for a stream, then each tensor, as often as it is given, and its address.
    """
    tensors: list[Any] = [None]
    names = sorted(options)  # torch's dispatcher has an order of its own
    seen: list[Hashable] = [*names]
    for argument in (*given, *[options[name] for name in names]):
        for value in argument if isinstance(argument, (list, tuple)) else (argument,):
            if isinstance(value, Tensor):
                address = value.data_ptr()
                tensors += value, address
                seen += type(value), value.shape, value.stride(), value.dtype, address % ALIGNMENT, value.device
            else:
                seen.append(value)
        seen.append(NOT_SEEN)  # where an argument ends
    indices = {id(tensor): index for index, tensor in enumerate(tensors[1::2])}
    if 2 * len(indices) < len(tensors) - 1:  # a tensor that is there twice
        seen.append(tuple(indices[id(tensor)] for tensor in tensors[1::2]))
    return tuple(seen), tensors


@contextmanager
def off() -> Iterator[None]:
    """Every call of this thread launches as one of new shapes does."""
    ACTIVITY.direct = True
    try:
        yield
    finally:
        ACTIVITY.direct = False


def _nothing() -> None:
    pass


def replayed(launch: Callable[..., Any]) -> Callable[..., Any]:
    """A launcher whose calls are recorded and replayed."""
    interpreted = triton.knobs.runtime.interpret  # interpreter: it has no compiled kernels to call directly
    recordings: dict[Hashable, Any] = {}  # a Recording, or None of what was seen once
    lock = threading.Lock()

    def again(given: Sequence[Any], options: dict[str, Any]) -> Any:
        """What a call gives whose like was recorded, replayed; NOT_SEEN where none was."""
        if unusual():
            return NOT_SEEN
        seen, tensors = describe(given, options)
        recording = recordings.get((seen, ACTIVITY.dependent))
        if recording is None:
            return NOT_SEEN
        CURRENT.check, workspace = None, CURRENT.workspace
        plan = recording.plan if workspace is None else workspace.plan_of(recording)
        with torch.cuda.device_of(tensors[1]), torch.no_grad() if recording.computes else NOTHING:
            tensors[0] = stream_of(tensors[1].get_device())
            return recording.replay(tensors, plan)

    def unusual() -> bool:
        """Whether nothing is recorded or replayed."""
        known = ACTIVITY.direct or ACTIVITY.collected is not None or ACTIVITY.record is not None
        return interpreted or known

    def call(*given: Any, **options: Any) -> Any:
        result = again(given, options)
        if result is not NOT_SEEN:
            return result
        check, CURRENT.check = CURRENT.check or _nothing, None
        if unusual():
            check()
            return launch(*given, **options)
        seen, tensors = describe(given, options)
        key, workspace = (seen, ACTIVITY.dependent), CURRENT.workspace
        if key not in recordings:
            check()
            with lock:
                if len(recordings) >= MOST_RECORDINGS:
                    del recordings[next(iter(recordings))]
                recordings[key] = None
            if workspace is None:
                return launch(*given, **options)
        recording = Recording(tensors[1::2])
        result = recording.record(launch, given, options)
        with lock:
            recordings[key] = recording
        if workspace is not None:
            workspace.plan_of(recording)
        return result

    call.again = again  # type: ignore[attr-defined]
    return call
