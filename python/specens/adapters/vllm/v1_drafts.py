"""Draft models of the V1 model runner: drawn drafts follow from seeds, and a member of an ensemble drafts itself.

A draft model that is a member is that module, with its KV cache. It has seen every accepted token when the ensemble
scored them, so that its first pass needs the next tokens alone.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.sample.metadata import SamplingMetadata
from vllm.v1.spec_decode.draft_model import DraftModelProposer
from vllm.v1.spec_decode.llm_base_proposer import SpecDecodeBaseProposer
from vllm.v1.spec_decode.utils import PADDING_SLOT_ID

from specens.adapters.vllm import arguments
from specens.adapters.vllm.member_drafter import SHARED, sharing_a_member
from specens.adapters.vllm.replacements import Replacement
from specens_kernels import sample

FIRST_DRAFTS, STEP = "specens_first_drafts", "specens_step"  # kept on vLLM's proposer


def replacements(rule: str) -> list[Replacement]:
    """What is replaced in vLLM; rule: "token" or "gumbel"."""
    tokens = ("target_token_ids", "next_token_ids", "target_positions", "target_hidden_states")
    inputs = ("self", *tokens, "token_indices_to_sample", "cad", "num_rejected_tokens_gpu")
    draws = ("self", "logits", "sampling_metadata")
    shares = partial(sharing_a_member, DraftModelProposer, "_get_model", "_draft_attn_layer_names")
    return [
        Replacement(SpecDecodeBaseProposer, "load_model", ("self", "target_model"), shares),
        Replacement(SpecDecodeBaseProposer, "set_inputs_first_pass", inputs, _remembering_positions),
        Replacement(SpecDecodeBaseProposer, "_sample_from_logits", draws, partial(_drawing_by_seed, rule)),
    ]


def _remembering_positions(original: Callable) -> Callable:
    def first_pass(
        self: Any,
        target_token_ids: Tensor,
        next_token_ids: Tensor,
        target_positions: Tensor,
        target_hidden_states: Tensor,
        token_indices_to_sample: Tensor | None,
        cad: CommonAttentionMetadata,
        num_rejected_tokens_gpu: Tensor | None,
    ) -> tuple[int, Tensor, CommonAttentionMetadata]:
        if getattr(self, SHARED, False):
            inputs = next_tokens_alone(self, next_token_ids, target_positions, cad, num_rejected_tokens_gpu)
        else:
            call = (target_token_ids, next_token_ids, target_positions, target_hidden_states)
            inputs = original(self, *call, token_indices_to_sample, cad, num_rejected_tokens_gpu)
        if not self.uses_mrope:
            setattr(self, FIRST_DRAFTS, self.positions[inputs[1].long()] + 1)
            setattr(self, STEP, 0)
        return inputs

    return first_pass


def next_tokens_alone(
    proposer: Any,
    next_token_ids: Tensor,
    target_positions: Tensor,
    cad: CommonAttentionMetadata,
    num_rejected: Tensor | None,
) -> tuple[int, Tensor, CommonAttentionMetadata]:
    """Inputs of one token a request: the member's KV holds the others already.

    next_token_ids: [batch]. target_positions: [tokens], of what the ensemble forwarded. num_rejected: [batch] of the
    drafts, or None; set to 0, as vLLM would take it from the lengths once more.
    """
    batch, last = cad.batch_size(), cad.query_start_loc[1:].long() - 1
    lengths = cad.seq_lens + 1
    if num_rejected is not None:
        last, lengths = last - num_rejected, lengths - num_rejected
        num_rejected.zero_()
    positions = target_positions[last] + 1
    within = positions.clamp(max=proposer.max_model_len - 1)
    proposer.input_ids[:batch] = next_token_ids
    proposer.positions[:batch] = within
    blocks = cad.block_table_tensor.gather(1, (within // proposer.block_size)[:, None])[:, 0]
    slots = blocks.long() * proposer.block_size + within % proposer.block_size
    upper = cad.seq_lens_cpu_upper_bound
    indices = proposer.arange[: batch + 1]
    alone = cad.replace(
        query_start_loc=indices,
        query_start_loc_cpu=torch.arange(batch + 1, dtype=torch.int32),
        seq_lens=lengths,
        seq_lens_cpu_upper_bound=None if upper is None else upper + 1,
        num_actual_tokens=batch,
        max_query_len=1,
        max_seq_len=cad.max_seq_len + 1,
        slot_mapping=slots.masked_fill(positions >= proposer.max_model_len, PADDING_SLOT_ID),
    )
    return batch, indices[:batch], alone


def _drawing_by_seed(rule: str, original: Callable) -> Callable:
    def draw(self: Any, logits: Tensor, sampling_metadata: SamplingMetadata) -> tuple[Tensor, Tensor | None]:
        first, step = getattr(self, FIRST_DRAFTS, None), getattr(self, STEP, 0)
        setattr(self, STEP, step + 1)
        drawn = self._enable_probabilistic_draft_probs and not sampling_metadata.all_greedy
        if not drawn or first is None or first.shape[0] != logits.shape[0]:
            return original(self, logits, sampling_metadata)
        return drafts_by_seed(logits, sampling_metadata, first, step, rule)

    return draw


def drafts_by_seed(
    logits: Tensor, batch: SamplingMetadata, first_drafts: Tensor, step: int, rule: str
) -> tuple[Tensor, Tensor]:
    """Drafts int64 [batch] and their probabilities float32 [batch, vocab], with nothing but temperatures applied.

    logits: [batch, vocab]. first_drafts: [batch], the positions of the round's first drafts. step: how many came
    before.
    """
    sampling = arguments.sampling(batch.temperature, None, None, None, logits.shape[1])
    draw = sample(
        logits,
        sampling=sampling,
        seeds=arguments.seeds_of(batch.generators, logits.shape[0], logits.device),
        positions=first_drafts.long(),
        step=step,
        method="gumbel" if rule == "gumbel" else "inverse_cdf",
    )
    temperature = torch.as_tensor(sampling.temperature, device=logits.device)
    temperature = torch.where(temperature == 0, 1.0, temperature)  # of a greedy request none is looked at
    return arguments.some_token(draw.tokens), (logits.float() / temperature[:, None]).softmax(-1)
