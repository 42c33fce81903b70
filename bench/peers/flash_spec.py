"""flashspec's step from log-probabilities to the number of accepted drafts and the next token, without filters.

It draws random numbers of its own. The drafter's log-probabilities are handed in, since there the drafter made them.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from flashspec.sampling.rejection import rejection_step
from torch import Tensor

from bench.case import Rival
from bench.inputs import ChainInputs
from bench.peers import law
from specens_kernels import Sampling


def verify_chain(inputs: ChainInputs) -> Rival | None:
    """None for what it does not serve: filters, ensembles."""
    if inputs.sampling.filters or inputs.draft_logits is None:
        return None
    return Rival(_round(inputs), checked=False, fault=law.fault(_first_tokens, inputs.sampling))


def _round(inputs: ChainInputs) -> Callable[[], Tensor]:
    assert inputs.draft_logits is not None
    target, tokens, sampling = inputs.member_logits[0], inputs.draft_tokens, inputs.sampling
    draft_logprobs = _logprobs(inputs.draft_logits, sampling)
    return lambda: rejection_step(tokens, draft_logprobs, _logprobs(target, sampling))


def _logprobs(logits: Tensor, sampling: Sampling) -> Tensor:
    logits = logits.float()
    return (logits if sampling.temperature == 1 else logits / sampling.temperature).log_softmax(-1)


def _first_tokens(inputs: ChainInputs) -> Tensor:
    num_accepted, next_token = _round(inputs)().unbind(-1)
    return torch.where(num_accepted > 0, inputs.draft_tokens[:, 0], next_token)
