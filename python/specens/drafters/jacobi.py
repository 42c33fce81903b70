"""The target's own guesses draft: what it took for the most likely tokens behind drafts that were rejected.

Sources: Santilli et al., Accelerating Transformer Inference for Translation via Parallel Decoding, ACL 2023 (Jacobi);
Fu et al., Lookahead Decoding, ICML 2024 (n-grams from its iterates).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from specens.decoding.request import Request
from specens.drafters.drafter import Drafter, add_chosen, check_count, check_place
from specens.engines.transformers.causal_lm import CausalLM
from specens_kernels import NgramIndex

if TYPE_CHECKING:
    from specens.decoding.batch import Batch


@dataclass
class Guesses:
    """What a member took for the most likely tokens at the positions from `start` on, behind the drafts of a round.

    pool: n-grams of drafts and the guess behind them, of all rounds.
    """

    start: int = 0
    tokens: list[int] = field(default_factory=list)
    pool: NgramIndex | None = None

    def at(self, position: int) -> list[int]:
        """Those from a position on."""
        return self.tokens[max(position - self.start, 0) :]


class Jacobi(Drafter):
    """Jacobi iteration: the next drafts are a member's most likely tokens behind the drafts of the round before.

    Costs nothing beside reading the drafts. A chain begins with tokens of the prompt as a filling; where drafts were
    rejected, the guesses behind them, made for another text, are often right again. Models that were not trained for
    it gain little. Guesses are a member's, and tested against the ensemble; they never change the text at
    temperature 0, nor its law.

    place: the member whose guesses they are; best the one of the largest weight.
    """

    def __init__(self, place: int = 0) -> None:
        self.place = place

    def bind(self, models: Sequence[CausalLM], tokenizer: Any | None) -> Drafter:  # noqa: ARG002
        """Itself, checked."""
        check_place(self.place, len(models))
        return self

    def propose(
        self,
        batch: Batch,  # noqa: ARG002
        requests: Sequence[Request],
        draft_lens: Sequence[int],
        min_probability: float = 0.0,  # noqa: ARG002
    ) -> None:
        """The guesses at hand, then fill tokens."""
        for request, most in zip(requests, draft_lens, strict=True):
            add_chosen(request, self._chain(request, most))

    def observe(self, requests: Sequence[Request]) -> None:
        """Keep the most likely tokens at all positions that were scored."""
        for request in requests:
            start, rows = request.num_settled, request.rows[self.place]
            if rows.end > start:
                guesses = _guesses(request)
                guesses.start, guesses.tokens = start, rows.take(start, rows.end).argmax(-1).tolist()

    def _chain(self, request: Request, most: int) -> list[int]:
        chain, prompt = _guesses(request).at(request.num_settled)[:most], request.task.prompts[self.place]
        return chain + [prompt[(request.num_settled + step) % len(prompt)] for step in range(len(chain), most)]


class Lookahead(Jacobi):
    """Jacobi iteration, whose n-grams are kept: drafts that were made for one place often come true at a later one.

    Where the pool knows a token of the text's end, it drafts, else the guesses do. The window of the paper, a second
    branch in the same forward, is left out: the n-grams come from the drafts that are read anyway.

    ngram: the tokens of an n-gram, its guess included.
    """

    def __init__(self, ngram: int = 5, place: int = 0) -> None:
        super().__init__(place)
        check_count("ngram", ngram, 2)
        self.ngram = ngram

    def observe(self, requests: Sequence[Request]) -> None:
        """Keep the n-grams that end with a most likely token."""
        super().observe(requests)
        for request in requests:
            guesses = _guesses(request)
            for place, token in enumerate(guesses.tokens):
                before = request.sequence[: guesses.start + place][1 - self.ngram :]
                self._pool(request).extend([*before, token])
                self._pool(request).begin_text()

    def _pool(self, request: Request) -> NgramIndex:
        guesses = _guesses(request)
        if guesses.pool is None:
            guesses.pool = NgramIndex(max_match=self.ngram - 1)
        return guesses.pool

    def _chain(self, request: Request, most: int) -> list[int]:
        end = request.sequence[1 - self.ngram :] or request.task.prompts[self.place][1 - self.ngram :]
        found = self._pool(request).propose_after(end, most)[0].tolist()
        return found + super()._chain(request, most)[len(found) :]


def _guesses(request: Request) -> Guesses:
    if request.drafter_state is None:
        request.drafter_state = Guesses()
    state: Guesses = request.drafter_state
    return state
