"""What makes Gumbel scores of logits on a GPU: exact values of a lone model's or of mixed logits, in float64."""

from __future__ import annotations

import struct
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from specens_kernels.parts.gumbel import NOISE_BLOCK
from specens_kernels.parts.sampling import INFINITY
from specens_kernels.parts.statistics import Statistics
from specens_kernels.parts.target import (
    TargetView,
    batch_of,
    clean,
    edited,
    everywhere,
    load_logits,
    marks_of,
    member_weight,
    mix_reads,
    raw_logits,
    row_edits,
    target_temperature,
)

TILE = 4096  # tokens that a program of the pass reads
AT_ONCE, EDITED_AT_ONCE = 1024, 512  # tokens that a search looks at; what edits of them look up takes more registers


class ScoreView(NamedTuple):
    """What the pass leaves for a search, and what makes scores of logits. *_rest: what float32 leaves of a number."""

    maxima: Tensor  # [rows, blocks]: as the logits of a lone model, float32 if edited or mixed
    marks: Tensor  # int8 [rows, tiles]: status bits
    first_maxima: Tensor  # float32 [rows, tiles]: member 0's, where that tells plausibility
    arrived: Tensor | None  # of a chain: int32 [batch], how many rows have been searched, 0 after the pass
    seeds: Tensor | None  # int64 [batch]
    positions: Tensor | None  # int64 [batch]
    temperature_rest: float
    weight_rests: tuple[float, ...]
    plausibility_rest: float
    blocks: int
    tiles: int
    first_block: int | None  # of noise, of a part of the vocabulary; None: the vocabulary is whole
    HAS_SEEDS: tl.constexpr
    LONE: tl.constexpr  # no logits are mixed
    EXACT: tl.constexpr  # a value is a logit over the temperature, not a logarithm of a probability
    FROM_STATISTICS: tl.constexpr
    TOLD: tl.constexpr  # log-probabilities under the target are
    TILE: tl.constexpr
    TILES: tl.constexpr  # the power of two from their number
    BLOCK: tl.constexpr  # tokens of which a bound is known
    COUNT: tl.constexpr  # the power of two from the number of such blocks
    VISITED: tl.constexpr  # tokens of a block of the search, which is never smaller than one of noise
    PART: tl.constexpr  # of them at once
    GROUPS: tl.constexpr  # so many blocks at once


def score_view(
    target: TargetView,
    statistics: Statistics,
    seeds: Tensor | None,
    positions: Tensor | None,
    told: bool,
    chain: bool = False,
) -> ScoreView:
    """Unwritten. told: whether log-probabilities under the target are. chain: whether the last row's program judges."""
    one = len(target.logits) == 1
    plain = target.weight_rows is None and target.weights[0] == 1 and target.log_plausibility is None
    lone = one and (target.MIXTURE.value or plain)
    exact = lone or not target.MIXTURE.value
    from_statistics = not exact or statistics.TARGET_SLOTS.value > 0
    rows, device = batch_of(target) * target.steps, target.logits[0].device
    tile = min(TILE, max(NOISE_BLOCK.value, triton.next_power_of_2(target.vocab)))
    blocks, tiles = triton.cdiv(target.vocab, NOISE_BLOCK.value), triton.cdiv(target.vocab, tile)
    plausibility = target.log_plausibility or 0.0
    # the largest logit of a lone model is one of them
    kept = target.logits[0].dtype if lone and not target.EDITED.value else torch.float32
    block = statistics.BLOCK_VOCAB.value if from_statistics else NOISE_BLOCK.value
    visited = max(block, NOISE_BLOCK.value)
    count = statistics.BLOCK_COUNT.value if from_statistics else triton.next_power_of_2(blocks)
    at_once = AT_ONCE if target.edits is None else EDITED_AT_ONCE
    new_counts = torch.zeros if from_statistics or rows == 0 else torch.empty  # else the pass writes them
    arrived = new_counts(batch_of(target), dtype=torch.int32, device=device) if chain else None
    return ScoreView(
        maxima=torch.empty(rows, blocks, dtype=kept, device=device),
        marks=torch.empty(rows, tiles, dtype=torch.int8, device=device),
        first_maxima=torch.empty(
            rows if target.log_plausibility is not None else 0, tiles, dtype=torch.float32, device=device
        ),
        arrived=arrived,
        seeds=seeds,
        positions=positions,
        temperature_rest=target.temperature - _float32(target.temperature),
        weight_rests=tuple(weight - _float32(weight) for weight in target.weights),
        plausibility_rest=plausibility - _float32(plausibility),
        blocks=blocks,
        tiles=tiles,
        first_block=None,
        HAS_SEEDS=tl.constexpr(seeds is not None),
        LONE=tl.constexpr(lone),
        EXACT=tl.constexpr(exact),
        FROM_STATISTICS=tl.constexpr(from_statistics),
        TOLD=tl.constexpr(told),
        TILE=tl.constexpr(tile),
        TILES=tl.constexpr(triton.next_power_of_2(tiles)),
        BLOCK=tl.constexpr(block),
        COUNT=tl.constexpr(count),
        VISITED=tl.constexpr(visited),
        PART=tl.constexpr(min(visited, at_once)),
        GROUPS=tl.constexpr(max(min(at_once, count * block) // visited, 1)),
    )


class ScoreLogits(NamedTuple):
    """Clean logits of tokens, a lone model's or mixed, in a kernel."""

    logits: Any  # float32, or float64 where they are mixed
    marks: Any  # status bits, int32
    first: Any  # member 0's, float32


def _float32(number: float) -> float:
    return struct.unpack("f", struct.pack("f", number))[0]


@triton.jit
def exact_rate(scores, target, request):
    """1 / temperature, float64; 1 for greedy requests and those out of range."""
    temperature = target_temperature(target, request).to(tl.float64)
    if target.temperatures is None:
        temperature += tl.full([], scores.temperature_rest, tl.float32).to(tl.float64)
    return 1.0 / tl.where(temperature > 0, temperature, 1.0)


@triton.jit
def _exact_weight(scores, target, request, member: tl.constexpr):
    weight = member_weight(target, request, member).to(tl.float64)
    if target.weight_rows is None:
        weight += tl.full([], scores.weight_rests[member], tl.float32).to(tl.float64)
    return weight


@triton.jit
def score_logits(scores, target, request, step, tokens, threshold):
    """The ScoreLogits of tokens, int32."""
    if scores.LONE:
        raw = raw_logits(target, 0, request, step, tokens, tokens >= 0)
        return ScoreLogits(clean(raw), marks_of(raw), raw)
    else:
        total = tl.where(tokens < target.vocab, 0.0, -INFINITY).to(tl.float64)
        marks = tokens & 0
        first = tl.zeros(tokens.shape, tl.float32)
        edits = row_edits(target, request, step, tokens, tokens >= 0)
        for member in tl.static_range(len(target.logits)):
            weight = _exact_weight(scores, target, request, member)
            read = everywhere(mix_reads(target, member, weight), tokens)
            raw = edited(target, request, read, edits, load_logits(target, member, request, step, tokens, read))
            logits = clean(raw)
            if member == 0:
                first = logits
            used = everywhere(weight != 0, tokens)
            marks |= tl.where(used, marks_of(raw), 0)
            excluded = used & (logits == -INFINITY)
            term = tl.where(used & (logits > -INFINITY), logits, 0.0).to(tl.float64) * weight
            total = tl.where(excluded, -INFINITY, total + term)
            if member == 0 and target.log_plausibility is not None:
                total = tl.where(logits.to(tl.float64) < threshold, -INFINITY, total)
        return ScoreLogits(total, marks, first)
