"""A launch as data, so that what is compiled ahead of time is what is launched."""

from __future__ import annotations

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
}
Path = tuple[int, ...]
AotVariant = tuple[Any, dict[str, Any], dict[Path, Any]]


class Launch(NamedTuple):
    """A jitted kernel, its grid, its arguments by name and in order, and the warps of a program."""

    kernel: Any
    grid: tuple[int, ...]
    arguments: dict[str, Any]
    num_warps: int


def aot_variant(launch: Launch) -> AotVariant:
    """(kernel, signature, constexprs by path) of a launch, for compilation without a GPU."""
    constexprs: dict[Path, Any] = {}
    names = [parameter.name for parameter in launch.kernel.params]
    annotated = {parameter.name for parameter in launch.kernel.params if parameter.is_constexpr}
    signature = {}
    for index, name in enumerate(names):
        value = launch.arguments[name]
        value = tl.constexpr(value) if name in annotated else value
        signature[name] = _type_of(value, (index,), constexprs)
    return launch.kernel, signature, constexprs


def _type_of(value: Any, path: Path, constexprs: dict[Path, Any]) -> Any:
    if value is None or isinstance(value, tl.constexpr):
        constexprs[path] = None if value is None else value.value
        return "constexpr"
    if isinstance(value, Tensor):
        return POINTERS[value.dtype]
    if isinstance(value, tuple):
        types = [_type_of(item, (*path, index), constexprs) for index, item in enumerate(value)]
        return type(value)(*types) if hasattr(value, "_fields") else tuple(types)
    return "fp32" if isinstance(value, float) else "i32" if -(2**31) <= value < 2**31 else "i64"
