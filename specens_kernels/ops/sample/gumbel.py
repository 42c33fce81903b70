"""The definition of Gumbel scores, in float64: the noise of a token, and the tokens of the best scores.

The token of the largest log-probability + standard Gumbel noise is distributed as the probabilities say; those of the k
largest are drawn without replacement. Where the noise is a function of seed, position and token id, so is the token.

Sources: Maddison, Tarlow, Minka, A* Sampling, NeurIPS 2014 (the maximum of many Gumbel variables first, then the
others below it); Kool, van Hoof, Welling, Stochastic Beams and Where to Find Them, ICML 2019 (Gumbel top-k); Daliri,
Musco, Suresh, Coupling without Communication and Drafter-Invariant Speculative Decoding, 2024.
"""

from __future__ import annotations

import torch
from torch import Tensor

from specens_kernels.ops.target_logprobs.reference import Distributions
from specens_kernels.ops.uniforms.reference import WORD, Counter, philox4x32_10, words

BLOCK, WORDS = 128, 4  # tokens of a block; words of a Philox counter
LANES = BLOCK // WORDS
MAXIMUM_STREAM, REST_STREAM = 3, 4


def _random_words(seeds: Tensor, positions: Tensor, index: Tensor, stream: int) -> Counter:
    """Four words of a seed and position [...] and each index [n], int64 [..., n]."""
    index = index.expand(*seeds.shape, -1)
    low, high = (half[..., None].expand_as(index) for half in words(positions))
    seed_low, seed_high = (half[..., None] for half in words(seeds))
    return philox4x32_10((low, high, index & WORD, index * 0 + stream), (seed_low, seed_high))


def unit(high: Tensor, low: Tensor) -> Tensor:
    """53 bits of two words as a number in (0, 1)."""
    return ((((high >> 5) * 2**26 + (low >> 6)).double() + 0.5) / 2**53).clamp(max=1 - 2.0**-53)


def gumbel_noise(seeds: Tensor, positions: Tensor, vocab: int, start: int = 0) -> Tensor:
    """Standard Gumbel noise of `vocab` tokens from `start` on, float64 [..., vocab]; seeds and positions int64 [...].

    A block of 128 neighbours has its maximum M and the place of it first; the others are Gumbel variables below M.
    """
    first = start % BLOCK
    block = torch.arange(start // BLOCK, -(-(start + vocab) // BLOCK), device=seeds.device)
    lane = torch.arange(min(LANES, first + vocab), device=seeds.device)  # of fewer tokens no other word is looked at
    high, low, position, _ = _random_words(seeds, positions, block, MAXIMUM_STREAM)
    exp_minus_max = (-unit(high, low).log() / BLOCK)[..., None]  # exp(-M)
    index = (LANES * block[:, None] + lane).flatten()
    rest = torch.stack(_random_words(seeds, positions, index, REST_STREAM), -2)
    rest = rest.unflatten(-1, (len(block), len(lane))).transpose(-3, -2).flatten(-2)  # [..., blocks, BLOCK]
    below = exp_minus_max - ((rest.double() + 0.5) / 2**32).log()
    is_max = torch.arange(rest.shape[-1], device=seeds.device) == (position >> 25)[..., None]
    return -torch.where(is_max, exp_minus_max, below).log().flatten(-2)[..., first : first + vocab]


def noise_of(seeds: Tensor, positions: Tensor, tokens: Tensor) -> Tensor:
    """The same noise of single tokens, float64 [..., n]; seeds and positions int64 [...], tokens int64 [..., n]."""
    block, index = tokens // BLOCK, tokens % BLOCK
    high, low, largest, _ = _random_words(seeds, positions, block, MAXIMUM_STREAM)
    exp_minus_max = -unit(high, low).log() / BLOCK
    rest = torch.stack(_random_words(seeds, positions, LANES * block + index % LANES, REST_STREAM), -1)
    word = rest.gather(-1, (index // LANES)[..., None])[..., 0]
    below = exp_minus_max - ((word.double() + 0.5) / 2**32).log()
    return -torch.where(index == (largest >> 25), exp_minus_max, below).log()


def best_tokens(rows: Distributions, seeds: Tensor | None, positions: Tensor | None, count: int) -> Tensor:
    """The tokens of the `count` best scores, best first, the lowest id on a tie, then -1: int64 [batch, steps, count].

    seeds [batch] and positions [batch, steps], of each row's own token; None: every request is greedy. Greedy requests
    have no noise.
    """
    scores = rows.logprobs
    vocab = scores.shape[-1]
    if seeds is not None and positions is not None:
        noise = gumbel_noise(seeds[:, None].expand_as(positions), positions, vocab)
        scores = scores + torch.where(rows.greedy[:, None, None], 0.0, noise)
    first = torch.arange(vocab, device=scores.device) == rows.most_likely[..., None]  # before rounding made ties
    scores = torch.where(rows.greedy[:, None, None] & first & (scores > -torch.inf), torch.inf, scores)
    scores = torch.nn.functional.pad(scores, (0, max(0, count - vocab)), value=-torch.inf)
    values, tokens = scores.sort(dim=-1, descending=True, stable=True)
    return torch.where(values > -torch.inf, tokens, -1)[..., :count]
