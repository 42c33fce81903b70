"""The caller's buffers: what `out=` of an operation takes, and what results must not be written over."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from itertools import repeat
from operator import is_, itemgetter
from typing import Any

import torch
from torch import Tensor

from specens_kernels.checks import check_tensor
from specens_kernels.values import fail

REPORTED = ("logprobs", "top_tokens", "top_logprobs")
Kind = tuple[tuple[int, ...], torch.dtype]
Shapes = Mapping[str, Kind]  # of results by name; "": of the one there is


def reported(logprobs: bool | str, top_logprobs: int) -> tuple[str, ...]:
    """The results that tell more of emitted tokens, where they are asked for."""
    return REPORTED if top_logprobs else REPORTED[:1] if logprobs else ()


def report_shapes(shape: tuple[int, ...], top_shape: tuple[int, ...], names: Sequence[str]) -> dict[str, Kind]:
    """Of what is reported of tokens of this shape."""
    kinds = {"logprobs": (shape, torch.float32), "top_tokens": (top_shape, torch.int64)}
    kinds["top_logprobs"] = (top_shape, torch.float32)
    return {name: kinds[name] for name in names}


def written(out: Any, names: Sequence[str]) -> list[Tensor]:
    """The buffers of these results. Raises ValueError, whose words `check_out` finds, where they are not just these."""
    if isinstance(out, Tensor):
        return [out]
    fields = _fields_of if torch.compiler.is_compiling() else _kept_fields_of  # which tracing would warn of
    take, absent = fields(type(out), tuple(names))
    if [*map(is_, out, repeat(None))] != absent:
        raise ValueError("out")
    return list(take(out))


def _fields_of(result: Any, names: tuple[str, ...]) -> tuple[Callable[[Any], tuple[Tensor, ...]], list[bool]]:
    """What takes these fields out of a result, and for each field whether it is another one."""
    return itemgetter(*map(result._fields.index, names)), [name not in names for name in result._fields]


_kept_fields_of: Callable[..., Any] = cache(_fields_of)


def check_out(out: Any, result: Any, shapes: Shapes, call: Any, device: torch.device) -> None:
    """Raise ValueError unless `out` has a buffer for each result, and shares no memory with the call's arguments."""
    if out is None:
        return
    if not isinstance(out, result):
        fail("out", f"a {result.__name__}", type(out).__name__)
    given: dict[str, Any] = {"": out} if isinstance(out, Tensor) else out._asdict()
    buffers = {}
    for name, buffer in given.items():
        full_name = f"out.{name}" if name else "out"
        if name not in shapes:
            if buffer is not None:
                fail(full_name, "None, as it was not asked for", "a tensor")
            continue
        shape, dtype = shapes[name]
        check_tensor(full_name, buffer, shape, (dtype,), device)
        if not buffer.is_contiguous():
            fail(full_name, "a contiguous tensor", f"strides {buffer.stride()}")
        buffers[full_name] = buffer
    check_disjoint(buffers, {name: value for name, value in call.items() if name != "out"})


def check_disjoint(out: Mapping[Any, Tensor], inputs: Mapping[str, Any]) -> None:
    """Raise ValueError where a result would be written over an argument or another result.

    inputs: arguments by name, in which tensors are looked for.
    """
    if torch.compiler.is_compiling():
        return  # a traced tensor has no address
    seen = [(name, *extent(value)) for own, argument in inputs.items() for name, value in _tensors_in(own, argument)]
    for name, result in out.items():
        begin, end = extent(result)
        for other, other_begin, other_end in seen:
            if begin < other_end and other_begin < end:
                fail(name, "memory of its own", f"some that it shares with {other}")
        seen.append((name, begin, end))


def _tensors_in(name: str, value: Any) -> Iterator[tuple[str, Tensor]]:
    """The tensors of arguments and their names."""
    if isinstance(value, Tensor):
        yield name, value
    elif value is None or isinstance(value, bool | int | float | str):
        return  # most are
    elif isinstance(value, list | tuple) and not hasattr(value, "_fields"):
        for index, part in enumerate(value):
            yield from _tensors_in(f"{name}[{index}]", part)
    elif hasattr(value, "_fields") or hasattr(value, "__dict__"):
        parts = value._asdict() if hasattr(value, "_fields") else vars(value)
        for part_name, part in parts.items():
            yield from _tensors_in(f"{name}.{part_name}", part)


def extent(tensor: Tensor) -> tuple[int, int]:
    """The addresses from a tensor's first element to the end of its last; nothing where there is no memory."""
    if tensor.numel() == 0 or tensor.is_meta or type(tensor) is not Tensor:
        return 0, 0
    if tensor.is_contiguous():
        return tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr(), tensor.data_ptr() + (last + 1) * tensor.element_size()
