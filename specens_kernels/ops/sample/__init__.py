"""sample: one token a request from the target distribution of an ensemble."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from specens_kernels.backend import implementations, select
from specens_kernels.checks import (
    COINS_SCHEMA,
    TARGET_SCHEMA,
    coin_arguments,
    flat,
    member_list,
    target_arguments,
)
from specens_kernels.ops.sample import reference
from specens_kernels.types import Draw, Ensemble, Sampling

SCHEMA = (
    f"({TARGET_SCHEMA}, {COINS_SCHEMA}, int step, int stream, bool logprobs)"
    " -> (Tensor tokens, Tensor logprobs, Tensor status)"
)
IMPLEMENTATIONS = implementations("sample", SCHEMA, reference.sample)


def sample(
    member_logits: Tensor | Sequence[Tensor],
    *,
    ensemble: Ensemble | None = None,
    sampling: Sampling = Sampling(),
    allowed: Tensor | None = None,
    seeds: Tensor | None = None,
    positions: Tensor | None = None,
    step: int = 0,
    stream: int = 2,
    uniforms: Tensor | None = None,
    logprobs: bool = False,
    backend: str | None = None,
) -> Draw:
    """Draw one token a request by inverse CDF from one coin.

    member_logits: float32, bfloat16 or float16 [batch, vocab], a tensor or one a member (vocabularies may differ).
    ensemble, sampling, seeds, positions, logprobs, backend, errors: as in `verify_chain`.
    step, stream: which random number of (seed, position) is used; a draft token takes the absolute position of its
        round's first draft, its offset in the round as step, and stream 2.
    uniforms: float64 or float32 [batch] in [0, 1), instead of seeds and positions.
    """
    members = member_list(member_logits, dims=2)
    if allowed is not None:
        raise NotImplementedError("allowed: no backend serves this argument yet")
    target = target_arguments(members, ensemble, sampling)
    coins = coin_arguments(uniforms, seeds, positions, (members[0].shape[0],), target)
    _, run = select(IMPLEMENTATIONS, backend, members[0].device, "sample")
    tokens, token_logprobs, status = run(*flat(target), *coins, step, stream, logprobs)
    return Draw(tokens, token_logprobs if logprobs else None, status)
