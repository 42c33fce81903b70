"""What a call of `verify_tree` must be like; the names of what is wrong."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from specens_kernels.buffers import check_out, reported
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
from specens_kernels.ops.tree_mask.reference import MAX_NODES
from specens_kernels.ops.verify_chain.checks import VERDICT, verdict_shapes
from specens_kernels.results import Verdict
from specens_kernels.rules import TREE, Typical
from specens_kernels.sampling import Processing, Sampling
from specens_kernels.values import fail
from specens_kernels.workspace import Workspace

if TYPE_CHECKING:
    from specens_kernels._host import TokenTree

SIBLINGS = {"with_replacement": 0, "without_replacement": 1}


class TreeCall(NamedTuple):
    """The arguments of `verify_tree`."""

    member_logits: Tensor | Sequence[Tensor]
    draft_tokens: Tensor
    parents: Tensor | TokenTree | Sequence[TokenTree]
    ensemble: Ensemble | None
    sampling: Sampling
    drafter: int | Tensor | None
    draft_logits: Tensor | None
    draft_sampling: Sampling | None
    siblings: str | None
    rule: str | Typical
    num_nodes: Tensor | None
    max_levels: int | None
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


def check(call: TreeCall) -> None:
    """Raise ValueError naming an argument that is wrong."""
    members = check_members(call.member_logits, 3)
    device, (batch, rows) = members[0].device, members[0].shape[:2]
    check_integers("draft_tokens", call.draft_tokens, (batch, None), device)
    nodes = call.draft_tokens.shape[1]
    if nodes > MAX_NODES:
        fail("draft_tokens", f"at most {MAX_NODES} nodes", nodes)
    if rows != nodes + 1:
        fail("member_logits", f"a row more than {nodes} nodes", list(members[0].shape))
    check_target(members, batch, call.ensemble, call.sampling, call.processing, call.allowed)
    if call.draft_sampling is not None:
        check_sampling("draft_sampling", call.draft_sampling, batch, device)
    _check_draft_source(call, members)
    if call.num_nodes is not None:
        check_integers("num_nodes", call.num_nodes, (batch,), device)
    if isinstance(call.parents, Tensor):
        check_integers("parents", call.parents, tuple(call.draft_tokens.shape), device)
    levels = call.max_levels
    if levels is not None:
        check_count("max_levels", levels, MAX_NODES)
    rule = check_rule(call, TREE, nodes)
    if not isinstance(call.process_drafts, bool):
        fail("process_drafts", "True or False", repr(call.process_drafts))
    needed = rule.needs_random(call.sampling.greedy)
    check_random(call.uniforms, call.seeds, call.positions, (batch, rows), device, needed)
    check_report(call.logprobs, call.top_logprobs)
    if call.out is not None:
        width = 1 + (nodes if levels is None else levels)
        if levels is None and not isinstance(call.parents, Tensor):
            trees = call.parents if isinstance(call.parents, Sequence) else [call.parents]
            width = 1 + max((tree.num_levels for tree in trees), default=0)
        shapes = verdict_shapes(batch, width, call.top_logprobs, reported(call.logprobs, call.top_logprobs))
        check_out(call.out, Verdict, {**shapes, "path": ((batch, width - 1), torch.int64)}, call._asdict(), device)


def out_names(call: TreeCall) -> tuple[str, ...]:
    """The fields of a Verdict that a call fills, in the order of an operator's results."""
    return (*VERDICT, "path", *reported(call.logprobs, call.top_logprobs))


def _check_draft_source(call: TreeCall, members: list[Tensor]) -> None:
    check_drafter(call.drafter, call.draft_tokens, members)
    if call.draft_logits is not None:
        if call.drafter is not None:
            fail("drafter", "either drafter or draft_logits", "both")
        check_logits("draft_logits", call.draft_logits, members[0].shape[:2], members[0].device)
    known = " or ".join(map(repr, SIBLINGS))
    if call.drafter is None and call.draft_logits is None:
        if call.siblings is not None:
            fail("siblings", "None, as without drafter and draft_logits no draft is drawn", repr(call.siblings))
    elif not isinstance(call.siblings, str) or call.siblings not in SIBLINGS:
        fail("siblings", f"{known}, the way in which drafts were drawn", repr(call.siblings))
    elif call.rule == "k_seq" and SIBLINGS[call.siblings]:
        fail("siblings", "'with_replacement' under the rule 'k_seq'", repr(call.siblings))
