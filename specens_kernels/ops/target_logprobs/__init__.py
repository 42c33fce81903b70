"""target_logprobs: the dense log target distribution of an ensemble, for scoring, tests and unfused rules."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from specens_kernels.backend import implementations, run_operator
from specens_kernels.buffers import check_out
from specens_kernels.checks import check_integers, check_members, check_target
from specens_kernels.ensembles import Ensemble
from specens_kernels.ops.target_logprobs import reference
from specens_kernels.packing import Options, sampling_numbers, target_options
from specens_kernels.sampling import Processing, Sampling
from specens_kernels.values import fail
from specens_kernels.workspace import Workspace

IMPLEMENTATIONS = implementations("target_logprobs", reference.target_logprobs, fake=reference.empty_logprobs)


class ScoreCall(NamedTuple):
    """The arguments of `target_logprobs`."""

    member_logits: Tensor | Sequence[Tensor]
    ensemble: Ensemble | None
    sampling: Sampling
    processing: Processing | None
    allowed: Tensor | None
    draft_tokens: Tensor | None
    out: Tensor | None
    workspace: Workspace | None
    backend: str | None


def target_logprobs(
    member_logits: Tensor | Sequence[Tensor],
    *,
    ensemble: Ensemble | None = None,
    sampling: Sampling = Sampling(),
    processing: Processing | None = None,
    allowed: Tensor | None = None,
    draft_tokens: Tensor | None = None,
    out: Tensor | None = None,
    workspace: Workspace | None = None,
    backend: str | None = None,
) -> Tensor:
    """Log-probabilities of every token under the target distribution.

    member_logits: float32, bfloat16 or float16 [batch, vocab] or [batch, steps, vocab], a tensor or one a member.
    allowed: int32 [batch, words] or [batch, steps, words].
    draft_tokens: int64 or int32 [batch, steps - 1 or more]: the tokens before each row, for the penalties.
    out: a contiguous tensor like the result to write into, as in `verify_chain`.
    workspace: a Workspace to take scratch memory on a GPU from, as in `verify_chain`.
    ensemble, sampling, processing, backend, errors: as in `verify_chain`. At temperature 0 the distribution is one-hot.

    Returns float32 like the widest member's logits. A row without any token, or of a request whose parameters are out
    of range, is -inf throughout.
    """
    call = ScoreCall(member_logits, ensemble, sampling, processing, allowed, draft_tokens, out, workspace, backend)
    if out is not None:
        steps = call._replace(out=out[:, None]) if isinstance(out, Tensor) and out.dim() == 2 else call
        run_operator(IMPLEMENTATIONS, "target_logprobs", steps, _pack, lambda _: _check(call))
        return out
    logprobs = run_operator(IMPLEMENTATIONS, "target_logprobs", call, _pack, _check)
    first = member_logits if isinstance(member_logits, Tensor) else member_logits[0]
    return logprobs[:, 0] if first.dim() == 2 else logprobs


def _pack(call: ScoreCall, members: Sequence[Tensor]) -> tuple[tuple[Any, ...], Options]:
    allowed = call.allowed
    if members[0].dim() == 2:
        members = [logits[:, None] for logits in members]
        allowed = None if allowed is None else allowed[:, None]
    options = target_options(members, call.ensemble, sampling_numbers(call.sampling), call.processing, allowed)
    if call.draft_tokens is not None:
        options["draft_tokens"] = call.draft_tokens
    return (members,), options


def _check(call: ScoreCall) -> None:
    """Raise ValueError naming an argument that is wrong."""
    given = call.member_logits
    first = given[0] if isinstance(given, list | tuple) and given else given
    dims = first.dim() if isinstance(first, Tensor) else 3
    if dims not in (2, 3):
        fail("member_logits", "[batch, vocab] or [batch, steps, vocab]", f"{dims} dimensions")
    members = check_members(call.member_logits, dims)
    batch = members[0].shape[0]
    check_target(members, batch, call.ensemble, call.sampling, call.processing, call.allowed)
    if call.draft_tokens is not None:
        check_integers("draft_tokens", call.draft_tokens, (batch, None), members[0].device)
        steps = members[0].shape[1] if dims == 3 else 1
        if call.draft_tokens.shape[1] < steps - 1:
            fail("draft_tokens", f"a token before each of {steps} rows", list(call.draft_tokens.shape))
    shape = (*members[0].shape[:-1], max(logits.shape[-1] for logits in members))
    check_out(call.out, Tensor, {"": (shape, torch.float32)}, call._asdict(), members[0].device)
