"""A launch as data, so that what is compiled ahead of time is what is launched.

The JIT looks at everything anew each time, which takes longer than the rest of a call. So a kernel that it has compiled
is kept here, under what it was compiled for, and called directly.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from copy import copy
from functools import cache
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

POINTERS = {
    torch.float64: "*fp64",
    torch.float32: "*fp32",
    torch.bfloat16: "*bf16",
    torch.float16: "*fp16",
    torch.int64: "*i64",
    torch.int32: "*i32",
    torch.int16: "*i16",
    torch.int8: "*i8",
    torch.uint8: "*u8",
}
DEPENDENT = "DEPENDENT"  # a parameter of every kernel: whether it starts while the one before it may still run
DEPENDENT_CAPABILITY = 9  # major compute capability of devices that can do that
ALIGNMENT = 16  # of addresses, and of numbers that Triton is told to be multiples of it
Path = tuple[int, ...]


@triton.jit
def wait_for_launch_before(DEPENDENT: tl.constexpr):
    """First in every kernel: wait until the launch before it has ended and can be seen, then let the next one start.

    What starts early has read nothing until then, so that a launch may rely on all launches before it.
    """
    if DEPENDENT:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()


class AotVariant(NamedTuple):
    """A kernel for compilation without a GPU, as a launch would compile it."""

    kernel: Any
    signature: dict[str, Any]
    constexprs: dict[Path, Any]
    attributes: dict[Path, list[list[Any]]]  # which arguments are aligned
    num_warps: int
    max_registers: int | None
    dependent: bool


class Launch(NamedTuple):
    """A jitted kernel, its grid, arguments by name and in order, the warps of a program, the registers of a thread."""

    kernel: Any
    grid: tuple[int, ...]
    arguments: dict[str, Any]  # DEPENDENT is added when it is started
    num_warps: int
    max_registers: int | None = None

    def after_others(self, dependent: bool) -> Launch:
        """The same, which waits for the launch before it if `dependent`, else starts when that has ended."""
        return self._replace(arguments=self.arguments | {DEPENDENT: dependent})


def aot_variant(launch: Launch) -> AotVariant:
    """What a launch compiles; tensors count as aligned."""
    launch = launch.after_others(False)
    constexprs: dict[Path, Any] = {}
    attributes: dict[Path, list[list[Any]]] = {}
    names = [parameter.name for parameter in launch.kernel.params]
    annotated = {parameter.name for parameter in launch.kernel.params if parameter.is_constexpr}
    general = {names[index] for index in launch.kernel.do_not_specialize if isinstance(index, int)}
    general |= {name for name in launch.kernel.do_not_specialize if isinstance(name, str)}
    signature = {}
    for index, name in enumerate(names):
        value = launch.arguments[name]
        value = tl.constexpr(value) if name in annotated else value
        found: dict[Path, list[list[Any]]] = {}
        signature[name] = _type_of(value, (index,), constexprs, found)
        attributes |= {} if name in general else found
    warps, registers = launch.num_warps, launch.max_registers
    return AotVariant(launch.kernel, signature, constexprs, attributes, warps, registers, False)


def as_dependent(variant: AotVariant) -> AotVariant:
    """As a launch compiles it that waits for the one before it."""
    index = [parameter.name for parameter in variant.kernel.params].index(DEPENDENT)
    return variant._replace(constexprs=variant.constexprs | {(index,): True}, dependent=True)


def _type_of(value: Any, path: Path, constexprs: dict[Path, Any], attributes: dict[Path, list[list[Any]]]) -> Any:
    if value is None or isinstance(value, tl.constexpr):
        constexprs[path] = None if value is None else value.value
        return "constexpr"
    if isinstance(value, Tensor):
        attributes[path] = [["tt.divisibility", ALIGNMENT]]
        return POINTERS[value.dtype]
    if isinstance(value, tuple):
        types = [_type_of(item, (*path, index), constexprs, attributes) for index, item in enumerate(value)]
        return type(value)(*types) if hasattr(value, "_fields") else tuple(types)
    if isinstance(value, float):
        return "fp32"
    if value % ALIGNMENT == 0:
        attributes[path] = [["tt.divisibility", ALIGNMENT]]
    return "i32" if -(2**31) <= value < 2**31 else "i64"


class Activity(threading.local):
    """What is done with the launches of this thread, besides or instead of starting them."""

    direct: bool = False  # nothing is recorded or replayed
    dependent: bool = False  # launches are programmatic dependent ones, where the device has them
    record: Callable[[Any, Launch], None] | None = None  # told of each compiled kernel that was started
    collected: dict[Hashable, Launch] | None = None  # takes them instead


ACTIVITY = Activity()
COMPILED: dict[Hashable, Any] = {}  # by `launch_key`: kernels that are loaded on their device


def specialization(value: Any, specialize: bool = True) -> Hashable:
    """What the JIT compiles a kernel for, of one argument; values that it tells apart differ here.

    specialize: False for an argument of which it looks at the type alone, unless it is a tuple.
    """
    if isinstance(value, Tensor):
        return value.dtype, specialize and value.data_ptr() % ALIGNMENT == 0
    if isinstance(value, tl.constexpr):
        return type(value.value), value.value
    if isinstance(value, tuple):
        return type(value), *[specialization(item) for item in value]
    if type(value) is int:
        bits = 32 if -(2**31) <= value < 2**31 else 64 if value < 2**63 else 65
        return bits, specialize and (value == 1, value % ALIGNMENT == 0)
    return type(value)


def launch_key(launch: Launch, device: int, known: dict[int, Hashable]) -> Hashable:
    """What a compiled kernel is kept under. known: of arguments, by identity, that launches of a call share."""
    parts: list[Hashable] = [id(launch.kernel), device, launch.num_warps, launch.max_registers]
    for parameter in launch.kernel.params:
        value = launch.arguments[parameter.name]
        if parameter.is_constexpr:
            parts.append((type(value), value))
        elif parameter.do_not_specialize:
            parts.append(specialization(value, specialize=False))
        else:
            part = known.get(id(value))
            if part is None:
                part = known[id(value)] = specialization(value)
            parts.append(part)
    return tuple(parts)


def compile_options(launch: Launch | AotVariant) -> dict[str, Any]:
    """How a kernel is compiled. Sums are not fused, so that all kernels see the same numbers."""
    options = {"num_warps": launch.num_warps, "enable_fp_fusion": False}
    if launch.dependent if isinstance(launch, AotVariant) else launch.arguments[DEPENDENT]:
        options["launch_pdl"] = True
    return options if launch.max_registers is None else options | {"maxnreg": launch.max_registers}


def compile_launch(launch: Launch, start: bool) -> Any:
    """The JIT's kernel for a launch."""
    return launch.kernel.run(**launch.arguments, **compile_options(launch), grid=launch.grid, warmup=not start)


def start(compiled: Any, grid: tuple[int, ...], stream: int, arguments: Sequence[Any]) -> None:
    """Start a compiled kernel with arguments in order: tensors may be addresses. Who listens to launches is told."""
    if listened_to():
        compiled[(*grid, 1, 1)[:3]](*arguments, stream=stream)
    else:
        sizes, own = (*grid, 1, 1)[:3], (compiled.function, compiled.packed_metadata)
        compiled.run(*sizes, stream, *own, None, None, None, *arguments)


def listened_to() -> bool:
    """Whether someone listens to launches: a hook is a chain, or what was put in its place."""
    runtime = triton.knobs.runtime
    enter, leave = runtime.launch_enter_hook, runtime.launch_exit_hook
    return bool(getattr(enter, "calls", enter) or getattr(leave, "calls", leave))


class DriverCall(NamedTuple):
    """What starts a compiled kernel where nobody listens: `function(*before, stream, *after, *arguments)`."""

    function: Callable[..., Any]
    before: tuple[Any, ...]
    after: tuple[Any, ...]
    packed: bool  # the arguments are one tuple


def driver_call(compiled: Any, grid: tuple[int, ...]) -> DriverCall:
    """That of a kernel, which passes by Triton's launcher where this has nothing to do.

    The launcher hands all that it is given to the driver's function, in an order of its release, after it has made
    memory for a kernel that needs some. What it hands over besides is found by asking it once.
    """
    sizes, run = (*grid, 1, 1)[:3], compiled.run
    own = (compiled.function, compiled.packed_metadata, None, None, None)
    needs = [getattr(run, name, True) for name in ("global_scratch_size", "profile_scratch_size")]
    if any(needs) or getattr(run, "gsan_enabled", False) or not hasattr(run, "launch"):
        return DriverCall(run, sizes, own, False)
    found: list[Any] = []
    asked, stream, argument = copy(run), object(), object()
    asked.launch = lambda *given: found.extend(given)
    asked(*sizes, stream, *own, argument)
    at, packed = found.index(stream), found[-1] == (argument,)
    assert packed or found[-1] is argument, "Triton's launcher hands arguments on in a way that is not known"
    return DriverCall(run.launch, tuple(found[:at]), tuple(found[at + 1 : -1]), packed)


def stream_of(device: int) -> int:
    """The current stream of a device, as Triton launches on it."""
    return triton.runtime.driver.active.get_current_stream(device)


@cache
def has_dependent_launches(device: torch.device) -> bool:
    """Whether its kernels can start before the launch before them has ended."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] >= DEPENDENT_CAPABILITY


@contextmanager
def dependent_launches(wanted: bool = True) -> Iterator[None]:
    """Calls of this thread let each kernel start while the one before it ends, on devices that can do that.

    Programmatic dependent launch, off unless asked for: `bench/gpu/run.sh` times both.
    """
    before, ACTIVITY.dependent = ACTIVITY.dependent, wanted
    try:
        yield
    finally:
        ACTIVITY.dependent = before


def run(launches: Iterator[Launch], device_of: Tensor) -> None:
    """Start launches, but for those of empty grids."""
    dependent = ACTIVITY.dependent and has_dependent_launches(device_of.device)
    with torch.cuda.device_of(device_of):
        known: dict[int, Hashable] = {}
        kept = []  # what `known` knows by identity stays alive
        for launch in launches:
            if 0 not in launch.grid:
                kept.append(launch)
                _start(launch.after_others(dependent), device_of.get_device(), known)


def _start(launch: Launch, device: int, known: dict[int, Hashable]) -> None:
    if not isinstance(launch.kernel, triton.JITFunction):
        # interpreter: it has nothing to keep compiled
        launch.kernel[launch.grid](**launch.arguments, num_warps=launch.num_warps)
        return
    key = launch_key(launch, device, known)
    if ACTIVITY.collected is not None:
        ACTIVITY.collected[key] = launch
        return
    compiled = COMPILED.get(key)
    if compiled is not None:
        arguments = [launch.arguments[parameter.name] for parameter in launch.kernel.params]
        start(compiled, launch.grid, stream_of(device), arguments)
    else:
        compiled = COMPILED[key] = compile_launch(launch, start=True)
    if ACTIVITY.record is not None:
        ACTIVITY.record(compiled, launch)
