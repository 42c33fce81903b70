"""A member drafts a tree from its own distribution, level by level."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from specens.decoding.draft_tree import DraftTree
from specens.decoding.request import Request
from specens.decoding.verification import draw_best_children, draw_siblings
from specens.engines.transformers.member import Member
from specens.schedules.plan import TreePlan
from specens_kernels import TokenTree

SIBLINGS = {"top": None, "sampled": "without_replacement", "independent": "with_replacement"}


class TreeReader:
    """The drafter's reading of the nodes it has proposed so far, in an order of its own.

    rows: its logits behind the settled text and behind each node read, [1, 1 + nodes, vocab] when joined.
    """

    def __init__(self, request: Request, member: Member) -> None:
        self.tokens: list[int] = []
        self.rows = [member.score_next(request.sequence)[:, None]]
        self._parents: list[int] = []
        self._member, self._sequence = member, request.sequence

    def read(self, tokens: Sequence[int], parents: Sequence[int]) -> Tensor:
        """Read nodes below earlier ones, or below the text (-1); logits [nodes, vocab] behind them."""
        self.tokens += [max(token, 0) for token in tokens]
        self._parents += parents
        self.rows.append(self._member.score_nodes(self._sequence, self.tokens, self._parents)[:, -len(tokens) :])
        return self.rows[-1][0]

    def finish(self, tree: TokenTree, tokens: list[int], siblings: str | None, slots: list[int]) -> DraftTree:
        """The tree whose nodes were read in these places, or are past the last one."""
        rows = torch.cat([*self.rows, torch.zeros_like(self.rows[0])], dim=1)
        places = [0, *(min(slot, len(self.tokens)) + 1 for slot in slots)]
        return DraftTree(tree, tokens, siblings, rows[:, places], slots)


def propose_tree(request: Request, member: Member, place: int, plan: TreePlan, reads_leaves: bool) -> DraftTree:
    """Let the member at a place draft a tree behind the settled tokens, no deeper than tokens may still be emitted.

    One forward for each level. reads_leaves: whether its logits are wanted behind the last level too.
    """
    propose = _propose_static if plan.nodes is None else _propose_grown
    draft = propose(request, member, plan, reads_leaves)
    request.statistics.drafted[place] += len(draft.tokens) - draft.tokens.count(-1)
    return draft


def _propose_static(request: Request, member: Member, plan: TreePlan, reads_leaves: bool) -> DraftTree:
    branches = plan.branches[: request.remaining]
    tree = TokenTree.branching(branches)
    parents = tree.parents.tolist()
    tokens: list[int] = []
    by_gumbel = request.draws_by_gumbel and not request.is_greedy
    siblings = None if request.is_greedy or by_gumbel else SIBLINGS[plan.children]
    reader = TreeReader(request, member)
    logits = reader.rows[0][0]  # [nodes of the level above, vocab]
    for level, count in enumerate(branches):
        first = len(tokens)
        if by_gumbel:
            tokens += draw_best_children(request, logits, count, level)
        elif siblings is not None:
            for row in logits:
                tokens += draw_siblings(request, row, count, len(tokens), siblings)
        else:
            tokens += logits.topk(count, dim=-1).indices.flatten().tolist()
        if level + 1 < len(branches) or reads_leaves:
            logits = reader.read(tokens[first:], parents[first : len(tokens)])
    return reader.finish(tree, tokens, siblings, list(range(len(tokens))))


def _propose_grown(request: Request, member: Member, plan: TreePlan, reads_leaves: bool) -> DraftTree:
    assert plan.nodes is not None
    growth = TokenTree.grow(plan.nodes, plan.width, max_levels=min(plan.levels, request.remaining))
    reader = TreeReader(request, member)
    logits = reader.rows[0][0]
    parents: list[int] = []  # of all candidates, as places of the reader
    tokens: list[int] = []
    places = {-1: -1}  # of the candidates that were read
    while len(frontier := growth.frontier.tolist()):
        if frontier != [-1]:
            places |= {candidate: len(reader.tokens) + row for row, candidate in enumerate(frontier)}
            logits = reader.read([tokens[i] for i in frontier], [parents[i] for i in frontier])
        chances, ids = logits.float().softmax(dim=-1).topk(min(plan.width, logits.shape[-1]), dim=-1)
        growth.add(ids.cpu().numpy(), chances.cpu().numpy())
        tokens += ids.flatten().tolist()
        parents += [places[candidate] for candidate in frontier for _ in range(ids.shape[1])]
    tree, kept_tokens, candidates = growth.prune()
    unread = [candidate for candidate in candidates.tolist() if candidate not in places]
    if unread and reads_leaves:
        places |= {candidate: len(reader.tokens) + row for row, candidate in enumerate(unread)}
        reader.read([tokens[i] for i in unread], [parents[i] for i in unread])
    slots = [places.get(candidate, len(reader.tokens)) for candidate in candidates.tolist()]
    return reader.finish(tree, kept_tokens.tolist(), None, slots)
