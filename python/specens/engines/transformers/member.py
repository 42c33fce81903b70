"""A text that a model reads with a cache of its own, whatever kind that is."""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch
from torch import Tensor

from specens.engines.protocol import Forward, Read, Text
from specens.engines.token_ids import TokenIds
from specens.engines.transformers.kv_cache import Rollback, holds_trees, keep_slots
from specens.engines.transformers.model import Model
from specens.engines.transformers.reading import Reading
from specens.engines.transformers.tree_arguments import tree_arguments

FED_TOGETHER = 8


class Member(Text):
    """Scores the generated tokens after its prompt; feeds each token once and takes rejected ones back.

    A cache that cannot be cut goes back to an earlier state instead, and the settled tokens since then are fed again
    with the next ones; one that cannot do that either is filled anew.

    reading: what the model's forwards can do.
    num_seen: how many generated tokens the cache holds, beside the prompt. num_nodes: of a draft tree after them.
    forwards: those of the last `read`. hidden: [rows, width], beside its logits, where the model keeps it.
    """

    def __init__(
        self, model: Model, prompt: list[int], can_roll_back: bool = True, reading: Reading | None = None
    ) -> None:
        self.forwards: list[Forward] = []
        self.hidden: Tensor | None = None
        self._model = model
        self._prompt_len = len(prompt)
        self._reading = Reading() if reading is None else reading
        self._can_roll_back = can_roll_back and self._reading.caches and self._reading.rolls_back
        self._ids = TokenIds(prompt, model.device)
        self._num_settled = 0  # of the generated tokens, how many are known never to be taken back
        self._begin()

    def _begin(self) -> None:
        """Hold nothing, not even the prompt."""
        self.num_seen = self.num_nodes = 0
        self._prompt_fed = False
        self.cache = self._model.new_cache() if self._reading.caches else None
        self._rollback = Rollback(self.cache) if self._can_roll_back else None

    def read(self, read: Read) -> Tensor:
        """Logits [num_rows, vocab], as of `Context.read`."""
        self.forwards = []
        if not read.nodes:
            return self.score(read.sequence, read.num_rows)
        return self._score_nodes(read.sequence, read.nodes, read.parents, read.num_rows)

    def score(self, sequence: Sequence[int], rows: int) -> Tensor:
        """Logits [rows, vocab] of the last rows after feeding what is new; one forward where the cache allows."""
        parts, hidden = [], []
        for end in self._ends(len(sequence), rows):
            parts.append(self._feed(sequence[:end], rows))
            hidden += [self._model.hidden] if self._model.hidden is not None else []
        self.hidden = _last_rows(hidden, rows) if hidden else None
        return _last_rows(parts, rows)

    def roll_back(self, length: int) -> None:
        """Forget the tokens after the first `length` generated ones, which are settled."""
        self.keep_path(())
        self._num_settled = length
        self._ids.forget(length)
        if self._rollback is not None and not self._switches(length, self.num_seen):
            left = self._rollback.undo(self.num_seen, length)
        else:
            left = min(self.num_seen, length)
        if left == self.num_seen:
            return
        if (self._rollback is None and self._reading.caches) or self._switches(left, self.num_seen):
            self._begin()
        self.num_seen = min(self.num_seen, left)

    def settle(self, length: int) -> None:
        """The first `length` generated tokens will never be taken back; those after them stay under test."""
        if self.num_seen <= length:
            self.roll_back(length)
            return
        self._num_settled = length
        if self._rollback is not None:
            self._rollback.settle(length)

    def holds_tree(self, num_tokens: int) -> bool:
        """Whether nodes can be read in one forward, which make so many tokens of the text in all."""
        return self._reading.trees and self._rollback is not None and holds_trees(self.cache, num_tokens)

    def _score_nodes(
        self, sequence: Sequence[int], tokens: Sequence[int], parents: Sequence[int], num_rows: int
    ) -> Tensor:
        """One forward for what is new of the sequence and the nodes; one before, without a mask, for a prompt."""
        parts, hidden = [], []
        if not self._prompt_fed:
            parts.append(self.score(sequence, 1)[None])
            hidden += [self._model.hidden] if self._model.hidden is not None else []
        chain, nodes = list(sequence[self.num_seen :]), list(tokens[self.num_nodes :])
        started = time.perf_counter()
        num_cached = self._prompt_len + self.num_seen
        arguments = tree_arguments(parents, len(chain), num_cached, self.num_nodes, self.cache, self._model)
        input_ids = torch.tensor([chain + nodes], device=self._model.device)
        parts.append(self._model.forward(input_ids, self.cache, min(num_rows, len(chain) + len(nodes)), **arguments))
        hidden += [self._model.hidden] if self._model.hidden is not None else []
        self.forwards.append(Forward((self,), (len(chain) + len(nodes),), time.perf_counter() - started))
        self.num_seen, self.num_nodes = len(sequence), len(tokens)
        self.hidden = _last_rows(hidden, num_rows) if hidden else None
        return _last_rows(parts, num_rows)

    def keep_nodes(self, nodes: Sequence[int]) -> None:
        """Keep these nodes, as far as they were fed."""
        if not self.num_nodes:
            return
        assert self._rollback is not None
        kept = [node for node in nodes if node < self.num_nodes]
        keep_slots(self.cache, self._prompt_len + self.num_seen, kept)
        self._rollback.undo(self.num_seen + self.num_nodes, self.num_seen + len(kept))
        self.num_nodes = len(kept)

    def keep_path(self, path: Sequence[int]) -> None:
        """Keep the nodes of an accepted path as settled tokens, and forget the others.

        Nodes that were never fed end the path: they are fed with the next tokens.
        """
        self.keep_nodes(path)
        self.num_seen, self.num_nodes = self.num_seen + self.num_nodes, 0

    def _ends(self, length: int, rows: int) -> list[int]:
        """Where forwards end that feed the tokens up to `length`, and give the logits of the last `rows` positions.

        To note states that can be returned to, the prompt is fed by itself, and so are settled tokens before they
        become too many to be fed again. Rotary embeddings that change with the length set ends too.
        """
        first = self.num_seen + self._prompt_fed  # the first end that there may be
        ends = {length} | {end for end in self._changes(length) if first <= end < length}
        if not self._reading.caches and not self._reading.several:
            ends.update(range(max(length - rows + 1, 0), length))
        elif not self._reading.several:
            # An empty cache takes all that is settled at once, as `generate` gives it a prompt.
            ends.update(range(first if self._prompt_fed else min(self._num_settled, length), length))
        if self._rollback is not None and self._rollback.by_snapshots:
            waiting = self._num_settled - self.num_seen
            if not self._prompt_fed or waiting > FED_TOGETHER:
                ends.add(min(self._num_settled, length))
        return sorted(ends)

    def _changes(self, length: int) -> list[int]:
        """The numbers of generated tokens after which a rotary embedding changes."""
        switch, growth = self._model.switch_length, self._model.growth_length
        changes = [] if switch is None else [switch - self._prompt_len]
        if growth is not None:
            changes += range(max(growth - self._prompt_len, 0), length)
        return changes

    def _switches(self, length: int, num_seen: int) -> bool:
        """Whether texts of these numbers of generated tokens are read so differently that they share no cache."""
        switch = self._model.switch_length if self._reading.caches and self._model.drops_cache else None
        return switch is not None and self._prompt_len + length <= switch < self._prompt_len + num_seen

    def _feed(self, sequence: Sequence[int], rows: int) -> Tensor:
        """One forward; logits [1, at most rows, vocab]."""
        started = time.perf_counter()
        num_new = len(sequence) - self.num_seen
        rows = min(rows, num_new if self._prompt_fed else num_new + 1)
        if self._prompt_fed and self._switches(self.num_seen, len(sequence)):
            self._begin()
            num_new = len(sequence)
        if not self._reading.caches:
            rows = rows if self._reading.several else 1
        ids = self._ids.after(sequence)
        held = self._prompt_len + self.num_seen if self._prompt_fed and self._reading.caches else 0
        logits = self._model.read(ids, self.cache, held, rows)
        num_fed = num_new if self._prompt_fed else self._prompt_len + num_new
        self.forwards.append(Forward((self,), (num_fed,), time.perf_counter() - started))
        self._prompt_fed = True
        self.num_seen = len(sequence)
        if self._rollback is not None:
            self._rollback.note(self.num_seen)
        return logits


def _last_rows(parts: list[Tensor], rows: int) -> Tensor:
    """The last `rows` rows [rows, width] of parts [1, n, width]."""
    return (parts[0] if len(parts) == 1 else torch.cat(parts, dim=1))[0, -rows:]
