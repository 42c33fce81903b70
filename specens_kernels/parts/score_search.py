"""The search for the best Gumbel scores of a row on a GPU.

Blocks are visited in groups, the best of each group at once, as long as one can hold a score that counts. What no score
of a block or of a token exceeds is computed in float32; only tokens that can win by that are weighed in float64.
"""

from __future__ import annotations

import triton
import triton.language as tl

from specens_kernels.parts.gumbel import (
    NOISE_BLOCK,
    block_bounds,
    block_tokens,
    bound_of,
    largest_bound,
    token_noise,
)
from specens_kernels.parts.sampling import FLOAT_MAX, INFINITY
from specens_kernels.parts.scores import exact_rate, score_logits
from specens_kernels.parts.states import keep_part, log_power, log_probability, target_state
from specens_kernels.parts.statistics import NO_TOKEN, NOWHERE, load_plane, row_marks
from specens_kernels.parts.target import (
    LN_2,
    clean,
    everywhere,
    marks_of,
    part_logits,
    raw_logits,
    target_temperature,
)

SLACK = tl.constexpr(1e-3)  # what float32 statistics may hide of a value


@triton.jit
def _clean_maxima(scores, target, request, step, row):
    """The largest logit of each block of the pass, float32 [COUNT], and status bits: blocks with NaN or +inf show +inf
    there, and are read again."""
    block = tl.arange(0, scores.COUNT)
    maxima = tl.load(scores.maxima + row * scores.blocks + block, mask=block < scores.blocks, other=-INFINITY)
    maxima = maxima.to(tl.float32)
    if scores.LONE:
        status = tl.full([], 0, tl.int32)
        while tl.max(maxima, 0) == INFINITY:
            bad = tl.min(tl.where(maxima == INFINITY, block, NOWHERE), 0)
            tokens = bad * NOISE_BLOCK + tl.arange(0, NOISE_BLOCK)
            raw = raw_logits(target, 0, request, step, tokens, tokens >= 0)
            status |= tl.reduce_or(marks_of(raw), 0)
            maxima = tl.where(block == bad, tl.max(clean(raw), 0), maxima)
    else:
        tile = tl.arange(0, scores.TILES)
        marks = tl.load(scores.marks + row * scores.tiles + tile, mask=tile < scores.tiles, other=0)
        status = tl.reduce_or(marks.to(tl.int32), 0)
    return maxima, status


@triton.jit
def _plausible(scores, target, row):
    """The smallest plausible logit of member 0, float64."""
    if target.log_plausibility is not None:
        tile = tl.arange(0, scores.TILES)
        first = tl.load(scores.first_maxima + row * scores.tiles + tile, mask=tile < scores.tiles, other=-FLOAT_MAX)
        return tl.max(first, 0).to(tl.float64) + target.log_plausibility + scores.plausibility_rest
    else:
        return tl.full([], -INFINITY, tl.float64)


@triton.jit
def _scaled(differences, rate):
    """Logits that the origin was taken from, over the temperature, float32, finite where they were."""
    scaled = differences * tl.minimum(rate.to(tl.float32), FLOAT_MAX)
    return tl.where(differences > -INFINITY, tl.maximum(scaled, -FLOAT_MAX), -INFINITY)


@triton.jit
def _value_bounds(scores, statistics, target, state, request, rows, maxima, origin, rate):
    """What no value of a block of the pass, or of the statistics, exceeds, float32 [COUNT]."""
    if not scores.FROM_STATISTICS:
        return _scaled(maxima - origin.to(tl.float32), rate)
    elif scores.EXACT:
        maxima = tl.reshape(load_plane(statistics, rows, 0, rows >= 0, -INFINITY), [scores.COUNT])
        kept = (maxima > -INFINITY) & (maxima >= tl.max(state.cuts[0], 0))
        return tl.where(kept, SLACK, -INFINITY)
    else:
        best = tl.zeros([scores.COUNT], tl.float32) - INFINITY
        for part in tl.static_range(statistics.PARTS):
            maxima = tl.reshape(load_plane(statistics, rows, part, rows >= 0, -INFINITY), [scores.COUNT])
            used = target_temperature(target, request)
            power = log_power(maxima, tl.max(state.maxima[part], 0), tl.max(state.offsets[part], 0), used, tl.float32)
            best = tl.maximum(best, power)
        spread: tl.constexpr = statistics.PARTS * LN_2  # at least the logarithm of their number
        return tl.where(best > -INFINITY, best + spread + SLACK, -INFINITY)


@triton.jit
def _of_noise(scores, block):
    """The number of a block of the vocabulary's first 128 tokens, the next, ..., of which this may be a part."""
    if scores.first_block is not None:
        return block + scores.first_block
    else:
        return block


@triton.jit
def _block_bounds(scores, statistics, target, state, request, rows, maxima, origin, rate, seed, position, noisy):
    """What no score of a block exceeds, float32 [GROUPS, blocks of a group], and those blocks, int32."""
    TOGETHER: tl.constexpr = scores.VISITED // scores.BLOCK
    JOINED: tl.constexpr = TOGETHER if TOGETHER < scores.COUNT else scores.COUNT  # that make one of the search
    EACH: tl.constexpr = scores.COUNT // JOINED // scores.GROUPS
    bounds = _value_bounds(scores, statistics, target, state, request, rows, maxima, origin, rate)
    bounds = tl.max(tl.reshape(bounds, [EACH, scores.GROUPS, JOINED]), 2)
    block = tl.arange(0, EACH)[:, None] * scores.GROUPS + tl.arange(0, scores.GROUPS)[None, :]
    noise = tl.zeros(bounds.shape, tl.float32) - INFINITY
    PARTS: tl.constexpr = scores.VISITED // NOISE_BLOCK
    for part in range(PARTS):
        noise = tl.maximum(noise, largest_bound(seed, position, _of_noise(scores, block * PARTS + part)))
    bounds = tl.where(bounds > -INFINITY, bound_of(bounds) + tl.where(noisy, noise, 0.0), -INFINITY)
    return tl.trans(bounds), tl.trans(block)


@triton.jit
def _values(scores, statistics, target, state, request, step, tokens, origin, threshold, rate, DTYPE: tl.constexpr):
    """The value of each token, computed as DTYPE, -inf where it is excluded."""
    if scores.EXACT:
        logits = score_logits(scores, target, request, step, tokens, threshold).logits
        if DTYPE.primitive_bitwidth == 64:
            values = (logits.to(tl.float64) - origin) * rate
        elif scores.LONE:
            values = _scaled(logits - origin.to(tl.float32), rate)
        else:
            values = _scaled((logits - origin).to(tl.float32), rate)
        if scores.FROM_STATISTICS:
            kept = part_logits(target, 0, request, step, tokens, tokens >= 0, state.threshold)
            values = tl.where(keep_part(statistics, kept, state.cuts, 0) > -INFINITY, values, -INFINITY)
        return values
    else:
        return log_probability(statistics, target, state, request, step, tokens, tokens < target.vocab, DTYPE)


@triton.jit
def _score(scores, value, seed, position, token, noisy):
    """Of one token, [1], its value with the noise, float64."""
    block = _of_noise(scores, token // NOISE_BLOCK)
    own = token_noise(seed, position, block * NOISE_BLOCK + token % NOISE_BLOCK)
    noise = tl.where(everywhere(noisy, token), -tl.log(own), 0.0)
    return tl.max(tl.where(value > -INFINITY, value + noise, -INFINITY), 0)


@triton.jit
def _put(best, chosen, score, token):
    """Tokens [BEST] and their scores with one in the place of the worst, if it is better."""
    index = tl.arange(0, best.shape[0])
    worst = tl.min(best, 0)
    last = tl.max(tl.where(best == worst, chosen, -1), 0)
    here = tl.min(tl.where((best == worst) & (chosen == last), index, best.shape[0]), 0)
    better = (score > worst) | ((score == worst) & (token < last) & (score > -INFINITY))
    taken = (index == here) & everywhere(better, index)
    return tl.where(taken, score, best), tl.where(taken, token, chosen)


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
        origin = tl.max(state.maxima[0], 0).to(tl.float64)
        maxima = rate  # unused
    else:
        maxima, status = _clean_maxima(scores, target, request, step, row)
        threshold = _plausible(scores, target, row)
        origin = tl.max(maxima, 0).to(tl.float64)
        status |= tl.where(origin > -INFINITY, 0, NO_TOKEN)
        origin = tl.where(origin > -INFINITY, origin, 0.0)
    bounds, blocks = _block_bounds(
        scores, statistics, target, state, request, rows, maxima, origin, rate, seed, position, noisy
    )
    best = tl.zeros([BEST], tl.float64) - INFINITY
    chosen = tl.where(tl.arange(0, BEST) < WANTED, NOWHERE, NOWHERE - 1)
    best = tl.where(tl.arange(0, BEST) < WANTED, best, INFINITY)
    reached = tl.max(bounds, 1)  # by the groups
    while (tl.max(reached, 0).to(tl.float64) >= tl.min(best, 0)) & (tl.max(reached, 0) > -INFINITY):
        visited = tl.min(tl.where(bounds == reached[:, None], blocks, NOWHERE), 1)
        visited = tl.where(reached.to(tl.float64) >= tl.min(best, 0), visited, NOWHERE // scores.VISITED)
        for part in range(scores.VISITED // scores.PART):
            PARTS: tl.constexpr = scores.PART // NOISE_BLOCK
            first = visited * (scores.VISITED // NOISE_BLOCK) + part * PARTS
            noise_blocks = tl.reshape(first[:, None] + tl.arange(0, PARTS)[None, :], [scores.GROUPS * PARTS])
            tokens = block_tokens(noise_blocks)
            values = _values(
                scores, statistics, target, state, request, step, tokens, origin, threshold, rate, tl.float32
            )
            noise = block_bounds(seed, position, _of_noise(scores, noise_blocks))
            noise = tl.where(everywhere(noisy, tokens), noise, 0.0)
            upper = tl.where(values > -INFINITY, bound_of(values) + noise, -INFINITY)
            largest = tl.max(upper, 0)
            while (largest.to(tl.float64) >= tl.min(best, 0)) & (largest > -INFINITY):
                token = tl.min(tl.where(upper == largest, tokens, NOWHERE), 0)
                one = tl.zeros([1], tl.int32) + token
                value = _values(
                    scores, statistics, target, state, request, step, one, origin, threshold, rate, tl.float64
                )
                best, chosen = _put(best, chosen, _score(scores, value, seed, position, one, noisy), token)
                if BEST == 1 and scores.LONE:  # equal logits of a greedy request: the first of them wins
                    done = (tokens == token) | ((upper == largest) & everywhere(noisy == 0, tokens))
                else:
                    done = tokens == token
                upper = tl.where(done, -INFINITY, upper)
                largest = tl.max(upper, 0)
        bounds = tl.where(blocks == visited[:, None], -INFINITY, bounds)
        reached = tl.max(bounds, 1)
    found = tl.max(tl.where(tl.arange(0, BEST) < WANTED, best, -INFINITY), 0)
    status |= tl.where(found > -INFINITY, 0, NO_TOKEN)  # all that is left may not be plausible
    return best, chosen, status
