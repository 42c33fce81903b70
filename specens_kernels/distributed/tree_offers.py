"""What is left of rows on several ranks while their children are offered, as `ops.verify_tree.rules.offer` has it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import torch
from torch import Tensor

from specens_kernels.distributed.draw import Masses, mass_steps
from specens_kernels.distributed.slices import Places, Slices, exceeding, has_source, masses_of_drafts, residuals
from specens_kernels.distributed.steps import Steps
from specens_kernels.distributed.target import masses_here
from specens_kernels.distributed.tree_rows import Call, Seen, node_drafts, nothing_rejected
from specens_kernels.ops.target_logprobs.reference import one_hot
from specens_kernels.ops.tree_mask.reference import descent
from specens_kernels.ops.verify_tree import parents_of_trees
from specens_kernels.ops.verify_tree.reference import earlier_siblings
from specens_kernels.ops.verify_tree.rules import Runs
from specens_kernels.parts.written_tokens import from_the_end
from specens_kernels.rules import EMPTY_RESIDUAL_MASS, RuleKind

Rounds = list[list[int]]  # the nodes that are offered in each turn


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

    @abstractmethod
    def exceeding(self, row: Tensor, node: Tensor, factor: Tensor, ratios: Tensor) -> Tensor:
        """This rank's sums over tokens where factor * what is left of a row exceeds a ratio times a node's draft.

        Of the difference, and of the draft: float64 [batch, n, 2, ratios]. row, node: int64 [batch, n]. ratios:
        float64 [batch, n, ratios], ascending; where they are 0 the node may be any.
        """

    @abstractmethod
    def lessen_runs(self, row: Tensor, node: Tensor, factor: Tensor, ratio: Tensor, nothing: Tensor) -> None:
        """`lessen` of runs of siblings. All [batch, n]; node: the first of each, -1 for none."""

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

    def tell_left(self, row: Tensor, now: Tensor, of_ranks: Tensor) -> None:
        """of_ranks: [ranks, batch, n], what each has of rows [batch, n], in the numbers of `residuals`."""
        assert self.masses is not None
        self.masses = self.masses._replace(residual=at_rows(self.masses.residual, row, now, of_ranks))

    def leave_runs(
        self, runs: Runs, row: Tensor, node: Tensor, ratio: Tensor, of_ranks: Tensor, uniforms: Tensor
    ) -> None:
        """Test runs of siblings that were drawn alike, and take them out of their rows.

        node: int64 [batch, n], the first of each, -1 for none; ratio: [batch, n]; of_ranks: [ranks, batch, n], what
        each rank has of what they leave of rows int64 [batch, n].
        """
        call, shape, mass = self.call, self.call.shape, of_ranks.sum(0)
        ends, nothing = node >= 0, mass <= EMPTY_RESIDUAL_MASS
        self.lessen_runs(row, node, 1 / self.mass.gather(1, row), ratio, nothing)

        def of_nodes(values: Tensor, fill: float) -> Tensor:
            rows = torch.full_like(self.share, fill, dtype=values.dtype)
            return at_rows(rows, row, ends, values).gather(1, shape.parent_row)

        first, own_ratio, own_nothing = of_nodes(node, -1), of_nodes(ratio, 1.0), of_nodes(nothing, False)
        in_run = call.usable & (first >= 0) & (runs.first == first)
        at_node = self.drafts.at.diagonal(dim1=1, dim2=2)
        passes = in_run & (uniforms * own_ratio * at_node < self.left_at)
        self.passes = torch.where(in_run, passes, self.passes)
        at_first = self.drafts.at.gather(1, first.clamp(min=0)[:, None])[:, 0]  # of each token in its row's run
        left_at = (self.left_at - own_ratio * at_first).clamp(min=0) / of_nodes(mass, 1.0)
        left_at = torch.where(own_nothing, self.seen.at_target, left_at)
        self.left_at = torch.where(first >= 0, left_at, self.left_at)
        self.mass = at_rows(self.mass, row, ends, torch.where(nothing, 1.0, mass))
        self.empty |= in_run & runs.is_last & own_nothing & self.has_token.gather(1, shape.parent_row)
        assert self.masses is not None
        whole = self.masses.target.gather(-1, row.expand_as(of_ranks))
        self.tell_left(row, ends, torch.where(nothing, whole, of_ranks))


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

    def exceeding(self, row: Tensor, node: Tensor, factor: Tensor, ratios: Tensor) -> Tensor:
        left, draft = factor[..., None] * self.left[self.request[:, None], row], self._drawn(node)
        own = torch.where(left > 0, left / draft, 0.0)
        place = torch.searchsorted(ratios.contiguous(), own)
        none = left.new_zeros(*ratios.shape[:-1], ratios.shape[-1] + 1)
        above, drafted = (from_the_end(none.scatter_add(2, place, values))[..., :-1] for values in (left, draft))
        return torch.stack([(above - ratios * drafted).clamp(min=0), drafted], 2)

    def lessen_runs(self, row: Tensor, node: Tensor, factor: Tensor, ratio: Tensor, nothing: Tensor) -> None:
        request = self.request[:, None]
        own = self.left[request, row]
        left = (factor[..., None] * own - ratio[..., None] * self._drawn(node.clamp(min=0))).clamp(min=0)
        left = torch.where(nothing[..., None], self.target[request, row], left)
        ends = (node >= 0)[..., None].expand_as(left)
        where = row[..., None].expand_as(left)
        self.left = at_rows(self.left.mT, where.mT, ends.mT, left.mT).mT

    def _drawn(self, node: Tensor) -> Tensor:
        """This rank's part of what nodes [batch, n] were drawn from, [batch, n, width]."""
        return self.seen.draft.logprobs[self.request[:, None], node].exp()

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
        return masses_here(self.call.shard, self.seen.rows)

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

    def exceeding(self, row: Tensor, node: Tensor, factor: Tensor, ratios: Tensor) -> Tensor:
        return exceeding(self.slices, self.places(row)._replace(shares=factor.contiguous()), node, ratios)

    def lessen_runs(self, row: Tensor, node: Tensor, factor: Tensor, ratio: Tensor, nothing: Tensor) -> None:
        ends, above = node >= 0, self.call.shape.parent_row

        def of_nodes(values: Tensor) -> Tensor:
            return at_rows(torch.full_like(self.share, -1.0), row, ends, values.double()).gather(1, above)

        offer = torch.stack([of_nodes(factor), of_nodes(ratio)], -1)
        is_first = of_nodes(node) == torch.arange(above.shape[1], device=above.device)
        offers = torch.where(is_first[..., None], offer, self.offers)
        self.offers = torch.where((of_nodes(nothing) > 0)[..., None], -1.0, offers)


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


def at_rows(values: Tensor, row: Tensor, now: Tensor, new: Tensor) -> Tensor:
    """values [..., rows], with new [..., n] at rows int64 [..., n], where `now` says so."""
    padded = torch.nn.functional.pad(values, (0, 1))
    where = torch.where(now, row, values.shape[-1]).expand(new.shape)
    return padded.scatter(-1, where, new)[..., :-1]


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
