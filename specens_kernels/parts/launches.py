"""A launch as data, so that what is compiled ahead of time is what is launched."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import triton.language as tl
from torch import Tensor

POINTERS = {
    torch.float64: "*fp64",
    torch.float32: "*fp32",
    torch.bfloat16: "*bf16",
    torch.float16: "*fp16",
    torch.int64: "*i64",
    torch.int32: "*i32",
    torch.int8: "*i8",
}
ALIGNMENT = 16  # of addresses, and of numbers that Triton is told to be multiples of it
Path = tuple[int, ...]


class AotVariant(NamedTuple):
    """A kernel for compilation without a GPU, as a launch would compile it."""

    kernel: Any
    signature: dict[str, Any]
    constexprs: dict[Path, Any]
    attributes: dict[Path, list[list[Any]]]  # which arguments are aligned
    num_warps: int


class Launch(NamedTuple):
    """A jitted kernel, its grid, its arguments by name and in order, and the warps of a program."""

    kernel: Any
    grid: tuple[int, ...]
    arguments: dict[str, Any]
    num_warps: int


def aot_variant(launch: Launch) -> AotVariant:
    """What a launch compiles; tensors count as aligned."""
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
    return AotVariant(launch.kernel, signature, constexprs, attributes, launch.num_warps)


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


def run(launches: Iterator[Launch], device_of: Tensor) -> None:
    """Start launches, but for those of empty grids. Sums are not fused, so that all kernels see the same numbers."""
    with torch.cuda.device_of(device_of):
        for launch in launches:
            if 0 not in launch.grid:
                launch.kernel[launch.grid](**launch.arguments, num_warps=launch.num_warps, enable_fp_fusion=False)
