"""Trees whose rows lie on several ranks: `specens_kernels.ops.verify_tree.reference`, with what it sums told."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, NamedTuple

import torch
from torch import Tensor

from specens_kernels.arguments import (
    NO_LOGPROBS,
    Draft,
    RandomSource,
    Report,
    Rule,
    Target,
    Tree,
    TreeArguments,
)
from specens_kernels.distributed import local
from specens_kernels.distributed.draw import (
    Choice,
    Drawn,
    Masses,
    Reports,
    draw_steps,
    mass_steps,
    picked_steps,
    reported,
    top_steps,
)
from specens_kernels.distributed.reads import noise_at, read_rows
from specens_kernels.distributed.shard import Shard, shifted
from specens_kernels.distributed.slices import (
    Places,
    SlicedChoice,
    Slices,
    by_parts,
    entropies,
    least_of,
    masses_of_drafts,
    residuals,
)
from specens_kernels.distributed.steps import Steps, together
from specens_kernels.distributed.target import (
    DraftRows,
    Looked,
    Rows,
    always_greedy,
    draft_steps,
    has_source,
    invalid_draft,
    kernels_verify,
    masses_here,
    probabilities,
    scores_need_no_sums,
    without_source,
)
from specens_kernels.ops.target_logprobs.reference import one_hot, parameters
from specens_kernels.ops.tree_mask.reference import descent
from specens_kernels.ops.verify_chain.reference import as_verdict, bad_uniforms, chain_uniforms
from specens_kernels.ops.verify_chain.rules import entropy, typical_limit
from specens_kernels.ops.verify_tree import parents_of_trees
from specens_kernels.ops.verify_tree.reference import (
    LEAST_MASS_LEFT,
    at_parents,
    at_path,
    earlier_siblings,
    used_status,
)
from specens_kernels.ops.verify_tree.rules import Acceptance, Drafts, first_kept, first_passing, longest
from specens_kernels.ops.verify_tree.shape import Shape, path_to, paths, tree_shape
from specens_kernels.results import Status
from specens_kernels.rules import EMPTY_RESIDUAL_MASS, RuleKind


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


class Accepted(NamedTuple):
    acceptance: Acceptance
    draft_status: Tensor  # int64 [batch, nodes]
    masses: Masses | None  # of what is left of all rows, where ranks have told them
    places: Places | None  # of the last row, where kernels read what is left of it


Rounds = list[list[int]]  # the nodes that are offered in each turn


def tree_steps(shard: Shard, arguments: TreeArguments, rounds: Rounds | None) -> Steps[list[Tensor]]:
    """What `verify_tree` of the whole vocabulary gives, on every rank.

    rounds: None: each node has a turn of its own.
    """
    call = prepare(shard, arguments)
    seen = yield from read_steps(call)
    accepted = yield from accept_steps(call, seen, rounds)
    return (yield from finish_steps(call, seen, accepted))


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
    follows_paths = call.kind == RuleKind.GUMBEL and call.target.processing.active
    needed = "mass_of_drafts_of_shard"
    members = call.target.member_logits
    several = draft.drafters is not None and len(members) > 1
    if call.direct or follows_paths or (several and not local.takes_a_drafter_a_node(members[0])):
        return None
    if not kernels_verify(call.shard, call.target, draft, call.kind, call.report, needed):
        return None
    parents = torch.where(call.shape.used, call.shape.parent_row - 1, -2)
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
    return Seen(*read, at_target, slices)


def accept_steps(call: Call, seen: Seen, rounds: Rounds | None) -> Steps[Accepted]:
    """The last accepted row of each request, and the status of the nodes."""
    rows, shape = seen.rows, call.shape
    target = probabilities(call.shard, rows)  # of no meaning where kernels read the rows
    no_status = torch.zeros_like(call.tokens)
    empty = torch.zeros_like(call.usable)
    most_likely = longest(call.usable & (seen.at_target > 0), shape)
    if call.by_best:
        reads = call.kind != RuleKind.GUMBEL and call.kind != RuleKind.TYPICAL
        return Accepted(Acceptance(most_likely, target, empty, reads), no_status, None, None)
    if call.kind == RuleKind.TYPICAL:
        index = torch.arange(rows.alive.shape[1], device=target.device).expand_as(rows.alive)
        of_rows = entropy(target) if seen.slices is None else entropies(seen.slices, seen.places(index))
        own, none = target_masses(call, seen), target.new_zeros(len(target), 0)
        masses, of_all = yield from mass_steps(call.shard, none, own, of_rows)
        passes = call.usable & (seen.at_target > typical_limit(of_all, call.rule).gather(1, shape.parent_row))
        last = torch.where(rows.greedy, most_likely, longest(passes, shape))
        places = None
        if seen.slices is not None:
            places = seen.places(last[:, None], None, nothing_rejected(call))
        return Accepted(Acceptance(last, target, empty, False), no_status, masses, places)
    uniforms = tested_uniforms(call, rows)
    shares = DenseShares(call, seen, target) if seen.slices is None else SlicedShares(call, seen, seen.slices)
    yield from offer_steps(shares, uniforms, rounds)
    if call.kind == RuleKind.TRAVERSAL:
        last = first_kept(shares.share, as_drafts(call, uniforms))
    else:
        last = first_passing(shares.passes, shape)
    last = torch.where(rows.greedy, most_likely, last)
    of_ranks = shares.masses
    if of_ranks is not None:
        own = torch.where(rows.greedy[:, None], of_ranks.target, of_ranks.residual)
        of_ranks = of_ranks._replace(residual=own, target=own)
    left, places = target, None
    if isinstance(shares, DenseShares):
        left = torch.where(rows.greedy[:, None, None], target, shares.left)
    else:
        places = shares.places(last[:, None])
    acceptance = Acceptance(last, left, shares.empty & ~rows.greedy[:, None], True)
    return Accepted(acceptance, shares.drafts.status, of_ranks, places)


def target_masses(call: Call, seen: Seen) -> Tensor:
    """This rank's part of every row, float64 [batch, rows]."""
    if seen.slices is None:
        return probabilities(call.shard, seen.rows).sum(-1)
    return masses_here(call.shard, call.target, seen.rows)


def nothing_rejected(call: Call) -> Tensor:
    """`Places.offers` before any child is."""
    return torch.full((*call.tokens.shape, 2), -1.0, dtype=torch.float64, device=call.tokens.device)


def as_drafts(call: Call, uniforms: Tensor) -> Drafts:
    """What functions of the reference look at that read no probabilities."""
    return Drafts(uniforms, uniforms, call.tokens, call.tokens, uniforms, call.usable, call.shape)


def tested_uniforms(call: Call, rows: Rows) -> Tensor:
    without = rows.greedy | (call.kind == RuleKind.GUMBEL)
    return torch.where(without[:, None], 0.0, chain_uniforms(call.random, None, call.tokens))


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


class Shares(ABC):
    """What is left of every row while its children are offered: what all ranks know, and each rank's part of it."""

    def __init__(self, call: Call, seen: Seen) -> None:
        self.call, self.seen = call, seen
        self.drafts = node_drafts(call, seen, torch.ones_like(call.tokens, dtype=torch.float64))
        self.masses: Masses | None = None  # of all ranks: left in each row, in the numbers of `residuals`, and at first
        self.request = torch.arange(len(call.tokens), device=call.tokens.device)
        self.left_at = seen.at_target.clone()  # float64 [batch, nodes], of the row of each node at its token
        self.share = torch.ones_like(seen.rows.best)  # float64 [batch, rows]
        self.mass = torch.ones_like(self.share)  # of what is left of a row, in the numbers of `residuals`
        self.has_token = seen.rows.alive
        self.passes = torch.zeros_like(call.usable)
        self.empty = torch.zeros_like(call.usable)

    @abstractmethod
    def target_masses(self) -> Tensor:
        """This rank's part of every row before anything is offered, float64 [batch, rows]."""

    @abstractmethod
    def masses_of_drafts(self) -> Tensor:
        """This rank's part of the mass that earlier siblings leave of what each node was drawn from, [batch, nodes]."""

    @abstractmethod
    def residuals(self, due: list[int]) -> Tensor:
        """This rank's part of what each of these nodes leaves of its row if it is rejected, [batch, len(due)]."""

    @abstractmethod
    def lessen(self, node: int, usable: Tensor, nothing: Tensor) -> None:
        """Take a rejected node out of its row where it is usable; nothing: the target is back in its place."""

    def enter(self, node: int, now: Tensor, uniform: Tensor) -> None:
        """Test a node, and give its row the share that it is offered."""
        row = self.call.shape.parent_row[:, node]
        target_there = self.share[self.request, row] * self.left_at[:, node]
        draft_there = self.drafts.at[:, node, node]
        passes = self.call.usable[:, node] & (uniform * draft_there < target_there)
        self.passes[:, node] = torch.where(now, passes, self.passes[:, node])
        if self.call.kind == RuleKind.TRAVERSAL:
            share = torch.where(target_there > 0, target_there / draft_there, 0.0).clamp(max=1)
            self.share[:, node + 1] = torch.where(now, share, self.share[:, node + 1])

    def factor(self, row: Tensor) -> Tensor:
        """What is left of a row [batch] is multiplied with it when a child is offered."""
        return self.share[self.request, row] / self.mass[self.request, row]

    def mass_of_chosen(self, node: int) -> Tensor:
        """The sum of `residuals` over all ranks, of a node that was chosen and not drawn."""
        row = self.call.shape.parent_row[:, node]
        share = self.share[self.request, row]
        there = share * self.left_at[:, node]
        whole = torch.where(self.has_token[self.request, row], share, 0.0)
        return (whole - there).clamp(min=0) + (there - 1).clamp(min=0)

    def leave(self, node: int, now: Tensor, mass: Tensor, of_ranks: Tensor | None) -> None:
        """Take a rejected node's part out of its row. mass: the residual's; of_ranks [ranks, batch]: that of each."""
        request, shape = self.request, self.call.shape
        row, usable = shape.parent_row[:, node], self.call.usable[:, node] & now
        nothing = mass <= EMPTY_RESIDUAL_MASS
        self.lessen(node, usable, nothing)
        share = self.share[request, row]
        rest = mass + 1 - share
        lessened = torch.where(rest > EMPTY_RESIDUAL_MASS, mass / rest, 1.0)
        in_row = (shape.parent_row == row[:, None]) & usable[:, None]
        left_at = (share[:, None] * self.left_at - self.drafts.at[:, node]).clamp(min=0) / mass[:, None]
        left_at = torch.where(nothing[:, None], self.seen.at_target, left_at)
        self.left_at = torch.where(in_row, left_at, self.left_at)
        self.share[request, row] = torch.where(usable, lessened, share)
        own = torch.where(nothing, 1.0, mass)
        self.mass[request, row] = torch.where(usable, own, self.mass[request, row])
        self.empty[:, node] |= usable & nothing & self.has_token[request, row]
        if self.masses is not None and of_ranks is not None:
            left, whole = self.masses.residual, self.masses.target[:, request, row]
            own = torch.where(nothing, whole, of_ranks)
            left[:, request, row] = torch.where(usable, own, left[:, request, row])


class DenseShares(Shares):
    """Of rows that are written down."""

    def __init__(self, call: Call, seen: Seen, target: Tensor) -> None:
        super().__init__(call, seen)
        self.target, self.left = target, target.clone()  # float64 [batch, rows, width]

    def target_masses(self) -> Tensor:
        return self.target.sum(-1)

    def masses_of_drafts(self) -> Tensor:
        call = self.call
        taken = earlier_siblings(call.shape).double() @ one_hot(call.here, call.shard.width) > 0
        gone = taken | ~self.seen.draft.drawn[..., None]
        return torch.where(gone, 0.0, self.seen.draft.logprobs.exp()).sum(-1)

    def residuals(self, due: list[int]) -> Tensor:
        return torch.stack([self._residual(node).sum(-1) for node in due], 1)

    def lessen(self, node: int, usable: Tensor, nothing: Tensor) -> None:
        request, row = self.request, self.call.shape.parent_row[:, node]
        residual = torch.where(nothing[:, None], self.target[request, row], self._residual(node))
        self.left[request, row] = torch.where(usable[:, None], residual, self.left[request, row])

    def _residual(self, node: int) -> Tensor:
        """float64 [batch, width]."""
        row = self.call.shape.parent_row[:, node]
        return (self.factor(row)[:, None] * self.left[self.request, row] - self._draft(node)).clamp(min=0)

    def _draft(self, node: int) -> Tensor:
        """This rank's part of what a node was drawn from, float64 [batch, width]."""
        call, shape = self.call, self.call.shape
        own = one_hot(call.here[:, node], call.shard.width)
        if not has_source(call.draft):
            return own
        probs = self.seen.draft.logprobs[:, node].exp()
        if call.tree.without_replacement:
            earlier = (shape.parent_row[:, :node] == shape.parent_row[:, node, None]) & shape.used[:, :node]
            gone = (earlier[..., None] & (one_hot(call.here[:, :node], call.shard.width) > 0)).any(1)
            probs = torch.where(gone, 0.0, probs) / self.drafts.mass[:, node, None]
        return torch.where(self.drafts.drawn[:, node, None], probs, own)


class SlicedShares(Shares):
    """Of rows that kernels read: these make what is left of a row anew from the nodes that were rejected.

    Of tokens that siblings took nothing is left to subtract from, so they are not set apart.
    """

    def __init__(self, call: Call, seen: Seen, slices: Slices) -> None:
        super().__init__(call, seen)
        self.slices, self.offers = slices, nothing_rejected(call)

    def target_masses(self) -> Tensor:
        return target_masses(self.call, self.seen)

    def masses_of_drafts(self) -> Tensor:
        nodes = torch.arange(self.call.tokens.shape[1], device=self.request.device).expand_as(self.call.tokens)
        return masses_of_drafts(self.slices, self.seen.places(nodes))

    def places(self, rows: Tensor) -> Places:
        return self.seen.places(rows, self.drafts.drawn, self.offers.contiguous())

    def enter(self, node: int, now: Tensor, uniform: Tensor) -> None:
        super().enter(node, now, uniform)
        scale = torch.where(self.drafts.drawn[:, node], 1 / self.drafts.mass[:, node], 1.0)
        offer = torch.stack([self.factor(self.call.shape.parent_row[:, node]), scale], -1)
        now = now & self.call.usable[:, node]
        self.offers[:, node] = torch.where(now[:, None], offer, self.offers[:, node])

    def residuals(self, due: list[int]) -> Tensor:
        return residuals(self.slices, self.places(self.call.shape.parent_row[:, due])).sum(-1)

    def lessen(self, node: int, usable: Tensor, nothing: Tensor) -> None:
        shape = self.call.shape
        back = (shape.parent_row == shape.parent_row[:, node, None]) & (usable & nothing)[:, None]
        back[:, node + 1 :] = False
        self.offers = torch.where(back[..., None], -1.0, self.offers)


def offer_steps(shares: Shares, uniforms: Tensor, rounds: Rounds | None) -> Steps[None]:
    """`offer` on a shard. A turn offers one child of every row that is ready, and tells the masses of what is left.

    Where children were chosen, their tokens' probabilities say what is left, and nothing is told. Before the first turn
    nobody has siblings before it, so that what these leave of its draft distribution is told in that turn.
    """
    call = shares.call
    nodes = call.tokens.shape[1]
    turns = torch.arange(nodes, device=call.tokens.device).expand_as(call.tokens)
    if rounds is not None:
        turns = offered_at(call.shape.parent_row, call.shape.used, call.kind == RuleKind.TRAVERSAL)
    for turn, due in enumerate([[node] for node in range(nodes)] if rounds is None else rounds):
        for node in due:
            shares.enter(node, turns[:, node] == turn, uniforms[:, node])
        of_ranks = None
        if has_source(call.draft):
            told = shares.residuals(due)
            if turn > 0:
                of_ranks = yield told
            else:
                of_ranks = yield from first_turn(shares, told)
        for index, node in enumerate(due):
            own = None if of_ranks is None else of_ranks[..., index]
            mass = shares.mass_of_chosen(node) if own is None else own.sum(0)
            shares.leave(node, turns[:, node] == turn, mass, own)


def first_turn(shares: Shares, told: Tensor) -> Steps[Tensor]:
    """What ranks tell in the first turn, [ranks, batch, n], with the masses of their rows and of what drafts leave."""
    call = shares.call
    left = [shares.masses_of_drafts()] if call.tree.without_replacement else []
    masses, mass = yield from mass_steps(call.shard, told, shares.target_masses(), *left)
    shares.masses = masses._replace(residual=masses.target.clone())
    if left:
        shares.drafts = node_drafts(call, shares.seen, mass)
    return masses.residual


def offered_at(parent_row: Tensor, used: Tensor, whole_paths: bool) -> Tensor:
    """int64 [batch, nodes]: the turn of each node, after the siblings before it; -1 for padding.

    whole_paths: and not before its parent's, which says what share the row has.
    """
    batch, nodes = parent_row.shape
    free = torch.zeros(batch, nodes + 1, dtype=torch.int64, device=parent_row.device)  # when a row can take a child
    request = torch.arange(batch, device=parent_row.device)
    turn = torch.full_like(parent_row, -1)
    for node in range(nodes):
        row, there = parent_row[:, node], used[:, node]
        own = free[request, row]
        turn[:, node] = torch.where(there, own, -1)
        free[:, node + 1] = own if whole_paths else 0
        free[request, row] = own + there
    return turn


def rounds_of(parents: Any, draft_tokens: Tensor, whole_paths: bool) -> Rounds | None:
    """The nodes of any request that each turn offers; None: the host does not know the trees."""
    if isinstance(parents, Tensor):
        if not parents.is_cpu:
            return None
        table = parents.long()
    else:
        table, _ = parents_of_trees(parents, torch.empty(draft_tokens.shape, device="cpu"))
    if table.numel() == 0:
        return []
    _, used = descent(table, None)
    turns = offered_at(torch.where(used, table + 1, 0), used, whole_paths)
    return [(turns == turn).any(0).nonzero()[:, 0].tolist() for turn in range(int(turns.max()) + 1)]


def finish_steps(call: Call, seen: Seen, accepted: Accepted) -> Steps[list[Tensor]]:
    """The next token, the status, what is emitted, and what is reported of it."""
    rows, shape, tokens, acceptance = seen.rows, call.shape, call.tokens, accepted.acceptance
    request = torch.arange(tokens.shape[0], device=tokens.device)
    num_accepted = shape.depth[request, acceptance.last]
    without = rows.greedy | (call.kind == RuleKind.GUMBEL)
    uniform = torch.where(without, 0.0, chain_uniforms(call.random, num_accepted, tokens))
    path, on_path = path_to(acceptance.last, shape, call.tree.levels)
    columns, reports = torch.nn.functional.pad(path + 1, (1, 0)), call.report.logprobs != NO_LOGPROBS
    next_token = next_steps(call, seen, accepted, uniform)
    if reports:
        parts = next_token, top_steps(seen.reports, columns, call.report.top)
        drawn, top = yield from together(*parts)
    else:
        drawn = yield from next_token
    uniforms = tested_uniforms(call, rows)
    status = used_status(rows.status, accepted.draft_status, acceptance, as_drafts(call, uniforms), on_path)
    nodes = torch.full_like(num_accepted, tokens.shape[1]) if call.draft.lens is None else call.draft.lens.long()
    invalid = rows.invalid | shape.invalid | invalid_draft(call.shard, call.draft)
    invalid = invalid | bad_uniforms(uniforms, uniform, nodes)
    path = torch.where(invalid[:, None], -1, path)
    verdict = [*as_verdict(at_path(tokens, path), num_accepted, drawn.tokens, status, invalid), path]
    if not reports:
        return verdict
    is_next = torch.arange(path.shape[1] + 1, device=path.device) == num_accepted[:, None]
    of_nodes = torch.nn.functional.pad(seen.told.looked_up, (1, 1))  # the next token comes after the path
    of_nodes = of_nodes.gather(1, torch.nn.functional.pad(path + 1, (0, 1)))
    return [*verdict, *reported(torch.where(is_next, drawn.logprobs[:, None], of_nodes), verdict[0], top)]


def next_steps(call: Call, seen: Seen, accepted: Accepted, uniform: Tensor) -> Steps[Drawn]:
    """From what the children of the last accepted row have left of it, or what the row picks."""
    last, reports = accepted.acceptance.last, call.report.logprobs != NO_LOGPROBS
    request = torch.arange(len(last), device=last.device)
    logprobs = seen.reports.of_row(last) if reports else None
    if call.by_best:
        picked = torch.where(seen.rows.alive[request, last], seen.picked[request, last], -1)
        of_picked = None if seen.of_picked is None else seen.of_picked[request, last]
        return (yield from picked_steps(call.shard, picked, of_picked, logprobs))
    masses, never = None if accepted.masses is None else accepted.masses.at(last), torch.zeros_like(seen.rows.greedy)
    if seen.slices is not None and accepted.places is not None:
        blocks = residuals(seen.slices, accepted.places)[:, 0]
        certain = torch.where(seen.rows.greedy & seen.rows.alive[request, last], seen.picked[request, last], -1)
        given = accepted.places, blocks, blocks.sum(-1), never, uniform, logprobs, certain
        return (yield from draw_steps(call.shard, SlicedChoice(seen.slices, *given), masses))
    left = accepted.acceptance.left[request, last]  # so nothing is subtracted any more
    choice = Choice(left, left, never, uniform, logprobs, call.shard.start)
    return (yield from draw_steps(call.shard, choice, masses))
