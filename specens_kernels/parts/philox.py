"""Philox4x32-10 in Triton, and the uniform made from it."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def uniform(seed, position, step, stream):
    """The float64 number in [0, 1) of each element: key = seed, counter = (position, step, stream).

    seed, position: int64 blocks. step, stream: integer blocks or scalars, taken modulo 2^32.
    """
    position = position.to(tl.uint64)
    position_low = (position & 0xFFFFFFFF).to(tl.uint32)
    position_high = (position >> 32).to(tl.uint32)
    step_word = tl.zeros_like(position_low) + step.to(tl.uint32)
    stream_word = tl.zeros_like(position_low) + stream.to(tl.uint32)
    first, second, _, _ = tl.philox(seed, position_low, position_high, step_word, stream_word)
    high_bits = (first >> 5).to(tl.float64)
    low_bits = (second >> 6).to(tl.float64)
    return (high_bits * 67108864.0 + low_bits) * (1.0 / 9007199254740992.0)  # 2^26, 2^-53
