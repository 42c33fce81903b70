"""The operations of `specens_kernels` on the requests of a batch: draw drafts, test them, draw from the target.

Uniforms belong to a seed, the position of the first token that is not settled, the offset behind it and a stream. Every
test settles at least one token, so none is used twice, nor by a draft and its test; and a request's uniforms, like its
text, do not depend on the batch around it. Under the rule "gumbel" a position has noise of its own instead, which draws
of a draft and of the target share: the text is the one that `standard` writes with the seed.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from specens.decoding.draft_tree import DraftTree
from specens.decoding.request import OUTSIDE, Request
from specens.decoding.settings import alike, edits, padded, row_masks, sampling_of, target_arguments
from specens.targets import DenseTarget
from specens_kernels import sample, target_logprobs, uniforms, verify_chain, verify_tree
from specens_kernels.backend import backend_for

NEXT_TOKEN_STREAM = 1
DRAFT_STREAM = 2
NO_TOKEN = -1


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
            **edits(group, logits.device, behind_drafts=True),
            **_mask(group, positions, logits.device),
            **randomness,
            logprobs=with_probabilities,
        )
        for request, token, status in zip(group, draw.tokens.tolist(), draw.status.tolist(), strict=True):
            request.note_status(status, emitted=True)
            if token >= 0:
                request.add_draft(token, place)
        chances = [1.0] * len(group) if draw.logprobs is None else draw.logprobs.exp().tolist()
        drawn = zip(group, draw.tokens.tolist(), chances, strict=True)
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
            logprobs=group[0].task.logprobs,
        )
        for place, (request, token) in enumerate(zip(group, draw.tokens.tolist(), strict=True)):
            request.note_status(int(draw.status[place]), emitted=token >= 0)
            logprobs = None if draw.logprobs is None else [float(draw.logprobs[place])]
            request.settle([token], [kind], [OUTSIDE], logprobs)
            request.forget_drafts()
            request.statistics.rounds += kind != "bonus"


def num_scored(request: Request) -> int:
    """How many positions behind the settled tokens have been scored by all members that have a weight."""
    return max(min(request.rows[place].end for place in request.counted) - request.num_settled, 0)


def verify(requests: Sequence[Request], *, bonus: bool = False) -> None:
    """Test the drafts at the positions that all members have scored, and settle what the test emits.

    bonus: also draw a token behind a fully accepted chain, where all members have scored that position too.
    """
    ready = [request for request in requests if num_scored(request) and len(request.drafts)]
    with_bonus = {request: bonus and _awaits_bonus(request) for request in ready}  # before anything is settled
    for has_bonus in (True, False):
        for group in alike([request for request in ready if with_bonus[request] is has_bonus]):
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
        logprobs=group[0].task.logprobs,
    )
    status, accepted, tokens = verdict.status.tolist(), verdict.num_accepted.tolist(), verdict.tokens.tolist()
    all_logprobs = verdict.logprobs.tolist() if verdict.logprobs is not None else [None] * len(group)
    for row, (request, count) in enumerate(zip(group, counts, strict=True)):
        emitted = [token for token in tokens[row] if token >= 0]
        complete = accepted[row] == count and not with_bonus
        request.note_status(status[row], emitted=complete or len(emitted) > accepted[row])
        request.statistics.rounds += 1
        request.settle_chain(emitted, accepted[row], count, all_logprobs[row])


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
    if group[0].draws_by_gumbel or (drafters == {OUTSIDE} and not has_rows):
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
        parts = [
            request.rows[place].take(start, start + count)
            for request, start, count in zip(group, starts, num_rows, strict=True)
        ]
        rows = parts[0][None] if len(parts) == 1 else torch.cat(parts)
        members.append(rows.to(members[0].device) if members else rows)
    device = members[0].device
    masks = row_masks(group, positions, device)
    if len(group) == 1:
        return members, {"allowed": masks[0][None]} if masks else {}
    offsets = torch.tensor([0, *num_rows], device=device).cumsum(0)
    return members, {"row_offsets": offsets} | ({"allowed": torch.cat(masks)} if masks else {})


def draw_siblings(request: Request, logits: Tensor, count: int, first_node: int, siblings: str) -> list[int]:
    """Draw draft tokens from one member's distribution, logits [vocab], with or without replacement.

    first_node: the number of the first sibling in its tree. siblings: as of `verify_tree`; without replacement each is
    drawn without those before it, and -1 stands where no probability is left.
    """
    seeds = seeds_of_uniforms([request], logits.device)
    left = target_logprobs([logits[None]], sampling=request.task.sampling)
    tokens = []
    for node in range(first_node, first_node + count):
        tokens.append(int(sample([left], **seeds, step=node).tokens))
        if tokens[-1] >= 0 and siblings == "without_replacement":
            left[0, tokens[-1]] = float("-inf")
    return tokens


def draw_best_children(request: Request, logits: Tensor, count: int, level: int) -> list[int]:
    """The tokens of a drafter's best Gumbel scores, `count` for each of its rows, logits [nodes, vocab], row by row.

    level: of the children, 0 below the settled text. -1 stands where no probability is left.
    """
    draw = sample(
        [logits],
        sampling=request.task.sampling,
        **_randomness([request] * len(logits), [level] * len(logits), DRAFT_STREAM, logits.device),
        count=count,
    )
    return draw.tokens.flatten().tolist()


def verify_draft_tree(
    request: Request, logits: Sequence[Tensor], draft: DraftTree, drafter: int, rule: str
) -> list[int]:
    """Test a draft tree behind the settled tokens and settle what the test emits; the accepted nodes that were settled.

    logits: [1, nodes + 1, vocab] of every place; drafter: the place that drafted. rule: of the tree, unless that of the
    request is "gumbel". What the test emits behind the end of the text is dropped.
    """
    device, ensemble = logits[0].device, request.task.ensemble
    assert not isinstance(ensemble, DenseTarget)  # `specens.settings.jobs` refuses them
    verdict = verify_tree(
        [rows.to(device) for rows in logits],
        ensemble=ensemble,
        sampling=request.task.sampling,
        rule="gumbel" if request.draws_by_gumbel else rule,
        **draft.test_arguments(drafter, device),
        **seeds_of_uniforms([request], device),
        logprobs=request.task.logprobs,
        backend=backend_for("verify_tree", logits[0]),
    )
    num_accepted = int(verdict.num_accepted)
    tokens = [token for token in verdict.tokens[0].tolist() if token >= 0]
    request.note_status(int(verdict.status), emitted=len(tokens) > num_accepted)
    assert verdict.path is not None
    path = verdict.path[0, :num_accepted].tolist()
    at_leaf = bool(path) and draft.tree.first_child[path[-1]] < 0
    request.statistics.rounds += 1
    request.note_tested(draft.tokens, [drafter] * len(draft.tokens), path, draft.tree.parents.tolist())
    return request.settle_path(tokens, path, at_leaf, drafter, _first_row(verdict.logprobs))


def _first_row(values: Tensor | None) -> list[float] | None:
    return None if values is None else values[0].tolist()


def _rows(requests: Sequence[Request], place: int, positions: Iterable[int]) -> Tensor:
    """Logits [requests, vocab] of one member at a position of each."""
    parts = [
        request.rows[place].take(position, position + 1) for request, position in zip(requests, positions, strict=True)
    ]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _mask(requests: Sequence[Request], positions: Sequence[int], device: torch.device) -> dict[str, Any]:
    masks = row_masks(requests, [[position] for position in positions], device)
    return {"allowed": torch.cat(masks)} if masks else {}


def _on_device(arguments: dict[str, Any], device: torch.device) -> dict[str, Any]:
    return {name: value.to(device) if isinstance(value, Tensor) else value for name, value in arguments.items()}


def seeds_of_uniforms(requests: Sequence[Request], device: torch.device) -> dict[str, Any]:
    """The seeds and positions that the uniforms of the requests belong to, as arguments of the operations."""
    return {
        "seeds": torch.tensor([request.task.seed for request in requests], device=device),
        "positions": torch.tensor([request.num_settled for request in requests], device=device),
    }


def _randomness(requests: Sequence[Request], steps: list[int], stream: int, device: torch.device) -> dict[str, Any]:
    """The arguments of `sample` that say what each request draws with; offsets may differ between them."""
    seeds = seeds_of_uniforms(requests, device)
    if requests[0].draws_by_gumbel:
        seeds["positions"] += torch.tensor(steps, device=device)
        return seeds | {"method": "gumbel"}
    if len(set(steps)) == 1:
        return seeds | {"step": steps[0], "stream": stream}
    return {"uniforms": uniforms(**seeds, step=torch.tensor(steps, device=device), stream=stream)}
