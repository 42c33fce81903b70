"""Which implementations of an operation exist here, why others do not, and which one a call takes."""

from __future__ import annotations

import importlib
import importlib.util
import os
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import filterfalse
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from specens_kernels import __path__ as package_folders
from specens_kernels import instruction_set
from specens_kernels.buffers import check_disjoint, written
from specens_kernels.triton_release import find_triton, import_triton, loaded_when_called
from specens_kernels.workspace import CURRENT, Workspace, in_workspace

Implementation = Callable[..., Any]
Table = dict[str, Implementation | None]


OPERATOR_VERSION = 4  # of the schemas; csrc/operators has the same
TRITON_OPERATOR = "{}_triton"  # where the operator of the name is not Triton's


class Operators:
    """What was loaded and added in `torch.ops.specens`. One a process, which outlives this module.

    A second copy of the package, or a second import, finds the operators there, and takes them.
    """

    def __init__(self) -> None:
        self.library = torch.library.Library("specens", "FRAGMENT")
        self.loaded: set[str] = set()
        self.traced: set[str] = set()

    def trace(self, name: str, fake: Implementation) -> None:
        """Let torch trace an operator, whose results claim no gradient; fake: its fake kernel."""
        if name not in self.traced:
            self.traced.add(name)
            self.library.impl(name, torch.library.fallthrough_kernel, "Autograd")
            torch.library.register_fake(f"specens::{name}", fake, lib=self.library)

    def define(self, name: str, schema: str, fake: Implementation) -> None:
        """Define an operator that C++ does not, and let torch trace it."""
        if not hasattr(torch.ops.specens, name):
            self.library.define(name + schema)
        elif getattr(torch.ops.specens, name).default._schema != torch._C.parse_schema(f"specens::{name}{schema}"):
            raise RuntimeError(f"another version of specens_kernels has defined specens::{name} in this process")
        self.trace(name, fake)

    def implement(self, name: str, kernel: Implementation, key: str) -> None:
        """Add a kernel, unless there is one."""
        if not _has_kernel(name, key):
            self.library.impl(name, torch.no_grad()(kernel), key)


OPERATORS: Operators = vars(torch.ops.specens).setdefault("_operators", Operators())
OPERATOR_LIBRARY = "_C.so"
FASTEST_FIRST = {"cpu": ("cpp", "reference"), "cuda": ("triton", "cpp", "reference")}


@dataclass(frozen=True)
class BackendInfo:
    """One backend on this machine: its name, the device types it runs on here, and why it does not (None: it does).

    instruction_set: that of the processor which "cpp" uses on the CPU.
    """

    name: str
    devices: tuple[str, ...]
    reason: str | None
    instruction_set: str | None = None


def _load_library(file_name: str, folders: Iterable[str]) -> str | None:
    """Load an operator library from the first of `folders` that has it. Return why it could not be loaded, or None."""
    if file_name in OPERATORS.loaded:
        return None
    if file_name == OPERATOR_LIBRARY and hasattr(torch.ops.specens, "verify_chain"):
        _require_version()  # `torch.ops.load_library` was here before
        return None
    path = next((path for folder in folders if (path := Path(folder, file_name)).is_file()), None)
    if path is None:
        return f"not built: the package has no {file_name}"
    try:
        torch.ops.load_library(path)
    except (OSError, RuntimeError) as error:
        return f"{file_name} could not be loaded: {error}"
    OPERATORS.loaded.add(file_name)
    return None


def _require_version() -> None:
    """Raise RuntimeError where operators of another version are loaded."""
    if not hasattr(torch.ops.specens, "operator_version") or torch.ops.specens.operator_version() != OPERATOR_VERSION:
        raise RuntimeError("another version of specens_kernels has defined the operators torch.ops.specens")


def _load_cuda_library() -> str | None:
    if torch.version.cuda is None:
        return f"torch {torch.__version__} is built without CUDA"
    reason = _load_library("_C_cuda.so", package_folders)
    return (
        f"{reason}; build it where nvcc is found" if reason is not None and reason.startswith("not built") else reason
    )


CHOSEN_BACKEND = os.environ.get("SPECENS_BACKEND") or None
CPP_REASON = _load_library(OPERATOR_LIBRARY, package_folders)
instruction_set.use_chosen()
CUDA_REASON = _load_cuda_library()
TRITON_REASON, TRITON_INTERPRETED = find_triton()
KERNEL_DEVICES: dict[str, frozenset[str]] = {}  # operator name -> device types that it has a kernel for
GPU_BACKENDS: dict[
    str, tuple[str, ...]
] = {}  # operation -> the backends that have a kernel of it for GPUs in a full build
# (operation, backend or None for the fastest, device type) -> the name and the operator that a call takes
READY: dict[tuple[str, str | None, str], tuple[str, Implementation]] = {}
EAGER: dict[Implementation, Implementation] = {}  # Triton's operator -> what calls of it take
NOT_SEEN = object()  # what a function of AGAIN returns where no such call was there before
AGAIN: dict[str, Callable[[Any, Any], Any]] = {}  # operator -> calls of Triton's that were there before, replayed
WRITING: dict[str, Table] = {}  # operation -> the implementations that write into the caller's buffers


def implementations(
    name: str,
    reference: Implementation,
    *,
    fake: Implementation | None = None,
    cuda: bool = False,
    cuda_first: bool = False,
) -> Table:
    """Complete the operators `specens::{name}` and `specens::{name}_out`, which C++ defines; return the first's table.

    An operator is that of the backend "cpp" on CPUs, and on GPUs that of C++ where the operation has a cuda.cu that was
    built, else of Triton. Where that leaves Triton's kernel without one (on CPUs in its interpreter, and beside a
    cuda.cu), it is the operator `specens::{name}_triton`. Triton's kernel is the function `launch` of triton_kernel.py
    in the operation's folder, which takes `out=` too. `reference` takes the operator's arguments, is its fake kernel,
    or `fake` is where it would take long. cuda: there is a cuda.cu, so "cpp" serves CUDA tensors where nvcc was there
    to build it; cuda_first: and is preferred to Triton there.

    Returns {"reference": reference, "cpp": operator or None, "triton": operator or None}: None where it cannot run.
    The table of the operator that writes into the caller's buffers, its first argument, is in WRITING.
    """
    module = f"specens_kernels.ops.{name}.triton_kernel"
    has_triton = importlib.util.find_spec(module) is not None

    def load() -> Implementation:
        return cast(Implementation, importlib.import_module(module).launch)

    usable = has_triton and TRITON_REASON is None
    GPU_BACKENDS[name] = GPU_BACKENDS[name + "_out"] = ("triton",) * has_triton + ("cpp",) * cuda
    kernels = (_copying(reference), _copying(fake or reference), (lambda: writing(load())) if usable else None)
    WRITING[name] = _table(name + "_out", *kernels, cuda, cuda_first)
    return _table(name, reference, fake or reference, load if usable else None, cuda, cuda_first)


def writing(launch: Implementation) -> Implementation:
    """A launcher that takes the buffers first."""

    def write(out: list[Tensor], *given: Any, **options: Any) -> None:
        launch(*given, out=out, **options)

    return write


def _copying(function: Implementation) -> Implementation:
    """The same, of what knows no buffers."""

    def write(out: list[Tensor], *given: Any, **options: Any) -> None:
        results = function(*given, **options)
        for into, values in zip(out, [results] if isinstance(results, Tensor) else results, strict=True):
            into.copy_(values)

    return write


def _table(
    name: str,
    reference: Implementation,
    fake: Implementation,
    load: Callable[[], Implementation] | None,
    cuda: bool,
    cuda_first: bool,
) -> Table:
    """That of one operator; load: gives Triton's launcher."""
    table: Table = {"reference": torch.no_grad()(reference), "cpp": None, "triton": None}
    KERNEL_DEVICES[f"{name}_cpp"] = KERNEL_DEVICES[f"{name}_triton"] = frozenset()
    if hasattr(torch.ops.specens, name):
        traced = _on_one_device(fake)
        OPERATORS.trace(name, traced)
        cuda = cuda and CUDA_REASON is None
        KERNEL_DEVICES[f"{name}_cpp"] = frozenset({"cpu", "cuda"} if cuda else {"cpu"})
        table["cpp"] = getattr(torch.ops.specens, name).default
        if load is not None:
            operator = add_triton(name, load, traced, cuda)
            KERNEL_DEVICES[f"{name}_triton"] = _kernel_devices(operator) - ({"cpu"} if operator == name else set())
            table["triton"] = triton_operator = getattr(torch.ops.specens, operator).default
            EAGER[triton_operator] = _eager(triton_operator)
    for device_type, preference in FASTEST_FIRST.items():
        if cuda_first and device_type == "cuda":
            preference = ("cpp", "triton", "reference")
        usable = [backend for backend in table if _unusable(table, backend, device_type, name) is None]
        for chosen in (None, *usable):
            backend = chosen or next(backend for backend in preference if backend in usable)
            if backend != "reference":
                taken = cast(Implementation, table[backend])
                READY[name, chosen, device_type] = backend, _taken(backend, taken)
    return table


def add_triton(name: str, load: Callable[[], Implementation], traced: Implementation, cuda: bool) -> str:
    """The operator that has Triton's kernel."""
    own = name if not TRITON_INTERPRETED and not cuda else TRITON_OPERATOR.format(name)

    def load_replayed() -> Implementation:
        call = importlib.import_module("specens_kernels.parts.replays").replayed(load(), name.endswith("_out"))
        AGAIN[f"specens::{own}"] = call.again
        return cast(Implementation, call)

    kernel = loaded_when_called(name, load_replayed)
    if own == name:
        OPERATORS.implement(name, kernel, "CUDA")
        return name
    schema = str(getattr(torch.ops.specens, name).default._schema)
    OPERATORS.define(own, schema[schema.index("(") :], traced)
    for key in ("CPU", "CUDA") if TRITON_INTERPRETED else ("CUDA",):
        OPERATORS.implement(own, kernel, key)
    return own


def _taken(backend: str, function: Implementation) -> Implementation:
    """What a call takes of an entry of a table; on a GPU the operator of C++ is that of Triton, too."""
    return EAGER.get(function, function) if backend == "triton" else function


def _eager(operator: Any) -> Implementation:
    """Triton's operator, but that a call whose like was there before passes by torch's dispatcher.

    That takes a third of such a call's time, and has nothing to do for eager tensors where nothing listens.
    """
    name = operator.name()

    def call(*given: Any, **options: Any) -> Any:
        if not torch.compiler.is_compiling() and name in AGAIN and _nothing_listens():
            like = given[0] if isinstance(given[0], Tensor) else given[0][0]
            if type(like) is Tensor:  # others have dispatchers of their own
                result = AGAIN[name](given, options)
                if result is not NOT_SEEN:
                    return result
        return operator(*given, **options)

    return call


def _nothing_listens() -> bool:
    """Whether an operator's call is no more than that of its kernel: no mode, transform, trace or profile is on."""
    return not (
        torch._C._len_torch_dispatch_stack()
        or torch._C._len_torch_function_stack()
        or torch._C._functorch.peek_interpreter_stack() is not None
        or torch._C._get_tracing_state() is not None
        or torch._C._autograd._profiler_enabled()
    )


def _on_one_device(fake: Implementation) -> Implementation:
    """The fake kernel, which torch also takes where one tensor among real ones is on the device "meta"."""

    def checked(*arguments: Any, **options: Any) -> Any:
        given = (*arguments, *options.values())
        lists = (argument if isinstance(argument, list) else [argument] for argument in given)
        tensors = [value for values in lists for value in values if isinstance(value, Tensor)]
        if len({tensor.is_meta for tensor in tensors}) > 1:
            raise ValueError("expected tensors on one device, got some on the device meta")
        return fake(*arguments, **options)

    return checked


def _kernel_devices(operator: str) -> frozenset[str]:
    return frozenset(key.lower() for key in ("CPU", "CUDA") if _has_kernel(operator, key))


def _has_kernel(operator: str, key: str) -> bool:
    return torch._C._dispatch_has_kernel_for_dispatch_key(f"specens::{operator}", key)


def select(table: Table, backend: str | None, like: Tensor, op_name: str) -> tuple[str, Implementation]:
    """Return (name, function) of the implementation that a call with a tensor like this takes.

    backend: a name, which runs or raises; None: the environment variable SPECENS_BACKEND at the time of the import (a
    name likewise), else the fastest usable one. On a GPU that is never the reference, unless by name.
    Raises ValueError for an unknown name, RuntimeError with the reason for one that cannot run here.
    """
    name = backend if backend is not None else CHOSEN_BACKEND
    device_type = "cpu" if like.is_cpu else like.device.type  # torch makes a new string each time
    ready = READY.get((op_name, name, device_type)) if name is None or isinstance(name, str) else None
    if ready is not None:
        return ready
    if name is None and device_type not in ("cpu", "meta"):
        raise RuntimeError(no_gpu_kernel(op_name, device_type))
    if name is None:
        name = "reference"
    argument = "backend" if backend is not None else "SPECENS_BACKEND"
    if not isinstance(name, str) or name not in table:
        raise ValueError(f"{argument}: expected None or one of {', '.join(table)}, got {name!r}")
    reason = _unusable(table, name, device_type, op_name)
    function = table[name]
    if reason is not None or function is None:
        raise RuntimeError(f"{op_name}: backend {name!r} cannot run on {device_type}: {reason}")
    return name, function if torch.compiler.is_compiling() else _taken(name, function)


def no_gpu_kernel(op_name: str, device_type: str) -> str | None:
    """Why no kernel of an operation can run on a GPU here, and what to do about it; None if one can."""
    if (op_name, None, device_type) in READY:
        return None
    reasons = {"triton": TRITON_REASON, "cpp": CUDA_REASON}
    found = [f"{name}: {reasons[name]}" for name in GPU_BACKENDS[op_name] if device_type == "cuda" and reasons[name]]
    return (
        f"{op_name}: no kernel can run on {device_type}: {'; '.join(found) or 'this operation has none for it'}. "
        'backend="reference" (or SPECENS_BACKEND=reference) computes it in PyTorch, slowly'
    )


def backend_for(op_name: str, like: Tensor) -> str | None:
    """What a caller inside the package names: None, or "reference", with a warning, on a GPU without a kernel."""
    if CHOSEN_BACKEND or like.is_cpu or like.is_meta:
        return None
    reason = no_gpu_kernel(op_name, like.device.type)
    if reason is None:
        return None
    warnings.warn(reason, stacklevel=3)
    return "reference"


def select_for(
    table: Table, backend: str | None, like: Tensor, op_name: str, out: Any, workspace: Workspace | None
) -> tuple[str, Implementation]:
    """The same of an operation that writes into the caller's buffers, where `out` has them, in a workspace or none."""
    if out is None:
        name, operator = select(table, backend, like, op_name)
    else:
        name, operator = select(WRITING[op_name], backend, like, op_name + "_out")
    return name, operator if workspace is None else in_workspace(workspace, name, operator)


def run_operator(
    table: Table,
    op_name: str,
    call: Any,
    pack: Callable[[Any, Any], Any],
    check: Callable[[Any], None],
    names: Callable[[Any], Sequence[str]] = lambda _: (),
) -> Any:
    """Run the implementation that a call takes; return what it returns, or None where it writes into `out`.

    call: the public arguments, a named tuple with member_logits, out, workspace and backend. pack(call, members): what
    the operator takes, in order and by name; members: a sequence of the members' logits. check(call): raises ValueError
    for an argument that is wrong. The C++ checks for itself what it reads: there, `check` only finds the name of what
    was wrong, since looking at all arguments in Python would double a call's cost. With Triton only the first of calls
    that are alike is checked. names(call): the fields of `out` that the operator writes, in its order.
    """
    logits, out = call.member_logits, call.out
    try:
        members = [logits] if isinstance(logits, Tensor) else logits
        if out is None and call.workspace is None:
            name, operator = select(table, call.backend, members[0], op_name)
        else:
            name, operator = select_for(table, call.backend, members[0], op_name, out, call.workspace)
        buffers = [] if out is None else written(out, names(call))
        if torch.compiler.is_compiling() or name == "reference":
            check(call)
        elif name == "triton":
            operator = partial(checked_where_new, operator, partial(check, call))
        given, options = pack(call, members)
        if out is None:
            return operator(*given, **options)
        if name == "triton" and options.copied:
            check_disjoint(dict(enumerate(buffers)), {"": options.copied})
        operator(buffers, *given, **options)
    except Exception:
        check(call)
        raise
    if torch.is_grad_enabled():
        count_changes(buffers)
    return None


def checked_where_new(operator: Implementation, check: Callable[[], None], *given: Any, **options: Any) -> Any:
    """Call an operator of Triton, after a check unless a call like it was there before (`parts.replays`).

    What is wrong with a call shows in what its operator takes, without reading tensors, but for memory that is shared,
    which replays look for.
    """

    CURRENT.check = check
    try:
        result = operator(*given, **options)
        if CURRENT.check is not None:  # no kernel has run: tensors are fake
            check()
        return result
    finally:
        CURRENT.check = None


def count_changes(tensors: Iterable[Tensor]) -> None:
    """Tell autograd that tensors were written to, so that it uses none that it has saved."""
    if not torch.compiler.is_compiling():  # compiled code sees it in the schema
        torch.autograd.graph.increment_version([*filterfalse(Tensor.is_inference, tensors)])


def _unusable(table: Table, name: str, device_type: str, op_name: str) -> str | None:
    """Why this implementation cannot run on a device, or None."""
    if name == "reference":
        return None
    if table[name] is not None and device_type in KERNEL_DEVICES[f"{op_name}_{name}"]:
        return None
    if name == "cpp":
        library_reason = CUDA_REASON if device_type == "cuda" else CPP_REASON
        return library_reason or f"this build has no C++ kernel of {op_name} for {device_type}"
    if device_type == "cpu" and TRITON_REASON is None and not TRITON_INTERPRETED:
        return "Triton runs CPU tensors in its interpreter only (TRITON_INTERPRET=1, set before the import)"
    if table["cpp"] is None:
        return CPP_REASON
    return TRITON_REASON or f"there is no Triton kernel of {op_name} for {device_type}"


def backends() -> dict[str, BackendInfo]:
    """Return what runs on this machine, by name.

    "reference", "cpp" and "triton" are what `backend=` takes; "cuda" is the library of CUDA C++ kernels that "cpp"
    takes for CUDA tensors. `reason` is None for a usable one, else why it is not: not built, the loader's error, ...
    `instruction_set` is the one that "cpp" uses on the CPU: the best that the processor has, or what the environment
    variable SPECENS_INSTRUCTION_SET named at the time of the import.
    """
    no_gpu = _no_gpu_reason()
    cuda_reason = CUDA_REASON or no_gpu
    triton_reason = TRITON_REASON or import_triton()[0] or (None if TRITON_INTERPRETED else no_gpu)
    gpu_devices = ("cuda",) if no_gpu is None else ()
    cpp_devices = ("cpu",) * (CPP_REASON is None) + ("cuda",) * (cuda_reason is None)
    triton_devices = (("cpu",) if TRITON_INTERPRETED else ()) + gpu_devices
    return {
        "reference": BackendInfo("reference", ("cpu", *gpu_devices), None),
        "cpp": BackendInfo("cpp", cpp_devices, CPP_REASON, instruction_set.in_use()),
        "triton": BackendInfo("triton", triton_devices if triton_reason is None else (), triton_reason),
        "cuda": BackendInfo("cuda", ("cuda",) if cuda_reason is None else (), cuda_reason),
    }


def _no_gpu_reason() -> str | None:
    if torch.cuda.is_available():
        return None
    if torch.version.cuda is None:
        return f"no GPU: torch {torch.__version__} is built without CUDA"
    return "no GPU: torch sees no CUDA device"
