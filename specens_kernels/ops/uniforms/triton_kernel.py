"""The uniforms on a GPU."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import triton
import triton.language as tl
from torch import Tensor

from specens_kernels.parts.launches import Launch, run, wait_for_launch_before
from specens_kernels.parts.philox import uniform

BLOCK_BATCH, WARPS = 256, 4  # two requests a thread


@triton.jit(do_not_specialize=["uniform_stream", "batch"])
def _uniforms_kernel(
    uniforms_ptr,  # float64 [batch], written
    seeds_ptr,  # integers [batch]
    positions_ptr,  # integers [batch]
    steps_ptr,  # integers [batch]
    seeds_stride,
    positions_stride,
    steps_stride,
    uniform_stream,  # Triton takes no argument of the name stream
    batch,
    BLOCK_BATCH: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    wait_for_launch_before(DEPENDENT)
    request = tl.program_id(0).to(tl.int64) * BLOCK_BATCH + tl.arange(0, BLOCK_BATCH)
    used = request < batch
    seed = tl.load(seeds_ptr + request * seeds_stride, mask=used, other=0).to(tl.int64)
    position = tl.load(positions_ptr + request * positions_stride, mask=used, other=0).to(tl.int64)
    step = tl.load(steps_ptr + request * steps_stride, mask=used, other=0).to(tl.int64)
    stream_word = tl.zeros_like(step) + uniform_stream
    tl.store(uniforms_ptr + request, uniform(seed, position, step, stream_word), mask=used)


def launches(uniforms: Tensor, seeds: Tensor, positions: Tensor, steps: Tensor, stream: int) -> Iterator[Launch]:
    """One launch, a program for each BLOCK_BATCH requests."""
    arguments = {
        "uniforms_ptr": uniforms,
        "seeds_ptr": seeds,
        "positions_ptr": positions,
        "steps_ptr": steps,
        "seeds_stride": seeds.stride(0),
        "positions_stride": positions.stride(0),
        "steps_stride": steps.stride(0),
        "uniform_stream": stream,
        "batch": uniforms.shape[0],
        "BLOCK_BATCH": BLOCK_BATCH,
    }
    yield Launch(_uniforms_kernel, (triton.cdiv(uniforms.shape[0], BLOCK_BATCH),), arguments, WARPS)


def launch(seeds: Tensor, positions: Tensor, steps: Tensor, stream: int, *, out: list[Tensor] | None = None) -> Tensor:
    """Uniforms, float64 [batch]. out: where to."""
    uniforms = torch.empty(seeds.shape[0], dtype=torch.float64, device=seeds.device) if out is None else out[0]
    run(launches(uniforms, seeds, positions, steps, stream), uniforms)
    return uniforms
