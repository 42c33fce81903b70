"""verify_tree: from the raw logits at the nodes of draft trees to the tokens that a speculative step emits."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from specens_kernels.backend import implementations, run_operator
from specens_kernels.ensembles import Ensemble
from specens_kernels.ops.verify_tree import reference
from specens_kernels.ops.verify_tree.checks import SIBLINGS, TreeCall, check, out_names
from specens_kernels.packing import (
    Options,
    add_draft,
    add_random,
    add_report,
    add_rule,
    draft_numbers,
    sampling_numbers,
    target_options,
    whole,
)
from specens_kernels.results import Verdict
from specens_kernels.rules import TREE, Typical, chosen
from specens_kernels.sampling import Processing, Sampling
from specens_kernels.values import fail
from specens_kernels.workspace import Workspace

if TYPE_CHECKING:
    from specens_kernels._host import TokenTree

PADDING = -2  # of parents
IMPLEMENTATIONS = implementations("verify_tree", reference.verify_tree, fake=reference.empty_verdict)


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
    out: Verdict | None = None,
    workspace: Workspace | None = None,
    backend: str | None = None,
) -> Verdict:
    """Accept a path of each request's draft tree from the root down, and draw the token after it.

    Under all rules but "typical" the emitted tokens are distributed exactly as if each had been drawn from the target
    distribution: the ensemble's, after processing and sampling parameters. A tree that is a chain gives the tokens that
    `verify_chain` gives under "token", "block" and "gumbel", from the same seeds. No host synchronisation; traceable by
    torch.compile(fullgraph=True) with a tensor for parents.

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
    rule: "token": from the root down, child after child. "k_seq": likewise, but children that one drafter drew with
        replacement are tested alike, against one target (SpecTr): more are accepted. "traversal": from the leaves to
        the root, whole paths are tested: longer accepted paths, as lossless, but more rows are read.
        "gumbel": the path of the tokens of the best scores, as in `verify_chain`: a seed is a text, whatever the tree
        is. Children drawn by `sample` with method="gumbel" and count are accepted most often; how they were drawn plays
        no part, so drafter, draft_logits, draft_sampling, siblings and uniforms must be None. "typical", or a Typical
        with settings of its own: the longest path that the target finds likely enough; not lossless.
    num_nodes: int64 or int32 [batch]: nodes from there on are padding. None: `parents` alone says which are.
    max_levels: the most nodes of a path, the width of the result; deeper nodes are padding. None: that of the
        TokenTrees, and for a tensor all nodes, since their depth is known on the device only.
    ensemble, sampling, draft_sampling, processing, process_drafts, logprobs, top_logprobs: as in `verify_chain`. The
        output before a row is that of the committed text and of the tokens on the way to it.
    allowed: int32 [batch, nodes + 1, words]: bit masks as in `verify_chain`, of each row.
    seeds, positions: int64 [batch]: random numbers by Philox; positions is the absolute position of nodes of depth 0.
        A node's uniform has its number as step; `sample` with that step draws the node itself, from another stream.
    uniforms: float64 or float32 [batch, nodes + 1] in [0, 1), instead of seeds and positions: one for each node and,
        last, one for the next token. Where every request is greedy (temperature 0.0), neither is needed: then the
        longest path of most likely tokens is accepted, whatever the rule.
    out: a Verdict of contiguous tensors to write into, with its path, as in `verify_chain`.
    workspace: a Workspace to take scratch memory on a GPU from, as in `verify_chain`.
    backend: "reference", "cpp", "triton" or None (the fastest for the device).

    Returns a Verdict whose `path` tells the accepted nodes. Raises ValueError naming the argument that is wrong,
    RuntimeError where a backend that was asked for by name is not usable. What only the device can read is checked
    there: `Status.INVALID_PARAMETER`.
    """
    origin = (drafter, draft_logits, draft_sampling, siblings, rule, num_nodes, max_levels)
    edits, random_numbers = (processing, process_drafts, allowed), (seeds, positions, uniforms)
    call = TreeCall(
        member_logits,
        draft_tokens,
        parents,
        ensemble,
        sampling,
        *origin,
        *edits,
        *random_numbers,
        logprobs,
        top_logprobs,
        out,
        workspace,
        backend,
    )
    results = run_operator(IMPLEMENTATIONS, "verify_tree", call, _pack, check, out_names)
    if out is not None:
        return out
    tokens, num_accepted, num_tokens, next_token, status, path, *reported = results
    emitted, top_tokens, top = (*reported, None, None, None)[:3]
    return Verdict(tokens, num_accepted, num_tokens, next_token, emitted, status, top_tokens, top, path)


def _pack(call: TreeCall, members: Sequence[Tensor]) -> tuple[tuple[Any, ...], Options]:
    sampling, draft_sampling = sampling_numbers(call.sampling), draft_numbers(call.draft_sampling)
    target = (sampling, call.processing, call.allowed, None, draft_sampling)
    options = target_options(members, call.ensemble, *target)
    add_draft(options, call.drafter, call.draft_logits, None, None, call.process_drafts)
    add_random(options, call.uniforms, call.seeds, call.positions)
    add_rule(options, call, chosen(call.rule, TREE), call.draft_tokens.shape[1])
    add_report(options, call.logprobs, call.top_logprobs)
    parents, levels = _tree_part(call)
    if call.siblings is not None and SIBLINGS[call.siblings]:
        options["without_replacement"] = True
    tree = [parents] if call.num_nodes is None else [parents, call.num_nodes]
    return (members, call.draft_tokens, tree, levels), options


def _tree_part(call: TreeCall) -> tuple[Tensor, int]:
    """The parents, and the most nodes of a path."""
    drawn = call.drafter is not None or call.draft_logits is not None
    if drawn != (call.siblings in SIBLINGS) or (not drawn and call.siblings is not None):
        raise ValueError("siblings")
    if call.rule == "k_seq" and call.siblings == "without_replacement":
        raise ValueError("siblings")
    if isinstance(call.parents, Tensor):
        table, levels = call.parents, call.draft_tokens.shape[1]
    else:
        table, levels = parents_of_trees(call.parents, call.draft_tokens)
    return table, levels if call.max_levels is None else whole("max_levels", call.max_levels)


PARENTS: dict[tuple[int, torch.device], Tensor] = {}  # of trees, by identity, as long as they live


def _kept_parents(tree: TokenTree, device: torch.device) -> Tensor:
    """int64 [nodes], copied to the device once."""
    key = id(tree), device
    if key not in PARENTS:
        PARENTS[key] = torch.from_numpy(tree.parents).to(device)
        weakref.finalize(tree, PARENTS.pop, key, None)
    return PARENTS[key]


def parents_of_trees(trees: TokenTree | Sequence[TokenTree], draft_tokens: Tensor) -> tuple[Tensor, int]:
    """The parents of TokenTrees, int64 [batch, nodes], and the most nodes of a path."""
    from specens_kernels import TokenTree

    batch, nodes = draft_tokens.shape
    if isinstance(trees, TokenTree):
        if len(trees) != nodes:
            fail("parents", f"a tree of {nodes} nodes", f"{len(trees)} nodes")
        return _kept_parents(trees, draft_tokens.device).expand(batch, nodes), trees.num_levels
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
