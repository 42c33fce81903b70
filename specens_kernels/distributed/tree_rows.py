"""The rows of trees that lie on several ranks, and what their nodes were drawn from."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from specens_kernels.arguments import NO_LOGPROBS, Draft, RandomSource, Report, Rule, Target, Tree, TreeArguments
from specens_kernels.distributed import local
from specens_kernels.distributed.draw import Reports
from specens_kernels.distributed.reads import noise_at, read_rows
from specens_kernels.distributed.shard import Shard, shifted
from specens_kernels.distributed.slices import Places, Slices, by_parts, has_source, least_of
from specens_kernels.distributed.steps import Steps
from specens_kernels.distributed.target import (
    DraftRows,
    Looked,
    Rows,
    always_greedy,
    draft_steps,
    kernels_verify,
    scores_need_no_sums,
    without_source,
)
from specens_kernels.distributed.written import is_written, lone_draft
from specens_kernels.ops.target_logprobs.reference import parameters
from specens_kernels.ops.verify_tree.reference import LEAST_MASS_LEFT, at_parents, earlier_siblings
from specens_kernels.ops.verify_tree.shape import Shape, paths, tree_shape
from specens_kernels.results import Status
from specens_kernels.rules import RuleKind


class Call(NamedTuple):
    """What is known before anything is told."""

    shard: Shard
    kind: RuleKind
    rule: Rule
    report: Report
    random: RandomSource
    target: Target  # processing as the shard sees it
    draft: Draft
    tree: Tree
    shape: Shape
    tokens: Tensor  # int64 [batch, nodes], of the whole vocabulary
    here: Tensor  # likewise, as the shard sees them
    usable: Tensor  # bool [batch, nodes]

    @property
    def by_best(self) -> bool:
        """Whether a row has one token for all requests."""
        return self.kind == RuleKind.GUMBEL or always_greedy(self.target)

    @property
    def direct(self) -> bool:
        return self.by_best and scores_need_no_sums(self.target) and self.report.logprobs == NO_LOGPROBS

    @property
    def offers(self) -> bool:
        """Whether children are offered to a share of what the target leaves."""
        return not self.by_best and self.kind != RuleKind.TYPICAL


class Seen(NamedTuple):
    """What all ranks know of the rows, but for their local log-probabilities."""

    rows: Rows
    draft: DraftRows
    told: Rows  # whose log-probabilities are reported
    reports: Reports
    picked: Tensor  # int64 [batch, rows]
    of_picked: Tensor | None  # float64 [batch, rows], their reported log-probabilities
    at_target: Tensor  # float64 [batch, nodes], the probability of each node at its parent's row
    slices: Slices | None  # where kernels read the rows, whose local log-probabilities nobody knows

    def places(self, rows: Tensor, drawn: Tensor | None = None, offers: Tensor | None = None) -> Places:
        """Of rows int64 [batch, n]. drawn: bool [batch, nodes], False: one-hot; None: as the drafts say."""
        assert self.slices is not None
        masses = self.draft.masses if drawn is None else torch.where(drawn, self.draft.masses, -1.0)
        least = least_of(self.rows.parts.least, self.draft.least, self.slices.numbers)
        shares = torch.ones_like(rows, dtype=torch.float64)
        return Places(rows.contiguous(), shares, by_parts(self.rows.parts.whole, masses, -1.0), least, offers)


class NodeDrafts(NamedTuple):
    """What nodes were drawn from, given the siblings before them."""

    mass: Tensor  # float64 [batch, nodes], what is left of the distribution
    drawn: Tensor  # bool [batch, nodes], False: one-hot
    at: Tensor  # float64 [batch, node, token of a node], probabilities
    status: Tensor  # int64 [batch, nodes]


def prepare(shard: Shard, arguments: TreeArguments) -> Call:
    target = arguments.target._replace(processing=shifted(shard, arguments.target.processing))
    draft, tokens = arguments.draft, arguments.draft.tokens.long()
    shape = tree_shape(arguments.tree, draft)
    known = shard.vocab if draft.logits is None else max(shard.vocab, shard.draft_size)
    usable = shape.used & (tokens >= 0) & (tokens < known)
    kind, rule = RuleKind(arguments.rule.kind), arguments.rule
    report, source, own = arguments.report, arguments.random_numbers, shard.own(tokens)
    return Call(shard, kind, rule, report, source, target, draft, arguments.tree, shape, tokens, own, usable)


def slices_of(call: Call) -> Slices | None:
    """The rows as kernels read them, where these can; None: torch."""
    draft = call.draft if call.offers else without_source(call.draft)
    needed = "exceeding_of_shard" if call.kind == RuleKind.K_SEQ else "mass_of_drafts_of_shard"
    members = call.target.member_logits
    several, written = draft.drafters is not None and len(members) > 1, is_written(call.target, False)
    if call.direct and not written:
        return None
    if several and (written or not local.takes_a_drafter_a_node(members[0])):
        return None
    if not kernels_verify(call.shard, call.target, draft, call.kind, call.report, needed):
        return None
    parents = torch.where(call.shape.used, call.shape.parent_row - 1, -2)
    if written:
        draft = lone_draft(call.shard, call.target, draft, paths(call.here, call.shape), call.tokens.shape[1] + 1)
    return Slices(call.shard, call.target, draft, call.here, parents)


def read_steps(call: Call) -> Steps[Seen]:
    shard, shape, tokens = call.shard, call.shape, call.tokens
    batch, nodes = tokens.shape
    looked, drafts, slices = Looked(call.here, shape.parent_row), None, slices_of(call)
    if call.offers and has_source(call.draft) and not call.direct:
        node = torch.arange(nodes, device=tokens.device)
        pairs = Looked(call.here.repeat(1, nodes), node.repeat_interleave(nodes).expand(batch, -1))
        given = call.target, call.draft, paths(call.here, shape)
        if slices is None:
            given = at_parents(call.target, call.draft, call.here, shape)
        greedy = parameters(call.target.sampling, tokens).greedy
        drafts = draft_steps(shard, *given[:2], greedy, given[2], pairs, slices)
    before, noise = paths(call.here, shape), noise_at(call.kind, call.random, shape.depth)
    how: dict[str, Any] = {"direct": call.direct, "drafts": drafts, "slices": slices}
    read = yield from read_rows(shard, call.target, tokens, before, looked, noise, call.kind, call.report, **how)
    rows, above_row = read.rows, shape.parent_row
    at_target = ((tokens == read.picked.gather(1, above_row)) & rows.alive.gather(1, above_row)).double()
    if not call.by_best:
        at_target = torch.where(rows.greedy[:, None], at_target, rows.looked_up.exp())
    return Seen(*read, at_target, rows.slices)


def nothing_rejected(call: Call) -> Tensor:
    """`Places.offers` before any child is."""
    return torch.full((*call.tokens.shape, 2), -1.0, dtype=torch.float64, device=call.tokens.device)


def node_drafts(call: Call, seen: Seen, mass: Tensor) -> NodeDrafts:
    """What each node was drawn from. mass: what is left of it, where siblings were drawn without replacement."""
    tokens, draft = call.tokens, seen.draft
    batch, nodes = tokens.shape
    same = tokens[:, :, None] == tokens[:, None]  # [batch, node, token of a node]
    if not has_source(call.draft):
        return NodeDrafts(mass, draft.drawn, same.double(), draft.status)
    at, drawn, status = draft.looked_up.exp().view(batch, nodes, nodes), draft.drawn, draft.status
    if call.tree.without_replacement:
        taken = (earlier_siblings(call.shape).double() @ same.double()) > 0
        drawn = drawn & (mass > LEAST_MASS_LEFT)
        status = status | (draft.drawn & ~drawn) * Status.INVALID_DRAFT_DISTRIBUTION
        at = torch.where(taken, 0.0, at) / torch.where(drawn, mass, 1.0)[..., None]
    at = torch.where(drawn[..., None], at, same.double())
    return NodeDrafts(mass, drawn, at, status)
