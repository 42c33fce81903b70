"""The test of drafts, chains and trees, of the requests of a batch, by the operations of `specens_kernels`."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from specens.decoding.draws import on_host, report_arguments, seeds_of_uniforms, told
from specens.decoding.logit_rows import joined
from specens.decoding.request import OUTSIDE, Request
from specens.decoding.settings import alike, edits, padded, row_masks, sampling_of, target_arguments, with_drafters
from specens.targets import DenseTarget
from specens_kernels import Verdict, verify_chain, verify_tree
from specens_kernels.backend import backend_for
from specens_kernels.ops.verify_tree import PADDING

NO_TOKEN = -1
TREE_RULES = ("traversal", "k_seq")  # which a chain is tested by as a tree


def num_scored(request: Request) -> int:
    """How many positions after the settled tokens have been scored by all members that have a weight."""
    return max(min([request.rows[index].end for index in request.counted]) - request.num_settled, 0)


def verify(requests: Sequence[Request], *, bonus: bool = False) -> None:
    """Test the drafts after what all members have scored, and settle what the test emits.

    A tree waits for all members that have a weight. The token after its accepted path is drawn where they have scored
    its place. bonus: so is that after a fully accepted chain.
    """
    tested: dict[Request, int] = {}  # drafts of each chain
    trees: list[Request] = []
    chains: dict[bool, list[Request]] = {True: [], False: []}
    for request in requests:
        drafts = request.drafts
        if not drafts.parents or not (count := num_scored(request)):
            continue
        if not drafts.is_chain or request.task.rule in TREE_RULES:
            trees += [request] * (count >= drafts.num_tested_rows)
            continue
        tested[request] = min(count, len(drafts.parents))
        chains[bonus and count > tested[request] and request.may_follow(len(request.sequence))].append(request)
    for group in alike(trees):
        _verify_trees(group)
    for has_bonus, of_one_kind in chains.items():
        for group in alike(of_one_kind):
            _verify_chains(group, [tested[request] for request in group], has_bonus)


def _verify_chains(group: list[Request], counts: list[int], with_bonus: bool) -> None:
    num_rows, device = [count + with_bonus for count in counts], group[0].rows[group[0].counted[0]].last.device
    logits, layout = _chain_rows(group, num_rows, device)
    origin = _origin(group, counts, device)
    if "draft_logits" in origin and isinstance(group[0].task.ensemble, DenseTarget):
        origin["draft_sampling"] = sampling_of(group, device)  # its own logits have the temperature in them already
    drafts = [request.sequence[request.num_settled :][:count] for request, count in zip(group, counts, strict=True)]
    verdict = verify_chain(
        **target_arguments(group, logits, num_rows),
        draft_tokens=padded(drafts, NO_TOKEN, device),
        **origin,
        **layout,
        **edits(group, device),
        **seeds_of_uniforms(group, device),
        rule=group[0].task.rule,
        **report_arguments(group),
    )
    ends = [None if with_bonus else count for count in counts]
    statuses, tokens, accepted = on_host(verdict.status, verdict.tokens, verdict.num_accepted)
    _settle(group, verdict, (statuses, tokens), list(map(range, accepted)), counts, ends)


def _verify_trees(group: list[Request]) -> None:
    counted, device = group[0].counted, group[0].rows[group[0].counted[0]].last.device
    others, origin = _tree_origin(group, device)
    counts = [len(request.drafts) for request in group]
    logits = [_tree_rows(group, index).to(device) for index in (*counted, *others)]
    if "siblings" in origin and isinstance(group[0].task.ensemble, DenseTarget):
        origin["draft_sampling"] = sampling_of(group, device)
    indices = [range(request.num_settled, len(request.sequence) + 1) for request in group]
    masks = row_masks(group, indices, device)
    allowed = torch.nn.utils.rnn.pad_sequence(masks, batch_first=True) if masks else None
    verdict = verify_tree(
        **with_drafters(
            target_arguments(group, logits[: len(counted)], [logits[0].shape[1]] * len(group)),
            logits[len(counted) :],
        ),
        draft_tokens=padded([request.sequence[request.num_settled :] for request in group], NO_TOKEN, device),
        parents=padded([request.drafts.parents for request in group], PADDING, device),
        max_levels=max([max(request.drafts.depths) for request in group]),
        **origin,
        **edits(group, device),
        **seeds_of_uniforms(group, device),
        allowed=allowed,
        rule=group[0].task.rule,
        **report_arguments(group),
        backend=backend_for("verify_tree", logits[0]),
    )
    assert verdict.path is not None
    statuses, tokens, nodes = on_host(verdict.status, verdict.tokens, verdict.path)
    paths = [[node for node in path if node >= 0] for path in nodes]
    _settle(group, verdict, (statuses, tokens), paths, counts, [None] * len(group))


def _settle(
    group: list[Request],
    verdict: Verdict,
    read: tuple[list[int], list[list[int]]],
    paths: Sequence[Sequence[int]],
    counts: list[int],
    ends: Sequence[int | None],
) -> None:
    """Settle what a test emitted. read: its status bits and tokens, on the host.

    ends: the drafts after which it emits nothing, where all of them are accepted.
    """
    (status, tokens), reports = read, told(verdict)
    for row, (request, path, count) in enumerate(zip(group, paths, counts, strict=True)):
        emitted = [token for token in tokens[row] if token >= 0]
        is_whole = len(path) == ends[row] or len(emitted) > len(path)
        if status[row] or not is_whole:
            request.note_status(status[row], emitted=is_whole)
        if path and ends[row] is None and (request.is_unreadable(path[-1]) or num_scored(request) < path[-1] + 2):
            del emitted[len(path) :]  # not all members have scored the place after it
        request.statistics.rounds += 1
        request.settle_drafts(emitted, path, count, None if reports is None else reports[row])


def _tree_rows(group: list[Request], index: int) -> Tensor:
    """Logits [requests, nodes + 1, vocab] of a member after the text and all nodes, 0 where it has read none."""
    spans = [(request.rows[index], request.num_settled, len(request.sequence) + 1) for request in group]
    lines = [rows.pieces(first, min(rows.end, last)) if rows.end > first else [] for rows, first, last in spans]
    like = next(line[0] for line in lines if line)
    for line, (rows, first, last) in zip(lines, spans, strict=True):
        if rows.end < last:
            line.append(like.new_zeros(last - max(rows.end, first), like.shape[1]))
    return _stacked(lines)


def _stacked(lines: Sequence[Sequence[Tensor]]) -> Tensor:
    """Rows [requests, most, vocab] that each request has in pieces, with 0 after those that are fewer."""
    if len({sum([piece.shape[0] for piece in line]) for line in lines}) == 1:
        return joined([piece for line in lines for piece in line]).view(len(lines), -1, lines[0][0].shape[1])
    return torch.nn.utils.rnn.pad_sequence([joined(line) for line in lines], batch_first=True)


def _tree_origin(group: list[Request], device: torch.device) -> tuple[list[int], dict[str, Any]]:
    """Whose rows are read beside those of the members that count, and whose the nodes are, as `_origin` says of chains.

    They are members without a weight and outside drafters that drew nodes; beside a dense target, which is one row, all
    that did.
    """
    counted, is_dense = group[0].counted, isinstance(group[0].task.ensemble, DenseTarget)
    proposers = [request.drafts.proposers for request in group]
    drafters = sorted({proposer for line in proposers for proposer in line})
    siblings = {"siblings": group[0].drafts.siblings}
    if group[0].draws_by_gumbel or group[0].drafts.siblings is None or not _are_drawn(group, drafters):
        return [], {}
    if len(drafters) == 1 and (drafters[0] not in counted or is_dense):
        return [], siblings | {"draft_logits": _tree_rows(group, drafters[0]).to(device)}
    others = [index for index in drafters if index != OUTSIDE and (is_dense or index not in counted)]
    read = [None, *others] if is_dense else [*counted, *others]
    return others, siblings | {"drafter": _drafter(proposers, read, device)}


def _drafter(proposers: Sequence[Sequence[int]], indices: Sequence[int | None], device: torch.device) -> int | Tensor:
    """Who proposed drafts, as the number of a member among those that are read, or of each draft, -1 for nobody."""
    numbers = {index: number for number, index in enumerate(indices)} | {OUTSIDE: OUTSIDE}
    drafters = set().union(*proposers)
    if len(drafters) == 1:
        return numbers[drafters.pop()]
    return padded([[numbers[proposer] for proposer in line] for line in proposers], OUTSIDE, device)


def _are_drawn(group: list[Request], drafters: Collection[int]) -> bool:
    """Whether drafts have a distribution: those of an outside drafter without rows have none."""
    return set(drafters) != {OUTSIDE} or group[0].rows[OUTSIDE].end > 0  # all of a group are alike in it


def _origin(group: list[Request], counts: list[int], device: torch.device) -> dict[str, Any]:
    """Whose the drafts are: of members that count, of an outside drafter, of nobody; and how many.

    A member without a weight is an outside drafter too: it may have scored no other rows than those it drafted from.
    The rule "gumbel" does not ask whose they are.
    """
    counted = group[0].counted
    lens = {"draft_lens": torch.tensor(counts, device=device)} if len(group) > 1 else {}
    if group[0].draws_by_gumbel or group[0].drafts.siblings is None:
        return lens
    proposers = [request.drafts.proposers[:count] for request, count in zip(group, counts, strict=True)]
    drafters = set().union(*proposers)
    if not _are_drawn(group, drafters):
        return lens
    has_rows = group[0].rows[OUTSIDE].end > 0  # all of a group are alike in it
    if has_rows or not drafters <= {OUTSIDE, *counted} or isinstance(group[0].task.ensemble, DenseTarget):
        return lens | {"draft_logits": _draft_logits(group, proposers, device)}
    return lens | {"drafter": _drafter(proposers, counted, device)}


def _draft_logits(group: list[Request], proposers: list[list[int]], device: torch.device) -> Tensor:
    """Logits [requests, drafts, vocab] that the drafts were drawn from, padded after; one-hot where they were not."""
    lines = []
    for request, line in zip(group, proposers, strict=True):
        own = request.rows[line[0]]
        start, end = request.num_settled, request.num_settled + len(line)
        if len(set(line)) == 1 and (line[0] != OUTSIDE or own.start <= start < end <= own.end):
            rows = own.pieces(start, end)
        else:
            rows = [_draft_row(request, start + step, who) for step, who in enumerate(line)]
        lines.append([piece.to(device) for piece in rows])  # members may lie on devices of their own
    return _stacked(lines)


def _draft_row(request: Request, position: int, proposer: int) -> Tensor:
    """Logits [1, vocab] that one draft was drawn from."""
    rows = request.rows[proposer]
    if rows.start <= position < rows.end:
        return rows.take(position, position + 1)
    like = request.rows[request.counted[0]].take(position, position + 1)
    token = request.sequence[position]
    return torch.full_like(like, float("-inf")).index_fill_(1, torch.tensor([token], device=like.device), 0.0)


def _chain_rows(group: list[Request], num_rows: list[int], device: torch.device) -> tuple[list[Tensor], dict[str, Any]]:
    """Logits of the members at the rows of each chain, dense for a lone request, else packed; masks and offsets."""
    spans = [(own, own.num_settled, own.num_settled + count) for own, count in zip(group, num_rows, strict=True)]
    members = [
        joined([part for request, start, end in spans for part in request.rows[index].pieces(start, end)]).to(device)
        for index in group[0].counted
    ]
    masks = row_masks(group, [range(start, end) for _, start, end in spans], device)
    if len(group) == 1:
        return [rows[None] for rows in members], {"allowed": masks[0][None]} if masks else {}
    offsets = torch.tensor([*accumulate(num_rows, initial=0)], device=device)
    return members, {"row_offsets": offsets} | ({"allowed": torch.cat(masks)} if masks else {})
