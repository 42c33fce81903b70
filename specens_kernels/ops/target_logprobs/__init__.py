"""target_logprobs: the dense log target distribution of an ensemble, for scoring, tests and unfused rules."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from specens_kernels.arguments import SCHEMA, Drafts, pack, target_arguments
from specens_kernels.backend import implementations, select
from specens_kernels.checks import check_tensor, fail, member_list, refuse_for_triton
from specens_kernels.ops.target_logprobs import reference
from specens_kernels.types import INTEGER_DTYPES, Ensemble, Processing, Sampling

IMPLEMENTATIONS = implementations("target_logprobs", f"({SCHEMA}) -> Tensor", reference.target_logprobs)


def target_logprobs(
    member_logits: Tensor | Sequence[Tensor],
    *,
    ensemble: Ensemble | None = None,
    sampling: Sampling = Sampling(),
    processing: Processing | None = None,
    allowed: Tensor | None = None,
    draft_tokens: Tensor | None = None,
    backend: str | None = None,
) -> Tensor:
    """Log-probabilities of every token under the target distribution.

    member_logits: float32, bfloat16 or float16 [batch, vocab] or [batch, steps, vocab], a tensor or one a member.
    allowed: int32 [batch, words] or [batch, steps, words].
    draft_tokens: int64 or int32 [batch, steps - 1 or more]: the tokens before each row, for the penalties.
    ensemble, sampling, processing, backend, errors: as in `verify_chain`. At temperature 0 the distribution is one-hot.

    Returns float32 like the widest member's logits. A row without any token, or of a request whose parameters are out
    of range, is -inf throughout.
    """
    first = member_logits if isinstance(member_logits, Tensor) else next(iter(member_logits), None)
    dims = first.dim() if isinstance(first, Tensor) else 3
    if dims not in (2, 3):
        fail("member_logits", "[batch, vocab] or [batch, steps, vocab]", f"{dims} dimensions")
    members = member_list(member_logits, dims)
    if dims == 2:
        members = [logits[:, None] for logits in members]
        allowed = None if allowed is None else allowed[:, None]
    if draft_tokens is not None:
        check_tensor("draft_tokens", draft_tokens, (len(members[0]), None), INTEGER_DTYPES, members[0].device)
        if draft_tokens.shape[1] < members[0].shape[1] - 1:
            fail("draft_tokens", f"a token before each of {members[0].shape[1]} rows", list(draft_tokens.shape))
    target = target_arguments(members, ensemble, sampling, processing, allowed)
    name, run = select(IMPLEMENTATIONS, backend, members[0].device, "target_logprobs")
    if name == "triton":
        refuse_for_triton(target)
    logprobs = run(*pack(target, Drafts(draft_tokens)))
    return logprobs[:, 0] if dims == 2 else logprobs
