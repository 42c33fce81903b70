"""Trees whose rows lie on several ranks: `specens_kernels.ops.verify_tree.reference`, with what it sums told."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from specens_kernels.arguments import NO_LOGPROBS, TreeArguments
from specens_kernels.distributed.draw import (
    Choice,
    Drawn,
    Masses,
    draw_steps,
    mass_steps,
    picked_steps,
    reported,
    top_steps,
)
from specens_kernels.distributed.shard import Shard
from specens_kernels.distributed.slices import Places, SlicedChoice, entropies, has_source, residuals
from specens_kernels.distributed.steps import Steps, together
from specens_kernels.distributed.target import Rows, invalid_draft, masses_here, probabilities
from specens_kernels.distributed.tree_offers import DenseShares, Rounds, SlicedShares, offer_steps
from specens_kernels.distributed.tree_rows import Call, Seen, nothing_rejected, prepare, read_steps
from specens_kernels.distributed.tree_runs import run_steps
from specens_kernels.ops.verify_chain.reference import as_verdict, bad_uniforms, chain_uniforms
from specens_kernels.ops.verify_chain.rules import entropy, typical_limit
from specens_kernels.ops.verify_tree.reference import at_path, used_status
from specens_kernels.ops.verify_tree.rules import Acceptance, Drafts, first_kept, first_passing, longest
from specens_kernels.ops.verify_tree.shape import path_to
from specens_kernels.rules import RuleKind


class Accepted(NamedTuple):
    acceptance: Acceptance
    draft_status: Tensor  # int64 [batch, nodes]
    masses: Masses | None  # of what is left of all rows, where ranks have told them
    places: Places | None  # of the last row, where kernels read what is left of it


def tree_steps(shard: Shard, arguments: TreeArguments, rounds: Rounds | None) -> Steps[list[Tensor]]:
    """What `verify_tree` of the whole vocabulary gives, on every rank.

    rounds: None: each node has a turn of its own.
    """
    call = prepare(shard, arguments)
    seen = yield from read_steps(call)
    accepted = yield from accept_steps(call, seen, rounds)
    return (yield from finish_steps(call, seen, accepted))


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
        own, none = masses_here(call.shard, rows), target.new_zeros(len(target), 0)
        masses, of_all = yield from mass_steps(call.shard, none, own, of_rows)
        passes = call.usable & (seen.at_target > typical_limit(of_all, call.rule).gather(1, shape.parent_row))
        last = torch.where(rows.greedy, most_likely, longest(passes, shape))
        places = None
        if seen.slices is not None:
            places = seen.places(last[:, None], None, nothing_rejected(call))
        return Accepted(Acceptance(last, target, empty, False), no_status, masses, places)
    uniforms = tested_uniforms(call, rows)
    shares = DenseShares(call, seen, target) if seen.slices is None else SlicedShares(call, seen, seen.slices)
    in_runs = call.kind == RuleKind.K_SEQ and has_source(call.draft)
    yield from (run_steps if in_runs else offer_steps)(shares, uniforms, rounds)
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


def as_drafts(call: Call, uniforms: Tensor) -> Drafts:
    """What functions of the reference look at that read no probabilities."""
    return Drafts(uniforms, uniforms, call.tokens, call.tokens, uniforms, call.usable, call.shape)


def tested_uniforms(call: Call, rows: Rows) -> Tensor:
    without = rows.greedy | (call.kind == RuleKind.GUMBEL)
    return torch.where(without[:, None], 0.0, chain_uniforms(call.random, None, call.tokens))


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
