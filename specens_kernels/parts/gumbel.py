"""Gumbel noise on a GPU; `specens_kernels.ops.sample.gumbel` is the definition."""

from __future__ import annotations

import triton
import triton.language as tl

from specens_kernels.ops.sample.gumbel import BLOCK, LANES, MAXIMUM_STREAM, REST_STREAM

NOISE_BLOCK = tl.constexpr(BLOCK)
NOISE_LANES = tl.constexpr(LANES)
MAXIMUM = tl.constexpr(MAXIMUM_STREAM)
REST = tl.constexpr(REST_STREAM)
LARGEST_UNIT = tl.constexpr(1 - 2.0**-53)


@triton.jit
def random_words(seed, position, index, STREAM: tl.constexpr):
    """Four words, uint32, of a seed, a position and each index, an int32 block."""
    seeds = tl.zeros(index.shape, tl.int64) + seed
    positions = (tl.zeros(index.shape, tl.int64) + position).to(tl.uint64)
    low = (positions & 0xFFFFFFFF).to(tl.uint32)
    high = (positions >> 32).to(tl.uint32)
    return tl.philox(seeds, low, high, index.to(tl.uint32), tl.zeros_like(low) + STREAM)


@triton.jit
def largest_noise(seed, position, block):
    """exp(-noise), float64, of the largest noise of each block, int32, and its place among the block's tokens."""
    high, low, place, _ = random_words(seed, position, block, MAXIMUM)
    bits = (high >> 5).to(tl.float64) * 67108864.0 + (low >> 6).to(tl.float64)  # 2^26
    unit = tl.minimum((bits + 0.5) * (1.0 / 9007199254740992.0), LARGEST_UNIT)  # 2^-53
    return -tl.log(unit) / NOISE_BLOCK, (place >> 25).to(tl.int32)


@triton.jit
def token_noise(seed, position, tokens):
    """exp(-noise), float64, of each token, int32."""
    block = tokens // NOISE_BLOCK
    place = tokens % NOISE_BLOCK
    largest, place_of_largest = largest_noise(seed, position, block)
    first, second, third, fourth = random_words(seed, position, block * NOISE_LANES + place % NOISE_LANES, REST)
    number = place // NOISE_LANES
    word = tl.where(number == 0, first, tl.where(number == 1, second, tl.where(number == 2, third, fourth)))
    rest = largest - tl.log((word.to(tl.float64) + 0.5) * (1.0 / 4294967296.0))  # 2^-32
    return tl.where(place == place_of_largest, largest, rest)
