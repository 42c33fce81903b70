"""How a drafter makes a tree: level by level from its distributions, grown by them, or from candidate chains."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from specens.decoding.drafts import ROOT
from specens.decoding.draws import draft_logprobs, draw_best_children, draw_siblings, largest, most_likely
from specens.decoding.request import OUTSIDE, Request
from specens.drafters.tree_plan import TreePlan
from specens_kernels import TokenTree

SIBLINGS = {"top": None, "sampled": "without_replacement", "independent": "with_replacement"}
Read = Callable[[list[Request]], None]


def draft_trees(index: int, read: Read, requests: Sequence[Request], plan: TreePlan, levels: int | None = None) -> None:
    """Append a tree to each request from the rows of a place, no deeper than `levels` and tokens that may still come.

    read: sees to it that requests have these rows after their settled text and all their drafts; once for each level.
    """
    levels = plan.most_levels if levels is None else min(levels, plan.most_levels)
    for request in requests:
        request.drafts.siblings = None if _by_scores(request) else SIBLINGS[plan.children]
    if not plan.is_grown:
        _fill(index, read, requests, plan, levels)
        return
    _grow(index, read, [request for request in requests if request.drafts.siblings is None], plan, levels)
    _draw(index, read, [request for request in requests if request.drafts.siblings is not None], plan, levels)


def _by_scores(request: Request) -> bool:
    """Whether a request's children are the best ones of a row, whatever the plan says."""
    return request.is_greedy or request.draws_by_gumbel


def _fill(index: int, read: Read, requests: Sequence[Request], plan: TreePlan, levels: int) -> None:
    """Give every node of the plan's shape a token."""
    made = {request: {ROOT: ROOT} for request in requests}  # drafts by nodes of the shape
    level = {request: [ROOT] for request in requests}
    for _ in range(levels):
        level = {request: _fertile(request, nodes, made[request], plan) for request, nodes in level.items()}
        level = {request: nodes for request, nodes in level.items() if nodes}
        if not level:
            return
        read(list(level))
        level = {request: _fill_level(index, request, nodes, made[request], plan) for request, nodes in level.items()}


def _fertile(request: Request, nodes: Iterable[int], made: dict[int, int], plan: TreePlan) -> list[int]:
    return [node for node in nodes if node in plan.families and request.can_draft_after(made[node])]


def _fill_level(index: int, request: Request, nodes: list[int], made: dict[int, int], plan: TreePlan) -> list[int]:
    """Give the children of some nodes of the shape their tokens; those that have got one."""
    ranks = plan.ranks
    families = [plan.families[node] for node in nodes]
    after = [made[node] for node in nodes]
    most = 1 + max([ranks[child] for family in families for child in family])
    if request.drafts.siblings is not None:
        rows = draft_logprobs(request, index, after)
        for parent, row, family in zip(after, rows, families, strict=True):
            for child, (token, _) in zip(family, draw_siblings(request, row, parent, request.drafts.siblings)):
                made[child] = len(request.drafts)
                request.add_draft(token, index, parent=parent)
    else:
        scored = request.draws_by_gumbel and not request.is_greedy
        best = draw_best_children(request, index, after, most) if scored else most_likely(request, index, after, most)
        for parent, tokens, family in zip(after, best, families, strict=True):
            for child in family:
                if ranks[child] < len(tokens):
                    made[child] = request.choose_draft(tokens[ranks[child]], index, parent)
    return [child for family in families for child in family if child in made]


class _Growth:
    """A request's tree while it grows: candidates, and which of them are drafts, since they were expanded."""

    def __init__(self, request: Request, plan: TreePlan, levels: int) -> None:
        assert plan.nodes is not None
        levels = min(levels, request.remaining)
        self.request, self._plan, self._first = request, plan, len(request.drafts)
        self._growth = TokenTree.grow(plan.nodes, plan.width, max_levels=levels, order=plan.order)
        self._tokens: list[int] = []
        self._parents: list[int] = []
        self._drafts = {ROOT: ROOT}  # by candidates

    def expand(self, index: int) -> bool:
        """Add the children of the newest drafts; whether there is more to expand, which are drafts then."""
        frontier, length = self._growth.frontier.tolist(), self._growth.expected_length
        rows = draft_logprobs(self.request, index, [self._drafts[candidate] for candidate in frontier])
        scores, ids = largest(rows, self._plan.width)
        chances = scores.exp()
        for line, candidate in zip(chances, frontier, strict=True):
            if not self.request.can_draft_after(self._drafts[candidate]):
                line.zero_()  # of no use
        self._growth.add(ids.cpu().numpy(), chances.cpu().numpy())
        self._tokens += ids.flatten().tolist()
        self._parents += [candidate for candidate in frontier for _ in range(ids.shape[1])]
        if self._growth.expected_length - length < self._plan.gain:
            return False
        for candidate in self._growth.frontier.tolist():
            self._add(candidate, index)
        return len(self._growth.frontier) > 0

    def _add(self, candidate: int, index: int) -> None:
        parent = self._drafts[self._parents[candidate]]
        self._drafts[candidate] = self.request.choose_draft(self._tokens[candidate], index, parent)

    def finish(self, index: int) -> None:
        """Keep the most probable candidates as drafts: those that were read first."""
        candidates = self._growth.prune()[2].tolist()
        kept = {self._drafts[candidate] for candidate in candidates if candidate in self._drafts}
        left = [node for node in range(len(self.request.drafts)) if node < self._first or node in kept]
        self.request.keep_drafts(left)
        numbers = {ROOT: ROOT} | {node: number for number, node in enumerate(left)}
        self._drafts = {candidate: numbers[node] for candidate, node in self._drafts.items() if node in numbers}
        for candidate in candidates:
            if candidate not in self._drafts:
                self._add(candidate, index)


def _grow(index: int, read: Read, requests: Sequence[Request], plan: TreePlan, levels: int) -> None:
    growths = [_Growth(request, plan, levels) for request in requests if request.can_draft_after(ROOT)]
    growing = growths
    while growing:
        read([growth.request for growth in growing])
        growing = [growth for growth in growing if growth.expand(index)]
    for growth in growths:
        growth.finish(index)


def _draw(index: int, read: Read, requests: Sequence[Request], plan: TreePlan, levels: int) -> None:
    """Draw children level by level, as long as one is probable enough to be come to [Xiong et al., DySpec, 2024]."""
    level: dict[Request, dict[int, float]] = {request: {ROOT: 1.0} for request in requests}
    most = {request: len(request.drafts) + (plan.nodes or 0) for request in requests}
    for _ in range(levels):
        level = {
            request: {node: value for node, value in values.items() if request.can_draft_after(node)}
            for request, values in level.items()
        }
        level = {request: values for request, values in level.items() if values}
        if not level:
            return
        read(list(level))
        for request, values in level.items():
            level[request] = _draw_level(index, request, values, plan.threshold, most[request])


def _draw_level(index: int, request: Request, values: dict[int, float], least: float, most: int) -> dict[int, float]:
    """The children of nodes that are come to with some probabilities, and the probabilities of these."""
    children: dict[int, float] = {}
    for (node, value), row in zip(values.items(), draft_logprobs(request, index, list(values)), strict=True):
        if value < least or len(request.drafts) >= most:
            continue
        for token, chance in draw_siblings(request, row, node, "without_replacement"):
            children[len(request.drafts)] = value * chance
            request.add_draft(token, index, parent=node)
            value *= 1 - chance
            if value < least or len(request.drafts) >= most:
                break
    return children


def add_candidates(request: Request, chains: Iterable[Sequence[int]], plan: TreePlan) -> None:
    """Merge chains that were chosen, the likeliest first, into a tree after the settled text, as far as they fit."""
    request.drafts.siblings = None
    most = len(request.drafts) + (plan.nodes or len(plan.tree))
    shape_of = {ROOT: ROOT}  # the shape's node of each draft
    num_children = {ROOT: 0}
    for chain in chains:
        node = ROOT
        for token in chain:
            child = request.drafts.edges.get((node, token))
            if child not in shape_of:
                below = [] if plan.is_grown else plan.families.get(shape_of[node], [])
                fits = len(request.drafts) < most and (plan.is_grown or num_children[node] < len(below))
                if not fits or request.drafts.depth(node) >= plan.most_levels or not request.can_draft_after(node):
                    break
                child = request.choose_draft(token, OUTSIDE, node)
                shape_of[child] = below[num_children[node]] if below else ROOT
                num_children[child], num_children[node] = 0, num_children[node] + 1
            node = child


def paths_of(parents: NDArray[np.int64], tokens: NDArray[np.int64]) -> list[list[int]]:
    """The tokens on the way to each node of a tree."""
    paths: list[list[int]] = []
    for parent, token in zip(parents.tolist(), tokens.tolist(), strict=True):
        paths.append([*(paths[parent] if parent >= 0 else []), token])
    return paths
