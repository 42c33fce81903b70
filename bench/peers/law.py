"""Whether a peer that draws random numbers of its own emits tokens of the right distribution."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor

from bench.distribution import distribution
from bench.inputs import SINGLE_WEIGHT, ChainInputs
from specens_kernels import Sampling

REQUESTS = 2000
VOCAB = 64
LOGIT_SPREAD = 1.5
TOLERANCE = 0.08  # of the total variation; of REQUESTS tokens of the right distribution it is about 0.03


@cache
def fault(first_tokens: Callable[[ChainInputs], Tensor], sampling: Sampling) -> str | None:
    """What is wrong with the first token of a round, over rounds whose drafts come from the draft distribution.

    first_tokens: returns the first emitted token of each request, [batch].
    """
    inputs = _alike_requests(sampling)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        tokens = first_tokens(inputs)
    frequency = torch.bincount(tokens.long(), minlength=VOCAB)[:VOCAB] / REQUESTS
    target = distribution(inputs.member_logits[0][0, 0], sampling)
    distance = float((frequency - target).abs().sum() / 2)
    outside = int((frequency[target == 0] * REQUESTS).sum())
    if outside:
        return f"{outside} of {REQUESTS} tokens are ones that the filters drop"
    return f"total variation {distance:.2f} to the target distribution" if distance > TOLERANCE else None


def _alike_requests(sampling: Sampling) -> ChainInputs:
    """One draft a request; all have the same logits, the drafts are drawn."""
    generator = torch.Generator().manual_seed(0)
    target = torch.randn(1, 2, VOCAB, generator=generator) * LOGIT_SPREAD
    drafter = target[:, :1] + torch.randn(1, 1, VOCAB, generator=generator)
    tokens = torch.multinomial(distribution(drafter[0], sampling), REQUESTS, replacement=True, generator=generator)
    return ChainInputs(
        member_logits=[target.repeat(REQUESTS, 1, 1)],
        weights=SINGLE_WEIGHT,
        sampling=sampling,
        draft_logits=drafter.repeat(REQUESTS, 1, 1),
        draft_tokens=tokens.view(REQUESTS, 1),
        uniforms=torch.rand(REQUESTS, 2, generator=generator, dtype=torch.float64),
        num_accepted=torch.zeros(REQUESTS, dtype=torch.int64),
    )
