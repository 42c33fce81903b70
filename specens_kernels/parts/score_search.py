"""The search for the best Gumbel scores of a row on a GPU: blocks by what none of their scores exceeds."""

from __future__ import annotations

import triton
import triton.language as tl

from specens_kernels.parts.gumbel import NOISE_BLOCK, largest_noise, token_noise
from specens_kernels.parts.sampling import FLOAT_MAX, INFINITY
from specens_kernels.parts.scores import exact_rate, score_logits
from specens_kernels.parts.states import keep_part, log_power, log_probability, target_state
from specens_kernels.parts.statistics import NO_TOKEN, NOWHERE, load_plane, row_marks
from specens_kernels.parts.target import everywhere, part_logits, target_temperature

SLACK = tl.constexpr(1e-3)  # what float32 statistics may hide of a value


@triton.jit
def _plausible(scores, target, row):
    """The smallest plausible logit of member 0, float64."""
    if target.log_plausibility is not None:
        largest = -FLOAT_MAX
        for tile in range(scores.tiles):
            largest = tl.maximum(largest, tl.load(scores.first_maxima + row * scores.tiles + tile))
        return largest.to(tl.float64) + target.log_plausibility + scores.plausibility_rest
    else:
        return tl.full([], -INFINITY, tl.float64)


@triton.jit
def _block_noise(seed, position, noisy, scores):
    """At least the largest noise of the tokens of each block of a search, float64 [COUNT]."""
    index = tl.arange(0, scores.COUNT)
    bound = tl.zeros([scores.COUNT], tl.float64) - INFINITY
    PARTS: tl.constexpr = (scores.BLOCK + NOISE_BLOCK - 1) // NOISE_BLOCK
    for part in range(PARTS):
        largest, _ = largest_noise(seed, position, index * scores.BLOCK // NOISE_BLOCK + part)
        bound = tl.maximum(bound, -tl.log(largest))
    return tl.where(everywhere(noisy, index), bound, 0.0)


@triton.jit
def _bounds(scores, statistics, target, state, request, rows, row, origin, rate):
    """What no value of a block exceeds, float64 [COUNT]."""
    if not scores.FROM_STATISTICS:
        block = tl.arange(0, scores.COUNT)
        maxima = tl.load(scores.maxima + row * scores.blocks + block, mask=block < scores.blocks, other=-INFINITY)
        return (maxima.to(tl.float64) - origin) * rate
    elif scores.EXACT:
        maxima = tl.reshape(load_plane(statistics, rows, 0, rows >= 0, -INFINITY), [scores.COUNT])
        kept = (maxima > -INFINITY) & (maxima >= tl.max(state[4][0], 0))
        return tl.where(kept, SLACK, -INFINITY).to(tl.float64)
    else:
        best = tl.zeros([scores.COUNT], tl.float64) - INFINITY
        for part in tl.static_range(statistics.PARTS):
            maxima = tl.reshape(load_plane(statistics, rows, part, rows >= 0, -INFINITY), [scores.COUNT])
            used = target_temperature(target, request)
            power = log_power(maxima, tl.max(state[0][part], 0), tl.max(state[1][part], 0), used, tl.float64)
            best = tl.maximum(best, power)
        spread: tl.constexpr = statistics.PARTS * 0.6931471805599453  # at least the logarithm of their number
        return best + tl.where(best > -INFINITY, spread + SLACK + tl.abs(best) * 1e-5, 0.0)


@triton.jit
def _values(scores, statistics, target, state, request, step, tokens, origin, threshold, rate):
    """The value of each token, float64, -inf where it is excluded."""
    if scores.EXACT:
        logits, _, _ = score_logits(scores, target, request, step, tokens, threshold)
        values = (logits.to(tl.float64) - origin) * rate
        if scores.FROM_STATISTICS:
            kept = part_logits(target, 0, request, step, tokens, tokens >= 0, state[3])
            values = tl.where(keep_part(statistics, kept, state[4], 0) > -INFINITY, values, -INFINITY)
        return values
    else:
        return log_probability(statistics, target, state, request, step, tokens, tokens < target.vocab, tl.float64)


@triton.jit
def _merge(best, chosen, values, tokens):
    """Tokens [BEST] and their scores with those of `values` in the places of worse ones."""
    place = tl.arange(0, best.shape[0])
    own = tl.max(values, 0)
    while (own >= tl.min(best, 0)) & (own > -INFINITY):
        token = tl.min(tl.where(values == own, tokens, NOWHERE), 0)
        worst = tl.min(best, 0)
        last = tl.max(tl.where(best == worst, chosen, -1), 0)
        here = tl.min(tl.where((best == worst) & (chosen == last), place, best.shape[0]), 0)
        taken = (place == here) & everywhere((own > worst) | (token < last), place)
        chosen = tl.where(taken, token, chosen)
        best = tl.where(taken, own, best)
        values = tl.where(tokens == token, -INFINITY, values)
        own = tl.max(values, 0)
    return best, chosen


@triton.jit
def search_scores(scores, statistics, target, request, step, position, BEST: tl.constexpr, WANTED):
    """The tokens of the best scores of a row, int32 [BEST], in any order, NOWHERE for none, their scores and status.

    Only WANTED of them count; the others are there since sizes are powers of two.
    """
    row = request * target.steps + step
    rows = tl.zeros([1], tl.int64) + row
    rate = exact_rate(scores, target, request)
    noisy = target_temperature(target, request) > 0
    seed = row * 0
    if scores.HAS_SEEDS:
        seed = tl.load(scores.seeds + request)
    state = ((rows,), (rows,), rate, rows, (rows,))
    threshold = tl.full([], -INFINITY, tl.float64)
    if scores.FROM_STATISTICS:
        state, status = target_state(statistics, target, request, rows, rows >= 0)
        marks, _ = row_marks(statistics, rows, rows >= 0)
        status = tl.max(status | marks, 0)
        origin = tl.max(state[0][0], 0).to(tl.float64)
    else:
        status = 0
        for tile in range(scores.tiles):
            status |= tl.load(scores.marks + row * scores.tiles + tile).to(tl.int32)
        threshold = _plausible(scores, target, row)
        blocks = tl.arange(0, scores.COUNT)
        maxima = tl.load(scores.maxima + row * scores.blocks + blocks, mask=blocks < scores.blocks, other=-INFINITY)
        origin = tl.max(maxima, 0).to(tl.float64)
        status |= tl.where(origin > -INFINITY, 0, NO_TOKEN)
        origin = tl.where(origin > -INFINITY, origin, 0.0)
    bounds = _bounds(scores, statistics, target, state, request, rows, row, origin, rate)
    bounds += _block_noise(seed, position, noisy, scores)
    index = tl.arange(0, scores.COUNT)
    best = tl.zeros([BEST], tl.float64) - INFINITY
    chosen = tl.where(tl.arange(0, BEST) < WANTED, NOWHERE, NOWHERE - 1)
    best = tl.where(tl.arange(0, BEST) < WANTED, best, INFINITY)
    reached = tl.max(bounds, 0)
    while (reached >= tl.min(best, 0)) & (reached > -INFINITY):
        block = tl.min(tl.where(bounds == reached, index, NOWHERE), 0)
        for part in range(scores.BLOCK // scores.PART):
            tokens = block * scores.BLOCK + part * scores.PART + tl.arange(0, scores.PART)
            values = _values(scores, statistics, target, state, request, step, tokens, origin, threshold, rate)
            noise = tl.where(everywhere(noisy, tokens), -tl.log(token_noise(seed, position, tokens)), 0.0)
            best, chosen = _merge(best, chosen, tl.where(values > -INFINITY, values + noise, -INFINITY), tokens)
        bounds = tl.where(index == block, -INFINITY, bounds)
        reached = tl.max(bounds, 0)
    found = tl.max(tl.where(tl.arange(0, BEST) < WANTED, best, -INFINITY), 0)
    status |= tl.where(found > -INFINITY, 0, NO_TOKEN)  # all that is left may not be plausible
    return best, chosen, status
