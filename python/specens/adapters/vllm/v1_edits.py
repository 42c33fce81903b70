"""What requests of the V1 model runner ask to be done to the logits: folded into verification, or left to vLLM."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from vllm.v1.sample.logits_processor.builtin import (
    LogitBiasLogitsProcessor,
    MinPLogitsProcessor,
    MinTokensLogitsProcessor,
)
from vllm.v1.sample.metadata import SamplingMetadata
from vllm.v1.sample.ops.bad_words import apply_bad_words_with_drafts
from vllm.v1.spec_decode.metadata import SpecDecodeMetadata

from specens.adapters.vllm import arguments
from specens.adapters.vllm.arguments import Target
from specens_kernels import Sampling, target_logprobs


def processor_of(batch: SamplingMetadata, kind: type) -> Any:
    return next((processor for processor in batch.logitsprocs.all if type(processor) is kind), None)


def _ends_by_grammar(batch: SamplingMetadata) -> bool:
    """Whether end tokens may come before min_tokens where a grammar would leave nothing else."""
    lengths = processor_of(batch, MinTokensLogitsProcessor)
    return lengths is not None and any(asked[3] for asked in lengths.min_toks.values())


def _unknown(batch: SamplingMetadata) -> list[Any]:
    known = {MinTokensLogitsProcessor, LogitBiasLogitsProcessor, MinPLogitsProcessor}
    return [processor for processor in batch.logitsprocs.all if type(processor) not in known]


def _thinking(batch: SamplingMetadata) -> Any:
    """What holds the budgets of thinking tokens, where a request has one."""
    thinking = batch.thinking_budget_state_holder
    return thinking if thinking is not None and thinking.has_tracked_requests() else None


def needs_vllm(batch: SamplingMetadata) -> bool:
    """Whether a request asks for what `verify_chain` does not fold.

    That is bad words, the budget of thinking tokens, min_tokens together with a grammar, and logits processors of the
    user's own.
    """
    return bool(batch.bad_words_token_ids or _unknown(batch)) or _thinking(batch) is not None or _ends_by_grammar(batch)


def sampling_of(batch: SamplingMetadata, vocab: int) -> Sampling:
    """Temperature and filters."""
    min_p = processor_of(batch, MinPLogitsProcessor)
    min_p = None if min_p is None or not min_p.min_p_count else min_p.min_p.view(-1)
    return arguments.sampling(batch.temperature, batch.top_k, batch.top_p, min_p, vocab)


def folded_edits(metadata: SpecDecodeMetadata, batch: SamplingMetadata, device: torch.device) -> dict[str, Any]:
    """The arguments `processing` and `allowed` of `verify_chain`, where a request asks for them."""
    num_requests = len(metadata.num_draft_tokens)
    lengths, biases = processor_of(batch, MinTokensLogitsProcessor), processor_of(batch, LogitBiasLogitsProcessor)
    penalties = None
    if not batch.no_penalties:
        strengths = (batch.repetition_penalties, batch.frequency_penalties, batch.presence_penalties)
        penalties = (*strengths, batch.prompt_token_ids, batch.output_token_ids)
    edits: dict[str, Any] = {
        "processing": arguments.processing(
            penalties,
            {} if biases is None else biases.biases,
            {} if lengths is None or _ends_by_grammar(batch) else lengths.min_toks,
            num_requests,
            device,
        )
    }
    if batch.allowed_token_ids_mask is not None:
        owners = _owners_of_rows(metadata, device)
        edits["allowed"] = arguments.allowed_bits(batch.allowed_token_ids_mask)[owners]
    return edits


def edited_by_vllm(
    members: Sequence[Tensor], metadata: SpecDecodeMetadata, batch: SamplingMetadata
) -> tuple[Tensor, ...]:
    """Float32 copies of the logits with what `verify_chain` does not fold, or the logits where nobody needs that."""
    names = [type(processor).__name__ for processor in _unknown(batch)]
    if names:
        raise ValueError(f"logitsprocs: expected those of vLLM with speculative decoding, got {', '.join(names)}")
    if not needs_vllm(batch):
        return tuple(members)
    thinking = _thinking(batch)
    if thinking is not None:
        thinking.update_state(batch.output_token_ids, batch.spec_token_ids, repeat_indices=None)
    return tuple(_edited(logits.to(torch.float32, copy=True), metadata, batch, thinking) for logits in members)


def _edited(rows: Tensor, metadata: SpecDecodeMetadata, batch: SamplingMetadata, thinking: Any) -> Tensor:
    num_rows = [count + 1 for count in metadata.num_draft_tokens]
    if batch.bad_words_token_ids:
        past = texts_before_rows(batch.output_token_ids, batch.spec_token_ids, num_rows)
        apply_bad_words_with_drafts(rows, batch.bad_words_token_ids, past, num_rows)
    if _ends_by_grammar(batch):
        rows = processor_of(batch, MinTokensLogitsProcessor).apply_with_spec_decode(rows, num_rows)
    if thinking is not None:
        for indices, bonus in ((metadata.bonus_logits_indices, True), (metadata.target_logits_indices, False)):
            rows[indices.long()] = thinking.apply_to_logits(rows[indices.long()], bonus, batch.spec_token_ids)
    return rows


def texts_before_rows(outputs: list[list[int]], drafts: list[list[int]] | None, num_rows: list[int]) -> list[list[int]]:
    """What each request has written before each of its rows: its output and the drafts before the row."""
    drafts = drafts or [[] for _ in outputs]
    return [
        [*outputs[request], *drafts[request][:row]] for request, count in enumerate(num_rows) for row in range(count)
    ]


def raw_logprobs(target: Target, metadata: SpecDecodeMetadata) -> Tensor:
    """Log-probabilities float32 [drafts + batch, vocab] of an ensemble at temperature 1."""
    owners = _owners_of_rows(metadata, target.members[0].device)
    return target_logprobs(target.members, ensemble=target.of_requests(owners))


def processed_logprobs(
    target: Target, metadata: SpecDecodeMetadata, sampling: Sampling, edits: dict[str, Any]
) -> Tensor:
    """Log target distribution [drafts + batch, vocab]; of greedy requests, at temperature 1."""
    device, num_rows = target.members[0].device, target.members[0].shape[0]
    owners = _owners_of_rows(metadata, device)
    first = arguments.row_offsets(metadata.cu_num_sampled_tokens)[:-1].long()
    first_draft = arguments.row_offsets(metadata.cu_num_draft_tokens)[:-1].long()
    steps = torch.arange(metadata.max_spec_len + 1, device=device)
    padded = (first[:, None] + steps).clamp(max=num_rows - 1)
    drafts = metadata.draft_token_ids
    drafts = torch.cat((drafts, drafts.new_zeros(1)))[(first_draft[:, None] + steps[:-1]).clamp(max=drafts.shape[0])]
    temperature = torch.as_tensor(sampling.temperature, device=device).expand(first.shape)
    sampling = replace(sampling, temperature=torch.where(temperature == 0, 1.0, temperature))
    edits = {name: edit[padded] if name == "allowed" else edit for name, edit in edits.items()}
    members = [logits[padded] for logits in target.members]
    logprobs = target_logprobs(members, ensemble=target.ensemble, sampling=sampling, draft_tokens=drafts, **edits)
    return logprobs[owners, torch.arange(num_rows, device=device) - first[owners]]


def _owners_of_rows(metadata: SpecDecodeMetadata, device: torch.device) -> Tensor:
    """int64 [drafts + batch]: whose each row is."""
    return arguments.requests_of_rows([count + 1 for count in metadata.num_draft_tokens], device)
