"""Trees whose rows lie on several ranks: `specens_kernels.ops.verify_tree.reference`, with what it sums told."""

from __future__ import annotations

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
from specens_kernels.distributed.steps import Steps, together
from specens_kernels.distributed.target import (
    DraftRows,
    Looked,
    Rows,
    always_greedy,
    draft_steps,
    has_source,
    invalid_draft,
    probabilities,
    scores_need_no_sums,
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


class NodeDrafts(NamedTuple):
    """What nodes were drawn from, given the siblings before them."""

    mass: Tensor  # float64 [batch, nodes], what is left of the distribution
    drawn: Tensor  # bool [batch, nodes], False: one-hot
    at: Tensor  # float64 [batch, node, token of a node], probabilities
    status: Tensor  # int64 [batch, nodes]


class Accepted(NamedTuple):
    acceptance: Acceptance
    draft_status: Tensor  # int64 [batch, nodes]
    masses: Masses | None  # of all rows of `acceptance.left`, where ranks have told them


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


def read_steps(call: Call) -> Steps[Seen]:
    shard, shape, tokens = call.shard, call.shape, call.tokens
    batch, nodes = tokens.shape
    looked, drafts = Looked(call.here, shape.parent_row), None
    if call.offers and has_source(call.draft) and not call.direct:
        node = torch.arange(nodes, device=tokens.device)
        pairs = Looked(call.here.repeat(1, nodes), node.repeat_interleave(nodes).expand(batch, -1))
        of_nodes, own, above = at_parents(call.target, call.draft, call.here, shape)
        greedy = parameters(call.target.sampling, tokens).greedy
        drafts = draft_steps(shard, of_nodes, own, greedy, above, pairs)
    before, noise = paths(call.here, shape), noise_at(call.kind, call.random, shape.depth)
    how: dict[str, Any] = {"direct": call.direct, "drafts": drafts}
    read = yield from read_rows(shard, call.target, tokens, before, looked, noise, call.kind, call.report, **how)
    rows, above_row = read.rows, shape.parent_row
    at_target = ((tokens == read.picked.gather(1, above_row)) & rows.alive.gather(1, above_row)).double()
    if not call.by_best:
        at_target = torch.where(rows.greedy[:, None], at_target, rows.looked_up.exp())
    return Seen(*read, at_target)


def accept_steps(call: Call, seen: Seen, rounds: Rounds | None) -> Steps[Accepted]:
    """The last accepted row of each request, and the status of the nodes."""
    rows, shape = seen.rows, call.shape
    target = probabilities(call.shard, rows)
    no_status = torch.zeros_like(call.tokens)
    empty = torch.zeros_like(call.usable)
    most_likely = longest(call.usable & (seen.at_target > 0), shape)
    if call.by_best:
        reads = call.kind != RuleKind.GUMBEL and call.kind != RuleKind.TYPICAL
        return Accepted(Acceptance(most_likely, target, empty, reads), no_status, None)
    if call.kind == RuleKind.TYPICAL:
        own, none = target.sum(-1), target.new_zeros(len(target), 0)
        masses, entropies = yield from mass_steps(call.shard, none, own, entropy(target))
        limit = typical_limit(entropies, call.rule)
        passes = call.usable & (seen.at_target > limit.gather(1, shape.parent_row))
        last = torch.where(rows.greedy, most_likely, longest(passes, shape))
        return Accepted(Acceptance(last, target, empty, False), no_status, masses)
    uniforms = tested_uniforms(call, rows)
    offers = yield from offer_steps(call, seen, uniforms, target, rounds)
    if call.kind == RuleKind.TRAVERSAL:
        last = first_kept(offers.share, as_drafts(call, uniforms))
    else:
        last = first_passing(offers.passes, shape)
    left = torch.where(rows.greedy[:, None, None], target, offers.left)
    last = torch.where(rows.greedy, most_likely, last)
    of_ranks = offers.masses
    if of_ranks is not None:
        own = torch.where(rows.greedy[:, None], of_ranks.target, of_ranks.residual)
        of_ranks = of_ranks._replace(residual=own, target=own)
    acceptance = Acceptance(last, left, offers.empty & ~rows.greedy[:, None], True)
    return Accepted(acceptance, offers.drafts.status, of_ranks)


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


def mass_of_drafts(call: Call, seen: Seen) -> Tensor:
    """This rank's part of the mass that earlier siblings leave of what each node was drawn from, [batch, nodes]."""
    taken = earlier_siblings(call.shape).double() @ one_hot(call.here, call.shard.width) > 0
    gone = taken | ~seen.draft.drawn[..., None]
    return torch.where(gone, 0.0, seen.draft.logprobs.exp()).sum(-1)


def node_draft(call: Call, seen: Seen, drafts: NodeDrafts, node: int) -> Tensor:
    """This rank's part of what a node was drawn from, float64 [batch, width]."""
    own = one_hot(call.here[:, node], call.shard.width)
    if not has_source(call.draft):
        return own
    probs = seen.draft.logprobs[:, node].exp()
    if call.tree.without_replacement:
        shape = call.shape
        earlier = (shape.parent_row[:, :node] == shape.parent_row[:, node, None]) & shape.used[:, :node]
        gone = (earlier[..., None] & (one_hot(call.here[:, :node], call.shard.width) > 0)).any(1)
        probs = torch.where(gone, 0.0, probs) / drafts.mass[:, node, None]
    return torch.where(drafts.drawn[:, node, None], probs, own)


class Shares:
    """What is left of every row while its children are offered, each rank's part of it, and what all ranks know."""

    def __init__(self, call: Call, seen: Seen, target: Tensor) -> None:
        self.call, self.seen, self.target = call, seen, target
        self.drafts = node_drafts(call, seen, torch.ones_like(call.tokens, dtype=torch.float64))
        self.masses: Masses | None = None  # of all ranks: left in each row, and the target's
        self.request = torch.arange(target.shape[0], device=target.device)
        self.left = target.clone()  # float64 [batch, rows, width]
        self.left_at = seen.at_target.clone()  # float64 [batch, nodes], of the row of each node at its token
        self.share = torch.ones_like(target[..., 0])  # float64 [batch, rows]
        self.has_token = seen.rows.alive
        self.passes = torch.zeros_like(call.usable)
        self.empty = torch.zeros_like(call.usable)

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

    def residual(self, node: int) -> Tensor:
        """What a node that is rejected leaves of its row, not normalised, float64 [batch, width]."""
        row = self.call.shape.parent_row[:, node]
        draft = node_draft(self.call, self.seen, self.drafts, node)
        return (self.share[self.request, row][:, None] * self.left[self.request, row] - draft).clamp(min=0)

    def mass_of_chosen(self, node: int) -> Tensor:
        """The sum of that over all ranks, of a node that was chosen and not drawn."""
        row = self.call.shape.parent_row[:, node]
        share = self.share[self.request, row]
        there = share * self.left_at[:, node]
        whole = torch.where(self.has_token[self.request, row], share, 0.0)
        return (whole - there).clamp(min=0) + (there - 1).clamp(min=0)

    def leave(self, node: int, now: Tensor, mass: Tensor, of_ranks: Tensor | None) -> None:
        """Take a rejected node's part out of its row. mass: the residual's; of_ranks [ranks, batch]: that of each."""
        request, shape = self.request, self.call.shape
        row, usable = shape.parent_row[:, node], self.call.usable[:, node] & now
        residual, share = self.residual(node), self.share[request, row]
        rest = mass + 1 - share
        nothing = mass <= EMPTY_RESIDUAL_MASS
        lessened = torch.where(rest > EMPTY_RESIDUAL_MASS, mass / rest, 1.0)
        residual = torch.where(nothing[:, None], self.target[request, row], residual / mass[:, None])
        in_row = (shape.parent_row == row[:, None]) & usable[:, None]
        left_at = (share[:, None] * self.left_at - self.drafts.at[:, node]).clamp(min=0) / mass[:, None]
        left_at = torch.where(nothing[:, None], self.seen.at_target, left_at)
        self.left_at = torch.where(in_row, left_at, self.left_at)
        self.share[request, row] = torch.where(usable, lessened, share)
        self.left[request, row] = torch.where(usable[:, None], residual, self.left[request, row])
        self.empty[:, node] |= usable & nothing & self.has_token[request, row]
        if self.masses is not None and of_ranks is not None:
            left, whole = self.masses.residual, self.masses.target[:, request, row]
            left[:, request, row] = torch.where(
                usable, torch.where(nothing, whole, of_ranks / mass), left[:, request, row]
            )


def offer_steps(call: Call, seen: Seen, uniforms: Tensor, target: Tensor, rounds: Rounds | None) -> Steps[Shares]:
    """`offer` on a shard. A turn offers one child of every row that is ready, and tells the masses of what is left.

    Where children were chosen, their tokens' probabilities say what is left, and nothing is told. Before the first turn
    nobody has siblings before it, so that what these leave of its draft distribution is told in that turn.
    """
    nodes = call.tokens.shape[1]
    shares = Shares(call, seen, target)
    turns = torch.arange(nodes, device=call.tokens.device).expand_as(call.tokens)
    if rounds is not None:
        turns = offered_at(call.shape.parent_row, call.shape.used, call.kind == RuleKind.TRAVERSAL)
    for turn, due in enumerate([[node] for node in range(nodes)] if rounds is None else rounds):
        for node in due:
            shares.enter(node, turns[:, node] == turn, uniforms[:, node])
        of_ranks = None
        if has_source(call.draft):
            told = torch.stack([shares.residual(node).sum(-1) for node in due], 1)
            if turn > 0:
                of_ranks = yield told
            else:
                of_ranks = yield from first_turn(shares, told)
        for index, node in enumerate(due):
            own = None if of_ranks is None else of_ranks[..., index]
            mass = shares.mass_of_chosen(node) if own is None else own.sum(0)
            shares.leave(node, turns[:, node] == turn, mass, own)
    return shares


def first_turn(shares: Shares, told: Tensor) -> Steps[Tensor]:
    """What ranks tell in the first turn, [ranks, batch, n], with the masses of their rows and of what drafts leave."""
    call, seen = shares.call, shares.seen
    by_row = shares.target.sum(-1)
    left = [mass_of_drafts(call, seen)] if call.tree.without_replacement else []
    masses, mass = yield from mass_steps(call.shard, told, by_row, *left)
    shares.masses = masses._replace(residual=masses.target.clone())
    if left:
        shares.drafts = node_drafts(call, seen, mass)
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
    left = accepted.acceptance.left[request, last]  # so nothing is subtracted any more
    masses = None if accepted.masses is None else accepted.masses.at(last)
    choice = Choice(left, left, torch.zeros_like(seen.rows.greedy), uniform, logprobs, call.shard.start)
    return (yield from draw_steps(call.shard, choice, masses))
