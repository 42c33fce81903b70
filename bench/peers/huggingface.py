"""transformers' verification of a chain, one request at a time, with random numbers of its own; its prompt lookup.

The chain is verified as in its generate: a float32 copy of the target logits, the processors on a row at a time, then
the test. The drafter's processed logits are handed in, since there the drafter made them.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from transformers import LogitsProcessorList, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper
from transformers.generation.candidate_generator import PromptLookupCandidateGenerator
from transformers.generation.utils import _speculative_sampling

from bench.case import Rival
from bench.inputs import ChainInputs, LookupInputs
from bench.peers import law
from specens_kernels import Sampling


def verify_chain(inputs: ChainInputs) -> Rival | None:
    """None for what it does not serve: more than one request, ensembles."""
    if inputs.draft_tokens.shape[0] > 1 or inputs.draft_logits is None:
        return None
    return Rival(_round(inputs), checked=False, fault=law.fault(_first_tokens, inputs.sampling))


def ngram_index(inputs: LookupInputs) -> Rival:
    """Its prompt lookup, which takes the first place where the n-gram occurs: here there is but one."""
    draft_len, text = inputs.draft_len, torch.from_numpy(inputs.text)[None]
    lookup = PromptLookupCandidateGenerator(
        num_output_tokens=draft_len, max_matching_ngram_size=inputs.ngram_size, max_length=2 * text.shape[1]
    )
    return Rival(lambda: lookup.get_candidates(text)[0][0, text.shape[1] :], checked=True)


def _round(inputs: ChainInputs) -> Callable[[], tuple[Tensor, Tensor]]:
    assert inputs.draft_logits is not None
    tokens, target, draft_len = inputs.draft_tokens, inputs.member_logits[0], inputs.draft_tokens.shape[1]
    processors = _processors(inputs.sampling)
    draft_logits = _process(inputs.draft_logits, processors, tokens)

    def run() -> tuple[Tensor, Tensor]:
        return _speculative_sampling(tokens, draft_logits, draft_len, _process(target, processors, tokens))

    return run


def _processors(sampling: Sampling) -> LogitsProcessorList:
    processors = LogitsProcessorList()
    if sampling.temperature != 1:
        processors.append(TemperatureLogitsWarper(sampling.temperature))
    if sampling.top_k is not None:
        processors.append(TopKLogitsWarper(sampling.top_k))
    if sampling.top_p is not None:
        processors.append(TopPLogitsWarper(sampling.top_p))
    return processors


def _process(logits: Tensor, processors: LogitsProcessorList, tokens: Tensor) -> Tensor:
    logits = logits.to(torch.float32, copy=True)
    if processors:
        for step in range(logits.shape[1]):
            logits[:, step] = processors(tokens, logits[:, step])
    return logits


def _first_tokens(inputs: ChainInputs) -> Tensor:
    requests = (inputs.request(index, 0.0) for index in range(inputs.draft_tokens.shape[0]))
    return torch.stack([_round(one)()[0][0, 0] for one in requests])
