"""The law of what tree verification emits, summed over all draft trees and integrated over all uniforms, without error.

Given the tokens of a tree, a node's uniform is compared with one number, the next token's with the cumulative
sums of what is left at each row. These numbers are worked out here a second time, in plain Python, tree by tree.
Between them the verdict is the same everywhere, which is checked at both ends of each interval.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from laws.enumeration import Enumeration
from laws.tiny_targets import Model
from torch import Tensor

from specens_kernels import TokenTree, Verdict, verify_tree

NARROWEST = 1e-5  # interval between two numbers that are not the same
EDGE = 1e-3  # how near to the end of an interval, as a share of it, verdicts are looked at
CHUNK = 100_000
Tokens = tuple[int, ...]  # of each node, -1 where there is none


@dataclass(frozen=True)
class Plan:
    """How trees are drafted and verified. drafts: of each node, by the token before, [vocab, vocab]."""

    model: Model
    tree: TokenTree
    rule: str
    siblings: str | None  # None: children are chosen
    drafts: list[Tensor]
    arguments: dict[str, Any]

    @property
    def parents(self) -> list[int]:
        return self.tree.parents.tolist()

    @property
    def depth(self) -> list[int]:
        return self.tree.depth.tolist()


def plan(model: Model, tree: TokenTree, rule: str, siblings: str | None) -> Plan:
    """The model's drafter at each depth drafts all nodes of that depth."""
    arguments, depth = dict(model.arguments), tree.depth.tolist()
    drafter = arguments.get("drafter")
    if isinstance(drafter, Tensor):
        arguments["drafter"] = drafter[depth][None]
    return Plan(model, tree, rule, siblings, [model.draft[level] for level in depth], arguments)


def row_of(tokens: Tokens, node: int, vocab: int) -> int:
    """The row of a table after a node, or after token 0 for the root, -1; after no token of the target it is any."""
    return 0 if node < 0 else max(0, tokens[node]) % vocab


def node_draft(plan: Plan, tokens: Tokens, node: int) -> list[float] | None:
    """What a node is drawn from, given the nodes before it; None where nothing is left to draw, or no parent."""
    parent = plan.parents[node]
    if parent >= 0 and tokens[parent] < 0:
        return None
    draft: list[float] = plan.drafts[node][row_of(tokens, parent, len(plan.drafts[node]))].tolist()
    if plan.siblings == "without_replacement":
        taken = {tokens[other] for other in range(node) if plan.parents[other] == parent}
        draft = [0.0 if token in taken else value for token, value in enumerate(draft)]
    total = sum(draft)
    return [value / total for value in draft] if total > 0 else None


def drawn_trees(plan: Plan) -> Iterator[tuple[Tokens, float]]:
    """Every tree that may be drawn, and its probability."""
    trees: list[tuple[Tokens, float]] = [((), 1.0)]
    for node in range(len(plan.parents)):
        longer: list[tuple[Tokens, float]] = []
        for tokens, probability in trees:
            draft = node_draft(plan, tokens, node)
            options = [(-1, 1.0)] if draft is None else list(enumerate(draft))
            longer += [((*tokens, token), probability * own) for token, own in options if own > 0]
        trees = longer
    return iter(trees)


def numbers(plan: Plan, tokens: Tokens) -> tuple[list[float], list[float]]:
    """With what each node's uniform is compared, and the next token's."""
    parents = plan.parents
    target, vocab = plan.model.target, plan.model.target.shape[-1]
    levels = [0, *(level + 1 for level in plan.depth)]
    rows = [target[levels[node + 1], row_of(tokens, node, vocab)].tolist() for node in range(-1, len(parents))]
    share, ratios = [1.0] * len(rows), [0.0] * len(parents)
    runs = runs_of(plan, tokens) if plan.rule == "k_seq" else {}
    for node, parent in enumerate(parents):
        if tokens[node] < 0:
            share[node + 1] = 0.0
            continue
        own = [float(token == tokens[node]) for token in range(len(rows[0]))]
        draft = own if plan.siblings is None else node_draft(plan, tokens, node)
        assert draft is not None
        draft = draft[: len(rows[0])] + [0.0] * (len(rows[0]) - len(draft))
        if len(run := runs.get(node, [node])) > 1:
            ratio = ratio_of(rows[parent + 1], draft, len(run))
            draft = [ratio * value for value in draft]
        offered = [share[parent + 1] * value for value in rows[parent + 1]]
        there = offered[tokens[node]] if tokens[node] < len(offered) else 0.0
        ratios[node] = there / max(draft[tokens[node]], there) if there > 0 else 0.0
        if node != run[-1]:
            continue
        residual = [max(0.0, value - taken) for value, taken in zip(offered, draft)]
        mass = sum(residual)
        if mass > 1e-9:
            rows[parent + 1] = [value / mass for value in residual]
            share[parent + 1] = mass / (mass + 1 - share[parent + 1])
        elif share[parent + 1] < 1:
            share[parent + 1] = 0.0
        if plan.rule == "traversal":
            share[node + 1] = ratios[node]
    compared = share[1:] if plan.rule == "traversal" else ratios
    return compared, [number for row in rows for number in itertools.accumulate(row)]


def runs_of(plan: Plan, tokens: Tokens) -> dict[int, list[int]]:
    """The siblings that one drafter drew one after the other, of each node that was drawn."""
    drafters = plan.arguments.get("drafter")
    found: dict[int, list[int]] = {}
    newest: dict[int, tuple[int, list[int]]] = {}
    for node, parent in enumerate(plan.parents):
        drafter = int(drafters[0, node]) if isinstance(drafters, Tensor) else 0
        if plan.siblings is None or drafter < 0 or tokens[node] < 0:
            drafter = -1 - node
        if newest.get(parent, (None, []))[0] != drafter:
            newest[parent] = drafter, []
        found[node] = newest[parent][1]
        found[node].append(node)
    return found


def ratio_of(target: list[float], draft: list[float], count: int) -> float:
    """Where what `count` tests accept of a token at most, ratio * its overlap, is what they accept in all."""
    low, high = 1.0, float(count)
    for _ in range(100):
        ratio = (low + high) / 2
        overlap = sum(min(own, value / ratio) for own, value in zip(draft, target))
        low, high = (low, ratio) if 1 - (1 - overlap) ** count <= ratio * overlap else (ratio, high)
    return high


def intervals(ends: Sequence[float]) -> list[tuple[float, float]]:
    """[0, 1) cut at these numbers."""
    cuts = [0.0]
    for end in sorted([*ends, 1.0]):
        if end > cuts[-1] + 1e-9 and end <= 1 + 1e-9:
            cuts.append(min(end, 1.0))
    pairs = list(itertools.pairwise(cuts))
    assert min(high - low for low, high in pairs) > NARROWEST, pairs
    return pairs


def enumerate_trees(plan: Plan, trees: Sequence[tuple[Tokens, float]] | None = None) -> Enumeration:
    """Verify every tree, or those given with their probabilities, with every uniform."""
    drawn, low, high, weights = [], [], [], []
    for tokens, probability in drawn_trees(plan) if trees is None else trees:
        compared, of_rows = numbers(plan, tokens)
        cells = itertools.product(*[intervals([end]) for end in compared], intervals(of_rows))
        for cell in cells:
            weight = probability
            for begin, end in cell:
                weight *= end - begin
            drawn.append(tokens)
            low.append([begin + EDGE * (end - begin) for begin, end in cell])
            high.append([end - EDGE * (end - begin) for begin, end in cell])
            weights.append(weight)
    chosen = torch.tensor(drawn).reshape(len(weights), -1)
    first = verify_all(plan, chosen, torch.tensor(low, dtype=torch.float64))
    second = verify_all(plan, chosen, torch.tensor(high, dtype=torch.float64))
    assert torch.equal(first.tokens, second.tokens), "a verdict hangs on a uniform in another way than was thought"
    return Enumeration(first, torch.tensor(weights, dtype=torch.float64))


def verify_all(plan: Plan, tokens: Tensor, random_numbers: Tensor) -> Verdict:
    chunks = zip(tokens.split(CHUNK), random_numbers.split(CHUNK), strict=True)
    parts = [verify_some(plan, own, own_uniforms) for own, own_uniforms in chunks]
    fields = zip(*parts, strict=True)
    return Verdict(*[None if field[0] is None else torch.cat(field) for field in fields])


def verify_some(plan: Plan, tokens: Tensor, random_numbers: Tensor) -> Verdict:
    """Rows come from the tables of the model, by depth and the token before."""
    model, vocab = plan.model, plan.model.target.shape[-1]
    level = torch.tensor([0, *(depth + 1 for depth in plan.depth)])
    previous = torch.nn.functional.pad(tokens, (1, 0)).clamp(min=0) % vocab
    arguments = dict(plan.arguments)
    if isinstance(arguments.get("drafter"), Tensor):
        arguments["drafter"] = arguments["drafter"].expand(len(tokens), -1)
    if model.draft_logits is not None:
        arguments["draft_logits"] = model.draft_logits[level.clamp(max=len(model.draft_logits) - 1), previous]
    return verify_tree(
        [logits[level, previous] for logits in model.member_logits],
        tokens,
        plan.tree,
        rule=plan.rule,
        siblings=plan.siblings,
        uniforms=random_numbers,
        backend="reference",
        **arguments,
    )
