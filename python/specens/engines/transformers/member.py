"""A member of the ensemble while it generates: a model, what it was prompted with, and its cache."""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch
from torch import Tensor

from specens.decoding.statistics import Statistics
from specens.engines.reading import Reading
from specens.engines.token_ids import TokenIds
from specens.engines.transformers.causal_lm import CausalLM
from specens.engines.transformers.kv_cache import Rollback, holds_trees, keep_slots
from specens.engines.transformers.tree_arguments import paths_to_read, tree_arguments

FED_TOGETHER = 8


class Member:
    """Scores the generated tokens behind its own prompt; feeds each token once and takes rejected ones back.

    A cache that cannot be cut goes back to an earlier state instead, and the settled tokens since then are fed again
    with the next ones; one that cannot do that either is filled anew.

    indices: the places in the ensemble that this object serves. Several where members share weights: their prompts
        are then one batch, padded on the left, and the logits have one row of the batch for each.
    reading: what the model's forwards can do.
    num_seen: how many generated tokens and drafts the cache holds, beside the prompt.
    next_logits: [prompts, vocab], of the token behind the last one seen.
    hidden: [prompts, rows, width], beside the logits of `score`, where the model keeps it.
    """

    def __init__(
        self,
        model: CausalLM,
        prompts: Sequence[list[int]],
        indices: Sequence[int],
        statistics: Statistics,
        can_roll_back: bool = True,
        reading: Reading | None = None,
    ) -> None:
        self.indices = tuple(indices)
        self.hidden: Tensor | None = None
        self._model = model
        self._prompts = prompts
        self._statistics = statistics
        self._reading = Reading() if reading is None else reading
        self._can_roll_back = can_roll_back and self._reading.caches and self._reading.rolls_back
        self._prompt_len = max(len(prompt) for prompt in prompts)
        self._padding = [self._prompt_len - len(prompt) for prompt in prompts]
        self._ids = TokenIds(prompts, model.device)
        self._num_settled = 0  # of the generated tokens, how many are known never to be taken back
        self._begin()

    def _begin(self) -> None:
        """Hold nothing, not even the prompt."""
        self.num_seen = 0
        self.next_logits: Tensor | None = None
        self._prompt_fed = False
        self.cache = self._model.new_cache() if self._reading.caches else None
        self._rollback = Rollback(self.cache) if self._can_roll_back else None

    def score(self, sequence: list[int], rows: int, parents: Sequence[int] = ()) -> Tensor:
        """Feed what is new in `sequence`, all generated tokens and drafts so far; one forward where the cache allows.

        parents: of the drafts, where they are the nodes of a tree that is no chain: -1 for the last generated token.
        One forward reads what is new of both, and one more a prompt; where the model does not read trees so, or they
        outgrow a sliding window, one for each path.
        Returns logits [prompts, rows, vocab]: the distributions of the last `rows` positions, the last one being that
        of the token behind `sequence`; of a tree, behind its last nodes. Raises ValueError where the model has no
        embedding for a token.
        """
        self._check_ids(sequence[self.num_seen :])
        if parents:
            return self._score_tree(sequence, rows, parents)
        parts, hidden = [], []
        for end in self._ends(len(sequence), rows):
            parts.append(self._feed(sequence[:end], rows))
            hidden += [self._model.hidden] if self._model.hidden is not None else []
        logits = _last_rows(parts, rows)
        self.hidden = _last_rows(hidden, rows) if hidden else None
        self.next_logits = logits[:, -1]
        return logits

    def score_next(self, sequence: list[int]) -> Tensor:
        """Logits [prompts, vocab] of the token behind `sequence`; no forward where they are known already."""
        if self.next_logits is not None and self.num_seen == len(sequence):
            return self.next_logits
        return self.score(sequence, 1)[:, -1]

    def roll_back(self, length: int) -> None:
        """Forget the tokens behind the first `length` generated ones, which are settled."""
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
        self.num_seen, self.next_logits = min(self.num_seen, left), None

    def settle(self, length: int) -> None:
        """The first `length` generated tokens will never be taken back; those behind them stay under test."""
        if self.num_seen <= length:
            self.roll_back(length)
            return
        self._num_settled = length
        if self._rollback is not None:
            self._rollback.settle(length)

    def _score_tree(self, sequence: list[int], rows: int, parents: Sequence[int]) -> Tensor:
        settled = sequence[: len(sequence) - len(parents)]
        if not self._reads_trees(self._prompt_len + len(sequence)):
            return self._score_paths(settled, sequence[len(settled) :], parents, rows)
        parts, hidden = [], []
        if not self._prompt_fed or (rows > len(parents) and self.num_seen == len(settled)):
            parts.append(self.score_next(settled)[:, None])
            hidden += [self.hidden[:, -1:]] if self.hidden is not None else []
        started = time.perf_counter()
        new = sequence[self.num_seen :]
        num_chain = max(len(settled) - self.num_seen, 0)
        num_read = self.num_seen + num_chain - len(settled)  # of the nodes
        num_cached = self._prompt_len + self.num_seen - num_read
        arguments = tree_arguments(parents, num_chain, num_cached, num_read, self.cache, self._model)
        input_ids = torch.tensor([new], device=self._model.device)
        parts.append(self._model.forward(input_ids, self.cache, min(rows, len(new)), **arguments))
        hidden += [self._model.hidden] if self._model.hidden is not None else []
        self._count(len(new), time.perf_counter() - started)
        self.num_seen, self.next_logits = len(sequence), None
        self.hidden = _last_rows(hidden, rows) if hidden else None
        return _last_rows(parts, rows)

    def _reads_trees(self, num_slots: int) -> bool:
        return self._reading.trees and self._rollback is not None and holds_trees(self.cache, num_slots)

    def _score_paths(self, settled: list[int], tokens: Sequence[int], parents: Sequence[int], rows: int) -> Tensor:
        """The rows of a tree from chains, each of which is taken back; the nodes are not kept."""
        if self.num_seen > len(settled):
            self.roll_back(len(settled))
        known = len(parents) + 1 - rows  # of the rows; the first one is behind the text
        logits: dict[int, Tensor] = {}
        hidden: dict[int, Tensor] = {}
        if not known:
            logits[-1] = self.score_next(settled)
            hidden |= {} if self.hidden is None else {-1: self.hidden[:, -1]}
        for path in paths_to_read(parents, max(known - 1, 0)):
            new = [node for node in path if node >= known - 1]
            own = self.score(settled + [tokens[node] for node in path], len(new))
            logits |= {node: own[:, row] for row, node in enumerate(new)}
            hidden |= {} if self.hidden is None else {node: self.hidden[:, row] for row, node in enumerate(new)}
            self.roll_back(len(settled))
        self.hidden = torch.stack([hidden[node] for node in sorted(hidden)], dim=1) if hidden else None
        return torch.stack([logits[node] for node in sorted(logits)], dim=1)

    def keep(self, first: int, nodes: Sequence[int]) -> None:
        """Of the drafts behind the first `first` tokens keep these, which ascend, as far as they were read."""
        kept = [node for node in nodes if first + node < self.num_seen]
        if self.num_seen <= first + len(kept):
            return
        if not self._reads_trees(self._prompt_len + self.num_seen):
            self.roll_back(first)
            return
        assert self._rollback is not None
        keep_slots(self.cache, self._prompt_len + first, kept)
        self.num_seen = self._rollback.undo(self.num_seen, first + len(kept))
        self.next_logits = None
        self._ids.forget(first)

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
        """The numbers of generated tokens behind which a rotary embedding changes."""
        switch, growth = self._model.switch_length, self._model.growth_length
        changes = [] if switch is None else [switch - self._prompt_len]
        if growth is not None:
            changes += range(max(growth - self._prompt_len, 0), length)
        return changes

    def _switches(self, length: int, num_seen: int) -> bool:
        """Whether texts of these numbers of generated tokens are read so differently that they share no cache."""
        switch = self._model.switch_length if self._reading.caches and self._model.drops_cache else None
        return switch is not None and self._prompt_len + length <= switch < self._prompt_len + num_seen

    def _feed(self, sequence: list[int], rows: int) -> Tensor:
        """One forward; logits [prompts, at most rows, vocab]."""
        started = time.perf_counter()
        new = sequence[self.num_seen :]
        rows = min(rows, len(new) if self._prompt_fed else len(new) + 1)
        if self._prompt_fed and self._switches(self.num_seen, len(sequence)):
            self._begin()
            new = sequence
        if not self._reading.caches:
            rows = rows if self._reading.several else 1
        logits = self._forward(sequence, rows)
        self._count(len(new), time.perf_counter() - started)
        self._prompt_fed = True
        self.num_seen = len(sequence)
        if self._rollback is not None:
            self._rollback.note(self.num_seen)
        return logits

    def _forward(self, sequence: list[int], rows: int) -> Tensor:
        ids = self._ids.behind(sequence)
        held = self._prompt_len + self.num_seen if self._prompt_fed and self._reading.caches else 0
        return self._model.read(ids, self.cache, held, rows, **self._padding_arguments(ids.shape[1]))

    def _padding_arguments(self, length: int) -> dict[str, Tensor]:
        """Which slots hold no token, and each token's place in its own prompt: needed where lengths differ."""
        if not any(self._padding):
            return {}
        slots = torch.arange(length, device=self._model.device)
        places = slots - torch.tensor(self._padding, device=self._model.device)[:, None]  # [prompts, slots]
        return {"attention_mask": (places >= 0).long(), "position_ids": places.clamp(min=0)}

    def _check_ids(self, tokens: list[int]) -> None:
        self._model.check_generated(tokens, self.indices[0])

    def _count(self, num_new: int, seconds: float) -> None:
        lens = [num_new if self._prompt_fed else len(prompt) + num_new for prompt in self._prompts]
        self._statistics.count_forward(self.indices, lens, seconds, reads_prompt=not self._prompt_fed)


def _last_rows(parts: list[Tensor], rows: int) -> Tensor:
    """The last `rows` rows of parts [prompts, n, width]."""
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)[:, -rows:]
