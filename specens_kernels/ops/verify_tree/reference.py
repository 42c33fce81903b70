"""The definition of tree verification, in float64; the rules and their sources are in `rules`."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from specens_kernels.arguments import (
    NO_LOGPROBS,
    TARGET_LOGPROBS,
    Draft,
    RandomSource,
    Target,
    Tree,
    TreeArguments,
)
from specens_kernels.ops.sample.gumbel import best_tokens
from specens_kernels.ops.sample.reference import draw, empty_report, most_likely
from specens_kernels.ops.target_logprobs.processing import Paths
from specens_kernels.ops.target_logprobs.reference import (
    Distributions,
    ensemble_logprobs,
    one_hot,
    parameters,
    raw,
    target_probs,
)
from specens_kernels.ops.verify_chain.reference import (
    as_verdict,
    bad_uniforms,
    chain_uniforms,
    draft_rows,
    status_of,
)
from specens_kernels.ops.verify_tree.rules import Acceptance, Drafts, apply_rule
from specens_kernels.ops.verify_tree.shape import Shape, path_to, paths, rows_of_parents, tree_shape
from specens_kernels.results import Status
from specens_kernels.rules import RuleKind

LEAST_MASS_LEFT = 2.0**-100  # of a draft distribution without the siblings' tokens


class NodeDrafts(NamedTuple):
    """What nodes were drawn from."""

    probs: Tensor  # float64 [batch, nodes, vocab] of target and drafter together, given the siblings before
    drafters: Tensor  # int64 [batch, nodes], -1: one-hot
    status: Tensor  # int64 [batch, nodes]


def node_drafts(target: Target, draft: Draft, tree: Tree, shape: Shape, greedy: Tensor) -> NodeDrafts:
    """The distributions of all nodes."""
    tokens = draft.tokens.long()
    vocab = max(logits.shape[-1] for logits in target.member_logits)
    if draft.logits is not None:
        vocab = max(vocab, draft.logits.shape[-1])
    of_nodes, draft, before = at_parents(target, draft, tokens, shape)
    rows = draft_rows(of_nodes, draft, vocab, greedy, before)
    drafters = torch.zeros_like(tokens) if draft.drafters is None else draft.drafters.long()
    drafters = torch.where(rows.drawn, drafters, -1)
    if not tree.without_replacement:
        return NodeDrafts(rows.probs, drafters, rows.status)
    taken = earlier_siblings(shape).double() @ one_hot(tokens, vocab) > 0
    remaining = torch.where(taken, 0.0, rows.probs)
    mass = remaining.sum(-1)
    drawn = rows.drawn & (mass > LEAST_MASS_LEFT)
    probs = torch.where(rows.drawn[..., None], one_hot(tokens, vocab), rows.probs)
    probs = torch.where(drawn[..., None], remaining / mass[..., None], probs)
    status = rows.status | (rows.drawn & ~drawn) * Status.INVALID_DRAFT_DISTRIBUTION
    return NodeDrafts(probs, torch.where(drawn, drafters, -1), status)


def at_parents(target: Target, draft: Draft, tokens: Tensor, shape: Shape) -> tuple[Target, Draft, Paths]:
    """What nodes were drawn from: the rows of their parents, and the tokens before them."""
    of_nodes = target._replace(
        member_logits=[rows_of_parents(logits, shape) for logits in target.member_logits],
        allowed=None if target.allowed is None else rows_of_parents(target.allowed, shape),
    )
    if draft.logits is not None:
        draft = draft._replace(logits=rows_of_parents(draft.logits, shape))
    return of_nodes, draft, Paths(tokens, rows_of_parents(shape.above, shape))


def earlier_siblings(shape: Shape) -> Tensor:
    """bool [batch, node, other]: whether the other node has the same parent and comes before."""
    node = torch.arange(shape.parent_row.shape[1], device=shape.parent_row.device)
    siblings = (shape.parent_row[:, :, None] == shape.parent_row[:, None]) & shape.used[:, None]
    return siblings & (node < node[:, None])


def verify_tree(*given: Any, **options: Any) -> list[Tensor]:
    """tokens, num_accepted, num_tokens, next_token, status, path, and what is reported; see `Verdict`."""
    arguments = TreeArguments.of(*given, **options)
    target, draft, tree = arguments[:3]
    tokens, shape = draft.tokens.long(), tree_shape(tree, draft)
    rows = ensemble_logprobs(target, paths(tokens, shape))
    probs, drawn = target_probs(rows), ~rows.greedy
    if arguments.rule.kind == RuleKind.GUMBEL:
        probs = one_hot(best_scores(arguments.random_numbers, rows, shape), probs.shape[-1])
        drawn = torch.zeros_like(rows.greedy)
    own = node_drafts(target, draft, tree, shape, rows.greedy)
    usable = shape.used & (tokens >= 0) & (tokens < own.probs.shape[-1])
    random_numbers = torch.where(drawn[:, None], chain_uniforms(arguments.random_numbers, None, tokens), 0.0)
    draft_probs = own.probs[..., : probs.shape[-1]]
    drafts = Drafts(probs, draft_probs, tokens, own.drafters, random_numbers, usable, shape)
    accepted = apply_rule(arguments.rule, drafts, rows.greedy)

    request = torch.arange(tokens.shape[0], device=tokens.device)
    num_accepted = shape.depth[request, accepted.last]
    uniform = torch.where(drawn, chain_uniforms(arguments.random_numbers, num_accepted, tokens), 0.0)
    next_token = draw(accepted.left[request, accepted.last], uniform)

    path, on_path = path_to(accepted.last, shape, tree.levels)
    status = used_status(rows.status, own.status, accepted, drafts, on_path)
    num_nodes = torch.full_like(num_accepted, tokens.shape[1]) if draft.lens is None else draft.lens.long()
    invalid = rows.invalid | shape.invalid | parameters(draft.sampling, tokens).invalid
    invalid = invalid | bad_uniforms(random_numbers, uniform, num_nodes)
    path = torch.where(invalid[:, None], -1, path)
    verdict = [*as_verdict(at_path(tokens, path), num_accepted, next_token, status, invalid), path]
    if arguments.report.logprobs == NO_LOGPROBS:
        return verdict
    logprobs = rows.logprobs
    if arguments.report.logprobs != TARGET_LOGPROBS:
        logprobs = ensemble_logprobs(raw(target)).logprobs
    logprobs = logprobs[request[:, None], torch.nn.functional.pad(path + 1, (1, 0))]
    return [*verdict, *most_likely(logprobs, arguments.report.top, verdict[0])]


def best_scores(source: RandomSource, rows: Distributions, shape: Shape) -> Tensor:
    """The tokens of the best Gumbel scores, int64 [batch, rows]; a row's position is `positions` + its depth."""
    positions = None if source.positions is None else source.positions[:, None] + shape.depth
    return best_tokens(rows, source.seeds, positions, 1)[..., 0]


def empty_verdict(*given: Any, **options: Any) -> list[Tensor]:
    """Tensors of the shapes that `verify_tree` gives, which takes a step a node: too many for a tracer."""
    arguments = TreeArguments.of(*given, **options)
    batch, width = arguments.draft.tokens.shape[0], arguments.tree.levels + 1
    tokens = arguments.draft.tokens.new_empty((batch, width), dtype=torch.int64)
    counts, path = [tokens.new_empty(batch) for _ in range(3)], tokens.new_empty((batch, width - 1))
    status = tokens.new_empty(batch, dtype=torch.int32)
    return [tokens, *counts, status, path, *empty_report(arguments.report, tokens, tokens.shape)]


def at_path(tokens: Tensor, path: Tensor) -> Tensor:
    """The tokens of a path, int64 [batch, levels]; -1 in the padding."""
    padded = torch.nn.functional.pad(tokens, (1, 0), value=-1)
    return padded.gather(1, path + 1)


def used_status(rows: Tensor, nodes: Tensor, accepted: Acceptance, drafts: Drafts, on_path: Tensor) -> Tensor:
    """The union of the status of the rows on the path, and of their children up to the accepted one, int64 [batch]."""
    batch, num_nodes = on_path.shape
    on_row = torch.nn.functional.pad(on_path, (1, 0), value=True)
    node = torch.arange(num_nodes, device=rows.device).expand(batch, -1)
    row = drafts.shape.parent_row
    stop = torch.full((batch, num_nodes + 2), num_nodes, dtype=torch.int64, device=rows.device)
    stop = stop.scatter(1, torch.where(on_path, row, num_nodes + 1), node)  # the accepted child of a row
    looked_at = drafts.shape.used & on_row.gather(1, row) & (node <= stop.gather(1, row))
    status = status_of(rows, on_row)
    if accepted.subtracts:
        status = status | status_of(nodes, looked_at & drafts.usable)
    status = status | (accepted.empty & looked_at & ~on_path).any(1) * Status.EMPTY_RESIDUAL
    return status | (looked_at & ~drafts.usable).any(1) * Status.INVALID_DRAFT_TOKEN
