"""sample: one token a request from the target distribution of an ensemble."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from specens_kernels.arguments import SCHEMA, Stream, coin_arguments, pack, report_arguments, target_arguments
from specens_kernels.backend import implementations, select
from specens_kernels.checks import member_list, refuse_for_triton
from specens_kernels.ops.sample import reference
from specens_kernels.types import Draw, Ensemble, Processing, Sampling

IMPLEMENTATIONS = implementations("sample", f"({SCHEMA}) -> Tensor[]", reference.sample)


def sample(
    member_logits: Tensor | Sequence[Tensor],
    *,
    ensemble: Ensemble | None = None,
    sampling: Sampling = Sampling(),
    processing: Processing | None = None,
    allowed: Tensor | None = None,
    seeds: Tensor | None = None,
    positions: Tensor | None = None,
    step: int = 0,
    stream: int = 2,
    uniforms: Tensor | None = None,
    logprobs: bool | str = False,
    top_logprobs: int = 0,
    backend: str | None = None,
) -> Draw:
    """Draw one token a request by inverse CDF from one coin.

    member_logits: float32, bfloat16 or float16 [batch, vocab], a tensor or one a member (vocabularies may differ).
    allowed: int32 [batch, words], as in `verify_chain`.
    ensemble, sampling, processing, seeds, positions, logprobs, top_logprobs, backend, errors: as in `verify_chain`.
    step, stream: which random number of (seed, position) is used; a draft token takes the absolute position of its
        round's first draft, its offset in the round as step, and stream 2.
    uniforms: float64 or float32 [batch] in [0, 1), instead of seeds and positions.
    """
    members = member_list(member_logits, dims=2)
    batch, device = members[0].shape[0], members[0].device
    target = target_arguments(members, ensemble, sampling, processing, allowed)
    coins = coin_arguments(uniforms, seeds, positions, (batch,), device, not target.sampling.greedy)
    report = report_arguments(logprobs, top_logprobs)
    name, run = select(IMPLEMENTATIONS, backend, device, "sample")
    if name == "triton":
        refuse_for_triton(target, report=report)
    tokens, status, *reported = run(*pack(target, coins, Stream(step, stream), report))
    token_logprobs, top_tokens, top = (*reported, None, None, None)[:3]
    return Draw(tokens, token_logprobs, status, top_tokens, top)
