"""A member of the ensemble while it generates: a model, what it was prompted with, and its cache."""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch
from torch import Tensor

from specens.adapters.causal_lm import CausalLM
from specens.kv_cache import prepare_roll_back, roll_back
from specens.statistics import Statistics


class Member:
    """Scores the generated tokens behind its own prompt; feeds each token once and takes rejected ones back.

    indices: the places in the ensemble that this object serves. Several where members share weights: their prompts
        are then one batch, padded on the left, and the logits have one row of the batch for each.
    num_seen: how many generated tokens the cache holds, beside the prompt.
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
        self.next_logits: Tensor | None = None  # [prompts, vocab], of the token behind the last one seen
        self._model = model
        self._prompts = prompts
        self._statistics = statistics
        self._prompt_len = max(len(prompt) for prompt in prompts)
        self._padding = [self._prompt_len - len(prompt) for prompt in prompts]
        self._prompt_fed = False
        self.cache = model.new_cache()
        if can_roll_back:
            prepare_roll_back(self.cache)

    def score(self, sequence: list[int], rows: int) -> Tensor:
        """Feed what is new in `sequence`, all generated tokens and drafts so far; one forward.

        Returns logits [prompts, rows, vocab]: the distributions of the last `rows` positions, the last one being that
        of the token behind `sequence`. Raises ValueError where the model has no embedding for a token.
        """
        started = time.perf_counter()
        new = sequence[self.num_seen :]
        self._check_ids(new)
        logits = self._forward(new, rows)
        self._count(len(new), time.perf_counter() - started)
        self._prompt_fed = True
        self.num_seen = len(sequence)
        self.next_logits = logits[:, -1]
        return logits

    def score_next(self, sequence: list[int]) -> Tensor:
        """Logits [prompts, vocab] of the token behind `sequence`; no forward where they are known already."""
        if self.next_logits is not None and self.num_seen == len(sequence):
            return self.next_logits
        return self.score(sequence, 1)[:, -1]

    def roll_back(self, length: int) -> None:
        """Forget the tokens behind the first `length` generated ones."""
        surplus = max(self.num_seen - length, 0)
        if surplus:
            self.num_seen, self.next_logits = length, None
        roll_back(self.cache, surplus)

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
        if tokens and max(tokens) >= self._model.num_embeddings:
            raise ValueError(
                f"members: token {max(tokens)} was generated, but member {self.indices[0]} has embeddings only for ids "
                f"below {self._model.num_embeddings}; do the members share one tokenizer?"
            )

    def _count(self, num_new: int, seconds: float) -> None:
        statistics = self._statistics
        statistics.model_calls += 1
        if not self._prompt_fed:
            statistics.prompt_seconds += seconds
        for index, prompt in zip(self.indices, self._prompts, strict=True):
            statistics.forwards[index] += 1
            statistics.tokens_fed[index] += num_new if self._prompt_fed else len(prompt) + num_new
            statistics.forward_seconds[index] += seconds / len(self.indices)
