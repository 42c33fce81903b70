"""The cost of ensembles as the published code has it in its plain Transformers version: no key-value cache.

Every member reads the whole text again for every token, as in the loop of Speculative-Ensemble (Fu et al., 2025) that
uses Transformers alone; the schedules of this package are measured beside it.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch

from specens_kernels import Mixture, Sampling, sample


@torch.inference_mode()
def generate_without_cache(
    models: Sequence[torch.nn.Module],
    prompt: list[int],
    ensemble: Mixture,
    sampling: Sampling,
    max_new_tokens: int,
    seed: int,
) -> tuple[list[int], float]:
    """The new tokens, and the seconds that they took."""
    started, tokens = time.perf_counter(), list(prompt)
    seeds = torch.tensor([seed])
    for position in range(max_new_tokens):
        ids = torch.tensor([tokens])
        logits = [model(input_ids=ids, use_cache=False, logits_to_keep=1).logits[:, -1] for model in models]
        draw = sample(
            logits,
            ensemble=ensemble,
            sampling=sampling,
            seeds=seeds,
            positions=torch.tensor([position]),
            stream=1,
        )
        tokens.append(int(draw.tokens))
    return tokens[len(prompt) :], time.perf_counter() - started
