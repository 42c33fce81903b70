"""Which groups of a row's tokens filters must read, by the largest logits of groups that the first pass has left.

A group is listed where it may have a value that is not below a bound, and the filters need to know no value below it.
"""

from __future__ import annotations

import triton
import triton.language as tl

from specens_kernels.parts.keys import apart, between, next_value
from specens_kernels.parts.sampling import FLOAT_MAX, INFINITY
from specens_kernels.parts.slots import slot_powers, value_of_power
from specens_kernels.parts.states import part_probability
from specens_kernels.parts.target import clean

MARGIN = tl.constexpr(1e-4)  # of masses and probabilities, wider than what float32 rounds
COARSE = tl.constexpr(2**12)  # numbers apart, of a bound by rank
HALVINGS = tl.constexpr(10)  # of the logarithm of a bound by mass


@triton.jit
def _maxima(statistics, maxima_ptr, row):
    """float32 [GROUP_COUNT]."""
    group = tl.arange(0, statistics.GROUP_COUNT)
    maxima = tl.load(maxima_ptr + row * statistics.groups + group, mask=group < statistics.groups, other=-INFINITY)
    return clean(maxima.to(tl.float32))


@triton.jit
def group_limits(statistics, source):
    """What the largest value of each group is at least and at most, float32 [GROUP_COUNT]."""
    lower = tl.zeros([statistics.GROUP_COUNT], tl.float32) - INFINITY
    if statistics.PART_GROUPS:
        for part in tl.static_range(statistics.PARTS):
            if source.plane == part:
                lower = _maxima(statistics, statistics.group_maxima[part], source.row)
    if statistics.DRAFT_GROUPS:  # noqa: SIM102 - decided when compiling
        if source.plane == statistics.DRAFT_PLANE:
            lower = _maxima(statistics, statistics.draft_group_maxima, source.row)
    upper = lower
    if statistics.WHOLE:  # noqa: SIM102 - decided when compiling
        if source.slot == 0:
            lower = tl.zeros([statistics.GROUP_COUNT], tl.float32)
            upper = lower
            for part in tl.static_range(statistics.PARTS):
                maxima = _maxima(statistics, statistics.group_maxima[part], source.row)
                probability = part_probability(source.state, part, maxima)
                lower = tl.maximum(lower, probability * (1 - MARGIN))
                upper += probability * (1 + MARGIN)
    return lower, upper


@triton.jit
def bound_of_rank(lower, rank):
    """A value that at least so many groups reach, near the largest, float32."""
    low = tl.zeros_like(rank) - FLOAT_MAX
    high = next_value(tl.max(lower, 0))
    reached = tl.sum((lower >= low).to(tl.int32), 0).to(tl.float32)
    enough = reached >= rank
    while enough & (reached != rank) & apart(low, high, COARSE):
        middle = between(low, high, 1, 2)
        count = tl.sum((lower >= middle).to(tl.int32), 0).to(tl.float32)
        reached = tl.where(count >= rank, count, reached)
        low = tl.where(count >= rank, middle, low)
        high = tl.where(count >= rank, high, middle)
    return tl.where(enough, low, -INFINITY)


@triton.jit
def bound_of_mass(statistics, source, upper, left_out):
    """A value below which all values together have less than this mass, float64; near the largest, float32."""
    powers = slot_powers(statistics, source, upper)
    spared = tl.div_rn(left_out.to(tl.float32), tl.full([], statistics.GROUP, tl.float32)) * (1 - MARGIN)
    low = tl.log2(tl.div_rn(spared, tl.full([], statistics.GROUP_COUNT, tl.float32)))  # if every group reaches it
    high = tl.log2(tl.max(powers, 0))
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        spares = tl.sum(tl.minimum(powers, tl.exp2(middle)), 0) <= spared
        low = tl.where(spares, middle, low)
        high = tl.where(spares, high, middle)
    return value_of_power(statistics, source, tl.exp2(low) * (1 - MARGIN))


@triton.jit
def list_groups(statistics, source, upper, bound):
    """Write the list of the groups that may reach a bound, and return their number."""
    group = tl.arange(0, statistics.GROUP_COUNT)
    listed = (upper >= bound) & (group < statistics.groups)
    index = tl.cumsum(listed.to(tl.int32), 0) - 1
    list_ptr = list_of(statistics, source)
    tl.store(list_ptr + index, group, mask=listed)
    tl.debug_barrier()  # other threads read what these have written
    return tl.sum(listed.to(tl.int32), 0)


@triton.jit
def list_of(statistics, source):
    return statistics.lists + (source.row * statistics.SLOTS + source.slot) * statistics.groups


@triton.jit
def listed_tokens(statistics, source, start, count, COLUMNS: tl.constexpr, CHUNK: tl.constexpr):
    """The tokens of columns of CHUNK from `start` on, counted through the listed groups, int32 [COLUMNS, CHUNK], and
    whether they are there. count: of the listed groups."""
    column = start + tl.arange(0, COLUMNS)
    PER_GROUP: tl.constexpr = statistics.GROUP // CHUNK
    index = column // PER_GROUP
    listed = index < count
    group = tl.load(list_of(statistics, source) + index, mask=listed, other=0).to(tl.int32)
    first = group * statistics.GROUP + column % PER_GROUP * CHUNK
    tokens = first[:, None] + tl.arange(0, CHUNK)[None, :]
    return tokens, listed[:, None] & (tokens >= 0)
