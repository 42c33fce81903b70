"""Argument checks shared by the doors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import Tensor

if TYPE_CHECKING:
    from specens_kernels.arguments import Draft, Report, Target

LOGIT_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
PARAMETER_DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
COIN_DTYPES = (torch.float64, torch.float32)
INT64 = (torch.int64,)


def fail(argument: str, expected: str, got: object) -> NoReturn:
    raise ValueError(f"{argument}: expected {expected}, got {got}")


def check_tensor(
    argument: str, value: Any, shape: tuple[int | None, ...], dtypes: tuple[torch.dtype, ...], device: torch.device
) -> None:
    """Raise ValueError unless value is a tensor of this shape (None: any size), of one of dtypes, on device."""
    if not isinstance(value, Tensor):
        fail(argument, "a tensor", type(value).__name__)
    if value.shape != shape and not _matches(value.shape, shape):
        wanted = ", ".join("*" if size is None else str(size) for size in shape)
        fail(argument, f"shape [{wanted}]", list(value.shape))
    if value.dtype not in dtypes:
        fail(argument, " or ".join(str(dtype) for dtype in dtypes), value.dtype)
    if value.device != device:
        fail(argument, f"device {device}", value.device)


def _matches(have: torch.Size, shape: tuple[int | None, ...]) -> bool:
    if len(have) != len(shape):
        return False
    for size, wanted in zip(have, shape, strict=True):  # noqa: SIM110  a generator would take three times as long
        if wanted is not None and size != wanted:
            return False
    return True


def check_logits(argument: str, logits: Any, leading: tuple[int | None, ...], device: torch.device) -> None:
    """Raise ValueError unless logits [..., vocab] have these leading dimensions and a contiguous vocabulary."""
    check_tensor(argument, logits, (*leading, None), LOGIT_DTYPES, device)
    if logits.shape[-1] < 1:
        fail(argument, "a vocabulary of at least one token", list(logits.shape))
    if logits.stride(-1) != 1 and logits.shape[-1] > 1:
        fail(argument, "a contiguous vocabulary (stride 1 in the last dimension)", f"stride {logits.stride(-1)}")


def member_list(member_logits: Tensor | Sequence[Tensor], dims: int) -> list[Tensor]:
    """The members' logits as a list, each with `dims` dimensions, equal but for the vocabulary."""
    members = [member_logits] if isinstance(member_logits, Tensor) else list(member_logits)
    if not members:
        fail("member_logits", "at least one member", "none")
    first = members[0]
    if not isinstance(first, Tensor):
        fail("member_logits", "a tensor or a sequence of tensors", f"a sequence of {type(first).__name__}")
    if first.dim() != dims:
        fail("member_logits", f"{dims} dimensions", list(first.shape))
    leading = first.shape[:-1]
    for index, logits in enumerate(members):
        check_logits(f"member_logits[{index}]", logits, leading, first.device)
    return members


def check_coins(
    uniforms: Tensor | None,
    seeds: Tensor | None,
    positions: Tensor | None,
    shape: tuple[int, ...],
    device: torch.device,
    needed: bool,
) -> None:
    """Raise ValueError unless exactly one source of random numbers is given, or none where none is needed."""
    if uniforms is not None:
        if seeds is not None or positions is not None:
            fail("uniforms", "either uniforms or seeds and positions", "both")
        check_tensor("uniforms", uniforms, shape, COIN_DTYPES, device)
    elif seeds is not None and positions is not None:
        check_tensor("seeds", seeds, shape[:1], INT64, device)
        check_tensor("positions", positions, shape[:1], INT64, device)
    elif needed or seeds is not None or positions is not None:
        fail("seeds" if seeds is None else "positions", "a tensor [batch] (or uniforms)", None)


def refuse_for_triton(target: Target, draft: Draft | None = None, rule: int = 0, report: Report | None = None) -> None:
    """Raise NotImplementedError with the name of what the triton backend does not serve yet."""
    samplings = [target.sampling] if draft is None else [target.sampling, draft.sampling]
    refused = {
        "top_k": any(s.top_k != 0 or s.top_ks is not None for s in samplings),
        "top_p": any(s.top_p != 1 or s.top_ps is not None for s in samplings),
        "min_p": any(s.min_p != 0 or s.min_ps is not None for s in samplings),
        "rule": rule != 0,
        "processing": target.processing.active,
        "allowed": target.allowed is not None,
        "row_offsets": target.row_offsets is not None,
        "draft_slots": draft is not None and draft.slots is not None,
        "logprobs": report is not None and (report.logprobs == 2 or report.top > 0),
    }
    for name, asked in refused.items():
        if asked:
            raise NotImplementedError(f"{name}: the triton backend does not serve it yet")
