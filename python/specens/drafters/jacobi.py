"""The target's own guesses draft: what it took for the most likely tokens after drafts that were rejected.

Sources: Santilli et al., Accelerating Transformer Inference for Translation via Parallel Decoding, ACL 2023 (Jacobi);
Fu et al., Lookahead Decoding, ICML 2024 (n-grams from its iterates).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from specens.decoding.drafts import ROOT
from specens.decoding.request import OUTSIDE, Request
from specens.drafters.drafter import Drafter, check_count, check_index
from specens.drafters.tree_plan import MOST_NODES, TreePlan
from specens.drafters.trees import paths_of
from specens.engines.protocol import Engine
from specens_kernels import NgramIndex

if TYPE_CHECKING:
    from specens.decoding.batch import Batch


@dataclass
class Guesses:
    """What a member took for the most likely tokens at the positions from `start` on, after each path of the drafts.

    pool: n-grams of drafts and the guess after them, of all rounds. window: rows of tokens that make n-grams.
    """

    start: int = 0
    lines: list[list[int]] = field(default_factory=list)
    pool: NgramIndex | None = None
    window: list[list[int]] = field(default_factory=list)

    def at(self, position: int) -> list[list[int]]:
        """Those from a position on, without repetitions."""
        left = (tuple(line[max(position - self.start, 0) :]) for line in self.lines)
        return [list(line) for line in dict.fromkeys(left) if line]


class Jacobi(Drafter):
    """Jacobi iteration: the next drafts are a member's most likely tokens after the drafts of the round before.

    Costs nothing beside reading the drafts. A chain begins with tokens of the prompt as a filling; where drafts were
    rejected, the guesses after them, made for another text, are often right again. Models that were not trained for
    it gain little. Guesses are a member's, and tested against the ensemble; they never change the text at
    temperature 0, nor its law.

    index: the member whose guesses they are; best the one of the largest weight.
    """

    def __init__(self, index: int = 0) -> None:
        self.index = index

    def bind(self, models: Sequence[Engine], tokenizer: Any | None) -> Drafter:  # noqa: ARG002
        """Itself, checked."""
        check_index(self.index, len(models))
        return self

    def candidates(self, request: Request, count: int, length: int) -> list[list[int]]:
        """The guesses after each path of the last round's drafts, and fill tokens after them."""
        lines = _guesses(request).at(request.num_settled) or [[]]
        return [line[:length] + self._filling(request, len(line[:length]), length) for line in lines[:count]]

    def observe(self, requests: Sequence[Request]) -> None:
        """Keep the most likely tokens at all places that were scored."""
        for request in requests:
            start, rows = request.num_settled, request.rows[self.index]
            if rows.end > start:
                tokens = rows.take(start, rows.end).argmax(-1).tolist()
                guesses = _guesses(request)
                guesses.start = start
                paths = ([0, *(1 + node for node in path)] for path in request.drafts.paths() or [[]])
                guesses.lines = [[tokens[row] for row in path if row < len(tokens)] for path in paths]

    def _filling(self, request: Request, start: int, length: int) -> list[int]:
        prompt = request.task.prompts[self.index]
        return [prompt[(request.num_settled + step) % len(prompt)] for step in range(start, length)]


class Lookahead(Jacobi):
    """Jacobi iteration, whose n-grams are kept: drafts that were made for one place often come true at a later one.

    What the pool knows of the text's end is drafted, of a tree all of it that fits, then the guesses. With a window, a
    tree gets a second branch, which makes n-grams as the paper does: a row of that many tokens, and below each a column
    of `ngram` - 2 more; in each round the most likely token after a column ends an n-gram, and every row becomes the
    one above it. All are drafts too, which are tested, and rarely right.

    ngram: the tokens of an n-gram, its guess included. window: 0 leaves the second branch out; else for trees only.
    """

    def __init__(self, ngram: int = 5, index: int = 0, window: int = 0) -> None:
        super().__init__(index)
        check_count("ngram", ngram, 2)
        check_count("window", window, 0, MOST_NODES)
        self.ngram, self.window = ngram, window

    @property
    def extra_nodes(self) -> int:
        """Those of the window."""
        return self.window * (self.ngram - 1)

    def check_topology(self, plan: TreePlan | None) -> None:
        """Raise ValueError for a window without trees."""
        if plan is None and self.window:
            raise ValueError("tree: expected draft trees, tree=, with a window of Lookahead; got none")

    def propose_trees(self, batch: Batch, requests: Sequence[Request], plan: TreePlan) -> None:
        """N-grams of the pool and guesses, then the window."""
        super().propose_trees(batch, requests, plan)
        for request in requests:
            for column in self._columns(request):
                node = ROOT
                for token in column:
                    if not request.can_draft_after(node):
                        break
                    node = request.choose_draft(token, OUTSIDE, node)

    def _columns(self, request: Request) -> list[list[int]]:
        """The way to the end of each column of the window: its row's tokens up to it, and its own."""
        rows = _guesses(request).window
        return (
            [rows[0][: index + 1] + [row[index] for row in rows[1:]] for index in range(len(rows[0]))] if rows else []
        )

    def _turn(self, request: Request) -> None:
        """Move the window's rows up, the last one being what is most likely after the columns."""
        first, guesses = request.num_settled, _guesses(request)
        if not guesses.window:
            filling = self._filling(request, 0, self.window + self.ngram - 2)
            guesses.window = [filling[level : level + self.window] for level in range(self.ngram - 1)]
            return
        found = [self._node(request, column) for column in self._columns(request)]
        ends = [1 + node for node in found if node is not None]
        if len(ends) == self.window:  # else the text, or a grammar, ended before it
            rows = request.rows[self.index].take(first, request.rows[self.index].end)
            guesses.window = [*guesses.window[1:], rows[ends].argmax(-1).tolist()]

    def _node(self, request: Request, tokens: Sequence[int]) -> int | None:
        node: int | None = ROOT
        for token in tokens:
            node = None if node is None else request.drafts.edges.get((node, token))
        return node

    def observe(self, requests: Sequence[Request]) -> None:
        """Keep the n-grams that end with a most likely token."""
        super().observe(requests)
        for request in requests:
            if self.window:
                self._turn(request)
            guesses, paths = _guesses(request), request.drafts.paths() or [[]]
            grams: dict[tuple[int, ...], None] = {}
            for path, line in zip(paths, guesses.lines, strict=True):
                text = request.sequence[: guesses.start] + [request.sequence[guesses.start + node] for node in path]
                for depth, token in enumerate(line):
                    gram = *text[: guesses.start + depth][1 - self.ngram :], token
                    grams[gram] = None
            for own in grams:
                self._pool(request).extend(own)
                self._pool(request).begin_text()

    def _pool(self, request: Request) -> NgramIndex:
        guesses = _guesses(request)
        if guesses.pool is None:
            guesses.pool = NgramIndex(max_match=self.ngram - 1)
        return guesses.pool

    def candidates(self, request: Request, count: int, length: int) -> list[list[int]]:
        """What the pool knows after the text's end, in the place of the first guesses."""
        end = request.settled[1 - self.ngram :] or request.task.prompts[self.index][1 - self.ngram :]
        pool, guessed = self._pool(request), super().candidates(request, count, length)
        found = pool.propose_after(end, length)[0].tolist()
        others = paths_of(*pool.propose_tree(count * length, max_levels=length, context=end)[:2]) if count > 1 else []
        return [found + guessed[0][len(found) :], *others, *guessed]


def _guesses(request: Request) -> Guesses:
    if request.drafter_state is None:
        request.drafter_state = Guesses()
    state: Guesses = request.drafter_state
    return state
