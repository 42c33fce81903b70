"""Integer keys that order float32 values, by which a bracket of them can be narrowed to a single one."""

from __future__ import annotations

import triton
import triton.language as tl


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
def next_value(value):
    """The float after one."""
    return value_of(key_of(value) + 1)


@triton.jit
def apart(low, high, numbers: tl.constexpr = 1):
    """Whether two floats are further apart than so many steps from one float to the next."""
    return key_of(high) - key_of(low) > numbers


@triton.jit
def between(low, high, part: tl.constexpr, parts: tl.constexpr):
    """The float that has so many parts of those between two below it."""
    return value_of(key_of(low) + (key_of(high) - key_of(low)) * part // parts)
