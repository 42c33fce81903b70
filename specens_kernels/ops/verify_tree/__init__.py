"""verify_tree: from the raw logits at the nodes of draft trees to the tokens that a speculative step emits."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from specens_kernels.arguments import (
    NO_DRAFTER,
    SCHEMA,
    Draft,
    Rule,
    Target,
    Tree,
    coin_arguments,
    pack,
    report_arguments,
    sampling_arguments,
    target_arguments,
)
from specens_kernels.backend import implementations, select
from specens_kernels.checks import check_logits, check_tensor, fail, member_list
from specens_kernels.ops.tree_mask.reference import MAX_NODES
from specens_kernels.ops.verify_chain import checked_integers, drafter_arguments
from specens_kernels.ops.verify_tree import reference
from specens_kernels.ops.verify_tree.rules import RuleKind
from specens_kernels.types import INTEGER_DTYPES, Ensemble, Processing, Sampling, Typical, Verdict

if TYPE_CHECKING:
    from specens_kernels._host import TokenTree

RULES = {kind.name.lower(): int(kind) for kind in RuleKind}
SIBLINGS = {"with_replacement": 0, "without_replacement": 1}
PADDING = -2  # of parents
IMPLEMENTATIONS = implementations(
    "verify_tree", f"({SCHEMA}) -> Tensor[]", reference.verify_tree, fake=reference.empty_verdict
)


def verify_tree(
    member_logits: Tensor | Sequence[Tensor],
    draft_tokens: Tensor,
    parents: Tensor | TokenTree | Sequence[TokenTree],
    *,
    ensemble: Ensemble | None = None,
    sampling: Sampling = Sampling(),
    drafter: int | Tensor | None = None,
    draft_logits: Tensor | None = None,
    draft_sampling: Sampling | None = None,
    siblings: str | None = None,
    rule: str | Typical = "token",
    num_nodes: Tensor | None = None,
    max_levels: int | None = None,
    processing: Processing | None = None,
    process_drafts: bool = True,
    allowed: Tensor | None = None,
    seeds: Tensor | None = None,
    positions: Tensor | None = None,
    uniforms: Tensor | None = None,
    logprobs: bool | str = False,
    top_logprobs: int = 0,
    backend: str | None = None,
) -> Verdict:
    """Accept a path of each request's draft tree from the root down, and draw the token after it.

    Under the rules "token" and "traversal" the emitted tokens are distributed exactly as if each had been drawn from
    the target distribution: the ensemble's, after processing and sampling parameters. A tree that is a chain gives the
    tokens that `verify_chain` gives under "token" and "block", from the same seeds. No host synchronisation; traceable
    by torch.compile(fullgraph=True) with a tensor for parents.

    member_logits: float32, bfloat16 or float16 [batch, nodes + 1, vocab], a tensor or one a member, as in
        `verify_chain`: row 0 is the position after the committed text, row i + 1 the one after node i. So the child of
        a node i is judged at row i + 1.
    draft_tokens: int64 or int32 [batch, nodes]. A node whose id is -1 or outside the vocabularies of members and
        drafter is not accepted, nor what is below it.
    parents: int64 or int32 [batch, nodes], as in `tree_mask`: -1 (a child of the last committed token) or an earlier
        node. Another value, like the padding -2 of `TokenTree.batch`, makes the node and all below it padding. Or a
        TokenTree of so many nodes, the same for all requests, or a sequence of TokenTrees of at most so many.
    drafter: the member that drew the draft tokens from its own distribution after the parent: an index, or int64 or
        int32 like draft_tokens where several did (-1: none, one-hot). None with draft_logits None: one-hot, children
        that were chosen and not drawn (the most likely ones, as in EAGLE and Medusa; n-grams).
    draft_logits: an outside drafter's logits [batch, nodes + 1, vocab]: row i + 1 is what the children of node i were
        drawn from. Those of leaves are not read.
    siblings: how the children of a node were drawn; needed with drafter or draft_logits. "with_replacement": each
        independently of the others, so a token may come twice. "without_replacement": each without the tokens of the
        siblings before it. What is said here must be true, else the text is biased; for chains both are.
    rule: "token": from the root down, child after child. "traversal": from the leaves to the root, whole paths are
        tested: longer accepted paths, as lossless, but more rows are read. "typical", or a Typical with settings of its
        own: the longest path that the target finds likely enough; not lossless.
    num_nodes: int64 or int32 [batch]: nodes from there on are padding. None: `parents` alone says which are.
    max_levels: the most nodes of a path, the width of the result; deeper nodes are padding. None: that of the
        TokenTrees, and for a tensor all nodes, since their depth is known on the device only.
    ensemble, sampling, draft_sampling, processing, process_drafts, logprobs, top_logprobs: as in `verify_chain`. The
        output before a row is that of the committed text and of the tokens on the way to it.
    allowed: int32 [batch, nodes + 1, words]: bit masks as in `verify_chain`, of each row.
    seeds, positions: int64 [batch]: random numbers by Philox; positions is the absolute position of nodes of depth 0.
        A node's coin has its number as step; `sample` with that step draws the node itself, from another stream.
    uniforms: float64 or float32 [batch, nodes + 1] in [0, 1), instead of seeds and positions: a coin for each node and,
        last, one for the next token. Where every request is greedy (temperature 0.0), neither is needed: then the
        longest path of most likely tokens is accepted, whatever the rule.
    backend: None for the fastest one on the device, or "reference" or "cpp".

    Returns a Verdict whose `path` tells the accepted nodes. Raises ValueError naming the argument that is wrong,
    RuntimeError where a backend that was asked for by name is not usable. What only the device can read is checked
    there: `Status.INVALID_PARAMETER`.
    """
    members = member_list(member_logits, 3)
    device, (batch, rows) = members[0].device, members[0].shape[:2]
    check_tensor("draft_tokens", draft_tokens, (batch, None), INTEGER_DTYPES, device)
    nodes = draft_tokens.shape[1]
    if rows != nodes + 1:
        fail("member_logits", f"a row more than {nodes} nodes", list(members[0].shape))
    target = target_arguments(members, ensemble, sampling, processing, allowed)
    drawn_with = target.sampling
    if draft_sampling is not None:
        drawn_with = sampling_arguments("draft_sampling", draft_sampling, batch, device)
    index, drafters = draft_source(target, draft_tokens, drafter, draft_logits)
    if num_nodes is not None:
        num_nodes = checked_integers("num_nodes", num_nodes, (batch,), device)
    processed = int(process_drafts)
    draft = Draft(draft_tokens, drafters, draft_logits, None, num_nodes, index, nodes, processed, drawn_with)
    one_hot = drafter is None and draft_logits is None
    tree = tree_arguments(parents, draft_tokens, max_levels, sibling_code(siblings, one_hot))
    rule_group = rule_arguments(rule)
    coins = coin_arguments(uniforms, seeds, positions, (batch, rows), device, not target.sampling.greedy)
    report = report_arguments(logprobs, top_logprobs)
    _, run = select(IMPLEMENTATIONS, backend, device, "verify_tree")
    results = run(*pack(target, draft, drawn_with, tree, coins, rule_group, report))
    tokens, num_accepted, num_tokens, next_token, status, path, *reported = results
    emitted, top_tokens, top = (*reported, None, None, None)[:3]
    return Verdict(tokens, num_accepted, num_tokens, next_token, emitted, status, top_tokens, top, path)


def draft_source(
    target: Target, draft_tokens: Tensor, drafter: int | Tensor | None, draft_logits: Tensor | None
) -> tuple[int, Tensor | None]:
    """Check what the draft tokens were drawn from: the drafter's index, and perhaps one a node."""
    members = target.member_logits
    if draft_logits is None:
        return drafter_arguments(drafter, draft_tokens, members)
    if drafter is not None:
        fail("drafter", "either drafter or draft_logits", "both")
    check_logits("draft_logits", draft_logits, members[0].shape[:2], members[0].device)
    return NO_DRAFTER, None


def sibling_code(siblings: str | None, one_hot: bool) -> int:
    """The code of how siblings were drawn."""
    known = " or ".join(map(repr, SIBLINGS))
    if one_hot:
        if siblings is not None:
            fail("siblings", "None, as without drafter and draft_logits no draft is drawn", repr(siblings))
        return 0
    if not isinstance(siblings, str) or siblings not in SIBLINGS:
        fail("siblings", f"{known}, the way in which drafts were drawn", repr(siblings))
    return SIBLINGS[siblings]


def rule_arguments(rule: str | Typical) -> Rule:
    """The code of a rule and its settings."""
    if isinstance(rule, str) and rule == "typical":
        rule = Typical()
    if isinstance(rule, Typical):
        return Rule(int(RuleKind.TYPICAL), rule.threshold, rule.alpha)
    if not isinstance(rule, str) or rule not in RULES:
        fail("rule", f"one of {', '.join(map(repr, RULES))} or a Typical", repr(rule))
    return Rule(RULES[rule], 0.0, 0.0)


def tree_arguments(
    parents: Tensor | TokenTree | Sequence[TokenTree], draft_tokens: Tensor, max_levels: int | None, siblings: int
) -> Tree:
    """Check the trees and write down their parents."""
    nodes = draft_tokens.shape[1]
    if nodes > MAX_NODES:
        fail("draft_tokens", f"at most {MAX_NODES} nodes", nodes)
    if isinstance(parents, Tensor):
        check_tensor("parents", parents, tuple(draft_tokens.shape), INTEGER_DTYPES, draft_tokens.device)
        table, levels = parents.to(torch.int64).contiguous(), nodes
    else:
        table, levels = parents_of_trees(parents, draft_tokens)
    if max_levels is None:
        max_levels = levels
    if isinstance(max_levels, bool) or not isinstance(max_levels, int) or max_levels < 0:
        fail("max_levels", "None or an integer >= 0", repr(max_levels))
    return Tree(table, max_levels, siblings)


def parents_of_trees(trees: TokenTree | Sequence[TokenTree], draft_tokens: Tensor) -> tuple[Tensor, int]:
    """The parents of TokenTrees, int64 [batch, nodes], and the most nodes of a path."""
    from specens_kernels import TokenTree

    batch, nodes = draft_tokens.shape
    if isinstance(trees, TokenTree):
        if len(trees) != nodes:
            fail("parents", f"a tree of {nodes} nodes", f"{len(trees)} nodes")
        table = torch.from_numpy(trees.parents).expand(batch, nodes).contiguous()
        return table.to(draft_tokens.device), trees.num_levels
    if not isinstance(trees, Sequence) or not all(isinstance(tree, TokenTree) for tree in trees):
        fail("parents", "a tensor [batch, nodes], a TokenTree or a sequence of TokenTrees", type(trees).__name__)
    if len(trees) != batch:
        fail("parents", f"a tree for each of {batch} requests", f"{len(trees)} trees")
    table = torch.full((batch, nodes), PADDING, dtype=torch.int64)
    for request, tree in enumerate(trees):
        if len(tree) > nodes:
            fail(f"parents[{request}]", f"a tree of at most {nodes} nodes", f"{len(tree)} nodes")
        table[request, : len(tree)] = torch.from_numpy(tree.parents)
    return table.to(draft_tokens.device), max((tree.num_levels for tree in trees), default=0)
