"""The best tokens of this rank's slices: by the C++ or Triton where they can, else in torch, on every device."""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from specens_kernels.arguments import Target
from specens_kernels.backend import CHOSEN_BACKEND, OPERATORS, TRITON_REASON, add_triton
from specens_kernels.distributed.shard import Shard, shifted
from specens_kernels.ensembles import EnsembleKind
from specens_kernels.ops.sample.gumbel import BLOCK
from specens_kernels.ops.target_logprobs.processing import Paths


class Found(NamedTuple):
    """Of each row the best token here, as its slice counts it, its logit, and the slice's status."""

    values: Tensor  # float64 [batch, rows], -inf where there is none
    tokens: Tensor  # int64 [batch, rows]
    status: Tensor  # int64 [batch, rows]


class Part(NamedTuple):
    """A part of a slice, with everything that names tokens as the part counts them."""

    shard: Shard
    target: Target
    before: Tensor | Paths | None


def empty_best(member_logits: list[Tensor], **_: Any) -> list[Tensor]:
    """Tensors of the shapes that `best_of_shard` gives."""
    shape = member_logits[0].shape[:2]
    types = (torch.float64, torch.int64, torch.int32)
    return [member_logits[0].new_empty(shape, dtype=dtype) for dtype in types]


def empty_noise(_seeds: Tensor, _positions: Tensor, tokens: Tensor) -> Tensor:
    """A tensor of the shape that `gumbel_noise` gives."""
    return tokens.new_empty(tokens.shape, dtype=torch.float64)


HAS_OPERATORS = CHOSEN_BACKEND != "reference" and hasattr(torch.ops.specens, "best_of_shard")
if HAS_OPERATORS:
    OPERATORS.trace("best_of_shard", empty_best)
    OPERATORS.trace("gumbel_noise", empty_noise)
BY_TRITON = None  # the name of the operator that has Triton's kernel
if HAS_OPERATORS and TRITON_REASON is None:
    BY_TRITON = add_triton(
        "best_of_shard",
        lambda: importlib.import_module("specens_kernels.ops.sample.triton_shard").launch,
        empty_best,
        False,
    )


def has_operators(like: Tensor) -> bool:
    """Whether the C++ is there for a tensor like this."""
    return HAS_OPERATORS and like.is_cpu


def best_operator(like: Tensor) -> Callable[..., list[Tensor]] | None:
    """What finds the best tokens of a part, of logits like these; None: torch."""
    name = "best_of_shard" if has_operators(like) else BY_TRITON if like.is_cuda else None
    return None if name is None else getattr(torch.ops.specens, name)


def has_kernel(target: Target, before: Tensor | Paths | None) -> bool:
    """Whether a kernel can find the best tokens; plausibility and the paths of trees are for torch."""
    follows_paths = target.processing.active and isinstance(before, Paths)
    like = target.member_logits[0]
    return best_operator(like) is not None and target.plausibility == 0 and not follows_paths


def split_at_block(shard: Shard, target: Target, before: Tensor | Paths | None) -> tuple[Part | None, Part | None]:
    """The tokens before the first whole block of noise, and those from there on, where there are some.

    target: its `processing` is the shard's. The bit mask of the second part begins with it.
    """
    head = min(-shard.start % BLOCK, shard.width)
    first = None
    if head > 0:
        logits = [_columns(values, 0, head) for values in target.member_logits]
        first = Part(shard._replace(width=head), target._replace(member_logits=logits), before)
    if head == shard.width:
        return first, None
    logits = [_columns(values, head, shard.width) for values in target.member_logits]
    rest = shard._replace(start=shard.start + head, width=shard.width - head)
    moved = Shard(head, shard.sizes, shard.draft_size, rest.width, None)
    if isinstance(before, Tensor):
        before = moved.own(before)
    allowed = None
    if target.allowed is not None:
        allowed = target.allowed[..., rest.start // 32 :]
        allowed = allowed if allowed.shape[-1] > 0 else allowed.new_zeros(*allowed.shape[:-1], 1)
    own = target._replace(member_logits=logits, allowed=allowed, processing=shifted(moved, target.processing))
    return first, Part(rest, own, before)


def _columns(logits: Tensor, begin: int, end: int) -> Tensor:
    """A part of a slice, or a token that cannot be drawn where it is empty."""
    own = logits[..., begin:end]
    return own if own.shape[-1] > 0 else logits.new_full((*logits.shape[:-1], 1), -math.inf)


def best_by_kernel(part: Part, seeds: Tensor | None, positions: Tensor | None) -> Found:
    """The best tokens of a part that begins with a block of noise."""
    target, options = part.target, operator_options(part.target)
    if isinstance(part.before, Tensor):
        options["draft_tokens"] = part.before
    if seeds is not None and positions is not None:
        options |= {"seeds": seeds, "positions": positions}
    operator = best_operator(target.member_logits[0])
    assert operator is not None
    values, tokens, status = operator(target.member_logits, first_token=part.shard.start, **options)
    return Found(values, tokens, status.long())


def operator_options(target: Target) -> dict[str, Any]:
    """What operators take of a target: `specens_kernels.arguments.target_of`, back."""
    own, edits = target.sampling, target.processing
    numbers = [own.temperature, float(own.top_k), own.top_p, own.min_p, float(own.min_p_first)]
    options: dict[str, Any] = {"sampling": numbers}
    rows = [own.temperatures, own.top_ks, own.top_ps, own.min_ps, target.weight_rows]
    if any(value is not None for value in rows):
        options["rows"] = rows
    if target.allowed is not None:
        options["allowed"] = target.allowed
    if target.ensemble != EnsembleKind.SINGLE:
        weights = [] if target.weight_rows is not None else list(target.weights)
        options["ensemble"] = [float(target.ensemble), float(target.filter_members), target.plausibility, *weights]
    if edits.active:
        options["processing"] = [
            edits.repetition_penalty,
            edits.frequency_penalty,
            edits.presence_penalty,
            float(edits.min_tokens),
        ]
        options["processing_rows"] = [
            *(edits.repetition_penalties, edits.frequency_penalties, edits.presence_penalties, edits.min_tokens_rows),
            *(edits.bias_tokens, edits.bias_values, edits.end_tokens, edits.prompt_tokens, edits.output_tokens),
        ]
    return options
