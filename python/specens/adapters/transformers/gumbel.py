"""Sampling of transformers by the rule "gumbel": a token depends on its seed, its position and the logits alone."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers import LogitsProcessor, LogitsProcessorList

from specens.engines.transformers.logits_processors import in_one_pass, split_processors
from specens_kernels import Sampling, sample


class GumbelRace(LogitsProcessor):
    """The last processor: leaves each request the token of the best score, at 0, and -inf for all others.

    seeds: int64 [batch]. num_padded: int64 [batch], tokens of padding before each prompt, which are no positions.
    seen: the scores that it was given, where they are kept.
    """

    def __init__(self, sampling: Sampling, seeds: Tensor, num_padded: Tensor, keeps_scores: bool) -> None:
        self.seen: list[Tensor] = []
        self._sampling, self._seeds, self._num_padded, self._keeps_scores = sampling, seeds, num_padded, keeps_scores

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Of scores [batch, vocab], float32 of the same shape."""
        draw = sample(
            scores,
            sampling=self._sampling,
            seeds=self._seeds.to(scores.device),
            positions=input_ids.shape[1] - self._num_padded.to(scores.device),
            method="gumbel",
        )
        if self._keeps_scores:
            self.seen.append(scores)
        best = torch.full_like(scores, float("-inf"))
        return best.scatter_(1, draw.tokens.clamp(min=0)[:, None], 0.0)


def sample_by_gumbel(
    original: Callable[..., Any],
    seeds: Tensor | None,
    model: Any,
    input_ids: Tensor,
    logits_processor: Any,
    stopping_criteria: Any,
    generation_config: Any,
    **rest: Any,
) -> Any:
    """Run transformers' `_sample` so that it takes the tokens of the best scores.

    seeds: int64 [batch]; None draws them from torch's global generator, one a prompt.
    """
    with_scores = bool(generation_config.return_dict_in_generate and generation_config.output_scores)
    batch = len(input_ids)
    if seeds is None:
        seeds = torch.randint(2**63 - 1, (batch,))
    mask = rest.get("attention_mask")
    num_padded = torch.zeros(batch, dtype=torch.int64) if mask is None else (mask == 0).sum(1)
    folds = in_one_pass(logits_processor), Sampling()  # so that the scores are there, processed, before the race
    others, sampling = folds if with_scores else split_processors(logits_processor)
    race = GumbelRace(sampling, seeds.expand(batch), num_padded, with_scores)
    config = copy.copy(generation_config)
    config.do_sample = False  # the best score stands out, and nothing more is drawn
    output = original(
        model,
        input_ids,
        logits_processor=LogitsProcessorList([*others, race]),
        stopping_criteria=stopping_criteria,
        generation_config=config,
        **rest,
    )
    if with_scores:  # as they were before the race
        output.scores = tuple(race.seen[: len(output.scores)])
    return output
