"""Definition of the uniforms: Philox4x32-10 in int64 arithmetic.

Source: Salmon, Moraes, Dror, Shaw, "Parallel random numbers: as easy as 1, 2, 3", SC 2011.
"""

from __future__ import annotations

import torch
from torch import Tensor

WORD = 0xFFFFFFFF
MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
KEY_INCREMENTS = (0x9E3779B9, 0xBB67AE85)
ROUNDS = 10

Counter = tuple[Tensor, Tensor, Tensor, Tensor]
Key = tuple[Tensor, Tensor]


def uniforms(seeds: Tensor, positions: Tensor, steps: Tensor | int, stream: int) -> Tensor:
    """Uniforms, float64 [batch], from seeds and positions, integers [batch], and steps, an int or integers [batch]."""
    seeds, positions = seeds.to(torch.int64), positions.to(torch.int64)
    steps = steps.to(torch.int64) if isinstance(steps, Tensor) else steps
    zeros = positions & 0
    counter = (*words(positions), zeros + (steps & WORD), zeros + (stream & WORD))
    first, second, _, _ = philox4x32_10(counter, words(seeds))
    return ((first >> 5) * 2**26 + (second >> 6)).double() / 2**53


def philox4x32_10(counter: Counter, key: Key) -> Counter:
    """Four random words for each counter and key; words are int64 tensors with values in [0, 2^32)."""
    for round_index in range(ROUNDS):
        round_key = tuple((word + round_index * step) & WORD for word, step in zip(key, KEY_INCREMENTS, strict=True))
        first_high, first_low = _wide_product(counter[0], MULTIPLIERS[0])
        second_high, second_low = _wide_product(counter[2], MULTIPLIERS[1])
        counter = (
            second_high ^ counter[1] ^ round_key[0],
            second_low,
            first_high ^ counter[3] ^ round_key[1],
            first_low,
        )
    return counter


def words(value: Tensor) -> Key:
    """Low and high half of two's complement int64."""
    return value & WORD, (value >> 32) & WORD


def _wide_product(word: Tensor, multiplier: int) -> Key:
    """High and low half of a 32 x 32 bit product, in halves of the word, since the product can exceed int64."""
    low_part = (word & 0xFFFF) * multiplier
    high_part = (word >> 16) * multiplier + (low_part >> 16)
    return high_part >> 16, ((high_part & 0xFFFF) << 16) | (low_part & 0xFFFF)
