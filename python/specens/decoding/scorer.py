"""What one set of weights reads for all requests of a batch."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from specens.decoding.processors import process
from specens.decoding.request import Request
from specens.engines.reading import Reading
from specens.engines.token_ids import TokenIds
from specens.engines.transformers.causal_lm import CausalLM
from specens.engines.transformers.member import Member
from specens.engines.transformers.members import Separate, make_member
from specens.engines.transformers.ragged_cache import RaggedCache


@dataclass
class Lane:
    """A request in the rows of a RaggedCache, one for each place in the ensemble.

    num_seen: of its generated tokens and drafts.
    """

    cache: RaggedCache
    prompt_lens: list[int]
    rows: list[int]
    num_seen: int = 0
    prompt_fed: bool = False

    def roll_back(self, length: int) -> None:
        """Forget the tokens behind the first `length` generated ones: the next ones are written over them."""
        self.num_seen = min(self.num_seen, length)

    def settle(self, length: int) -> None:
        """Nothing: any token can be taken back."""

    def keep(self, first: int, nodes: Sequence[int]) -> None:
        """Of what was read behind the first `first` tokens keep these, which ascend."""
        if self.num_seen <= first:
            return
        kept = [node for node in nodes if first + node < self.num_seen]
        for row, prompt_len in zip(self.rows, self.prompt_lens, strict=True):
            self.cache.keep(row, prompt_len + first, kept)
        self.num_seen = first + len(kept)


class Scorer:
    """Computes logits with one model, which may serve several places of the ensemble with prompts of their own.

    index: its number among the scorers of a batch, and of its lane in a request. reading: what the model can do; where
    it `shares`, one forward reads the tokens of all requests; else each has a cache of its own, of whatever kind.
    prompts_of: whose prompts it reads, one for each place; of an outside drafter it is a member's.
    """

    def __init__(
        self,
        index: int,
        model: CausalLM,
        places: Sequence[int],
        *,
        prompts_of: Sequence[int],
        reading: Reading,
        can_roll_back: bool,
    ) -> None:
        self.index = index
        self.places = tuple(places)
        self._prompts_of = tuple(prompts_of)
        self._model = model
        self._can_roll_back = can_roll_back
        self._reading = reading
        self._cache = RaggedCache(model) if reading.shares else None
        self._lanes: list[Lane] = []  # in the order of their rows

    def admit(self, request: Request) -> None:
        """Make room for a request."""
        if self._cache is None:
            prompts = self._prompts(request)
            how = (request.statistics, self._can_roll_back, self._reading)
            request.lanes[self.index] = make_member(self._model, prompts, self.places, *how)
        else:
            rows = [self._cache.add_row() for _ in self.places]
            lane = Lane(self._cache, [len(prompt) for prompt in self._prompts(request)], rows)
            request.lanes[self.index] = lane
            self._lanes.append(lane)

    def release(self, request: Request) -> None:
        """Forget a request; the last one moves into its rows."""
        lane = request.lanes.pop(self.index)
        if self._cache is None:
            return
        last = self._lanes.pop()
        for row in reversed(lane.rows):
            self._cache.remove_row(row)
        if last is not lane:
            last.rows = lane.rows
            self._lanes[self._lanes.index(lane)] = last

    def counts_for(self, request: Request) -> bool:
        """Whether a member that it serves has a part in the request's target."""
        return not set(self.places).isdisjoint(request.counted)

    def score(self, requests: Sequence[Request]) -> None:
        """Read what is new to the model, so that every request has its logits behind its last token."""
        waiting = [request for request in requests if self._num_rows(request)]
        if self._cache is None:
            for request in waiting:
                member: Member | Separate = request.lanes[self.index]
                logits = member.score(request.readable, self._num_rows(request), _tree(request))
                self._keep(request, logits, member.hidden)
            return
        # In the order of their rows, so that a forward of all reads its buffers in place.
        waiting.sort(key=lambda request: request.lanes[self.index].rows)
        fed = [request for request in waiting if request.lanes[self.index].prompt_fed]
        fresh = [request for request in waiting if not request.lanes[self.index].prompt_fed]
        for together in filter(None, (fresh, fed)):  # prompts are much longer than what comes behind them
            self._score_together(together, self._cache)

    def _prompts(self, request: Request) -> list[list[int]]:
        return [request.task.prompts[place] for place in self._prompts_of]

    def _num_rows(self, request: Request) -> int:
        """How many rows of logits the request lacks; the last one is behind its last token, or node."""
        first = max(request.rows[self.places[0]].end, request.num_settled)
        return len(request.readable) + 1 - first

    def _score_together(self, requests: list[Request], cache: RaggedCache) -> None:
        started = time.perf_counter()
        rows: list[int] = []
        lengths: list[int] = []
        tokens: list[list[int]] = []
        for request in requests:
            lane: Lane = request.lanes[self.index]
            new = request.readable[lane.num_seen :]
            self._model.check_generated(new, self.places[0])
            for row, prompt in zip(lane.rows, self._prompts(request), strict=True):
                rows.append(row)
                lengths.append(len(prompt) + lane.num_seen if lane.prompt_fed else 0)
                tokens.append(new if lane.prompt_fed else prompt + new)
        counts = [self._num_rows(request) for request in requests]
        trees = [_tree(request) for request in requests for _ in self.places]
        logits = cache.forward(rows, lengths, tokens, max(counts), trees)
        seconds = (time.perf_counter() - started) / len(requests)
        for number, (request, count) in enumerate(zip(requests, counts, strict=True)):
            own = slice(number * len(self.places), (number + 1) * len(self.places))
            self._note(request, [len(new) for new in tokens[own]], seconds)
            hidden = self._model.hidden
            self._keep(request, logits[own, -count:], None if hidden is None else hidden[own, -count:])

    def _note(self, request: Request, num_read: list[int], seconds: float) -> None:
        lane: Lane = request.lanes[self.index]
        request.statistics.count_forward(self.places, num_read, seconds, reads_prompt=not lane.prompt_fed)
        lane.num_seen, lane.prompt_fed = len(request.readable), True

    def _keep(self, request: Request, logits: Tensor, hidden: Tensor | None) -> None:
        """Keep logits [places, rows, vocab], as the request's processors leave them, and hidden states beside them."""
        if hidden is not None:
            first = len(request.readable) + 1 - hidden.shape[1]
            request.hidden |= {place: (first, rows) for place, rows in zip(self.places, hidden, strict=True)}
        for place, prompt, rows in zip(self.places, self._prompts(request), logits, strict=True):
            first = len(request.readable) + 1 - len(rows)
            request.rows[place].add(first, _processed(request, place, prompt, rows, first))


def _tree(request: Request) -> list[int]:
    """The parents of the drafts, where they are no chain."""
    return [] if request.drafts.is_chain else request.drafts.parents


def _processed(request: Request, place: int, prompt: list[int], rows: Tensor, first: int) -> Tensor:
    """Logits [rows, vocab] from the index `first` on, each edited for the tokens before it.

    Rows behind an end, or behind a draft that cannot be accepted, are of no use, and no processor sees them.
    """
    processors = request.processors(len(prompt))
    if not processors:
        return rows
    if place not in request.texts:
        request.texts[place] = TokenIds([prompt], rows.device)
    text = request.texts[place]
    edited = []
    for index, row in enumerate(rows, start=first):
        useful = processors if request.may_follow(index) else ()
        before = text.behind(request.text_before(index)) if useful else text.behind([])
        edited.append(process(useful, before, row, is_first=index == 0))
        if useful:
            request.note_processed(index, row, edited[-1][0])
        if not request.drafts.is_chain:
            text.forget(request.num_settled)
    text.forget(request.num_settled)
    return torch.cat(edited)
