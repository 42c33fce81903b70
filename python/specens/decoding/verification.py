"""The operations of `specens_kernels` on the requests of a batch: draw drafts, test them, draw from the target.

Uniforms belong to a seed, the position of the first token that is not settled, the offset behind it and a stream. Every
test settles at least one token, so none is used twice, nor by a draft and its test; and a request's uniforms, like its
text, do not depend on the batch around it. Under the rule "gumbel" a position has noise of its own instead, which draws
of a draft and of the target share: the text is the one that `standard` writes with the seed.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from specens.decoding.drafts import NO_NODE
from specens.decoding.logit_rows import joined
from specens.decoding.request import OUTSIDE, Request
from specens.decoding.settings import alike, edits, padded, row_masks, sampling_of, target_arguments
from specens.targets import DenseTarget
from specens_kernels import Draw, Sampling, Verdict, sample, target_logprobs, uniforms, verify_chain, verify_tree
from specens_kernels.backend import backend_for

NEXT_TOKEN_STREAM = 1
DRAFT_STREAM = 2
NO_TOKEN = -1
TREE_RULES = ("traversal",)  # which a chain is tested by as a tree


def draft(requests: Sequence[Request], place: int, *, with_probabilities: bool = False) -> dict[Request, float]:
    """Draw a draft token for each request from the distribution of member `place`, which has scored all before it.

    place: OUTSIDE is that of an outside drafter whose logits are in the requests' rows, and which may have no token for
    a request. Returns the requests that have got one, and, where asked for, its probability under the distribution
    that it was drawn from, at temperature 0 under the unfiltered one; else 1. A request whose distribution has no token
    gets none: whether that is an error shows where the target is drawn from.
    """
    probabilities: dict[Request, float] = {}
    for group in alike(requests):
        positions = [len(request.sequence) for request in group]
        logits = _rows(group, place, positions)
        randomness = _randomness(group, [len(request.drafts) for request in group], DRAFT_STREAM, logits.device)
        draw = sample(
            [logits],
            sampling=sampling_of(group, logits.device),
            **edits(group, logits.device, positions),
            **_mask(group, positions, logits.device),
            **randomness,
            logprobs=with_probabilities,
        )
        tokens, statuses = _on_host(draw.tokens, draw.status)
        for request, token, status in zip(group, tokens, statuses, strict=True):
            request.note_status(status, emitted=True)
            if token >= 0:
                request.add_draft(token, place)
        chances = [1.0] * len(group) if draw.logprobs is None else draw.logprobs.exp().tolist()
        drawn = zip(group, tokens, chances, strict=True)
        probabilities |= {request: chance for request, token, chance in drawn if token >= 0}
    return probabilities


def draw(requests: Sequence[Request], kind: str) -> None:
    """Draw and settle a token of each request from the target distribution, whose members have scored all before it."""
    for group in alike(requests):
        positions = [request.num_settled for request in group]
        places = group[0].counted
        logits = [_rows(group, place, positions) for place in places]
        device = logits[0].device
        draw = sample(
            **target_arguments(group, places, [rows.to(device) for rows in logits], [1] * len(group)),
            **edits(group, device),
            **_mask(group, positions, device),
            **_randomness(group, [0] * len(group), NEXT_TOKEN_STREAM, device),
            **_report(group),
        )
        told, (tokens, statuses) = _told(draw), _on_host(draw.tokens, draw.status)
        for place, (request, token, status) in enumerate(zip(group, tokens, statuses, strict=True)):
            request.drawn_at = request.num_settled
            request.note_status(status, emitted=token >= 0)
            request.settle([token], [kind], [OUTSIDE], None if told is None else [told[place]])
            request.forget_drafts()
            request.statistics.rounds += kind != "bonus"


def num_scored(request: Request) -> int:
    """How many positions behind the settled tokens have been scored by all members that have a weight."""
    return max(min(request.rows[place].end for place in request.counted) - request.num_settled, 0)


def verify(requests: Sequence[Request], *, bonus: bool = False) -> None:
    """Test the drafts behind what all members have scored, and settle what the test emits.

    bonus: also draw a token behind a fully accepted chain, where all members have scored that position too.
    """
    ready = [request for request in requests if num_scored(request) and len(request.drafts)]
    with_bonus = {request: bonus and _awaits_bonus(request) for request in ready}  # before anything is settled
    trees = [request for request in ready if not request.drafts.is_chain or request.task.rule in TREE_RULES]
    for group in alike(trees):
        _verify_trees(group)
    for has_bonus in (True, False):
        for group in alike([request for request in ready if with_bonus[request] is has_bonus and request not in trees]):
            counts = [min(len(request.drafts), num_scored(request)) for request in group]
            _verify_chains(group, counts, has_bonus)


def _awaits_bonus(request: Request) -> bool:
    """Whether a token can come behind the whole chain, and all members have scored its position."""
    return num_scored(request) > len(request.drafts) and request.may_follow(len(request.sequence))


def _verify_chains(group: list[Request], counts: list[int], with_bonus: bool) -> None:
    places, origin = group[0].counted, _origin(group, counts)
    logits, layout = _chain_rows(group, places, [count + with_bonus for count in counts])
    device = logits[0].device
    if "draft_logits" in origin and isinstance(group[0].task.ensemble, DenseTarget):
        origin["draft_sampling"] = sampling_of(group, device)  # its own logits have the temperature in them already
    drafts = [request.sequence[request.num_settled :][:count] for request, count in zip(group, counts, strict=True)]
    verdict = verify_chain(
        **target_arguments(group, places, logits, [count + with_bonus for count in counts]),
        draft_tokens=padded(drafts, NO_TOKEN, device),
        **_on_device(origin | layout, device),
        **edits(group, device),
        **seeds_of_uniforms(group, device),
        rule=group[0].task.rule,
        **_report(group),
    )
    ends = [None if with_bonus else count for count in counts]
    statuses, tokens, accepted = _on_host(verdict.status, verdict.tokens, verdict.num_accepted)
    _settle(group, verdict, (statuses, tokens), list(map(range, accepted)), counts, ends)


def _verify_trees(group: list[Request]) -> None:
    places = list(group[0].counted)
    origin = _tree_origin(group, places)
    counts = [len(request.drafts) for request in group]
    logits = [_tree_rows(group, place) for place in places]
    logits = [rows.to(logits[0].device) for rows in logits]
    device = logits[0].device
    if "draft_logits" in origin and isinstance(group[0].task.ensemble, DenseTarget):
        origin["draft_sampling"] = sampling_of(group, device)
    indices = [range(request.num_settled, len(request.sequence) + 1) for request in group]
    masks = row_masks(group, indices, device)
    allowed = torch.nn.utils.rnn.pad_sequence(masks, batch_first=True) if masks else None
    verdict = verify_tree(
        **target_arguments(group, places, logits, [logits[0].shape[1]] * len(group)),
        draft_tokens=padded([request.sequence[request.num_settled :] for request in group], NO_TOKEN, device),
        parents=padded([request.drafts.parents for request in group], NO_NODE, device),
        max_levels=max(max(request.drafts.depths) for request in group),
        **_on_device(origin, device),
        **edits(group, device),
        **seeds_of_uniforms(group, device),
        allowed=allowed,
        rule=group[0].task.rule,
        **_report(group),
        backend=backend_for("verify_tree", logits[0]),
    )
    assert verdict.path is not None
    statuses, tokens, nodes = _on_host(verdict.status, verdict.tokens, verdict.path)
    paths = [[node for node in path if node >= 0] for path in nodes]
    _settle(group, verdict, (statuses, tokens), paths, counts, [None] * len(group))


def _settle(
    group: list[Request],
    verdict: Verdict,
    on_host: tuple[list[int], list[list[int]]],
    paths: Sequence[Sequence[int]],
    counts: list[int],
    ends: Sequence[int | None],
) -> None:
    """Settle what a test emitted. on_host: its status bits and tokens.

    ends: the drafts behind which it emits nothing, where all of them are accepted.
    """
    (status, tokens), told = on_host, _told(verdict)
    for row, (request, path, count) in enumerate(zip(group, paths, counts, strict=True)):
        emitted = [token for token in tokens[row] if token >= 0]
        request.note_status(status[row], emitted=len(path) == ends[row] or len(emitted) > len(path))
        if path and not request.drafts.is_chain and request.is_unreadable(path[-1]):
            del emitted[len(path) :]  # no member has read what comes behind it
        request.statistics.rounds += 1
        request.settle_drafts(emitted, path, count, None if told is None else told[row])


def _on_host(*columns: Tensor) -> list[list[Any]]:
    """Integer tensors [rows] or [rows, n] as lists; from a GPU all are brought at once, which is waited for once."""
    if columns[0].device.type == "cpu":
        return [column.tolist() for column in columns]
    return _as_lists(columns)


def _as_lists(columns: Sequence[Tensor]) -> list[list[Any]]:
    table = torch.cat([column if column.dim() == 2 else column[:, None] for column in columns], dim=1).tolist()
    lists, first = [], 0
    for column in columns:
        last = first + (column.shape[1] if column.dim() == 2 else 1)
        lists.append([row[first:last] if column.dim() == 2 else row[first] for row in table])
        first = last
    return lists


def _report(group: list[Request]) -> dict[str, Any]:
    """What the operations tell of the tokens that they emit."""
    return {"logprobs": group[0].task.logprobs, "top_logprobs": group[0].task.top_logprobs}


def _told(result: Draw | Verdict) -> list[Any] | None:
    """The logprob and top_logprobs of each token, in lists of the shape of its tokens; None if not asked for."""
    if result.logprobs is None:
        return None
    logprobs = result.logprobs.tolist()
    if result.top_tokens is None or result.top_logprobs is None:
        tops: list[Any] = [None] * len(logprobs)
    else:
        tops = list(zip(result.top_tokens.tolist(), result.top_logprobs.tolist(), strict=True))
    if result.logprobs.dim() == 1:
        return [(logprob, _pairs(top)) for logprob, top in zip(logprobs, tops, strict=True)]
    rows = (
        [None] * len(own) if top is None else list(zip(*top, strict=True))
        for own, top in zip(logprobs, tops, strict=True)
    )
    return [
        [(logprob, _pairs(top)) for logprob, top in zip(own, row, strict=True)]
        for own, row in zip(logprobs, rows, strict=True)
    ]


def _pairs(top: tuple[list[int], list[float]] | None) -> list[tuple[int, float]] | None:
    return None if top is None else [(token, score) for token, score in zip(*top, strict=True) if token >= 0]


def _tree_rows(group: list[Request], place: int) -> Tensor:
    """Logits [requests, nodes + 1, vocab] of a member behind the text and all nodes, 0 where it has read none."""
    rows = [_rows_behind(request, place) for request in group]
    return rows[0][None] if len(rows) == 1 else torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)


def _rows_behind(request: Request, place: int) -> Tensor:
    first, last = request.num_settled, len(request.sequence) + 1
    rows = request.rows[place].take(first, min(request.rows[place].end, last))
    return torch.nn.functional.pad(rows, (0, 0, 0, last - first - len(rows)))


def _tree_origin(group: list[Request], places: list[int]) -> dict[str, Any]:
    """Whose the nodes are, as `_origin` says of chains; members without a weight that drew them are added to places."""
    proposers = [request.drafts.proposers for request in group]
    drafters = sorted({proposer for line in proposers for proposer in line})
    siblings = {"siblings": group[0].drafts.siblings}
    if group[0].draws_by_gumbel or group[0].drafts.siblings is None or not _are_drawn(group, drafters):
        return {}
    if len(drafters) == 1 and (drafters[0] not in places or isinstance(group[0].task.ensemble, DenseTarget)):
        return siblings | {"draft_logits": _tree_rows(group, drafters[0])}
    places += [place for place in drafters if place not in (OUTSIDE, *places)]
    numbers = {place: number for number, place in enumerate(places)} | {OUTSIDE: OUTSIDE}
    lines = [[numbers[proposer] for proposer in line] for line in proposers]
    drafter = lines[0][0] if len(drafters) == 1 else padded(lines, OUTSIDE, torch.device("cpu"))
    return siblings | {"drafter": drafter}


def _are_drawn(group: list[Request], drafters: Collection[int]) -> bool:
    """Whether drafts have a distribution: those of an outside drafter without rows have none."""
    return set(drafters) != {OUTSIDE} or group[0].rows[OUTSIDE].end > 0  # all of a group are alike in it


def _origin(group: list[Request], counts: list[int]) -> dict[str, Any]:
    """Whose the drafts are: of members that count, of an outside drafter, of nobody; and how many.

    A member without a weight is an outside drafter too: it may have scored no other rows than those it drafted from.
    The rule "gumbel" does not ask whose they are.
    """
    counted = group[0].counted
    proposers = [request.drafts.proposers[:count] for request, count in zip(group, counts, strict=True)]
    lens = {"draft_lens": torch.tensor(counts)} if len(group) > 1 else {}
    drafters = {proposer for line in proposers for proposer in line}
    has_rows = group[0].rows[OUTSIDE].end > 0  # all of a group are alike in it
    if group[0].draws_by_gumbel or group[0].drafts.siblings is None or not _are_drawn(group, drafters):
        return lens
    if has_rows or not drafters <= {OUTSIDE, *counted} or isinstance(group[0].task.ensemble, DenseTarget):
        return lens | {"draft_logits": _draft_logits(group, proposers)}
    numbers = {place: number for number, place in enumerate(counted)} | {OUTSIDE: OUTSIDE}
    lines = [[numbers[proposer] for proposer in line] for line in proposers]
    alone = len(drafters) == 1
    return lens | {"drafter": lines[0][0] if alone else padded(lines, OUTSIDE, torch.device("cpu"))}


def _draft_logits(group: list[Request], proposers: list[list[int]]) -> Tensor:
    """Logits [requests, drafts, vocab] that the drafts were drawn from, padded behind; one-hot where they were not."""
    lines = []
    for request, line in zip(group, proposers, strict=True):
        own = request.rows[line[0]]
        start, end = request.num_settled, request.num_settled + len(line)
        if len(set(line)) == 1 and (line[0] != OUTSIDE or own.start <= start < end <= own.end):
            lines.append(own.take(start, end))
        else:
            lines.append(torch.cat([_draft_row(request, start + step, who) for step, who in enumerate(line)]))
    return lines[0][None] if len(lines) == 1 else torch.nn.utils.rnn.pad_sequence(lines, batch_first=True)


def _draft_row(request: Request, position: int, proposer: int) -> Tensor:
    """Logits [1, vocab] that one draft was drawn from."""
    rows = request.rows[proposer]
    if rows.start <= position < rows.end:
        return rows.take(position, position + 1)
    like = request.rows[request.counted[0]].take(position, position + 1)
    token = request.sequence[position]
    return torch.full_like(like, float("-inf")).index_fill_(1, torch.tensor([token], device=like.device), 0.0)


def _chain_rows(
    group: list[Request], places: Sequence[int], num_rows: list[int]
) -> tuple[list[Tensor], dict[str, Any]]:
    """Logits of the members at the rows of each chain, dense for a lone request, else packed; masks and offsets."""
    starts = [request.num_settled for request in group]
    positions = [range(start, start + count) for start, count in zip(starts, num_rows, strict=True)]
    members: list[Tensor] = []
    for place in places:
        spans = zip(group, starts, num_rows, strict=True)
        rows = joined(
            [part for request, start, count in spans for part in request.rows[place].pieces(start, start + count)]
        )
        rows = rows[None] if len(group) == 1 else rows
        members.append(rows.to(members[0].device) if members else rows)
    device = members[0].device
    masks = row_masks(group, positions, device)
    if len(group) == 1:
        return members, {"allowed": masks[0][None]} if masks else {}
    offsets = torch.tensor([0, *num_rows], device=device).cumsum(0)
    return members, {"row_offsets": offsets} | ({"allowed": torch.cat(masks)} if masks else {})


def rows_at(request: Request, place: int, nodes: Sequence[int]) -> Tensor:
    """A member's logits [nodes, vocab] behind some drafts, -1 being the settled text."""
    first, last = min(nodes), max(nodes)
    rows = request.rows[place].take(request.num_settled + 1 + first, request.num_settled + 2 + last)
    return rows if len(nodes) == len(rows) else rows[[node - first for node in nodes]]


def draft_logprobs(request: Request, place: int, nodes: Sequence[int]) -> Tensor:
    """What a member's children of some nodes are drawn from, log-probabilities [nodes, vocab]; at temperature 1 for
    requests whose children are chosen.
    """
    logits = rows_at(request, place, nodes)
    sampling = Sampling() if request.drafts.siblings is None else sampling_of([request], logits.device)
    return target_logprobs([logits], sampling=sampling, **_at_nodes(request, nodes, logits.device))


def most_likely(request: Request, place: int, nodes: Sequence[int], count: int) -> list[list[int]]:
    """A member's most likely tokens behind each of some nodes, `count` at most, the likeliest first."""
    rows = rows_at(request, place, nodes)
    how = _at_nodes(request, nodes, rows.device)
    best = (target_logprobs([rows], **how) if how else rows).topk(min(count, rows.shape[-1]), dim=-1)
    lines = zip(best.indices.tolist(), best.values.tolist(), strict=True)
    return [[token for token, score in zip(*line, strict=True) if score > float("-inf")] for line in lines]


def draw_siblings(request: Request, logprobs: Tensor, siblings: str) -> Iterator[tuple[int, float]]:
    """Draw draft tokens from log-probabilities [vocab], with or without replacement, as long as there are any.

    Each with its probability among those that were left; it must have become the next draft before the next is drawn.
    siblings: as of `verify_tree`; without replacement each is drawn without those before it.
    """
    seeds, left = seeds_of_uniforms([request], logprobs.device), logprobs[None].clone()
    while True:
        draw = sample([left], **seeds, step=len(request.drafts), logprobs=True)
        token = int(draw.tokens)
        if token < 0:
            return
        assert draw.logprobs is not None
        yield token, float(draw.logprobs.exp())
        if siblings == "without_replacement":
            left[0, token] = float("-inf")


def draw_best_children(request: Request, place: int, nodes: Sequence[int], count: int) -> list[list[int]]:
    """The tokens of a drafter's best Gumbel scores behind nodes of one depth, `count` of each at most."""
    logits, depth = rows_at(request, place, nodes), request.drafts.depth(nodes[0])
    draw = sample(
        [logits],
        sampling=sampling_of([request], logits.device),
        **_at_nodes(request, nodes, logits.device),
        **_randomness([request] * len(nodes), [depth] * len(nodes), DRAFT_STREAM, logits.device),
        count=min(count, logits.shape[-1]),
    )
    return [[token for token in own if token >= 0] for own in draw.tokens.tolist()]


def _at_nodes(request: Request, nodes: Sequence[int], device: torch.device) -> dict[str, Any]:
    """What the operations are told about the rows behind some nodes."""
    rows, indices = [request] * len(nodes), [request.num_settled + 1 + node for node in nodes]
    return edits(rows, device, indices) | _mask(rows, indices, device)


def _rows(requests: Sequence[Request], place: int, positions: Iterable[int]) -> Tensor:
    """Logits [requests, vocab] of one member at a position of each."""
    at = zip(requests, positions, strict=True)
    return joined([request.rows[place].take(position, position + 1) for request, position in at])


def _mask(requests: Sequence[Request], positions: Sequence[int], device: torch.device) -> dict[str, Any]:
    masks = row_masks(requests, [[position] for position in positions], device)
    return {"allowed": torch.cat(masks)} if masks else {}


def _on_device(arguments: dict[str, Any], device: torch.device) -> dict[str, Any]:
    return {name: value.to(device) if isinstance(value, Tensor) else value for name, value in arguments.items()}


def seeds_of_uniforms(requests: Sequence[Request], device: torch.device) -> dict[str, Any]:
    """The seeds and positions that the uniforms of the requests belong to, as arguments of the operations."""
    numbers = [[request.task.seed for request in requests], [request.num_settled for request in requests]]
    seeds, positions = torch.tensor(numbers, device=device).unbind()
    return {"seeds": seeds, "positions": positions}


def _randomness(requests: Sequence[Request], steps: list[int], stream: int, device: torch.device) -> dict[str, Any]:
    """The arguments of `sample` that say what each request draws with; offsets may differ between them."""
    seeds = seeds_of_uniforms(requests, device)
    if requests[0].draws_by_gumbel:
        seeds["positions"] += torch.tensor(steps, device=device)
        return seeds | {"method": "gumbel"}
    if len(set(steps)) == 1:
        return seeds | {"step": steps[0], "stream": stream}
    return {"uniforms": uniforms(**seeds, step=torch.tensor(steps, device=device), stream=stream)}
