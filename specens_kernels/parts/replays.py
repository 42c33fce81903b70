"""An operator's launches, done again for arguments of the same shapes without the Python that made them.

What a launcher does follows from what can be seen of its arguments without reading a tensor: shapes, strides, dtypes,
alignment, and all numbers. The second call with the same of it is recorded: which tensors it made, by which operation
of torch, and which compiled kernels it started on which tensors. Later calls do just that.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache, partial, reduce
from operator import add, attrgetter, itemgetter, le, or_
from typing import Any

import torch
import triton
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from specens_kernels.backend import NOT_SEEN
from specens_kernels.buffers import extent
from specens_kernels.parts.launches import (
    ACTIVITY,
    ALIGNMENT,
    Launch,
    driver_call,
    listened_to,
    start,
    stream_of,
)
from specens_kernels.parts.rules import KEPT_NODES
from specens_kernels.values import fail
from specens_kernels.workspace import CURRENT, Layout, Plan, Scratch, Step, rounded

SEEN = attrgetter("shape", "dtype", "device")  # of a tensor, besides its type and strides
ALL_TENSORS = {Tensor}
MOST_RECORDINGS = 512  # of an operator; the oldest makes way. They hold no memory of a GPU
UNWRITTEN = (torch.ops.aten.empty.memory_format, torch.ops.aten.empty_like.default, torch.ops.aten.new_empty.default)
COPIES = (torch.ops.aten._to_copy.default, torch.ops.aten.clone.default)
OF_NEW_TENSORS = ("dtype", "layout", "device", "pin_memory")


class Recording(TorchDispatchMode):
    """What a launcher did, to be done again.

    A tensor has two places in the list that a plan works on: its own, and that of its address, which is what kernels
    are launched with. Of tensors that kernels alone read and write nothing but the address is ever made. Addresses of
    what is made come last in the list, and are counted from its end.
    """

    def __init__(self, inputs: Sequence[Tensor], num_written: int = 0) -> None:
        """inputs: tensors that are given; so many of them, the first ones, are the caller's buffers."""
        super().__init__()
        self.num_given = 1 + 2 * len(inputs)  # a stream comes first
        self.num_written = num_written
        self.device = inputs[0].device
        self.guarded = torch.cuda.device_count() > 1  # whether torch must be told of a device, or of no gradients
        self.results: set[int] = set()  # indices of what results are, or lie in
        self.plan = Plan([], 0, (), {}, [])
        self._sizes = [end - begin for begin, end in map(extent, inputs)]  # bytes from the first element to the last
        self._alive: list[Any] = []  # so that no identity is used twice
        self._indices: dict[int, int] = {}  # by identity: tensors, and arguments of kernels
        self._addresses: dict[int, int] = {}  # of a tensor's index: that of its address
        self._num_addresses = 0  # that are made
        self._unwritten: dict[int, Layout] = {}  # tensors that were made, of which addresses are all that is needed yet
        self._views: dict[int, Callable[[], Step]] = {}  # likewise; what makes the step that makes one
        self._storages: dict[int, int] = {}  # of tensors that were made, by index
        for index, tensor in enumerate(inputs, 1):
            self._know(tensor, index)
            self._addresses[index] = index + len(inputs)

    def _know(self, value: Any, index: int) -> int:
        self._indices[id(value)] = index
        self._alive.append(value)
        return index

    def _add(self, constant: Any) -> int:
        """The index of one more of what a plan holds besides what it is given."""
        self.plan.constants.append(constant)
        return self.num_given + len(self.plan.constants) - 1

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
        distances, end = [0] * self._num_addresses, 0
        for index, layout in self._unwritten.items():
            if layout.nbytes > 0:
                distances[self._addresses[index]] = end
                end += rounded(layout.nbytes)
        if end == 0:
            self.plan.constants.extend(distances)
        else:
            self.plan = self.plan._replace(nbytes=end, distances=tuple(distances))

    def replay(self, tensors: list[Tensor], addresses: list[int]) -> Any:
        """Do it again for other arguments, with the scratch memory of the workspace that this thread is in, or new."""
        plan, workspace = self.plan, CURRENT.workspace
        if workspace is not None:
            plan = workspace.plan_of(self)
        if not self.guarded:
            return self._run(plan, tensors, addresses)
        with torch.cuda.device_of(tensors[0]), torch.no_grad():
            return self._run(plan, tensors, addresses)

    def _run(self, plan: Plan, tensors: list[Tensor], addresses: list[int]) -> Any:
        if self.num_written > 0:
            self._check_apart(addresses)
        made = [stream_of(tensors[0].get_device()), *tensors, *addresses, *plan.constants]
        if plan.nbytes > 0:
            memory = torch.empty(plan.nbytes, dtype=torch.uint8, device=self.device)
            made += map(memory.data_ptr().__add__, plan.distances)
        for (index, address), layout in plan.new.items():
            made[index] = tensor = layout.make()
            made[address] = tensor.data_ptr()
        if listened_to():
            for step in plan.steps:
                getattr(step, "told", step)(made)
        else:
            for step in plan.steps:
                step(made)
        return self._result_of(made)

    def _check_apart(self, addresses: list[int]) -> None:
        """Raise ValueError where a buffer shares memory with an argument or another buffer."""
        order = sorted(range(len(addresses)), key=addresses.__getitem__)
        begins, sizes = itemgetter(*order)(addresses), itemgetter(*order)(self._sizes)
        if all(map(le, map(add, begins, sizes), begins[1:])):
            return  # nothing shares memory
        end = end_of_written = 0
        for index, begin, size in zip(order, begins, sizes, strict=True):
            if size > 0 and begin < (end if index < self.num_written else end_of_written):
                fail("out", "memory of its own", "some that it shares with an argument or another buffer")
            end = max(end, begin + size)
            if index < self.num_written:
                end_of_written = max(end_of_written, begin + size)

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
            index, self.guarded = self._new(result), True
            places = index, self._addresses[index]
            self.plan.steps.append(_scratch_of(places, result, function, fill, named))
        else:
            fill, several, self.guarded = self._getter(list(args)), not isinstance(result, Tensor), True
            indices = [self._new(tensor) for tensor in (result if several else (result,))]
            places = [(index, self._addresses[index]) for index in indices]
            self.plan.steps.append(_step_of(places, lambda made: function(*fill(made), **named), several))
        return result

    def _new(self, tensor: Tensor) -> int:
        index = self._know(tensor, self._add(None))
        if tensor.numel() == 0:
            self._addresses[index] = self._add(0)
        else:
            self._num_addresses += 1
            self._addresses[index] = -self._num_addresses
        self._storages[index] = _storage_of(tensor)
        return index

    def _record_view(self, function: Any, args: list[Any], named: dict[str, Any], result: Tensor) -> None:
        base = next(own for own in args if isinstance(own, Tensor) and _shares(result, [own]))
        address, distance = self._address_of(base), result.data_ptr() - base.data_ptr()
        index = self._new(result)
        if result.numel() > 0 and distance == 0:
            self._addresses[index] = address
        elif result.numel() > 0:
            own = self._addresses[index]
            self.plan.steps.append(lambda made: made.__setitem__(own, made[address] + distance))

        def step() -> Step:
            fill = self._getter(args)
            return lambda made: made.__setitem__(index, function(*fill(made), **named))

        self._views[index] = step

    def _index_of(self, tensor: Tensor) -> int:
        """Where a tensor is, which something other than a kernel needs."""
        index = self._indices[id(tensor)]
        if index in self._unwritten:
            self.plan.new[index, self._addresses[index]] = self._unwritten.pop(index)
        elif index in self._views:
            self.plan.steps.append(self._views.pop(index)())
            self.guarded = True
        return index

    def _address_of(self, tensor: Tensor) -> int:
        """Where the address of a tensor is, which is all that kernels need."""
        index = self._indices.get(id(tensor))
        if index is not None:
            return self._addresses[index]
        assert any(tensor is nodes for nodes in KEPT_NODES.values()), "a tensor of unknown origin"
        return self._add(tensor.data_ptr())

    def _launched(self, compiled: Any, launch: Launch) -> None:
        given = _tuple_of([self._argument(launch.arguments[parameter.name]) for parameter in launch.kernel.params])
        grid = launch.grid  # a launch itself has tensors
        function, before, after, packed = driver_call(compiled, grid)
        step: Any = lambda made: function(*before, made[0], *after, *given(made))  # noqa: E731
        if packed:
            step = lambda made: function(*before, made[0], *after, given(made))  # noqa: E731
        step.told = lambda made: start(compiled, grid, made[0], given(made))
        self.plan.steps.append(step)

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
        if all(isinstance(item, Tensor) for item in value):
            get = _tuple_of([self._index_of(item) for item in value])
            return lambda made: [*get(made)]
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
    layout = tuple(tensor.shape), tensor.stride()
    make = partial(torch.empty_strided, *layout, dtype=tensor.dtype, device=tensor.device)
    return Layout(*layout, tensor.dtype, nbytes, make)


def _step_of(places: Sequence[tuple[int, int]], make: Callable[[list[Any]], Any], several: bool) -> Step:
    """The step that puts what an operation of torch gives."""

    def put(made: list[Any]) -> None:
        result = make(made)
        for (index, address), tensor in zip(places, result if several else (result,), strict=True):
            made[index], made[address] = tensor, tensor.data_ptr()

    return put


def _scratch_of(
    place: tuple[int, int], result: Tensor, function: Any, fill: Callable[..., Any], named: dict[str, Any]
) -> Scratch:
    """The step that makes a new tensor by an operation of torch."""
    writing, rest = writing_form(function), {name: value for name, value in named.items() if name not in OF_NEW_TENSORS}

    def write(made: list[Any], out: Tensor) -> None:
        if function in COPIES:  # whose writing forms allocate
            out.copy_(fill(made)[0])
        elif writing is not None:
            writing(*fill(made), **rest, out=out)
        else:
            out.copy_(function(*fill(made), **named))

    return Scratch(place, _layout_of(result), lambda made: function(*fill(made), **named), write)


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


def describe(given: Sequence[Any], options: dict[str, Any]) -> tuple[Hashable, list[Tensor], list[int]]:
    """What a launcher can see of arguments without reading tensors; the tensors, as often as given; their addresses.

    Where it can, it maps built-in functions: that takes half of what a loop in Python does.
    """
    names = sorted(options)  # torch's dispatcher has an order of its own
    tensors: list[Tensor] = []
    seen: list[Hashable] = [*names]
    for argument in (*given, *map(options.__getitem__, names)):
        if isinstance(argument, Tensor):
            tensors.append(argument)
            seen.append(NOT_SEEN)  # stands for it
        elif isinstance(argument, (list, tuple)) and {*map(type, argument)} == ALL_TENSORS:
            tensors += argument
            seen += (Tensor, len(argument))
        elif isinstance(argument, (list, tuple)):
            for value in argument:
                if isinstance(value, Tensor):
                    tensors.append(value)
                    seen.append(NOT_SEEN)
                else:
                    seen.append(value)
            seen.append(len(argument))
        else:
            seen.append(argument)
    addresses = [*map(Tensor.data_ptr, tensors)]
    seen += map(type, tensors)
    seen += map(SEEN, tensors)
    seen += map(Tensor.stride, tensors)
    if reduce(or_, addresses, 0) % ALIGNMENT:
        seen += [address % ALIGNMENT for address in addresses]
    if len(set(map(id, tensors))) < len(tensors):  # a tensor that is there twice
        indices = {id(tensor): index for index, tensor in enumerate(tensors)}
        seen.append(tuple(indices[id(tensor)] for tensor in tensors))
    return tuple(seen), tensors, addresses


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


def replayed(launch: Callable[..., Any], writes: bool = False) -> Callable[..., Any]:
    """A launcher whose calls are recorded and replayed. writes: its first argument is the caller's buffers."""
    interpreted = triton.knobs.runtime.interpret  # interpreter: it has no compiled kernels to call directly
    recordings: dict[Hashable, Any] = {}  # a Recording, or None of what was seen once
    lock = threading.Lock()

    def again(given: Sequence[Any], options: dict[str, Any]) -> Any:
        """What a call gives whose like was recorded, replayed; NOT_SEEN where none was."""
        if unusual():
            return NOT_SEEN
        seen, tensors, addresses = describe(given, options)
        recording = recordings.get((seen, ACTIVITY.dependent))
        if recording is None:
            return NOT_SEEN
        result = recording.replay(tensors, addresses)
        CURRENT.check = None
        return result

    def unusual() -> bool:
        """Whether nothing is recorded or replayed."""
        known = ACTIVITY.direct or ACTIVITY.collected is not None or ACTIVITY.record is not None
        return interpreted or known

    def call(*given: Any, **options: Any) -> Any:
        result = again(given, options)
        if result is not NOT_SEEN:
            return result
        check, CURRENT.check = CURRENT.check or _nothing, None
        check()
        if unusual():
            return launch(*given, **options)
        seen, tensors, _ = describe(given, options)
        key, workspace = (seen, ACTIVITY.dependent), CURRENT.workspace
        if key not in recordings:
            with lock:
                if len(recordings) >= MOST_RECORDINGS:
                    del recordings[next(iter(recordings))]
                recordings[key] = None
            if workspace is None:
                return launch(*given, **options)
        recording = Recording(tensors, len(given[0]) if writes else 0)
        result = recording.record(launch, given, options)
        with lock:
            recordings[key] = recording
        if workspace is not None:
            workspace.plan_of(recording)
        return result

    call.again = again  # type: ignore[attr-defined]
    return call
