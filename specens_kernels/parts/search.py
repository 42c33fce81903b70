"""The search for what filters keep of a row: the smallest value that is kept, and the mass of the tokens that are.

Only groups of tokens that may reach a bound are read (`groups`). A pass over them keeps the two largest values of each
lane, which are some groups apart. Few groups reach the bound in most rows, and filters keep few tokens of them, so that
no lane has more: then these values are all that is needed. Where a lane has, more passes count and sum the tokens from
each of some pivots on, to narrow a bracket [low, high) of values in which the smallest kept one lies, until few tokens
lie in it, whose two largest of each lane are taken in turn. A bracket is cut by value or by the integer keys that order
floats, so that it can be narrowed to a single one.

Lanes that one thread loads at once make a column. No loop over the row has to wait for other threads.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from specens_kernels.parts.groups import bound_of_mass, bound_of_rank, group_limits, list_groups, listed_tokens
from specens_kernels.parts.keys import apart, between, next_value, value_of
from specens_kernels.parts.sampling import FLOAT_MAX, INFINITY
from specens_kernels.parts.slots import slot_powers, slot_values

PIVOTS = tl.constexpr(3)  # of a pass; each takes registers
LINEAR_PASSES = tl.constexpr(8)  # that may cut a bracket evenly by value; those after cut keys, which surely ends
LINEAR_SPAN = tl.constexpr(1024.0)  # of such a bracket at most, in powers of 2
FEW = tl.constexpr(16)  # with so many lanes a token, a lane seldom has three of them
CHUNK = tl.constexpr(8)  # lanes of a column: 16 bytes of half precision
SEARCH_BLOCK = tl.constexpr(4096)


class Measured(NamedTuple):
    """What a pass over the listed values finds, in a kernel."""

    counts: Any  # of the values from each pivot on, a tuple of int32
    masses: Any  # likewise, a tuple of float64
    smallest: Any  # from the first pivot on, float32
    largest: Any  # below the bracket's high, float32


class End(NamedTuple):
    """An end of a bracket, in a kernel."""

    value: Any  # float32
    count: Any  # of the values from it on, int32
    mass: Any  # likewise, float64


class Limits(NamedTuple):
    """Between what a row's kept values lie, in a kernel; float32."""

    lowest: Any  # the smallest value with mass
    top: Any  # above all values
    floor: Any  # the smallest value that min-p keeps


@triton.jit
def _largest_values(statistics, target, draft, source, count, low, high, BLOCK: tl.constexpr):
    """The two largest values of each lane in a bracket, float32 [columns, CHUNK, 2], -inf where there are less, and the
    largest value that is left out, -inf where there is none.

    count: of the listed groups.
    """
    first = tl.zeros([BLOCK // CHUNK, CHUNK], tl.float32) - INFINITY
    second = first
    third = tl.zeros([BLOCK // CHUNK], tl.float32) - INFINITY
    for start in range(0, count * (statistics.GROUP // CHUNK), BLOCK // CHUNK):
        tokens, used = listed_tokens(statistics, source, start, count, BLOCK // CHUNK, CHUNK)
        values = slot_values(statistics, target, draft, source, tokens, used)
        values = tl.where(used & (values >= low) & (values < high), values, -INFINITY)
        after = tl.minimum(first, values)
        first = tl.maximum(first, values)
        third = tl.maximum(third, tl.max(tl.minimum(second, after), 1))
        second = tl.maximum(second, after)
    return tl.join(first, second), tl.max(third, 0)


@triton.jit
def _measure(statistics, target, draft, source, count, pivots, high, BLOCK: tl.constexpr):
    """Measured of the listed values from each of some pivots on; the first is lowest. high: that of the bracket."""
    counts = ()
    masses = ()
    for _ in tl.static_range(len(pivots)):
        counts += (tl.zeros([BLOCK // CHUNK], tl.int32),)
        masses += (tl.zeros([BLOCK // CHUNK], tl.float32),)
    smallest = tl.zeros([BLOCK // CHUNK], tl.float32) + INFINITY
    largest = -smallest
    for start in range(0, count * (statistics.GROUP // CHUNK), BLOCK // CHUNK):
        tokens, used = listed_tokens(statistics, source, start, count, BLOCK // CHUNK, CHUNK)
        values = slot_values(statistics, target, draft, source, tokens, used)
        values = tl.where(used, values, -INFINITY)
        powers = slot_powers(statistics, source, values)
        more = ()
        heavier = ()
        for index in tl.static_range(len(pivots)):
            above = values >= pivots[index]
            more += (counts[index] + tl.sum(above.to(tl.int32), 1),)
            heavier += (masses[index] + tl.sum(tl.where(above, powers, 0.0), 1),)
        counts = more
        masses = heavier
        smallest = tl.minimum(smallest, tl.min(tl.where(values >= pivots[0], values, INFINITY), 1))
        largest = tl.maximum(largest, tl.max(tl.where(values < high, values, -INFINITY), 1))
    total_counts = ()
    total_masses = ()
    for index in tl.static_range(len(pivots)):
        total_counts += (tl.sum(counts[index], 0),)
        total_masses += (tl.sum(masses[index].to(tl.float64), 0),)
    return Measured(total_counts, total_masses, tl.min(smallest, 0), tl.max(largest, 0))


@triton.jit
def _pivots(statistics, source, low, high, passes):
    """Values, the first of which is `low`, that cut a bracket evenly: in some of the first passes as numbers."""
    width = high - low
    linear = (passes < LINEAR_PASSES) & (width * source.scale < LINEAR_SPAN)
    if statistics.WHOLE:
        linear &= source.slot != 0
    pivots = (low,)
    for index in tl.static_range(1, PIVOTS):
        value = tl.where(linear, low + width * (index / PIVOTS), between(low, high, index, PIVOTS))
        pivots += (tl.minimum(tl.maximum(value, low), high),)
    return pivots


@triton.jit
def _amount_from(statistics, source, values, low, by_mass):
    """The mass, or the number, of the values that are not below `low`, float64."""
    amounts = tl.where(by_mass, slot_powers(statistics, source, values), 1.0)
    columns = tl.sum(tl.sum(tl.where(values >= low, amounts, 0.0), 2), 1)
    return tl.sum(columns.to(tl.float64), 0)


@triton.jit
def _cut(statistics, source, values, low, high, above, wanted, by_mass):
    """The largest number of a bracket from which on values have the wanted amount, or any from which on they have no
    other; `low` where they have less.

    above: the amount from the bracket's high on.
    """
    amount = above
    while apart(low, high) & (amount != wanted):
        middle = between(low, high, 1, 2)
        amount = above + _amount_from(statistics, source, values, middle, by_mass)
        low = tl.where(amount >= wanted, middle, low)
        high = tl.where(amount >= wanted, high, middle)
    return low


@triton.jit
def _bracket(pivots, measured, high, wanted, by_mass):
    """What a look at some pivots leaves of a bracket: its low and its high, each an End.

    high: that of the bracket before; pivots[0] is its low.
    """
    low = End(pivots[0], measured.counts[0], measured.masses[0])
    for index in tl.static_range(1, PIVOTS):
        count = measured.counts[index]
        mass = measured.masses[index]
        amount = tl.where(by_mass, mass, count.to(tl.float64))
        reached = amount >= wanted
        missed = (amount < wanted) & (pivots[index] < high.value)
        low = End(
            tl.where(reached, pivots[index], low.value),
            tl.where(reached, count, low.count),
            tl.where(reached, mass, low.mass),
        )
        high = End(
            tl.where(missed, pivots[index], high.value),
            tl.where(missed, count, high.count),
            tl.where(missed, mass, high.mass),
        )
    return low, high


@triton.jit
def _narrow(statistics, target, draft, source, listed, low, high, wanted, by_mass, most, BLOCK: tl.constexpr):
    """Passes over the row, at least one, until at most so many tokens, or one value, lie in a bracket.

    high: an End. Returns the mass from the bracket's low on, its low, and its high, an End.
    """
    high, count_high, mass_high = high
    count = count_high
    mass = mass_high
    passes = tl.full([], 0, tl.int32)
    while (passes == 0) | (apart(low, high) & (count - count_high > most)):
        pivots = _pivots(statistics, source, low, high, passes)
        measured = _measure(statistics, target, draft, source, listed, pivots, high, BLOCK)
        lower, upper = _bracket(pivots, measured, End(high, count_high, mass_high), wanted, by_mass)
        low, count, mass = lower
        high, count_high, mass_high = upper
        if measured.smallest == measured.largest:  # all in the bracket tie
            low = measured.smallest
            high = next_value(measured.smallest)
        passes += 1
    return mass, low, End(high, count_high, mass_high)


@triton.jit
def _search_row(statistics, target, draft, source, listed, low, high, wanted, by_mass, BLOCK: tl.constexpr):
    """The largest value from which on a row has the wanted amount, and the mass from it on.

    low, high: a bracket from whose low on there is enough, and from whose high on nothing.
    """
    count_high = tl.full([], 0, tl.int32)
    mass_high = tl.full([], 0.0, tl.float64)
    mass = mass_high
    most = tl.full([], BLOCK // FEW, tl.int32)
    found = low > high
    while not found:
        upper = End(high, count_high, mass_high)
        mass, low, upper = _narrow(statistics, target, draft, source, listed, low, upper, wanted, by_mass, most, BLOCK)
        high, count_high, mass_high = upper
        found = not apart(low, high)
        if not found:
            largest, rest = _largest_values(statistics, target, draft, source, listed, low, high, BLOCK)
            found = rest < low
            if found:
                above = tl.where(by_mass, mass_high, count_high.to(tl.float64))
                low = _cut(statistics, source, largest, low, high, above, wanted, by_mass)
                mass = mass_high + _amount_from(statistics, source, largest, low, True)
        most = most // 2
    return low, mass


@triton.jit
def _limits(statistics, source, maximum, min_p):
    """The Limits of a row. maximum: its largest value."""
    lowest = tl.zeros_like(maximum) - FLOAT_MAX
    log_min_p = tl.log(tl.where(min_p > 0, min_p, 1.0).to(tl.float64))
    floor = (maximum.to(tl.float64) + log_min_p * source.temperature.to(tl.float64)).to(tl.float32)
    if statistics.WHOLE:
        lowest = tl.where(source.slot == 0, value_of(tl.full([], 1, tl.int64)), lowest)
        floor = tl.where(source.slot == 0, maximum * min_p, floor)
    return Limits(lowest, next_value(maximum), tl.where(min_p > 0, floor, -INFINITY))


@triton.jit
def _bound(statistics, source, filters, lower, upper):
    """No kept value is below it, and no filter needs to know a value that is.

    lower, upper: of the largest value of each group.
    """
    top_k, top_p, min_p, min_p_first = filters
    limits = _limits(statistics, source, tl.max(lower, 0), min_p)
    bound = limits.lowest
    if min_p_first | (top_p >= 1) | (top_k <= 0):
        bound = tl.maximum(bound, limits.floor)
    if top_k > 0:
        bound = tl.maximum(bound, bound_of_rank(lower, top_k))
    elif (top_p < 1) & ((min_p_first == 0) | (min_p <= 0)):
        left_out = source.mass - top_p.to(tl.float64) * source.mass
        bound = tl.maximum(bound, bound_of_mass(statistics, source, upper, left_out))
    return bound


@triton.jit
def search(statistics, target, draft, source, filters, BLOCK: tl.constexpr):
    """The smallest value that a slot's filters keep, float32, and the mass of the kept tokens, float64."""
    top_k, top_p, min_p, min_p_first = filters
    lower, upper = group_limits(statistics, source)
    low = _bound(statistics, source, filters, lower, upper)
    listed = list_groups(statistics, source, upper, low)
    largest, rest = _largest_values(statistics, target, draft, source, listed, low, INFINITY, BLOCK)
    maximum = tl.max(tl.max(tl.max(largest, 2), 1), 0)
    limits = _limits(statistics, source, maximum, min_p)
    mass = source.mass  # that top-p acts on, if no other filter comes first
    for stage in range(2):
        by_mass = tl.full([], 0, tl.int32) + stage == 1
        if tl.where(by_mass, top_p < 1, top_k > 0):
            wanted = tl.where(by_mass, top_p.to(tl.float64) * mass, top_k.to(tl.float64))
            low = _cut(statistics, source, largest, low, limits.top, tl.full([], 0.0, tl.float64), wanted, by_mass)
            mass = _amount_from(statistics, source, largest, low, True)
            if rest >= low:
                low, mass = _search_row(
                    statistics, target, draft, source, listed, low, limits.top, wanted, by_mass, BLOCK
                )
                largest = tl.full(largest.shape, -INFINITY, tl.float32)  # they are not kept in registers meanwhile
                rest = tl.full([], INFINITY, tl.float32)
        if (by_mass != min_p_first) & (min_p > 0):
            low = tl.maximum(low, limits.floor)
            mass = _amount_from(statistics, source, largest, low, True)
            if rest >= low:
                mass = _measure(statistics, target, draft, source, listed, (low,), limits.top, BLOCK).masses[0]
    return low, mass
