"""The target and the draft distributions of a batch as kernels take them, and their logits in registers."""

from __future__ import annotations

import math
from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from specens_kernels import arguments
from specens_kernels.arguments import Draft, Target
from specens_kernels.parts.sampling import (
    FLOAT_MAX,
    INFINITY,
    LARGEST_NUMBER,
    FilterView,
    filter_view,
    filters_are_valid,
    parameter_number,
    request_number,
    same_filters,
    stride_of,
)
from specens_kernels.types import WEIGHT_SUM_TOLERANCE, EnsembleKind, Status

NO_DRAFTER = tl.constexpr(arguments.NO_DRAFTER)
LN_2 = tl.constexpr(0.6931471805599453)
NAN_LOGITS = tl.constexpr(int(Status.NAN_LOGITS))
INFINITE_LOGITS = tl.constexpr(int(Status.INFINITE_LOGITS))
WEIGHT_TOLERANCE = tl.constexpr(WEIGHT_SUM_TOLERANCE)


class TargetView(NamedTuple):
    """The target distribution. Tuples have one entry a member; rows and temperatures win where they are not None."""

    logits: tuple[Tensor, ...]  # float32, bfloat16 or float16 [batch, steps, vocab of the member]
    strides_batch: tuple[int, ...]
    strides_step: tuple[int, ...]
    vocabs: tuple[int, ...]
    vocab: int  # the widest member's
    steps: int
    weights: tuple[float, ...]
    weight_rows: Tensor | None  # float32 [batch, members]
    temperature: float
    temperatures: Tensor | None  # float32 [batch]
    temperatures_stride: int
    log_plausibility: float | None  # only where member 0 has weight
    filters: FilterView | None
    MIXTURE: tl.constexpr  # of probabilities, a lone member included; else of logits
    WHOLE: tl.constexpr  # the filters act on a mixture of several members, not on each part of the target


class DraftView(NamedTuple):
    """The draft tokens and what they were drawn from: a member, outside logits, or nothing (one-hot). Default: none."""

    draft_len: int = 0
    lens: Tensor | None = None  # int64 [batch]
    tokens: Tensor | None = None  # int64 or int32 [batch, draft_len]
    tokens_stride_batch: int = 0
    tokens_stride_step: int = 0
    drafter: int = NO_DRAFTER.value
    drafters: Tensor | None = None  # int64 [batch, draft_len]
    logits: Tensor | None = None  # [batch, draft_len, vocab]
    logits_stride_batch: int = 0
    logits_stride_step: int = 0
    vocab: int = 0
    temperature: float = 0.0
    temperatures: Tensor | None = None  # float32 [batch]
    temperatures_stride: int = 0
    filters: FilterView | None = None
    SAME_TEMPERATURE: tl.constexpr = tl.constexpr(True)  # known to be the target's
    SAME_FILTERS: tl.constexpr = tl.constexpr(True)  # known to be those of the target's parts


def target_view(arguments: Target) -> TargetView:
    """From an operator's arguments, with member_logits [batch, steps, vocab]."""
    members, sampling = arguments.member_logits, arguments.sampling
    filters, mixture = filter_view(sampling), arguments.ensemble != EnsembleKind.LOGIT_MIXTURE
    whole = filters is not None and mixture and len(members) > 1 and not arguments.filter_members
    return TargetView(
        logits=tuple(members),
        strides_batch=tuple(logits.stride(0) for logits in members),
        strides_step=tuple(logits.stride(1) for logits in members),
        vocabs=tuple(logits.shape[2] for logits in members),
        vocab=max(logits.shape[2] for logits in members),
        steps=members[0].shape[1],
        weights=tuple(min(max(weight, -LARGEST_NUMBER), LARGEST_NUMBER) for weight in arguments.weights),
        weight_rows=arguments.weight_rows,
        temperature=parameter_number(sampling.temperature),
        temperatures=sampling.temperatures,
        temperatures_stride=stride_of(sampling.temperatures),
        log_plausibility=math.log(arguments.plausibility) if arguments.plausibility > 0 else None,
        filters=filters,
        MIXTURE=tl.constexpr(mixture),
        WHOLE=tl.constexpr(whole),
    )


def draft_view(target: TargetView, draft: Draft) -> DraftView:
    """From an operator's arguments."""
    number, temperatures = parameter_number(draft.sampling.temperature), draft.sampling.temperatures
    filters = filter_view(draft.sampling)
    stride_batch, stride_step, vocab = (
        (0, 0, 0) if draft.logits is None else (draft.logits.stride(0), draft.logits.stride(1), draft.logits.shape[2])
    )
    return DraftView(
        draft_len=draft.tokens.shape[1],
        lens=draft.lens,
        tokens=draft.tokens,
        tokens_stride_batch=draft.tokens.stride(0),
        tokens_stride_step=draft.tokens.stride(1),
        drafter=draft.drafter,
        drafters=draft.drafters,
        logits=draft.logits,
        logits_stride_batch=stride_batch,
        logits_stride_step=stride_step,
        vocab=vocab,
        temperature=number,
        temperatures=temperatures,
        temperatures_stride=stride_of(temperatures),
        filters=filters,
        SAME_TEMPERATURE=tl.constexpr(temperatures is target.temperatures and number == target.temperature),
        SAME_FILTERS=tl.constexpr(not target.WHOLE.value and same_filters(filters, target.filters)),
    )


@triton.jit
def target_temperature(target, request):
    return request_number(target.temperature, target.temperatures, target.temperatures_stride, request)


@triton.jit
def draft_temperature(draft, request):
    return request_number(draft.temperature, draft.temperatures, draft.temperatures_stride, request)


@triton.jit
def member_weight(target, request, member):
    if target.weight_rows is not None:
        return tl.load(target.weight_rows + request * len(target.logits) + member)
    else:
        return tl.full([], target.weights[member], tl.float32)


@triton.jit
def target_is_valid(target, request):
    """Whether a request's temperature, filters and weights are in range."""
    temperature = target_temperature(target, request)
    valid = (temperature >= 0) & (temperature < INFINITY)
    if target.filters is not None:
        valid &= filters_are_valid(target.filters, request)
    if target.weight_rows is not None:
        total = tl.zeros_like(temperature).to(tl.float64)
        for member in tl.static_range(len(target.logits)):
            weight = member_weight(target, request, member)
            valid &= (weight < INFINITY) & (weight > -INFINITY)
            if target.MIXTURE:
                valid &= weight >= 0
            total += weight.to(tl.float64)
        if target.MIXTURE:
            valid &= tl.abs(total - 1) <= WEIGHT_TOLERANCE
    return valid


@triton.jit
def clean(raw):
    """NaN as -inf, +inf as the largest float."""
    return tl.where(raw < INFINITY, raw, tl.where(raw == INFINITY, FLOAT_MAX, -INFINITY))


@triton.jit
def marks_of(raw):
    """Status bits of each logit, int32."""
    return tl.where(raw != raw, NAN_LOGITS, tl.where(raw == INFINITY, INFINITE_LOGITS, 0))


@triton.jit
def everywhere(condition, like):
    """A scalar condition as a block like `like`; the interpreter cannot broadcast a comparison itself."""
    return (like * 0 + condition.to(tl.int32)) != 0


@triton.jit
def raw_logits(target, member, request, step, tokens, used):
    """A member's logits as float32, -inf where `used` is false or its vocabulary ends."""
    row_ptr = target.logits[member] + request * target.strides_batch[member] + step * target.strides_step[member]
    used = used & (tokens < target.vocabs[member])
    return tl.load(row_ptr + tokens, mask=used, other=-INFINITY).to(tl.float32)


@triton.jit
def raw_draft_logits(draft, request, step, tokens, used):
    """An outside drafter's logits, likewise."""
    row_ptr = draft.logits + request * draft.logits_stride_batch + step * draft.logits_stride_step
    return tl.load(row_ptr + tokens, mask=used & (tokens < draft.vocab), other=-INFINITY).to(tl.float32)


@triton.jit
def no_logits_mixed(target, tokens, used):
    """The mix of logits before the first member is added."""
    return tl.where(used & (tokens < target.vocab), 0.0, -INFINITY)


@triton.jit
def mix_logits(target, member, mixed, logits, weight, threshold):
    """mixed + weight * logits, -inf at excluded tokens; fused, so that every kernel sees the same bits."""
    excluded = logits == -INFINITY
    total = tl.fma(tl.where(excluded, 0.0, logits), weight, mixed)
    mixed = tl.where(weight != 0, tl.where(excluded, -INFINITY, total), mixed)
    if member == 0 and target.log_plausibility is not None:
        mixed = tl.where(logits < threshold, -INFINITY, mixed)
    return mixed


@triton.jit
def part_logits(target, part, request, step, tokens, used, threshold):
    """Clean logits of one part of the target: a member of a mixture of probabilities, or the mixed logits (part 0).

    threshold: of plausibility, as `statistics.plausible_threshold` gives it.
    """
    if target.MIXTURE:
        weighted = everywhere(member_weight(target, request, part) != 0, tokens)
        return clean(raw_logits(target, part, request, step, tokens, used & weighted))
    else:
        mixed = no_logits_mixed(target, tokens, used)
        for member in tl.static_range(len(target.logits)):
            weight = member_weight(target, request, member)
            weighted = everywhere(weight != 0, tokens)
            logits = clean(raw_logits(target, member, request, step, tokens, used & weighted))
            mixed = tl.minimum(mix_logits(target, member, mixed, logits, weight, threshold), FLOAT_MAX)
        return mixed


@triton.jit
def drafter_of(draft, request, step, used):
    """The member that drafted at `step`, or another number where none did; like `step`."""
    if draft.drafters is not None:
        return tl.load(draft.drafters + request * draft.draft_len + step, mask=used, other=NO_DRAFTER)
    else:
        return tl.where(used, step * 0 + draft.drafter, NO_DRAFTER)


@triton.jit
def chain_len(draft, request):
    """The number of a request's draft tokens, int64."""
    if draft.lens is not None:
        return tl.load(draft.lens + request)
    else:
        return request * 0 + draft.draft_len
