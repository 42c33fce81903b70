"""vLLM's V1 rejection sampler as it runs on CPUs, the pass of sampling parameters included.

It draws random numbers of its own. The drafter's probabilities are handed in, since there the drafter made them.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from vllm.platforms import current_platform
from vllm.v1.sample import rejection_sampler
from vllm.v1.sample.logits_processor import LogitsProcessors
from vllm.v1.sample.metadata import SamplingMetadata
from vllm.v1.sample.sampler import Sampler
from vllm.v1.spec_decode.metadata import SpecDecodeMetadata

from bench.case import Rival
from bench.distribution import distribution
from bench.inputs import ChainInputs
from bench.peers import law
from specens_kernels import Sampling

LOST = "as published it loses the requests' sampling parameters; timed with that one function replaced"


def _expand(values: Tensor, ends: Tensor, total: int, replace_from: float = 0, replace_to: float = 0) -> Tensor:
    """values [batch] -> [total], each as often as its request has draft tokens; ends: int32 [batch], inclusive."""
    counts = ends.diff(prepend=ends.new_zeros(1))
    replaced = torch.where(values == replace_from, torch.full_like(values, replace_to), values)
    return replaced.repeat_interleave(counts, output_size=total)


def _mend() -> str | None:
    """Replace the expansion of parameters from requests to tokens where it is wrong, and say so."""
    temperature, ends = torch.tensor([0.7, 0.3]), torch.tensor([2, 3], dtype=torch.int32)
    expanded = rejection_sampler.expand_batch_to_tokens(temperature, ends, 3)
    if torch.equal(expanded, _expand(temperature, ends, 3)):
        return None
    rejection_sampler.expand_batch_to_tokens = _expand
    return LOST


def _load() -> str | None:
    if not current_platform.is_cpu():
        raise ImportError("this vLLM is not built for CPUs")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        current_platform.import_kernels()
        current_platform.register_triton_kernel_overrides()
    return _mend()


PUBLISHED_FAULT = _load()


def verify_chain(inputs: ChainInputs) -> Rival | None:
    """None for ensembles, which it does not serve."""
    if inputs.draft_logits is None:
        return None
    fault = law.fault(_first_tokens, inputs.sampling) or PUBLISHED_FAULT
    return Rival(_round(inputs), checked=False, fault=fault)


def _round(inputs: ChainInputs) -> Callable[[], Tensor]:
    assert inputs.draft_logits is not None
    sampler = rejection_sampler.RejectionSampler(Sampler())
    logits = inputs.member_logits[0].flatten(0, 1)
    draft_probs = distribution(inputs.draft_logits, inputs.sampling).flatten(0, 1)
    chain, parameters = _chain(inputs.draft_tokens), _parameters(inputs.sampling, inputs.draft_tokens.shape[0])
    return lambda: sampler(chain, draft_probs, logits, parameters).sampled_token_ids


def _chain(draft_tokens: Tensor) -> SpecDecodeMetadata:
    batch, draft_len = draft_tokens.shape
    steps = draft_len + 1
    rows = torch.arange(batch * steps, dtype=torch.int32).view(batch, steps)
    return SpecDecodeMetadata(
        draft_token_ids=draft_tokens.flatten().int(),
        num_draft_tokens=[draft_len] * batch,
        cu_num_draft_tokens=torch.arange(1, batch + 1, dtype=torch.int32) * draft_len,
        cu_num_sampled_tokens=torch.arange(1, batch + 1, dtype=torch.int32) * steps,
        target_logits_indices=rows[:, :draft_len].flatten(),
        bonus_logits_indices=rows[:, draft_len].contiguous(),
        logits_indices=rows.flatten(),
    )


def _parameters(sampling: Sampling, batch: int) -> SamplingMetadata:
    def each(value: Any, dtype: torch.dtype) -> Tensor | None:
        return None if value is None else torch.full((batch,), value, dtype=dtype)

    return SamplingMetadata(
        temperature=each(sampling.temperature, torch.float32),
        all_greedy=False,
        all_random=True,
        top_p=each(sampling.top_p, torch.float32),
        top_k=each(sampling.top_k, torch.int32),
        generators={},
        max_num_logprobs=None,
        no_penalties=True,
        prompt_token_ids=None,
        frequency_penalties=torch.zeros(batch),
        presence_penalties=torch.zeros(batch),
        repetition_penalties=torch.ones(batch),
        output_token_ids=[[] for _ in range(batch)],
        allowed_token_ids_mask=None,
        bad_words_token_ids={},
        logitsprocs=LogitsProcessors(),
    )


def _first_tokens(inputs: ChainInputs) -> Tensor:
    return _round(inputs)()[:, 0]
