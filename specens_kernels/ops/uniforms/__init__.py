"""Reproducible random numbers for speculative decoding."""

from __future__ import annotations

import torch
from torch import Tensor

from specens_kernels.backend import implementations, select_for
from specens_kernels.buffers import check_out
from specens_kernels.checks import check_integers
from specens_kernels.ops.uniforms import reference
from specens_kernels.values import fail, is_integer
from specens_kernels.workspace import Workspace

IMPLEMENTATIONS = implementations("uniforms", reference.uniforms, cuda=True)
WORD_LIMIT = 2**32


def uniforms(
    seeds: Tensor,
    positions: Tensor,
    *,
    step: int | Tensor = 0,
    stream: int = 0,
    out: Tensor | None = None,
    workspace: Workspace | None = None,
    backend: str | None = None,
) -> Tensor:
    """Return the random number of each request for one question: float64 [batch], in [0, 1).

    The number is ((w0 >> 5) * 2^26 + (w1 >> 6)) / 2^53, where w0 and w1 are the first two words of Philox4x32-10 with
    key (seed low, seed high) and counter (position low, position high, step, stream). All backends give the same bits.

    seeds: int64 or int32 [batch], any value (two's complement).
    positions: int64 or int32 [batch], the absolute position of the round's first draft token.
    step: the offset in the round: an int in [0, 2^32), or int64 or int32 [batch] (taken modulo 2^32).
    stream: the question asked: 0 accept, 1 next token, 2 draft; an int in [0, 2^32).
    out: a contiguous float64 tensor [batch] to write into; with a tensor for step, nothing is allocated then.
    workspace: a Workspace to take scratch memory on a GPU from, as in `verify_chain`.
    backend: None for the fastest one on the device, or "reference", "cpp" or "triton".

    Raises ValueError for an argument of another type, shape, dtype, device or range, RuntimeError for a backend that
    cannot run here.
    Source: Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011.
    """
    if not isinstance(seeds, Tensor):
        fail("seeds", "a tensor", type(seeds).__name__)
    check_integers("seeds", seeds, (None,), seeds.device)
    shape = (seeds.shape[0],)
    check_integers("positions", positions, shape, seeds.device)
    if isinstance(step, Tensor):
        check_integers("step", step, shape, seeds.device)
    else:
        _check_word("step", step)
        step = torch.full_like(seeds, step, dtype=torch.int64)
    _check_word("stream", stream)
    given = {"seeds": seeds, "positions": positions, "step": step}
    check_out(out, Tensor, {"": (shape, torch.float64)}, given, seeds.device)
    _, function = select_for(IMPLEMENTATIONS, backend, seeds, "uniforms", out, workspace)
    if out is None:
        return function(seeds, positions, step, stream)
    function([out], seeds, positions, step, stream)
    return out


def _check_word(argument: str, value: object) -> None:
    if not is_integer(value) or not 0 <= value < WORD_LIMIT:  # type: ignore[operator]
        fail(argument, f"an integer in [0, {WORD_LIMIT})", repr(value))
