"""What a call of `verify_chain` must be like; the names of what is wrong."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from specens_kernels.buffers import Shapes, check_out, report_shapes, reported
from specens_kernels.checks import (
    check_count,
    check_drafter,
    check_integers,
    check_logits,
    check_members,
    check_random,
    check_report,
    check_rule,
    check_sampling,
    check_target,
)
from specens_kernels.ensembles import Ensemble
from specens_kernels.results import Verdict
from specens_kernels.rules import CHAIN, MOST_DRAFTS, DecisionTree, Replacement, Synthetic, Threshold, Typical
from specens_kernels.sampling import Processing, Sampling
from specens_kernels.values import fail, is_integer
from specens_kernels.workspace import Workspace

VERDICT = ("tokens", "num_accepted", "num_tokens", "next_token", "status")
ChainRule = str | Typical | Threshold | Synthetic | Replacement | DecisionTree


class ChainCall(NamedTuple):
    """The arguments of `verify_chain`."""

    member_logits: Tensor | Sequence[Tensor]
    draft_tokens: Tensor
    ensemble: Ensemble | None
    sampling: Sampling
    drafter: int | Tensor | None
    draft_logits: Tensor | None
    draft_sampling: Sampling | None
    rule: ChainRule
    draft_lens: Tensor | None
    max_draft_len: int | None
    row_offsets: Tensor | None
    draft_slots: Tensor | None
    processing: Processing | None
    process_drafts: bool
    allowed: Tensor | None
    seeds: Tensor | None
    positions: Tensor | None
    uniforms: Tensor | None
    logprobs: bool | str
    top_logprobs: int
    out: Verdict | None
    workspace: Workspace | None
    backend: str | None


def check(call: ChainCall) -> None:
    """Raise ValueError naming an argument that is wrong."""
    packed_rows = call.row_offsets is not None
    dims, why = (2, " (packed rows), as there are row_offsets") if packed_rows else (3, ", as there are no row_offsets")
    members = check_members(call.member_logits, dims, why)
    device, batch = members[0].device, members[0].shape[0]
    if call.row_offsets is not None:
        check_integers("row_offsets", call.row_offsets, (None,), device)
        batch = call.row_offsets.shape[0] - 1
        if batch < 0:
            fail("row_offsets", "batch + 1 offsets", "none")
    check_target(members, batch, call.ensemble, call.sampling, call.processing, call.allowed)
    draft_len = _check_draft_tokens(call, members[0], batch)
    _check_draft_source(call, members, batch, draft_len)
    if call.draft_sampling is not None:
        check_sampling("draft_sampling", call.draft_sampling, batch, device)
    rule = check_rule(call, CHAIN, draft_len)
    if not isinstance(call.process_drafts, bool):
        fail("process_drafts", "True or False", repr(call.process_drafts))
    needed = rule.needs_random(call.sampling.greedy)
    check_random(call.uniforms, call.seeds, call.positions, (batch, draft_len + 1), device, needed)
    check_report(call.logprobs, call.top_logprobs)
    names = reported(call.logprobs, call.top_logprobs)
    shapes = verdict_shapes(batch, draft_len + 1, call.top_logprobs, names)
    check_out(call.out, Verdict, shapes, call._asdict(), device)


def _check_draft_tokens(call: ChainCall, logits: Tensor, batch: int) -> int:
    """The most drafts of a request, by the shape of dense tokens or as told for packed ones."""
    tokens, given = call.draft_tokens, call.max_draft_len
    packed = call.row_offsets is not None and isinstance(tokens, Tensor) and tokens.dim() == 1
    if not packed:
        check_integers("draft_tokens", tokens, (batch, None), logits.device)
        draft_len = tokens.shape[1]
        if draft_len > MOST_DRAFTS:
            fail("draft_tokens", f"at most {MOST_DRAFTS} drafts a request", draft_len)
        if given is not None and (not is_integer(given) or given != draft_len):
            fail("max_draft_len", f"None or {draft_len}, as draft_tokens are not packed", given)
        if call.row_offsets is None and logits.shape[1] not in (draft_len, draft_len + 1):
            fail("member_logits", f"draft_len = {draft_len} or draft_len + 1 steps", list(logits.shape))
        if call.draft_lens is not None:
            check_integers("draft_lens", call.draft_lens, (batch,), logits.device)
        return draft_len
    rows = logits.shape[0]
    check_integers("draft_tokens", tokens, (None,), logits.device)
    if tokens.shape[0] not in (rows, rows - batch):
        fail("draft_tokens", f"{rows} drafts, or {rows - batch} with a bonus row each", list(tokens.shape))
    if given is None:
        fail("max_draft_len", "the most drafts of a request, as draft_tokens are packed", None)
    check_count("max_draft_len", given, MOST_DRAFTS)
    if call.draft_lens is not None:
        fail("draft_lens", "None, as row_offsets tell the lengths of packed draft_tokens", "a tensor")
    return given


def _check_draft_source(call: ChainCall, members: list[Tensor], batch: int, draft_len: int) -> None:
    device, shape = members[0].device, call.draft_tokens.shape
    check_drafter(call.drafter, call.draft_tokens, members)
    if call.draft_logits is None:
        if call.draft_slots is not None:
            fail("draft_slots", "None, as there are no draft_logits", "a tensor")
        return
    if call.drafter is not None:
        fail("drafter", "either drafter or draft_logits", "both")
    if call.draft_slots is None:
        check_logits("draft_logits", call.draft_logits, shape, device)
        return
    check_logits("draft_logits", call.draft_logits, (None, None), device)
    if call.draft_logits.shape[1] < draft_len:
        fail("draft_logits", f"[slots, {draft_len} or more, vocab]", list(call.draft_logits.shape))
    check_integers("draft_slots", call.draft_slots, (batch,), device)


def out_names(call: ChainCall) -> tuple[str, ...]:
    """The fields of a Verdict that a call fills, in the order of an operator's results."""
    return (*VERDICT, *reported(call.logprobs, call.top_logprobs))


def verdict_shapes(batch: int, width: int, top: int, names: Sequence[str]) -> Shapes:
    """Of the results of a verification; width: tokens of a request. names: what is reported."""
    shapes: dict[str, tuple[tuple[int, ...], torch.dtype]] = {
        name: ((batch,), torch.int32 if name == "status" else torch.int64) for name in VERDICT
    }
    shapes["tokens"] = ((batch, width), torch.int64)
    return shapes | report_shapes((batch, width), (batch, width, top), names)
