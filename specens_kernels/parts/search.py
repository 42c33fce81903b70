"""The search for what filters keep of a row: the smallest value that is kept, and the mass of the tokens that are.

Each filter keeps the tokens from some value on, so the search narrows a bracket [low, high) of values in which that
value lies: a pass over the row counts and sums the tokens from each of several pivots on. Once few enough tokens lie in
the bracket they are collected, and the rest of the search, of all filters where it can, reads them alone. Values are
ordered by integer keys, so that a bracket can be narrowed to a single one.
"""

from __future__ import annotations

import triton
import triton.language as tl

from specens_kernels.parts.sampling import FLOAT_MAX, INFINITY
from specens_kernels.parts.slots import block_may_reach, slot_powers, slot_values
from specens_kernels.parts.target import everywhere

PIVOTS = tl.constexpr(16)
PIVOT_STEP = tl.constexpr(1.5)  # powers of 2 between the pivots of the first pass, down from the largest value
LINEAR_PASSES = tl.constexpr(4)  # that follow it; those behind cut keys evenly, which surely ends
ABOVE_PROBABILITIES = tl.constexpr(2.0)
SEARCH_BLOCK = tl.constexpr(512)


@triton.jit
def key_of(value):
    """int64, ordered as float32 values are."""
    bits = value.to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits).to(tl.int64)


@triton.jit
def value_of(key):
    """The float32 value of a key."""
    bits = key.to(tl.int32)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits).to(tl.float32, bitcast=True)


@triton.jit
def largest_value(statistics, target, draft, source, WIDEST: tl.constexpr, BLOCK: tl.constexpr):
    """The largest value of a row, by a pass over it."""
    largest = tl.zeros([BLOCK], tl.float32) - INFINITY
    for first in range(0, WIDEST, BLOCK):
        tokens = first + tl.arange(0, BLOCK)
        largest = tl.maximum(largest, slot_values(statistics, target, draft, source, tokens))
    return tl.max(largest, 0)


@triton.jit
def _count(values, powers, pivots):
    """The number, int32, and the mass, float32, of each value that is not below each pivot: [PIVOTS, values]."""
    above = values[None, :] >= pivots[:, None]
    return above.to(tl.int32), tl.where(above, powers[None, :], 0.0)


@triton.jit
def _measure(statistics, target, draft, source, pivots, WIDEST: tl.constexpr, BLOCK: tl.constexpr):
    """The number, int32, and the mass, float64, of a row's values that are not below each pivot: [PIVOTS]."""
    counts = tl.zeros([PIVOTS, BLOCK], tl.int32)
    masses = tl.zeros([PIVOTS, BLOCK], tl.float32)
    lowest = tl.min(pivots, 0)
    for first in range(0, WIDEST, BLOCK):
        if block_may_reach(statistics, source, first, lowest):
            values = slot_values(statistics, target, draft, source, first + tl.arange(0, BLOCK))
            more, heavier = _count(values, slot_powers(statistics, source, values), pivots)
            counts += more
            masses += heavier
    return tl.sum(counts, 1), tl.sum(masses.to(tl.float64), 1)


@triton.jit
def _measure_candidates(statistics, source, candidates, pivots):
    """The same of the candidates."""
    counts, masses = _count(candidates, slot_powers(statistics, source, candidates), pivots)
    return tl.sum(counts, 1), tl.sum(masses.to(tl.float64), 1)


@triton.jit
def _even_keys(low, high):
    """Pivots, int64 [PIVOTS], that cut a bracket of at least two keys into equally many."""
    return low + (high - low) * (tl.arange(0, PIVOTS) + 1) // (PIVOTS + 1)


@triton.jit
def _pivots(statistics, source, low, high, passes):
    """Keys between low and high, by how many passes there were."""
    _, slot, _, _, _, maximum, scale, _, _ = source
    index = tl.arange(0, PIVOTS)
    keys = _even_keys(low, high)
    linear = everywhere(slot >= 0, index)
    lowest = key_of(tl.zeros([PIVOTS], tl.float32) - FLOAT_MAX)
    powers = (index - (PIVOTS - 1)).to(tl.float32) * PIVOT_STEP
    spread = maximum + tl.div_rn(powers, tl.zeros([PIVOTS], tl.float32) + scale)
    if statistics.WHOLE:
        linear = everywhere(slot != 0, index)
        lowest = tl.where(linear, lowest, 1)
        spread = tl.where(linear, spread, tl.exp2(powers))
    if passes == 0:
        keys = tl.where(index == 0, lowest, key_of(spread))
    else:
        width = value_of(high) - value_of(low)
        if (passes <= LINEAR_PASSES) & (width < INFINITY):
            between = value_of(low) + width * ((index + 1).to(tl.float32) / (PIVOTS + 1))
            keys = tl.where(linear, key_of(between), keys)
    return tl.minimum(tl.maximum(keys, low), high)


@triton.jit
def _updated(bracket, pivots, counts, masses, wanted, by_mass):
    """The bracket (low, high, and the count and the mass from each on) after a look at some pivots."""
    low, high, count_low, mass_low, count_high, mass_high = bracket
    reached = tl.where(by_mass, masses, counts.to(tl.float64)) >= wanted
    low = tl.maximum(low, tl.max(tl.where(reached, pivots, low), 0))
    high = tl.minimum(high, tl.min(tl.where(reached, high, pivots), 0))
    count_low = tl.minimum(count_low, tl.min(tl.where(reached, counts, count_low), 0))
    mass_low = tl.minimum(mass_low, tl.min(tl.where(reached, masses, mass_low), 0))
    count_high = tl.maximum(count_high, tl.max(tl.where(reached, count_high, counts), 0))
    mass_high = tl.maximum(mass_high, tl.max(tl.where(reached, mass_high, masses), 0))
    return low, high, count_low, mass_low, count_high, mass_high


@triton.jit
def _narrow(
    statistics, target, draft, source, bracket, wanted, by_mass,
    CAPACITY: tl.constexpr, WIDEST: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Passes over the row until at most CAPACITY tokens, or one value, lie in the bracket."""
    low, high, count_low, mass_low, count_high, mass_high = bracket
    passes = tl.full([], 0, tl.int32)
    while (high - low > 1) & (count_low - count_high > CAPACITY):
        pivots = _pivots(statistics, source, low, high, passes)
        counts, masses = _measure(statistics, target, draft, source, value_of(pivots), WIDEST, BLOCK)
        low, high, count_low, mass_low, count_high, mass_high = _updated(
            (low, high, count_low, mass_low, count_high, mass_high), pivots, counts, masses, wanted, by_mass
        )
        passes += 1
    return low, high, count_low, mass_low, count_high, mass_high


@triton.jit
def _collect(
    candidates_ptr, statistics, target, draft, source, low, high, nothing,
    CAPACITY: tl.constexpr, WIDEST: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The values of a bracket, float32 [CAPACITY], `nothing` behind them."""
    written = tl.full([], 0, tl.int32)
    for first in range(0, WIDEST, BLOCK):
        if block_may_reach(statistics, source, first, value_of(low)):
            values = slot_values(statistics, target, draft, source, first + tl.arange(0, BLOCK))
            inside = (values >= value_of(low)) & (values < value_of(high)) & (values > nothing)
            place = written + tl.cumsum(inside.to(tl.int32), 0) - 1
            tl.store(candidates_ptr + place, values, mask=inside & (place < CAPACITY))
            written += tl.sum(inside.to(tl.int32), 0)
    tl.debug_barrier()
    index = tl.arange(0, CAPACITY)
    return tl.load(candidates_ptr + index, mask=index < written, other=nothing)


@triton.jit
def _finish(statistics, source, candidates, bracket, wanted, by_mass):
    """Narrow a bracket to one value, reading the values in it alone."""
    low, high, count_low, mass_low, count_high, mass_high = bracket
    while high - low > 1:
        pivots = _even_keys(low, high)
        counts, masses = _measure_candidates(statistics, source, candidates, value_of(pivots))
        low, high, count_low, mass_low, _, _ = _updated(
            (low, high, count_low, mass_low, count_high, mass_high),
            pivots, counts + count_high, masses + mass_high, wanted, by_mass,
        )  # fmt: skip
    return low, count_low, mass_low


@triton.jit
def _bounds(statistics, target, draft, source, min_p, temperature, WIDEST: tl.constexpr, BLOCK: tl.constexpr):
    """Keys of a slot's values: one not above any, one above all; and the smallest value that min-p keeps."""
    _, slot, _, _, _, maximum, _, _, _ = source
    lowest = key_of(tl.zeros_like(maximum) - INFINITY)
    top = key_of(maximum) + 1
    log_min_p = tl.log(tl.where(min_p > 0, min_p, 1.0).to(tl.float64))
    floor = (maximum.to(tl.float64) + log_min_p * temperature.to(tl.float64)).to(tl.float32)
    floor = tl.where(min_p > 0, floor, -INFINITY)
    if statistics.WHOLE:
        lowest = tl.where(slot == 0, 0, lowest)
        top = tl.where(slot == 0, key_of(tl.zeros_like(maximum) + ABOVE_PROBABILITIES), top)
        if (slot == 0) & (min_p > 0):
            floor = largest_value(statistics, target, draft, source, WIDEST, BLOCK) * min_p
    return lowest, top, floor


@triton.jit
def search(
    candidates_ptr, statistics, target, draft, source, filters, temperature, total,
    CAPACITY: tl.constexpr, WIDEST: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The smallest value that a slot's filters keep, float32, and the mass of the kept tokens, float64.

    filters, temperature, total: the slot's, the last the mass of its row. candidates_ptr: float32 [CAPACITY], scratch.
    """
    top_k, top_p, min_p, min_p_first = filters
    lowest, top, floor = _bounds(statistics, target, draft, source, min_p, temperature, WIDEST, BLOCK)
    low = lowest
    count_low = tl.full([], WIDEST, tl.int32)
    mass_low = total
    complete = lowest > top  # whether the candidates are all tokens that may be kept
    nothing = value_of(lowest)
    candidates = tl.zeros([CAPACITY], tl.float32) + nothing
    for stage in range(2):
        by_mass = tl.full([], 0, tl.int32) + stage == 1
        if tl.where(by_mass, top_p < 1, (top_k > 0) & (top_k < WIDEST)):
            wanted = tl.where(by_mass, top_p.to(tl.float64) * mass_low, top_k.to(tl.float64))
            high = top
            count_high = tl.full([], 0, tl.int32)
            mass_high = tl.full([], 0.0, tl.float64)
            if not complete:
                low, high, count_low, mass_low, count_high, mass_high = _narrow(
                    statistics, target, draft, source, (low, high, count_low, mass_low, count_high, mass_high),
                    wanted, by_mass, CAPACITY, WIDEST, BLOCK,
                )  # fmt: skip
                if high - low > 1:
                    complete = count_low <= CAPACITY
                    high = tl.where(complete, top, high)
                    count_high = tl.where(complete, 0, count_high)
                    mass_high = tl.where(complete, 0.0, mass_high)
                    candidates = _collect(
                        candidates_ptr, statistics, target, draft, source, low, high, nothing, CAPACITY, WIDEST, BLOCK
                    )
            low, count_low, mass_low = _finish(
                statistics, source, candidates, (low, high, count_low, mass_low, count_high, mass_high), wanted, by_mass
            )
        if (by_mass != min_p_first) & (key_of(floor) > low):
            low = key_of(floor)
            pivots = tl.zeros([PIVOTS], tl.float32) + floor
            if complete:
                counts, masses = _measure_candidates(statistics, source, candidates, pivots)
            else:
                counts, masses = _measure(statistics, target, draft, source, pivots, WIDEST, BLOCK)
            count_low = tl.max(counts, 0)
            mass_low = tl.max(masses, 0)
    return value_of(low), mass_low
