"""The uniforms of requests, given or made from seeds and positions."""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from specens_kernels.parts.philox import uniform

STREAM_ACCEPT = tl.constexpr(0)


class RandomView(NamedTuple):
    """Where random numbers come from; all None: every request is greedy."""

    uniforms: Tensor | None  # float64 [batch, draft_len + 1]
    seeds: Tensor | None  # int64 [batch]
    positions: Tensor | None  # int64 [batch]


@triton.jit
def uniforms_at(random, draft, request, index, step, stream, used):
    """float64 like step, an int64 block; index is the uniform's place among the given ones."""
    if random.uniforms is not None:
        position = tl.zeros_like(step) + request * (draft.draft_len + 1) + index
        return tl.load(random.uniforms + position, mask=used, other=0.0)
    elif random.seeds is not None:
        seeds = tl.zeros_like(step) + tl.load(random.seeds + request)
        positions = tl.zeros_like(step) + tl.load(random.positions + request)
        return uniform(seeds, positions, step, tl.zeros_like(step) + stream)
    else:
        return tl.zeros(step.shape, tl.float64)
