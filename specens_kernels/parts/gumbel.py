"""Gumbel noise on a GPU; `specens_kernels.ops.sample.gumbel` is the definition.

Noise is float64. What it does not exceed is had at a tenth of the cost in float32: `largest_bound`, `block_bounds`.
"""

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
    high, low, index, _ = random_words(seed, position, block, MAXIMUM)
    bits = (high >> 5).to(tl.float64) * 67108864.0 + (low >> 6).to(tl.float64)  # 2^26
    unit = tl.minimum((bits + 0.5) * (1.0 / 9007199254740992.0), LARGEST_UNIT)  # 2^-53
    return -tl.log(unit) / NOISE_BLOCK, (index >> 25).to(tl.int32)


@triton.jit
def token_noise(seed, position, tokens):
    """exp(-noise), float64, of each token, int32."""
    block = tokens // NOISE_BLOCK
    index = tokens % NOISE_BLOCK
    largest, index_of_largest = largest_noise(seed, position, block)
    first, second, third, fourth = random_words(seed, position, block * NOISE_LANES + index % NOISE_LANES, REST)
    number = index // NOISE_LANES
    word = tl.where(number == 0, first, tl.where(number == 1, second, tl.where(number == 2, third, fourth)))
    rest = largest - tl.log((word.to(tl.float64) + 0.5) * (1.0 / 4294967296.0))  # 2^-32
    return tl.where(index == index_of_largest, largest, rest)


@triton.jit
def _minus_log(unit, rest):
    """-log(unit), float32, of numbers in (0, 1) to 4e-6 of itself; rest: 1 - unit, of more digits where it is small."""
    series = rest * (1 + rest * (1 / 2 + rest * (1 / 3 + rest * (1 / 4 + rest * (1 / 5)))))
    return tl.where(rest < 1 / 16, series, -tl.log(unit))


@triton.jit
def _largest(seed, position, block):
    """As `largest_noise`, float32, and never more than that by rounding of the random number."""
    high, low, index, _ = random_words(seed, position, block, MAXIMUM)
    first = (high >> 5).to(tl.int32)  # 27 bits of 53
    second = (low >> 6).to(tl.int32)
    unit = first.to(tl.float32) * (1 / 134217728.0) + second.to(tl.float32) * (1 / 9007199254740992.0)
    rest = (134217727 - first).to(tl.float32) * (1 / 134217728.0)
    rest += (67108863 - second).to(tl.float32) * (1 / 9007199254740992.0)
    return _minus_log(unit, rest) / NOISE_BLOCK, (index >> 25).to(tl.int32)


@triton.jit
def bound_of(noise):
    """What a number does not exceed that was rounded several times to float32."""
    return tl.maximum(noise * (1 + 1e-5), noise * (1 - 1e-5)) + 1e-4


@triton.jit
def largest_bound(seed, position, block):
    """What no noise of the tokens of each block, int32, exceeds, float32; infinite with probability 2^-53."""
    largest, _ = _largest(seed, position, block)
    return bound_of(-tl.log(largest))


@triton.jit
def block_tokens(block):
    """The tokens of blocks, int32, as `block_bounds` has them: int32 [blocks * NOISE_BLOCK]."""
    QUARTERS: tl.constexpr = NOISE_BLOCK // NOISE_LANES
    lane = tl.arange(0, NOISE_LANES)[None, :, None]
    quarter = tl.arange(0, QUARTERS)[None, None, :]
    tokens = block[:, None, None] * NOISE_BLOCK + quarter * NOISE_LANES + lane
    return tl.reshape(tokens, [block.shape[0] * NOISE_BLOCK])


@triton.jit
def block_bounds(seed, position, block):
    """What the noise of each of `block_tokens` does not exceed, float32; four tokens share their random words."""
    largest, index = _largest(seed, position, block)
    lane = tl.arange(0, NOISE_LANES)[None, :]
    first, second, third, fourth = random_words(seed, position, block[:, None] * NOISE_LANES + lane, REST)
    words = tl.join(tl.join(first, third), tl.join(second, fourth))  # [blocks, lanes, 2, 2]
    words = tl.reshape(words, [block.shape[0], NOISE_LANES, NOISE_BLOCK // NOISE_LANES])
    scale: tl.constexpr = 1 / 4294967296.0  # 2^-32
    unit = (words.to(tl.float32) + 0.5) * scale
    rest = ((words ^ 0xFFFFFFFF).to(tl.float32) + 0.5) * scale
    own = largest[:, None, None] + _minus_log(unit, rest)
    number = tl.arange(0, NOISE_BLOCK // NOISE_LANES)[None, None, :] * NOISE_LANES + lane[:, :, None]
    own = tl.where(number == index[:, None, None], largest[:, None, None], own)
    return bound_of(tl.reshape(-tl.log(own), [block.shape[0] * NOISE_BLOCK]))
