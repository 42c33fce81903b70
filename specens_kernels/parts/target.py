"""The target distribution of a batch as kernels take it, and the members' logits in registers."""

from __future__ import annotations

import math
from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from specens_kernels.arguments import Target
from specens_kernels.ensembles import WEIGHT_SUM_TOLERANCE, EnsembleKind
from specens_kernels.parts.edits import (
    ENDS,
    EditView,
    MaskView,
    TokenEdits,
    allowed,
    edit_view,
    edits_are_valid,
    listed_edits,
    mask_view,
    processed,
)
from specens_kernels.parts.sampling import (
    FLOAT_MAX,
    INFINITY,
    LARGEST_NUMBER,
    FilterView,
    filter_view,
    filters_are_valid,
    parameter_number,
    request_number,
    stride_of,
)
from specens_kernels.results import Status

LN_2 = tl.constexpr(0.6931471805599453)
NAN_LOGITS = tl.constexpr(int(Status.NAN_LOGITS))
INFINITE_LOGITS = tl.constexpr(int(Status.INFINITE_LOGITS))
WEIGHT_TOLERANCE = tl.constexpr(WEIGHT_SUM_TOLERANCE)
FEW_MIXED = 2  # members of a mixture of logits for which the compiler's own number of registers is enough


class TargetView(NamedTuple):
    """The target distribution. Tuples have one entry a member; rows and temperatures win where they are not None."""

    logits: tuple[Tensor, ...]  # float32, bfloat16 or float16 [batch, steps, vocab of the member], or packed rows
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
    row_offsets: Tensor | None  # int64 [batch + 1] of packed rows
    edits: EditView | None
    mask: MaskView | None
    EDITED: tl.constexpr
    FILTERED: tl.constexpr
    MIXTURE: tl.constexpr  # of probabilities, a lone member included; else of logits
    WHOLE: tl.constexpr  # the filters act on a mixture of several members, not on each part of the target


def target_view(arguments: Target, steps: int, drafts: Tensor | None = None) -> TargetView:
    """From an operator's arguments. steps: the most rows of a request. drafts: [batch, n], those before the rows."""
    members, sampling = arguments.member_logits, arguments.sampling
    filters, mixture = filter_view(sampling), arguments.ensemble != EnsembleKind.LOGIT_MIXTURE
    whole = filters is not None and mixture and len(members) > 1 and not arguments.filter_members
    batch = (members[0] if arguments.row_offsets is None else arguments.row_offsets[1:]).shape[0]
    return TargetView(
        logits=tuple(members),
        strides_batch=tuple(logits.stride(0) if logits.dim() == 3 else 0 for logits in members),
        strides_step=tuple(logits.stride(-2) for logits in members),
        vocabs=tuple(logits.shape[-1] for logits in members),
        vocab=max(logits.shape[-1] for logits in members),
        steps=steps,
        weights=tuple(min(max(weight, -LARGEST_NUMBER), LARGEST_NUMBER) for weight in arguments.weights),
        weight_rows=arguments.weight_rows,
        temperature=parameter_number(sampling.temperature),
        temperatures=sampling.temperatures,
        temperatures_stride=stride_of(sampling.temperatures),
        log_plausibility=math.log(arguments.plausibility) if arguments.plausibility > 0 else None,
        filters=filters,
        row_offsets=arguments.row_offsets,
        edits=edit_view(arguments.processing, drafts, batch, members[0].device),
        mask=mask_view(arguments.allowed),
        EDITED=tl.constexpr(arguments.processing.active),
        FILTERED=tl.constexpr(filters is not None),
        MIXTURE=tl.constexpr(mixture),
        WHOLE=tl.constexpr(whole),
    )


def batch_of(target: TargetView) -> int:
    """The number of requests."""
    return target.logits[0].shape[0] if target.row_offsets is None else target.row_offsets.shape[0] - 1


def mixes_many(target: TargetView) -> bool:
    """Whether logits of so many members are mixed that a launch says how many registers that takes."""
    return not target.MIXTURE.value and len(target.logits) > FEW_MIXED


@triton.jit
def target_temperature(target, request):
    return request_number(target.temperature, target.temperatures, target.temperatures_stride, request)


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
    if target.EDITED:
        valid &= edits_are_valid(target.edits, request)
    if target.FILTERED:
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
    # interpreter: tl.maximum, which is the same instruction, passes NaN on there up to Triton 3.7
    return tl.minimum(tl.where(raw > -INFINITY, raw, -INFINITY), FLOAT_MAX)


@triton.jit
def marks_of(raw):
    """Status bits of each logit, int32."""
    return tl.where(raw != raw, NAN_LOGITS, tl.where(raw == INFINITY, INFINITE_LOGITS, 0))


@triton.jit
def everywhere(condition, like):
    """A scalar condition as a block like `like`."""
    # interpreter: it cannot broadcast a comparison itself
    return (like * 0 + condition.to(tl.int32)) != 0


@triton.jit
def row_index(target, request, step):
    """The index of a row along the steps of what is [batch, steps, ...] or packed."""
    if target.row_offsets is not None:
        step = step + tl.load(target.row_offsets + request)
    return step


@triton.jit
def row_edits(target, request, step, tokens, used):
    """What is done to tokens' logits in a row by processing and by the mask of allowed tokens, `TokenEdits`."""
    found = TokenEdits(tokens.to(tl.int32) & 0, 0.0)
    if target.EDITED:
        found = listed_edits(target.edits, request, step, tokens, used)
    if target.mask is not None:
        row = row_index(target, request, step)
        excluded = tl.where(allowed(target.mask, row, request, tokens, used), 0, ENDS)
        found = TokenEdits(found.marks | excluded, found.biases)
    return found


@triton.jit
def edited(target, request, used, edits, logits):
    """Logits of a member, or of the drafts, float32, with what `row_edits` says; -inf where `used` is false."""
    logits = logits.to(tl.float32)
    if target.EDITED:
        logits = tl.where(used, processed(target.edits, request, edits, logits), -INFINITY)
    if target.EDITED or target.mask is not None:
        logits = tl.where((edits.marks & ENDS) != 0, -INFINITY, logits)
    return logits


@triton.jit
def raw_logits(target, member, request, step, tokens, used):
    """A member's logits as float32, edited, -inf where `used` is false or its vocabulary ends."""
    edits = row_edits(target, request, step, tokens, used)
    return edited(target, request, used, edits, load_logits(target, member, request, step, tokens, used))


@triton.jit
def load_logits(target, member, request, step, tokens, used):
    """The same unedited, in the type in which they lie, which takes fewer registers while others are loaded."""
    row = row_index(target, request, step)
    row_ptr = target.logits[member] + request * target.strides_batch[member] + row * target.strides_step[member]
    used = used & (tokens < target.vocabs[member])
    return tl.load(row_ptr + tokens, mask=used, other=-INFINITY)


@triton.jit
def no_logits_mixed(target, tokens, used):
    """The mix of logits before the first member is added."""
    return tl.where(used & (tokens < target.vocab), 0.0, -INFINITY)


@triton.jit
def mix_reads(target, member, weight):
    """Whether a mix of logits looks at a member: where it has weight, and at member 0 where that tells plausibility."""
    if member == 0 and target.log_plausibility is not None:
        return weight == weight
    else:
        return weight != 0


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
        read = used & everywhere(member_weight(target, request, part) != 0, tokens)
        edits = row_edits(target, request, step, tokens, read)
        logits = load_logits(target, part, request, step, tokens, read)
        return clean(edited(target, request, read, edits, logits))
    else:
        mixed = no_logits_mixed(target, tokens, used)
        edits = row_edits(target, request, step, tokens, used)
        for member in tl.static_range(len(target.logits)):
            weight = member_weight(target, request, member)
            read = used & everywhere(mix_reads(target, member, weight), tokens)
            logits = load_logits(target, member, request, step, tokens, read)
            logits = clean(edited(target, request, read, edits, logits))
            mixed = tl.minimum(mix_logits(target, member, mixed, logits, weight, threshold), FLOAT_MAX)
        return mixed
