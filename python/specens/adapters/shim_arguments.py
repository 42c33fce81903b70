"""What the stand-ins for other engines' functions share: checks, and probabilities as logits."""

from __future__ import annotations

from typing import Any, NoReturn

import torch
from torch import Tensor

INTEGERS = (torch.int32, torch.int64)
FLOATS = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
LAST_UNIFORM = 1 - 2.0**-53  # the largest number below 1


def fail(argument: str, expected: str, got: object) -> NoReturn:
    raise ValueError(f"{argument}: expected {expected}, got {got}")


def check_tensor(argument: str, value: Any, shape: tuple[int | None, ...], dtypes: tuple[torch.dtype, ...]) -> None:
    """Raise ValueError unless this is a tensor of this shape (None: any size) and of one of these dtypes."""
    wanted = f"a tensor {list(shape)} of {' or '.join(str(dtype).removeprefix('torch.') for dtype in dtypes)}"
    if not isinstance(value, Tensor):
        fail(argument, wanted, type(value).__name__)
    fits = value.dim() == len(shape) and all(size in (None, own) for size, own in zip(shape, value.shape))
    if not fits or value.dtype not in dtypes:
        fail(argument, wanted, f"{value.dtype} {list(value.shape)}")


def check_deterministic(deterministic: Any) -> None:
    """Raise ValueError unless this is True or False. Results do not depend on it: they are the same every time."""
    if not isinstance(deterministic, bool):
        fail("deterministic", "True or False", repr(deterministic))


def readable(value: Tensor) -> bool:
    """Whether looking at the numbers costs no synchronisation and no graph break."""
    return value.device.type == "cpu" and not torch.compiler.is_compiling()


def as_logits(probs: Tensor) -> Tensor:
    """Logits whose softmax is these probabilities, float32: -inf for 0. One more pass over the tensor, and a copy."""
    return probs.float().log()
