"""A member of the ensemble while it generates: a model, what it was prompted with, and its cache."""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch
from torch import Tensor

from specens.adapters.causal_lm import CausalLM
from specens.kv_cache import Rollback, keep_slots
from specens.statistics import Statistics
from specens.tree_arguments import tree_arguments

FED_TOGETHER = 8


class Member:
    """Scores the generated tokens behind its own prompt; feeds each token once and takes rejected ones back.

    A cache that cannot be cut goes back to an earlier state instead, and the settled tokens since then are fed again
    with the next ones.

    indices: the places in the ensemble that this object serves. Several where members share weights: their prompts
        are then one batch, padded on the left, and the logits have one row of the batch for each.
    num_seen: how many generated tokens the cache holds, beside the prompt. num_nodes: of a draft tree behind them.
    """

    def __init__(
        self,
        model: CausalLM,
        prompts: Sequence[list[int]],
        indices: Sequence[int],
        statistics: Statistics,
        can_roll_back: bool = True,
    ) -> None:
        self.indices = tuple(indices)
        self.num_seen = 0
        self.num_nodes = 0
        self.next_logits: Tensor | None = None  # [prompts, vocab], of the token behind the last one seen
        self.hidden: Tensor | None = (
            None  # [prompts, rows, width], beside the logits of `score`, where the model keeps it
        )
        self._model = model
        self._prompts = prompts
        self._statistics = statistics
        self._prompt_len = max(len(prompt) for prompt in prompts)
        self._padding = [self._prompt_len - len(prompt) for prompt in prompts]
        self._prompt_fed = False
        self._num_settled = 0  # of the generated tokens, how many are known never to be taken back
        self.cache = model.new_cache()
        self._rollback = Rollback(self.cache) if can_roll_back else None

    def score(self, sequence: list[int], rows: int) -> Tensor:
        """Feed what is new in `sequence`, all generated tokens and drafts so far; one forward where the cache allows.

        Returns logits [prompts, rows, vocab]: the distributions of the last `rows` positions, the last one being that
        of the token behind `sequence`. Raises ValueError where the model has no embedding for a token.
        """
        self._check_ids(sequence[self.num_seen :])
        parts, hidden = [], []
        for end in self._ends(len(sequence)):
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
        assert self._rollback is not None
        self._num_settled = length
        left = self._rollback.undo(self.num_seen, length)
        if left < self.num_seen:
            self.num_seen, self.next_logits = left, None

    def settle(self, length: int) -> None:
        """The first `length` generated tokens will never be taken back; those behind them stay under test."""
        assert self._rollback is not None
        if self.num_seen <= length:
            self.roll_back(length)
        else:
            self._num_settled = length
            self._rollback.settle(length)

    def score_nodes(self, sequence: list[int], tokens: Sequence[int], parents: Sequence[int]) -> Tensor:
        """Feed the nodes from `num_nodes` on of a draft tree behind `sequence`, with what is new of that; one forward.

        Returns logits [1, rows, vocab], of the tokens behind the new nodes; for the first nodes that behind `sequence`
        stands before them. The prompt is read by a forward of its own.
        """
        first = [] if self.num_nodes else [self._score_settled(sequence)]
        chain, nodes = sequence[self.num_seen :], list(tokens[self.num_nodes :])
        self._check_ids(chain + nodes)
        started = time.perf_counter()
        num_cached = self._prompt_len + self.num_seen
        arguments = tree_arguments(parents, len(chain), num_cached, self.num_nodes, self.cache, self._model)
        input_ids = torch.tensor([chain + nodes], device=self._model.device)
        rows = len(nodes) + bool(chain)
        logits = self._model.forward(input_ids, self.cache, rows, **arguments)
        self._count(len(chain) + len(nodes), time.perf_counter() - started)
        self.num_seen, self.num_nodes, self.next_logits = len(sequence), len(tokens), None
        return torch.cat([*(row[:, None] for row in first if row is not None), logits], dim=1)

    def keep_path(self, path: Sequence[int]) -> None:
        """Keep the nodes of an accepted path, which ascend, as settled tokens, and forget the others.

        Nodes that were never fed end the path: they are fed with the next tokens.
        """
        assert self._rollback is not None
        kept = [node for node in path if node < self.num_nodes]
        start = self._prompt_len + self.num_seen
        keep_slots(self.cache, start, [start + node for node in kept])
        held = self.num_seen + self.num_nodes
        self.num_seen = self._rollback.undo(held, self.num_seen + len(kept))
        self.num_nodes, self._num_settled = 0, self.num_seen

    def _score_settled(self, sequence: list[int]) -> Tensor | None:
        """Logits [1, vocab] behind `sequence` where they are known, or need the prompt; None where they come along."""
        known = self.num_seen == len(sequence) and self.next_logits is not None
        return self.score_next(sequence) if known or not self._prompt_fed else None

    def _ends(self, length: int) -> list[int]:
        """Where forwards end that feed the tokens up to `length`.

        To note states that can be returned to, the prompt is fed by itself, and so are settled tokens before they
        become too many to be fed again.
        """
        ends = {length}
        if self._rollback is not None and self._rollback.by_snapshots:
            waiting = self._num_settled - self.num_seen
            if not self._prompt_fed or waiting > FED_TOGETHER:
                ends.add(min(self._num_settled, length))
            if not self._model.reads_several:
                ends.update(range(self.num_seen + 1, length))
        return sorted(ends)

    def _feed(self, sequence: list[int], rows: int) -> Tensor:
        """One forward; logits [prompts, at most rows, vocab]."""
        started = time.perf_counter()
        new = sequence[self.num_seen :]
        logits = self._forward(new, min(rows, len(new) if self._prompt_fed else len(new) + 1))
        self._count(len(new), time.perf_counter() - started)
        self._prompt_fed = True
        self.num_seen = len(sequence)
        if self._rollback is not None:
            self._rollback.note(self.num_seen)
        return logits

    def _forward(self, new: list[int], rows: int) -> Tensor:
        if self._prompt_fed:
            batch = [new] * len(self._prompts)
        else:
            batch = [[0] * pad + prompt + new for pad, prompt in zip(self._padding, self._prompts, strict=True)]
        input_ids = torch.tensor(batch, device=self._model.device)
        return self._model.forward(input_ids, self.cache, rows, **self._padding_arguments(input_ids.shape[1]))

    def _padding_arguments(self, num_new: int) -> dict[str, Tensor]:
        """Which slots hold no token, and each token's place in its own prompt: needed where lengths differ."""
        if not any(self._padding):
            return {}
        num_cached = self._prompt_len + self.num_seen if self._prompt_fed else 0
        slots = torch.arange(num_cached + num_new, device=self._model.device)
        places = slots - torch.tensor(self._padding, device=self._model.device)[:, None]  # [prompts, slots]
        return {"attention_mask": (places >= 0).long(), "position_ids": places[:, num_cached:].clamp(min=0)}

    def _check_ids(self, tokens: list[int]) -> None:
        self._model.check_generated(tokens, self.indices[0])

    def _count(self, num_new: int, seconds: float) -> None:
        lens = [num_new if self._prompt_fed else len(prompt) + num_new for prompt in self._prompts]
        self._statistics.count_forward(self.indices, lens, seconds, reads_prompt=not self._prompt_fed)


def _last_rows(parts: list[Tensor], rows: int) -> Tensor:
    """The last `rows` rows of parts [prompts, n, width]."""
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)[:, -rows:]
