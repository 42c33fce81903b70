"""A pytest plug-in under which vLLM's own tests of its rejection sampler run through `verify_chain`.

Those tests mock the sampler that draws bonus tokens, and pass no logits for it. Here each request gets a row for it all
the same, as in the engine, and where all drafts were accepted the mocked token stands after them.
"""

from __future__ import annotations

import os
from dataclasses import replace
from unittest.mock import Mock

import torch
from specens.adapters.vllm import register
from torch import Tensor
from vllm.v1.sample.rejection_sampler import RejectionSampler

os.environ["SPECENS_VLLM"] = "1"
register()
verified = RejectionSampler.forward


def forward_with_bonus_rows(self, metadata, draft_probs, logits, sampling_metadata):
    """The verified round, given logits of the draft rows only."""
    if not isinstance(self.sampler, Mock):
        return verified(self, metadata, draft_probs, logits, sampling_metadata)
    ends = metadata.cu_num_sampled_tokens.long()
    is_bonus = torch.zeros(int(ends[-1]), dtype=torch.bool).index_fill_(0, ends - 1, True)
    rows = logits.new_zeros(len(is_bonus), logits.shape[1])
    rows[~is_bonus] = logits
    indices = {"target_logits_indices": (~is_bonus).nonzero()[:, 0], "bonus_logits_indices": ends - 1}
    output = verified(self, replace(metadata, **indices), draft_probs, rows, sampling_metadata)
    put_bonus_tokens(output.sampled_token_ids, metadata, self.sampler.return_value.sampled_token_ids.flatten())
    return output


def put_bonus_tokens(tokens: Tensor, metadata, bonus: Tensor) -> None:
    """Behind every chain that was accepted whole, in place."""
    chains = metadata.draft_token_ids.split(metadata.num_draft_tokens)
    for request, drafts in enumerate(chains):
        if torch.equal(tokens[request, : len(drafts)], drafts):
            tokens[request, len(drafts)] = bonus[request]


RejectionSampler.forward = forward_with_bonus_rows
