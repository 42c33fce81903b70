"""What one set of weights reads for all requests of a batch."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import Tensor

from specens.decoding.processors import process
from specens.decoding.reader import Reader
from specens.decoding.reads import Ask, read_together
from specens.decoding.request import Request
from specens.engines.checks import open_context
from specens.engines.protocol import Context, Engine, Needs, Text
from specens.engines.token_ids import TokenIds

Asked = list[Ask]  # what is to be read together, of requests as they were when it was asked for


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
        self._is_outside = indices[0] < 0
        self._prompts_of = tuple(prompts_of)
        self._engine = engine
        self._needs = replace(needs, num_texts=len(indices)) if exact else needs
        self._exact = exact
        self.runs_elsewhere = engine.runs_elsewhere  # whether scoring mostly waits for another process
        self._serves = frozenset(indices)
        self._context = None if exact or engine.is_part else open_context(engine, needs)

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
            context = open_context(self._engine, self._needs) if self._context is None else self._context
        reader = Reader(context, self._engine.vocab_size, prompts, self.indices, request.statistics, texts)
        request.readers[self.index] = reader

    def release(self, request: Request) -> None:
        """Forget a request."""
        request.readers.pop(self.index).close()

    def counts_for(self, request: Request) -> bool:
        """Whether a member that it serves has a part in the request's target."""
        return not self._serves.isdisjoint(request.counted)

    def score(self, requests: Sequence[Request]) -> None:
        """Read what is new to the engine, so that every request has its logits after its last token."""
        for asked in self.ask(requests):
            self.keep(asked, self.read(asked))

    def ask(self, requests: Sequence[Request]) -> list[Asked]:
        """What `score` reads: nothing of it changes while the requests do."""
        asked = [own for request in requests if (own := self._ask_for(request)) is not None]
        return [[own] for own in asked] if self._exact else [asked] * bool(asked)

    def read(self, asked: Asked) -> list[list[Tensor]]:
        """The logits of each request, a tensor a member. It touches no more of a request than this scorer's reader."""
        return read_together(asked)

    def keep(self, asked: Asked, logits: Sequence[list[Tensor]]) -> None:
        """Hand requests what was read, [rows, vocab] of each member, as the request's processors leave it."""
        for own, rows in zip(asked, logits, strict=True):
            request, first = own.owner, own.length + 1 - own.num_rows
            for index, states in zip(self.indices, own.reader.hidden, strict=False):
                request.hidden[index] = (first, states)
            if request.has_processors:
                with request.failing_alone():
                    of_all = zip(self.indices, self._prompts(request), rows, strict=True)
                    rows = [_processed(request, *of_one, first) for of_one in of_all]
            for index, of_member in zip(self.indices, rows, strict=True):
                request.rows[index].add(first, of_member)

    def _prompts(self, request: Request) -> list[list[int]]:
        return [request.task.prompts[index] for index in self._prompts_of]

    def _ask_for(self, request: Request) -> Ask | None:
        """The request's sequence as the engine reads it, the rows of logits that it lacks, and where its drafts may
        become a tree the parents of those that are read.

        None where it lacks none. A token that the engine has no embedding for fails the request.
        """
        tokens = request.readable
        length = len(tokens)
        end = request.rows[self.indices[0]].end
        num_rows = length + 1 - (end if end > request.num_settled else request.num_settled)
        if not num_rows:
            return None
        reader = request.readers[self.index]
        if self._is_outside and self._engine.vocab_size < request.num_readable:
            tokens = list(map(self._readable, tokens))
        else:
            tokens = list(tokens)
            if max(tokens[reader.num_read + reader.num_nodes :], default=0) >= self._engine.vocab_size:
                with request.failing_alone():
                    reader.check(tokens)
        parents = request.drafts.parents[: length - request.num_settled] if self._needs.trees else ()
        return Ask(reader, tokens, length, num_rows, parents, request)

    def _readable(self, token: int) -> int:
        """A token; of one that an outside drafter has no embedding for, its last: its drafts are tested anyway."""
        return min(token, self._engine.vocab_size - 1) if self._is_outside else token


def score_all(work: Sequence[tuple[Scorer, Sequence[Request]]]) -> None:
    """Have each scorer score its requests: those whose engines run elsewhere beside the others, at the same time."""
    elsewhere = [own for own in work if own[0].runs_elsewhere]
    if elsewhere:
        with scoring(elsewhere):
            score_all([own for own in work if not own[0].runs_elsewhere])
        return
    for scorer, requests in work:
        scorer.score(requests)


@contextmanager
def scoring(work: Sequence[tuple[Scorer, Sequence[Request]]]) -> Iterator[None]:
    """Have scorers read requests as they are now, each in a thread, while the body goes on with other scorers.

    Threads read and do no more: what requests keep is kept at the end, where logits processors see it too.
    """
    waiting = [(scorer, asked) for scorer, requests in work if (asked := scorer.ask(requests))]
    if not waiting:
        yield
        return
    requests = {id(each.owner): each.owner for _, own in waiting for asked in own for each in asked}.values()
    before, started = [request.statistics.all_forward_seconds for request in requests], time.perf_counter()
    with ThreadPoolExecutor(len(waiting)) as pool:
        reads = [pool.submit(_read_all, scorer, own) for scorer, own in waiting]
        yield
        found = [read.result() for read in reads]
    part = (time.perf_counter() - started) / len(requests)
    for request, seconds in zip(requests, before, strict=True):
        statistics = request.statistics
        statistics.overlapped_seconds += max(0.0, statistics.all_forward_seconds - seconds - part)
    for (scorer, own), logits in zip(waiting, found, strict=True):
        for one, rows in zip(own, logits, strict=True):
            scorer.keep(one, rows)


@torch.inference_mode()  # which holds for a thread
def _read_all(scorer: Scorer, asked: Sequence[Asked]) -> list[list[list[Tensor]]]:
    return [scorer.read(one) for one in asked]


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
