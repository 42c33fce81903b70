"""Tokens of rows that are written down, and the bits of scores in their order that they are searched by; in torch."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

DIGIT = 8  # bits of a key that a collective settles
BUCKETS = 2**DIGIT
BESIDE_KEY = 2**21  # a float64 holds a key of 32 bits and a number below it
FAR = 2.0**50  # octaves are told apart up to it


class Keys(NamedTuple):
    """What orders the scores of a row."""

    dtype: torch.dtype  # bfloat16, float16 or float32: its numbers tell scores apart
    exact: bool  # scores are such numbers
    vocab: int  # of all ranks together

    @property
    def bits(self) -> int:
        return 32 if self.dtype == torch.float32 else 16

    def of(self, scores: Tensor) -> Tensor:
        """int64, the bits of scores in their order."""
        number = torch.int32 if self.bits == 32 else torch.int16
        sign = 2 ** (self.bits - 1)
        word = (scores.to(self.dtype) + 0.0).view(number).long() & (2 * sign - 1)
        return torch.where(word >= sign, 2 * sign - 1 - word, word + sign)

    def scores(self, keys: Tensor) -> Tensor:
        """float64, the scores that have these keys; NaN: none."""
        number = torch.int32 if self.bits == 32 else torch.int16
        sign = 2 ** (self.bits - 1)
        word = torch.where(keys >= sign, keys - sign, 2 * sign - 1 - keys)
        return (word - (word // sign * 2 * sign)).to(number).view(self.dtype).double()


OF_FLOAT32 = Keys(torch.float32, True, 0)


class Bracket(NamedTuple):
    """Where the key lies, each [batch, rows]."""

    octave: Tensor  # float64
    low: Tensor  # int64, it is not below
    high: Tensor  # int64, it is below
    goal: Tensor  # float64, the weight that it reaches
    total: Tensor  # float64


class WrittenTokens(NamedTuple):
    """Tokens that are written down, each [batch, rows, width]."""

    keys: Tensor  # int64
    weights: Tensor  # float64; 0: not there
    temperature: Tensor | None
    largest: Tensor | None

    def histogram(self, prefix: Tensor, shift: int) -> Tensor:
        inside = (self.keys >> (shift + DIGIT)) == prefix[..., None]
        digit = (self.keys >> shift) & (BUCKETS - 1)
        sums = self.weights.new_zeros(*self.keys.shape[:2], BUCKETS)
        return sums.scatter_add(2, digit, torch.where(inside, self.weights, 0.0))

    def total(self) -> Tensor:
        return self.weights.sum(-1)

    def samples(self, num: int, count: int) -> list[Tensor]:
        octaves = octaves_of(self.keys, self.temperature)
        top = torch.where(self.weights > 0, octaves, -FAR).amax(-1, keepdim=True)
        width, place = self.keys.shape[-1], (top - octaves).clamp(0, num - 1).long()
        of_octaves = self.weights.new_zeros(*place.shape[:2], num).scatter_add(2, place, self.weights)
        keys, by_key = self.keys.sort(dim=-1, descending=True, stable=True)
        weights, place = self.weights.gather(-1, by_key), place.gather(-1, by_key)
        after = from_the_end(weights) - from_the_end(of_octaves).gather(-1, place)  # the small ones first
        share = (1 - after / of_octaves.gather(-1, place)).nan_to_num(nan=0.0).clamp(0, 1)
        codes = keys.double() * BESIDE_KEY + (share * (BESIDE_KEY - 1)).floor()
        every = -(-width // count)
        codes = codes[..., every - 1 :: every]
        return [of_octaves, torch.cat([top, torch.nn.functional.pad(codes, (0, count - codes.shape[-1]))], -1)]

    def entries(self, found: Bracket, count: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        octaves, octave = octaves_of(self.keys, self.temperature), found.octave[..., None]
        here, is_over = octaves == octave, self.keys >= found.high[..., None]
        over = torch.where((octaves > octave) | (here & is_over), self.weights, 0.0).sum(-1, keepdim=True)
        inside = here & ~is_over & (self.keys >= found.low[..., None]) & (self.weights > 0)
        keys, order = torch.where(inside, self.keys, -1).sort(dim=-1, descending=True, stable=True)
        is_new = keys != torch.nn.functional.pad(keys[..., :-1], (1, 0), value=-1)
        slot = torch.where(keys >= 0, is_new.cumsum(-1) - 1, count).clamp(max=count)  # the last one is for all others
        none = over.new_zeros(*keys.shape[:2], count + 1)
        repeats = none.scatter_add(2, slot, torch.ones_like(self.weights))[..., :count]
        weights = none.scatter_add(2, slot, self.weights.gather(-1, order))[..., :count]
        keys = torch.full_like(none, -1, dtype=torch.int64).scatter(2, slot, keys)[..., :count]
        return over, keys, torch.where(keys >= 0, repeats, 0.0), torch.where(keys >= 0, weights, 0.0)


def octaves_of(keys: Tensor, temperature: Tensor | None) -> Tensor:
    """float64, the power of two of each key's mass, on a scale that all rows have; [..., batch, rows, n]."""
    if temperature is None:
        return torch.zeros_like(keys, dtype=torch.float64)
    return (
        (OF_FLOAT32.scores(keys) / temperature[:, None, None] / math.log(2))
        .floor()
        .nan_to_num(nan=-FAR)
        .clamp(-FAR, FAR)
    )


def from_the_end(weights: Tensor) -> Tensor:
    """The sums of those after each."""
    return torch.nn.functional.pad(weights[..., 1:], (0, 1)).flip(-1).cumsum(-1).flip(-1)
