"""Tokens that are drawn for the requests of a batch: drafts, and those of the target.

Uniforms belong to a seed, the position of the first token that is not settled, the offset after it and a stream. Every
test settles at least one token, so none is used twice, nor by a draft and its test; and a request's uniforms, like its
text, do not depend on the batch around it. Under the rule "gumbel" a position has noise of its own instead, which draws
of a draft and of the target share: the text is the one that `standard` writes with the seed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from specens.decoding.logit_rows import joined
from specens.decoding.request import OUTSIDE, Request
from specens.decoding.settings import alike, edits, is_edited, padded, row_masks, sampling_of, target_arguments
from specens_kernels import Draw, Sampling, Verdict, sample, target_logprobs, uniforms

NEXT_TOKEN_STREAM = 1
DRAFT_STREAM = 2
BLOCK = 64  # tokens of a row of which the largest number is looked at first


class Drafting:
    """Draws a round's drafts from the distribution of member `index`, a token of each request at a time.

    index: OUTSIDE is that of an outside drafter whose logits are in the requests' rows. min_probability, hands_over: by
    which `add` tells requests apart.
    """

    def __init__(self, index: int, min_probability: float = 0.0, hands_over: bool = False) -> None:
        self._index, self._least, self._hands_over = index, min_probability, hands_over
        self._requests: Sequence[Request] = ()
        self._groups: list[tuple[list[Request], dict[str, Any], dict[str, Any], bool]] = []  # and what draws share

    def add(self, requests: Sequence[Request]) -> list[Request]:
        """Append a draft token to each request, whose rows end after its last one; to some there may be none.

        Returns the requests whose draft is at least as probable as `min_probability` under the distribution that it was
        drawn from, at temperature 0 under the unfiltered one. hands_over: the others get none, and it is the most
        likely token that they are told apart by. A request whose distribution has no token gets none either: whether
        that is an error shows where the target is drawn from.
        """
        if requests != self._requests:
            self._requests, self._groups = requests, [self._shared(group) for group in alike(requests)]
        sure: list[Request] = []
        for group, settings, seeds, has_edits in self._groups:
            rows = [request.rows[self._index] for request in group]
            logits, positions = joined([own.last for own in rows]), [own.end - 1 for own in rows]
            edited = _edits(group, positions, logits.device) if has_edits else {}
            draw = sample([logits], **settings, **edited, **_randomness(group, positions, DRAFT_STREAM, seeds))
            tokens, statuses = on_host(draw.tokens, draw.status)
            told = draw.logprobs if draw.top_logprobs is None else draw.top_logprobs[:, 0]
            chances = [1.0] * len(group) if told is None else told.exp().tolist()
            for request, token, status, chance in zip(group, tokens, statuses, chances, strict=True):
                if status:
                    request.note_status(status, emitted=True)
                is_sure = chance >= self._least
                if token >= 0 and (is_sure or not self._hands_over):
                    request.add_draft(token, self._index)
                    sure += [request] * is_sure
        return sure

    def _shared(self, group: list[Request]) -> tuple[list[Request], dict[str, Any], dict[str, Any], bool]:
        device = group[0].rows[self._index].last.device
        settings = {"sampling": sampling_of(group, device), "logprobs": self._least > 0}
        settings["top_logprobs"] = int(self._hands_over)
        return group, settings, seeds_of_uniforms(group, device), is_edited(group[0])


def draw(requests: Sequence[Request], kind: str) -> None:
    """Draw and settle a token of each request from the target distribution, whose members have scored all before it."""
    for group in alike(requests):
        positions, indices = [request.num_settled for request in group], group[0].counted
        at = list(zip(group, positions, strict=True))
        logits = [joined([own.rows[index].pieces(first, first + 1)[0] for own, first in at]) for index in indices]
        device = logits[0].device
        draw = sample(
            **target_arguments(group, [rows.to(device) for rows in logits], [1] * len(group)),
            **_edits(group, positions, device),
            **_randomness(group, positions, NEXT_TOKEN_STREAM, seeds_of_uniforms(group, device)),
            **report_arguments(group),
        )
        reports, (tokens, statuses) = told(draw), on_host(draw.tokens, draw.status)
        for index, (request, token, status) in enumerate(zip(group, tokens, statuses, strict=True)):
            request.drawn_at = request.num_settled
            if status or token < 0:
                request.note_status(status, emitted=token >= 0)
            request.settle([token], [kind], [OUTSIDE], None if reports is None else [reports[index]])
            request.forget_drafts()
            request.statistics.rounds += kind != "bonus"


def report_arguments(group: list[Request]) -> dict[str, Any]:
    """What the operations tell of the tokens that they emit."""
    return {"logprobs": group[0].task.logprobs, "top_logprobs": group[0].task.top_logprobs}


def told(result: Draw | Verdict) -> list[Any] | None:
    """The logprob and top_logprobs of each token, in lists of the shape of its tokens; None if not asked for."""
    if result.logprobs is None:
        return None
    logprobs = result.logprobs.flatten().tolist()
    tops: list[Any] = [None] * len(logprobs)
    if result.top_tokens is not None and result.top_logprobs is not None:
        columns = [column.flatten(0, -2).tolist() for column in (result.top_tokens, result.top_logprobs)]
        tops = [[pair for pair in zip(*own, strict=True) if pair[0] >= 0] for own in zip(*columns, strict=True)]
    of_all = list(zip(logprobs, tops, strict=True))
    if result.logprobs.dim() == 1:
        return of_all
    width = result.logprobs.shape[1]
    return [of_all[first : first + width] for first in range(0, len(of_all), width)]


def on_host(*columns: Tensor) -> list[list[Any]]:
    """Integer tensors [rows] or [rows, n] as lists; from a GPU all are brought at once, which is waited for once."""
    if columns[0].is_cpu:
        return list(map(Tensor.tolist, columns))
    return _as_lists(columns)


def _as_lists(columns: Sequence[Tensor]) -> list[list[Any]]:
    table = torch.cat([column if column.dim() == 2 else column[:, None] for column in columns], dim=1).tolist()
    lists, first = [], 0
    for column in columns:
        last = first + (column.shape[1] if column.dim() == 2 else 1)
        lists.append([row[first:last] if column.dim() == 2 else row[first] for row in table])
        first = last
    return lists


def rows_at(request: Request, index: int, nodes: Sequence[int]) -> Tensor:
    """A member's logits [nodes, vocab] after some drafts, -1 being the settled text."""
    first, last = min(nodes), max(nodes)
    rows = request.rows[index].take(request.num_settled + 1 + first, request.num_settled + 2 + last)
    return rows if len(nodes) == rows.shape[0] else rows[[node - first for node in nodes]]


def draft_logprobs(request: Request, index: int, nodes: Sequence[int]) -> Tensor:
    """What a member's children of some nodes are drawn from, log-probabilities [nodes, vocab]; at temperature 1 for
    requests whose children are chosen.
    """
    logits = rows_at(request, index, nodes)
    sampling = Sampling() if request.drafts.siblings is None else sampling_of([request], logits.device)
    return target_logprobs([logits], sampling=sampling, **_at_nodes(request, nodes, logits.device))


def most_likely(request: Request, index: int, nodes: Sequence[int], count: int) -> list[list[int]]:
    """A member's most likely tokens after each of some nodes, `count` at most, the likeliest first."""
    rows = rows_at(request, index, nodes)
    how = _at_nodes(request, nodes, rows.device)
    scores, tokens = largest(target_logprobs([rows], **how) if how else rows, count)
    lines = zip(tokens.tolist(), scores.tolist(), strict=True)
    return [[token for token, score in zip(*line, strict=True) if score > float("-inf")] for line in lines]


def largest(rows: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The largest numbers of rows [n, vocab] and their tokens, `count` of each at most, the largest first.

    Those of a row lie in the `count` blocks with the largest maxima, which are found at the speed of reading; a topk of
    the whole row takes several times as long.
    """
    count, blocks = min(count, rows.shape[-1]), rows.shape[-1] // BLOCK
    if rows.device.type != "cpu" or blocks <= count:
        all_of = rows.topk(count, dim=-1)
        return all_of.values, all_of.indices
    best = rows[..., : blocks * BLOCK].unflatten(-1, (blocks, BLOCK)).amax(-1).topk(count, dim=-1).indices
    tokens = (best[..., None] * BLOCK + torch.arange(BLOCK)).flatten(-2)
    tokens = torch.cat([tokens, torch.arange(blocks * BLOCK, rows.shape[-1]).expand(len(rows), -1)], dim=-1)
    scores, found = rows.gather(-1, tokens).topk(count, dim=-1)
    return scores, tokens.gather(-1, found)


def draw_siblings(request: Request, logprobs: Tensor, node: int, siblings: str) -> Iterator[tuple[int, float]]:
    """Draw children of a node from log-probabilities [vocab], with or without replacement, as long as there are any.

    Each with its probability among those that were left; it must have become the next draft before the next is drawn.
    siblings: as of `verify_tree`; without replacement each is drawn without those before it, whoever proposed them.
    """
    seeds, left = seeds_of_uniforms([request], logprobs.device), logprobs[None].clone()
    if siblings == "without_replacement":
        taken = [request.sequence[request.num_settled + child] for child in request.drafts.children(node)]
        left[0, [token for token in taken if token < left.shape[1]]] = float("-inf")
    while True:
        draw = sample([left], **seeds, step=len(request.drafts), logprobs=True)
        token = int(draw.tokens)
        if token < 0:
            return
        assert draw.logprobs is not None
        yield token, float(draw.logprobs.exp())
        if siblings == "without_replacement":
            left[0, token] = float("-inf")


def draw_best_children(request: Request, index: int, nodes: Sequence[int], count: int) -> list[list[int]]:
    """The tokens of a drafter's best Gumbel scores after nodes of one depth, `count` of each at most."""
    logits, position = rows_at(request, index, nodes), request.num_settled + request.drafts.depth(nodes[0])
    rows = [request] * len(nodes)
    draw = sample(
        [logits],
        sampling=sampling_of([request], logits.device),
        **_at_nodes(request, nodes, logits.device),
        **_randomness(rows, [position] * len(nodes), DRAFT_STREAM, seeds_of_uniforms(rows, logits.device)),
        count=min(count, logits.shape[-1]),
    )
    return [[token for token in own if token >= 0] for own in draw.tokens.tolist()]


def _at_nodes(request: Request, nodes: Sequence[int], device: torch.device) -> dict[str, Any]:
    """What the operations are told about the rows after some nodes."""
    return _edits([request] * len(nodes), [request.num_settled + 1 + node for node in nodes], device)


def _edits(requests: Sequence[Request], indices: Sequence[int], device: torch.device) -> dict[str, Any]:
    """What is done to the logits at an index of each request, which are alike, before a token is drawn there."""
    if requests[0].task.constraint is None:
        return edits(requests, device, indices)
    masks = row_masks(requests, [[index] for index in indices], device)
    return edits(requests, device, indices) | {"allowed": torch.cat(masks)}


def seeds_of_uniforms(requests: Sequence[Request], device: torch.device) -> dict[str, Any]:
    """The seeds and positions that the uniforms of the requests belong to, as arguments of the operations."""
    return _as_seeds(tuple([(request.task.seed, request.num_settled) for request in requests]), device)


@lru_cache(maxsize=8)  # a round asks for the same numbers at each draft and in its test
def _as_seeds(numbers: tuple[tuple[int, int], ...], device: torch.device) -> dict[str, Any]:
    seeds, positions = padded(tuple(zip(*numbers, strict=True)), 0, device).unbind()
    return {"seeds": seeds, "positions": positions}


def _randomness(
    requests: Sequence[Request], positions: list[int], stream: int, seeds: dict[str, Any]
) -> dict[str, Any]:
    """The arguments of `sample` that say what each request draws with; offsets may differ between them."""
    step = positions[0] - requests[0].num_settled
    if requests[0].draws_by_gumbel:
        return seeds | {"positions": torch.tensor(positions, device=seeds["positions"].device), "method": "gumbel"}
    if [request.num_settled + step for request in requests] == positions:
        return seeds | {"step": step, "stream": stream}
    steps = torch.tensor(positions, device=seeds["positions"].device) - seeds["positions"]
    return {"uniforms": uniforms(**seeds, step=steps, stream=stream)}
