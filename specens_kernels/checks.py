"""Argument checks shared by the doors, and the flat form in which operators take their arguments."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from specens_kernels.types import Ensemble, EnsembleKind, Sampling

LOGIT_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
PARAMETER_DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
COIN_DTYPES = (torch.float64, torch.float32)
INTEGER_DTYPES = (torch.int64, torch.int32)
INT64 = (torch.int64,)


def fail(argument: str, expected: str, got: object) -> None:
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
    for size, wanted in zip(have, shape, strict=True):  # a loop: a generator would take three times as long
        if wanted is not None and size != wanted:
            return False
    return True


def check_logits(argument: str, logits: Any, leading: tuple[int, ...], device: torch.device) -> None:
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


def per_request(argument: str, value: float | Tensor, like: Tensor) -> tuple[float, Tensor | None]:
    """A number for all requests, or one a request: (number, None) or (0.0, float32 tensor [batch])."""
    if not isinstance(value, Tensor):
        return float(value), None
    check_tensor(argument, value, (like.shape[0],), PARAMETER_DTYPES, like.device)
    return 0.0, value.to(torch.float32)


class Target(NamedTuple):
    """The target distribution as operators take it. `weight_rows` and `temperatures` win where they are given."""

    member_logits: list[Tensor]
    ensemble: int
    weights: list[float]
    weight_rows: Tensor | None  # float32 [batch, members]
    plausibility: float  # 0 is off
    temperature: float
    temperatures: Tensor | None  # float32 [batch]


TARGET_SCHEMA = (
    "Tensor[] member_logits, int ensemble, float[] weights, Tensor? weight_rows, float plausibility, "
    "float temperature, Tensor? temperatures"
)


def target_arguments(members: list[Tensor], ensemble: Ensemble | None, sampling: Sampling) -> Target:
    """Check an ensemble and sampling parameters against the members and flatten them."""
    if not isinstance(sampling, Sampling):
        fail("sampling", "a Sampling", type(sampling).__name__)
    refuse_filters(sampling)
    temperature, temperatures = per_request("temperature", sampling.temperature, members[0])
    if ensemble is None:
        if len(members) > 1:
            fail("ensemble", f"an ensemble for {len(members)} members", None)
        return Target(members, EnsembleKind.SINGLE, [1.0], None, 0.0, temperature, temperatures)
    weights = ensemble.weights
    if isinstance(weights, Tensor):
        check_tensor("weights", weights, (members[0].shape[0], len(members)), PARAMETER_DTYPES, members[0].device)
        numbers, rows = [1.0] * len(members), weights.to(torch.float32).contiguous()
    else:
        if len(weights) != len(members):
            fail("weights", f"one weight for each of {len(members)} members", f"{len(weights)} weights")
        numbers, rows = list(weights), None
    return Target(members, ensemble.kind, numbers, rows, ensemble.plausibility or 0.0, temperature, temperatures)


def refuse_filters(sampling: Sampling) -> None:
    for name in ("top_k", "top_p", "min_p"):
        if getattr(sampling, name) is not None:
            raise NotImplementedError(f"{name}: no backend serves this filter yet")


class Coins(NamedTuple):
    """Where random numbers come from, as operators take it: given, or seeds and positions, or none (all greedy)."""

    uniforms: Tensor | None
    seeds: Tensor | None
    positions: Tensor | None


COINS_SCHEMA = "Tensor? uniforms, Tensor? seeds, Tensor? positions"


def coin_arguments(
    uniforms: Tensor | None, seeds: Tensor | None, positions: Tensor | None, shape: tuple[int, ...], target: Target
) -> Coins:
    """Check that exactly one source of random numbers is given; none is needed where every request is greedy."""
    device = target.member_logits[0].device
    if uniforms is not None:
        if seeds is not None or positions is not None:
            fail("uniforms", "either uniforms or seeds and positions", "both")
        check_tensor("uniforms", uniforms, shape, COIN_DTYPES, device)
        return Coins(uniforms.to(torch.float64).contiguous(), None, None)
    if seeds is None and positions is None and target.temperatures is None and target.temperature == 0:
        return Coins(None, None, None)
    for name, value in (("seeds", seeds), ("positions", positions)):
        if value is None:
            fail(name, "a tensor [batch] (or uniforms)", None)
        check_tensor(name, value, shape[:1], INT64, device)
    return Coins(None, seeds.contiguous(), positions.contiguous())
