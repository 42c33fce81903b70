"""target_logprobs: the dense log target distribution of an ensemble, for scoring, tests and unfused rules."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from specens_kernels.backend import implementations, select
from specens_kernels.checks import TARGET_SCHEMA, fail, flat, member_list, target_arguments
from specens_kernels.ops.target_logprobs import reference
from specens_kernels.types import Ensemble, Sampling

SCHEMA = f"({TARGET_SCHEMA}) -> Tensor"
IMPLEMENTATIONS = implementations("target_logprobs", SCHEMA, reference.target_logprobs)


def target_logprobs(
    member_logits: Tensor | Sequence[Tensor],
    *,
    ensemble: Ensemble | None = None,
    sampling: Sampling = Sampling(),
    backend: str | None = None,
) -> Tensor:
    """Log-probabilities of every token under the target distribution.

    member_logits: float32, bfloat16 or float16 [batch, vocab] or [batch, steps, vocab], a tensor or one a member.
    ensemble, sampling, backend, errors: as in `verify_chain`. At temperature 0 the distribution is one-hot.

    Returns float32 like the widest member's logits. A row without any token, or of a request whose parameters are out
    of range, is -inf throughout.
    """
    first = member_logits if isinstance(member_logits, Tensor) else next(iter(member_logits), None)
    dims = first.dim() if isinstance(first, Tensor) else 3
    if dims not in (2, 3):
        fail("member_logits", "[batch, vocab] or [batch, steps, vocab]", f"{dims} dimensions")
    members = member_list(member_logits, dims)
    rows = [logits[:, None] for logits in members] if dims == 2 else members
    target = target_arguments(rows, ensemble, sampling)
    _, run = select(IMPLEMENTATIONS, backend, members[0].device, "target_logprobs")
    logprobs = run(*flat(target))
    return logprobs[:, 0] if dims == 2 else logprobs
