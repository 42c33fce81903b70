"""What one set of weights reads for all requests of a batch."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import torch
from torch import Tensor

from specens.decoding.processors import process
from specens.decoding.reader import Reader
from specens.decoding.reads import read_together
from specens.decoding.request import OUTSIDE, Request
from specens.engines.protocol import Context, Engine, Needs, Text
from specens.engines.token_ids import TokenIds


class Scorer:
    """Computes logits with one engine, which may serve several indices of the ensemble with prompts of their own.

    index: its number among the scorers of a batch, and of its reader in a request. prompts_of: whose prompts it reads,
    one for each; of an outside drafter it is a member's. needs: of all texts of a batch.
    exact: each request is read by itself, in a context of its own.
    """

    def __init__(
        self,
        index: int,
        engine: Engine,
        indices: Sequence[int],
        *,
        prompts_of: Sequence[int],
        needs: Needs,
        exact: bool,
    ) -> None:
        self.index = index
        self.indices = tuple(indices)
        self._prompts_of = tuple(prompts_of)
        self._engine = engine
        self._needs = replace(needs, num_texts=len(indices)) if exact else needs
        self._exact = exact
        self._context = None if exact or engine.is_part else engine.open(needs)

    def admit(self, request: Request) -> None:
        """Make room for a request, after the members that the engine may be a part of."""
        prompts = [list(map(self._readable, prompt)) for prompt in self._prompts(request)]
        context: Context
        texts: list[Text] = []
        if self._engine.is_part:
            (member,) = self._prompts_of
            whole = next(reader for reader in request.readers.values() if member in reader.indices)
            context, *texts = whole.part(member)
        else:
            context = self._engine.open(self._needs) if self._context is None else self._context
        reader = Reader(context, self._engine.vocab_size, prompts, self.indices, request.statistics, texts)
        request.readers[self.index] = reader

    def release(self, request: Request) -> None:
        """Forget a request."""
        request.readers.pop(self.index).close()

    @property
    def runs_elsewhere(self) -> bool:
        """Whether scoring mostly waits for another process."""
        return self._engine.runs_elsewhere

    def counts_for(self, request: Request) -> bool:
        """Whether a member that it serves has a part in the request's target."""
        return not set(self.indices).isdisjoint(request.counted)

    def score(self, requests: Sequence[Request]) -> None:
        """Read what is new to the engine, so that every request has its logits after its last token."""
        waiting = [request for request in requests if self._num_rows(request)]
        for together in [[request] for request in waiting] if self._exact else filter(None, [waiting]):
            logits = read_together(
                [request.readers[self.index] for request in together],
                [self._sequence(request) for request in together],
                [self._num_rows(request) for request in together],
                [self._parents(request) for request in together],
            )
            for request, rows in zip(together, logits, strict=True):
                self._keep(request, rows)

    def _prompts(self, request: Request) -> list[list[int]]:
        return [request.task.prompts[index] for index in self._prompts_of]

    def _sequence(self, request: Request) -> list[int]:
        if self.indices == (OUTSIDE,) and self._engine.vocab_size < request.num_readable:
            return list(map(self._readable, request.readable))
        return request.readable

    def _parents(self, request: Request) -> list[int]:
        """Those of the drafts that it reads, where they may become a tree."""
        return request.drafts.parents[: len(request.readable) - request.num_settled] if self._needs.trees else []

    def _readable(self, token: int) -> int:
        """A token; of one that an outside drafter has no embedding for, its last: its drafts are tested anyway."""
        return min(token, self._engine.vocab_size - 1) if self.indices == (OUTSIDE,) else token

    def _num_rows(self, request: Request) -> int:
        """How many rows of logits the request lacks; the last one is after its last token, or node."""
        first = max(request.rows[self.indices[0]].end, request.num_settled)
        return len(request.readable) + 1 - first

    def _keep(self, request: Request, logits: Sequence[Tensor]) -> None:
        """Keep logits [rows, vocab] of each member, as the request's processors leave them, and hidden states."""
        hidden = request.readers[self.index].hidden
        for index, rows in zip(self.indices, hidden, strict=False):
            request.hidden[index] = (len(request.readable) + 1 - len(rows), rows)
        for index, prompt, rows in zip(self.indices, self._prompts(request), logits, strict=True):
            first = len(request.readable) + 1 - len(rows)
            request.rows[index].add(first, _processed(request, index, prompt, rows, first))


def score_all(work: Sequence[tuple[Scorer, Sequence[Request]]]) -> None:
    """Have each scorer score its requests: those whose engines run elsewhere at the same time, then the others."""
    elsewhere = [(scorer, requests) for scorer, requests in work if scorer.runs_elsewhere]
    everyone = {id(request): request for _, requests in elsewhere for request in requests}.values()
    edited = any(request.processors(len(prompt)) for request in everyone for prompt in request.task.prompts)
    if len(elsewhere) < 2 or edited:  # logits processors are the caller's, and may be no two threads' at a time
        elsewhere = []
    here = [own for own in work if own not in elsewhere]
    if not elsewhere:
        for scorer, requests in here:
            scorer.score(requests)
        return
    with ThreadPoolExecutor(len(elsewhere)) as pool:
        waiting = [pool.submit(scorer.score, requests) for scorer, requests in elsewhere]
        for scorer, requests in here:
            scorer.score(requests)
        for own in waiting:
            own.result()


def _processed(request: Request, member: int, prompt: list[int], rows: Tensor, first: int) -> Tensor:
    """Logits [rows, vocab] from the index `first` on, each edited for the tokens before it.

    Rows after an end, or after a draft that cannot be accepted, are of no use, and no processor sees them.
    """
    processors = request.processors(len(prompt))
    if not processors:
        return rows
    if member not in request.token_ids:
        request.token_ids[member] = TokenIds(prompt, rows.device)
    text = request.token_ids[member]
    edited = []
    for index, row in enumerate(rows, start=first):
        useful = processors if request.may_follow(index) else ()
        before = text.after(request.text_before(index)) if useful else text.after([])
        edited.append(process(useful, before, row, is_first=index == 0))
        if useful:
            request.note_processed(index, row, edited[-1][0])
        if not request.drafts.is_chain:
            text.forget(request.num_settled)
    text.forget(request.num_settled)
    return torch.cat(edited)
