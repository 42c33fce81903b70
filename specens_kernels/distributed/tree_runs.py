"""The rule k_seq on several ranks: `ops.verify_tree.rules.offer_runs`, its ratios found in two collectives.

What is left of a row is convex in the ratio: above lines that touch it, below those between two of its points. So a few
ratios that all ranks weigh say between which two the one that is looked for lies, and a few between these what it is.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from specens_kernels.distributed.steps import Steps
from specens_kernels.distributed.tree_offers import Rounds, Shares, at_rows, first_turn, offered_at
from specens_kernels.ops.verify_tree.rules import Drafts, runs, suffices

RATIOS = 64  # weighed at once
POWER = 4  # so that the first ones are told apart near 1, where nearly all drafts are accepted
SECTIONS = 4  # of a bracket, into as many parts each


class Weighed(NamedTuple):
    """What `Shares.exceeding` tells, of one rank or of all, each [..., batch, n, RATIOS]."""

    left: Tensor
    draft: Tensor


class Between(NamedTuple):
    """Two ratios that lie beside each other, and what is left at them; each [..., batch, n, 1]."""

    low: Tensor
    high: Tensor
    left: tuple[Tensor, Tensor]
    draft: tuple[Tensor, Tensor]

    @classmethod
    def at(cls, ratios: Tensor, weighed: Weighed, index: Tensor) -> Between:
        """index: int64 [batch, n, 1], of the second."""

        def pair(values: Tensor) -> tuple[Tensor, Tensor]:
            own = index.expand(*values.shape[:-1], 1)
            return values.gather(-1, own - 1), values.gather(-1, own)

        return cls(*pair(ratios), pair(weighed.left), pair(weighed.draft))

    def least(self, ratio: Tensor) -> Tensor:
        """What is left at least; as much where the tokens between the two have one ratio."""
        begin, end = (
            self.left[0] - self.draft[0] * (ratio - self.low),
            self.left[1] + self.draft[1] * (self.high - ratio),
        )
        return torch.maximum(begin, end).clamp(min=0)

    def most(self, ratio: Tensor) -> Tensor:
        share = ((ratio - self.low) / (self.high - self.low)).nan_to_num(nan=0.0)
        return torch.lerp(*self.left, share)

    def root(self, left: Callable[[Tensor], Tensor], count: Tensor) -> Tensor:
        """The first ratio that suffices, [batch, n]."""
        low, width = self.low, self.high - self.low
        parts = torch.arange(1, RATIOS + 1, device=low.device)
        for _ in range(SECTIONS):
            width = width / RATIOS
            ratio = low + width * parts
            short = (~suffices(left(ratio), ratio, count[..., None])).sum(-1, keepdim=True)
            low = low + width * short.clamp(max=RATIOS - 1)
        return (low + width)[..., 0]


def narrowed(ratios: Tensor, of_all: Weighed, count: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Between which two numbers the least ratio that suffices lies, [batch, n]; and the place of the one above them.

    Of the first of them it is known what is left, where tokens beside it have one ratio. The place: [batch, n, 1].
    """
    short = (~suffices(of_all.left, ratios, count[..., None])).sum(-1, keepdim=True)
    index = short.clamp(1, RATIOS - 1)
    between, short = Between.at(ratios, of_all, index), short[..., 0]
    roots = between.root(between.least, count), between.root(between.most, count)
    least, most = (
        torch.where(short == 0, ratios[..., 0], torch.where(short == RATIOS, ratios[..., -1], root)) for root in roots
    )
    return least, most, index


class Search(NamedTuple):
    """Runs whose ratios are not known yet, each [batch, rows]."""

    node: Tensor  # int64, the first one of a row's run; -1: none
    low: Tensor  # float64, the ratio is not below
    high: Tensor


class Asked(NamedTuple):
    """What a turn asks of rows, each [batch, n]."""

    row: Tensor  # int64
    now: Tensor  # bool, whether the row takes part
    begun: Tensor  # int64, the first node of a run that begins; -1: none does
    going: Tensor  # int64, likewise of one whose ratio was looked for before
    length: Tensor  # of the run
    ratios: Tensor  # float64 [batch, n, RATIOS]

    @property
    def node(self) -> Tensor:
        return torch.where(self.begun >= 0, self.begun, self.going)


class Turns:
    """When the siblings of rows are tested. Where one drafter drew all, a row has one run, which begins at once."""

    def __init__(self, shares: Shares, rounds: Rounds | None) -> None:
        call, drawn = shares.call, shares.drafts.drawn
        self.lone, self.parent_row, nodes = call.draft.drafters is None, call.shape.parent_row, call.tokens.shape[1]
        drafters = torch.zeros_like(call.tokens) if call.draft.drafters is None else call.draft.drafters.long()
        drafters = torch.where(drawn, drafters, -1)
        self.runs = runs(Drafts(drafters, drafters, call.tokens, drafters, drafters, call.usable, call.shape))
        self.index = torch.arange(nodes, device=drafters.device)
        self.turns = self.index.expand_as(drafters)
        if self.lone or rounds is not None:
            self.turns = offered_at(self.parent_row, call.shape.used, False)
        self.begins = torch.zeros_like(self.turns) if self.lone else self.turns
        self.is_first = (self.runs.first == self.index) & call.usable & drawn
        if rounds is None:
            rounds = [list(range(nodes))] * nodes if self.lone else [[node] for node in range(nodes)]
        self.rounds = rounds[:2] if self.lone else rounds
        self.chosen = [list(range(nodes)), []] if self.lone else rounds  # nodes that may have been

    def ask(self, turn: int, search: Search) -> Asked:
        due = self.rounds[turn]
        row, now = self.parent_row[:, due], self.turns[:, due] == turn
        none = torch.full_like(search.node, -1)
        begun = at_rows(none, self.parent_row, self.is_first & (self.begins == turn), self.runs.first)
        begun, going = (torch.where(now, own.gather(1, row), -1) for own in (begun, search.node))
        node, begins = torch.where(begun >= 0, begun, going), begun >= 0
        length = torch.where(node >= 0, self.runs.length.gather(1, node.clamp(min=0)), 1)
        low = torch.where(begins, 1.0, search.low.gather(1, row))
        high = torch.where(begins, length, search.high.gather(1, row))
        ratios = spaced(low, high, torch.where(begins, POWER, 1))
        ratios = torch.where((node >= 0)[..., None], ratios, 0.0)  # of others all that is left
        return Asked(row, now, begun, going, length, ratios)


def run_steps(shares: Shares, uniforms: Tensor, rounds: Rounds | None) -> Steps[None]:
    """`offer_steps` of drawn siblings: a run takes the turns of its first two. Each tells sums at a few ratios."""
    turns, ones = Turns(shares, rounds), torch.ones_like(shares.share)
    search = Search(torch.full_like(ones, -1, dtype=torch.int64), ones, ones)
    for turn in range(len(turns.rounds)):
        for child in turns.chosen[turn]:
            now = (turns.begins[:, child] == turn) & ~shares.drafts.drawn[:, child]
            shares.enter(child, now, uniforms[:, child])
            shares.leave(child, now, shares.mass_of_chosen(child), None)
        asked = turns.ask(turn, search)
        row, node = asked.row, asked.node
        factor = torch.where(node >= 0, 1 / shares.mass.gather(1, row), 1.0)
        told = shares.exceeding(row, node.clamp(min=0), factor, asked.ratios)
        heard = (yield told.flatten(1)) if turn > 0 else (yield from first_turn(shares, told.flatten(1)))
        of_ranks = Weighed(*heard.view(len(heard), *told.shape).unbind(-2))
        least, most, index = narrowed(asked.ratios, Weighed(*(part.sum(0) for part in of_ranks)), asked.length)
        opens, known = (asked.begun >= 0) & (asked.length > 1), (asked.begun < 0) & (asked.going >= 0)
        search = Search(
            at_rows(search.node, row, asked.now, torch.where(opens, asked.begun, -1)),
            at_rows(search.low, row, opens, least),
            at_rows(search.high, row, opens, most),
        )
        ratio = torch.where(known, least, 1.0)
        between = Between.at(asked.ratios.expand_as(of_ranks.left), of_ranks, index)
        left = torch.where(known, between.least(ratio[..., None])[..., 0], of_ranks.left[..., 0])
        shares.tell_left(row, asked.now & (node < 0), left)
        shares.leave_runs(turns.runs, row, torch.where(opens, -1, node), ratio, left, uniforms)


def spaced(low: Tensor, high: Tensor, power: Tensor) -> Tensor:
    """Ratios between two, [batch, n, RATIOS], the more of them near the first the higher the power."""
    place = torch.arange(RATIOS, device=low.device, dtype=low.dtype) / (RATIOS - 1)
    return low[..., None] + (high - low)[..., None] * place ** power[..., None]
