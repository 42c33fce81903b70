"""The coins on a GPU."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from specens_kernels.parts.philox import coin

BLOCK_BATCH = 256


@triton.jit
def _uniforms_kernel(
    coins_ptr,  # float64 [batch], written
    seeds_ptr,  # int64 [batch]
    positions_ptr,  # int64 [batch]
    steps_ptr,  # int64 [batch]
    seeds_stride,
    positions_stride,
    steps_stride,
    coin_stream,  # Triton takes no argument of the name stream
    batch,
    BLOCK_BATCH: tl.constexpr,
):
    request = tl.program_id(0).to(tl.int64) * BLOCK_BATCH + tl.arange(0, BLOCK_BATCH)
    used = request < batch
    seed = tl.load(seeds_ptr + request * seeds_stride, mask=used, other=0)
    position = tl.load(positions_ptr + request * positions_stride, mask=used, other=0)
    step = tl.load(steps_ptr + request * steps_stride, mask=used, other=0)
    stream_word = tl.zeros_like(step) + coin_stream
    tl.store(coins_ptr + request, coin(seed, position, step, stream_word), mask=used)


def launch(seeds: Tensor, positions: Tensor, steps: Tensor, stream: int) -> Tensor:
    """Coins, float64 [batch]."""
    batch = seeds.shape[0]
    coins = torch.empty(batch, dtype=torch.float64, device=seeds.device)
    if batch == 0:
        return coins
    with torch.cuda.device_of(seeds):
        _uniforms_kernel[(triton.cdiv(batch, BLOCK_BATCH),)](
            coins_ptr=coins,
            seeds_ptr=seeds,
            positions_ptr=positions,
            steps_ptr=steps,
            seeds_stride=seeds.stride(0),
            positions_stride=positions.stride(0),
            steps_stride=steps.stride(0),
            coin_stream=stream,
            batch=batch,
            BLOCK_BATCH=BLOCK_BATCH,
        )
    return coins


def aot_variants() -> list[tuple[Any, dict[str, str], dict[str, Any]]]:
    """(kernel, signature, constexprs) of what is launched, for compilation without a GPU."""
    signature = {"coins_ptr": "*fp64", "seeds_ptr": "*i64", "positions_ptr": "*i64", "steps_ptr": "*i64"}
    signature |= {"seeds_stride": "i64", "positions_stride": "i64", "steps_stride": "i64"}
    signature |= {"coin_stream": "i64", "batch": "i64", "BLOCK_BATCH": "constexpr"}
    return [(_uniforms_kernel, signature, {"BLOCK_BATCH": BLOCK_BATCH})]
