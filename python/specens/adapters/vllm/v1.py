"""The V1 model runner of vLLM, on CPUs and GPUs: its rejection sampler, and the sampler of steps without drafts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from vllm import SamplingParams
from vllm.v1.outputs import LogprobsTensors, SamplerOutput
from vllm.v1.sample.logits_processor import BUILTIN_LOGITS_PROCESSORS, LogitsProcessors
from vllm.v1.sample.logits_processor.builtin import (
    LogitBiasLogitsProcessor,
    MinPLogitsProcessor,
    MinTokensLogitsProcessor,
)
from vllm.v1.sample.metadata import SamplingMetadata
from vllm.v1.sample.ops.bad_words import apply_bad_words_with_drafts
from vllm.v1.sample.rejection_sampler import RejectionSampler
from vllm.v1.spec_decode.metadata import SpecDecodeMetadata
from vllm.v1.worker import gpu_model_runner

from specens.adapters.vllm import arguments
from specens.adapters.vllm.replacements import Replacement
from specens_kernels import Sampling, Synthetic, target_logprobs, verify_chain

FIRST_POSITIONS = "first_draft_positions"  # left by the runner on its rejection sampler, for the round


def replacements() -> list[Replacement]:
    """What is replaced in vLLM, with the parameters that it is known to have."""
    runner = gpu_model_runner.GPUModelRunner
    validate = ("self", "speculative_config")
    build = ("vllm_config", "device", "is_pin_memory", "is_pooling_model", "custom_logitsprocs")
    forward = ("self", "metadata", "draft_probs", "logits", "sampling_metadata")
    return [
        Replacement(RejectionSampler, "__init__", ("self", "sampler", "spec_config", "device"), _keeping_its_rule),
        Replacement(RejectionSampler, "forward", forward, _verifying),
        Replacement(runner, "_sample", ("self", "logits", "spec_decode_metadata"), _sampling_by_position),
        Replacement(gpu_model_runner, "build_logitsprocs", build, _with_all_processors),
        Replacement(SamplingParams, "_validate_spec_decode", validate, _allowing_all_parameters),
    ]


def _keeping_its_rule(original: Callable) -> Callable:
    def construct(self: Any, sampler: Any, spec_config: Any = None, device: torch.device | None = None) -> None:
        original(self, sampler, spec_config, device)
        self.rule = "block" if getattr(spec_config, "rejection_sample_method", None) == "block" else "token"
        self.synthetic_rates = self.synthetic_conditional_rates.tolist() if self.synthetic_mode else None

    return construct


def rule_of(sampler: RejectionSampler, draft_len: int) -> str | Synthetic:
    """The acceptance rule that vLLM was configured with."""
    if sampler.synthetic_rates is None:
        return sampler.rule
    return Synthetic(tuple(sampler.synthetic_rates[:draft_len]))


def _allowing_all_parameters(_original: Callable) -> Callable:
    def validate(self: Any, speculative_config: Any) -> None:
        """min_p and logit_bias are verified like the other parameters."""

    return validate


def _with_all_processors(original: Callable) -> Callable:
    def build(
        vllm_config: Any, device: Any, is_pin_memory: bool, is_pooling_model: bool, custom_logitsprocs: Any = ()
    ) -> LogitsProcessors:
        if is_pooling_model or custom_logitsprocs or vllm_config.speculative_config is None:
            return original(vllm_config, device, is_pin_memory, is_pooling_model, custom_logitsprocs)
        return LogitsProcessors(kind(vllm_config, device, is_pin_memory) for kind in BUILTIN_LOGITS_PROCESSORS)

    return build


def _sampling_by_position(original: Callable) -> Callable:
    """Rounds learn where they are; one in which no request has a draft is a round as well.

    So all tokens of a request with a seed come from that seed and their positions, whoever else has drafts.
    """

    def sample(self: Any, logits: Tensor, spec_decode_metadata: SpecDecodeMetadata | None) -> SamplerOutput:
        rejection_sampler = getattr(self, "rejection_sampler", None)
        if rejection_sampler is None:
            return original(self, logits, spec_decode_metadata)
        if spec_decode_metadata is None:
            if self.input_batch.sampling_metadata.logprob_token_ids:
                return original(self, logits, None)
            batch = logits.shape[0]
            spec_decode_metadata = no_drafts(self.query_start_loc.gpu[1 : batch + 1] - 1)
        first_rows = arguments.row_offsets(spec_decode_metadata.cu_num_sampled_tokens)[:-1]
        setattr(rejection_sampler, FIRST_POSITIONS, self.positions[spec_decode_metadata.logits_indices[first_rows]] + 1)
        return original(self, logits, spec_decode_metadata)

    return sample


def no_drafts(logits_indices: Tensor) -> SpecDecodeMetadata:
    """A round of requests with one row each, [batch], and no draft token."""
    batch, device = logits_indices.shape[0], logits_indices.device
    nothing = torch.empty(0, dtype=torch.int32, device=device)
    rows = torch.arange(batch + 1, dtype=torch.int32, device=device)
    return SpecDecodeMetadata(
        nothing, [0] * batch, torch.zeros_like(rows[1:]), rows[1:], nothing, rows[:-1], logits_indices
    )


def _verifying(_original: Callable) -> Callable:
    def forward(
        self: Any,
        metadata: SpecDecodeMetadata,
        draft_probs: Tensor | None,
        logits: Tensor,
        sampling_metadata: SamplingMetadata,
    ) -> SamplerOutput:
        first_positions = self.__dict__.pop(FIRST_POSITIONS, None)
        return verify(self, metadata, draft_probs, logits, sampling_metadata, first_positions)

    return forward


def verify(
    sampler: RejectionSampler,
    metadata: SpecDecodeMetadata,
    draft_probs: Tensor | None,
    logits: Tensor,
    batch: SamplingMetadata,
    first_positions: Tensor | None,
) -> SamplerOutput:
    """A round of vLLM by `verify_chain`.

    logits: [drafts + batch, vocab], the rows of a request together and its bonus row last; not changed.
    draft_probs: float [drafts, vocab], or None for drafts without a distribution. first_positions: [batch] or None.
    """
    num_requests = len(metadata.num_draft_tokens)
    edits = folded_edits(metadata, batch, logits.device)
    rows = edited_by_vllm(logits, metadata, batch)
    min_p = _processor(batch, MinPLogitsProcessor)
    min_p = None if min_p is None or not min_p.min_p_count else min_p.min_p.view(-1)
    sampling = arguments.sampling(batch.temperature, batch.top_k, batch.top_p, min_p, logits.shape[1])
    coinless = sampling.greedy and not sampler.synthetic_mode
    seeds, positions = None, None
    if not coinless:
        seeds, positions = arguments.coins(batch.generators, first_positions, num_requests, logits.device)
    verdict = verify_chain(
        rows,
        metadata.draft_token_ids,
        sampling=sampling,
        draft_logits=arguments.draft_logits(draft_probs),
        draft_sampling=None if draft_probs is None else Sampling(),
        process_drafts=False,  # vLLM's drafters know of the temperature alone
        rule=rule_of(sampler, metadata.max_spec_len),
        row_offsets=arguments.row_offsets(metadata.cu_num_sampled_tokens),
        max_draft_len=metadata.max_spec_len,
        seeds=seeds,
        positions=positions,
        **edits,
    )
    tokens = arguments.emitted(verdict)[0].int()
    if batch.max_num_logprobs is None:
        return SamplerOutput(sampled_token_ids=tokens, logprobs_tensors=None)
    if sampler.is_processed_logprobs_mode:
        logits = processed_logprobs(rows, metadata, sampling, edits)
    return SamplerOutput(tokens, _reported(sampler, metadata, logits, batch.max_num_logprobs, tokens))


def _processor(batch: SamplingMetadata, kind: type) -> Any:
    return next((processor for processor in batch.logitsprocs.all if type(processor) is kind), None)


def _left_to_vllm(batch: SamplingMetadata) -> bool:
    """Whether end tokens may come before min_tokens where a grammar would leave nothing else."""
    lengths = _processor(batch, MinTokensLogitsProcessor)
    return lengths is not None and any(asked[3] for asked in lengths.min_toks.values())


def folded_edits(metadata: SpecDecodeMetadata, batch: SamplingMetadata, device: torch.device) -> dict[str, Any]:
    """The arguments `processing` and `allowed` of `verify_chain`, where a request asks for them."""
    num_requests = len(metadata.num_draft_tokens)
    lengths, biases = _processor(batch, MinTokensLogitsProcessor), _processor(batch, LogitBiasLogitsProcessor)
    penalties = None
    if not batch.no_penalties:
        strengths = (batch.repetition_penalties, batch.frequency_penalties, batch.presence_penalties)
        penalties = (*strengths, batch.prompt_token_ids, batch.output_token_ids)
    edits: dict[str, Any] = {
        "processing": arguments.processing(
            penalties,
            {} if biases is None else biases.biases,
            {} if lengths is None or _left_to_vllm(batch) else lengths.min_toks,
            num_requests,
            device,
        )
    }
    if batch.allowed_token_ids_mask is not None:
        owners = arguments.requests_of_rows([count + 1 for count in metadata.num_draft_tokens], device)
        edits["allowed"] = arguments.allowed_bits(batch.allowed_token_ids_mask)[owners]
    return edits


def edited_by_vllm(logits: Tensor, metadata: SpecDecodeMetadata, batch: SamplingMetadata) -> Tensor:
    """A float32 copy of the logits with what `verify_chain` does not fold, or the logits where there is no such thing.

    That is bad words, the budget of thinking tokens, and min_tokens together with a grammar.
    """
    known = {MinTokensLogitsProcessor, LogitBiasLogitsProcessor, MinPLogitsProcessor}
    unknown = [type(processor).__name__ for processor in batch.logitsprocs.all if type(processor) not in known]
    if unknown:
        raise ValueError(f"logitsprocs: expected those of vLLM with speculative decoding, got {', '.join(unknown)}")
    thinking = batch.thinking_budget_state_holder
    if thinking is not None and not thinking.has_tracked_requests():
        thinking = None
    if not batch.bad_words_token_ids and thinking is None and not _left_to_vllm(batch):
        return logits
    rows, num_rows = logits.to(torch.float32, copy=True), [count + 1 for count in metadata.num_draft_tokens]
    if batch.bad_words_token_ids:
        past = texts_before_rows(batch.output_token_ids, batch.spec_token_ids, num_rows)
        apply_bad_words_with_drafts(rows, batch.bad_words_token_ids, past, num_rows)
    if _left_to_vllm(batch):
        rows = _processor(batch, MinTokensLogitsProcessor).apply_with_spec_decode(rows, num_rows)
    if thinking is not None:
        thinking.update_state(batch.output_token_ids, batch.spec_token_ids, repeat_indices=None)
        for indices, bonus in ((metadata.bonus_logits_indices, True), (metadata.target_logits_indices, False)):
            rows[indices.long()] = thinking.apply_to_logits(rows[indices.long()], bonus, batch.spec_token_ids)
    return rows


def texts_before_rows(outputs: list[list[int]], drafts: list[list[int]] | None, num_rows: list[int]) -> list[list[int]]:
    """What each request has written before each of its rows: its output and the drafts before the row."""
    drafts = drafts or [[] for _ in outputs]
    return [
        [*outputs[request], *drafts[request][:row]] for request, count in enumerate(num_rows) for row in range(count)
    ]


def processed_logprobs(rows: Tensor, metadata: SpecDecodeMetadata, sampling: Sampling, edits: dict[str, Any]) -> Tensor:
    """Log target distribution [drafts + batch, vocab]; of greedy requests, at temperature 1."""
    device = rows.device
    owners = arguments.requests_of_rows([count + 1 for count in metadata.num_draft_tokens], device)
    first = arguments.row_offsets(metadata.cu_num_sampled_tokens)[:-1].long()
    first_draft = arguments.row_offsets(metadata.cu_num_draft_tokens)[:-1].long()
    steps = torch.arange(metadata.max_spec_len + 1, device=device)
    padded = (first[:, None] + steps).clamp(max=rows.shape[0] - 1)
    drafts = metadata.draft_token_ids
    drafts = torch.cat((drafts, drafts.new_zeros(1)))[(first_draft[:, None] + steps[:-1]).clamp(max=drafts.shape[0])]
    temperature = torch.as_tensor(sampling.temperature, device=device).expand(first.shape)
    sampling = replace(sampling, temperature=torch.where(temperature == 0, 1.0, temperature))
    edits = {name: edit[padded] if name == "allowed" else edit for name, edit in edits.items()}
    logprobs = target_logprobs(rows[padded], sampling=sampling, draft_tokens=drafts, **edits)
    return logprobs[owners, torch.arange(rows.shape[0], device=device) - first[owners]]


def _reported(
    sampler: RejectionSampler, metadata: SpecDecodeMetadata, logits: Tensor, most: int, tokens: Tensor
) -> LogprobsTensors:
    """The report as vLLM makes it, with the ranks that it also asks for."""
    of_drafts, of_bonus = logits[metadata.target_logits_indices.long()], logits[metadata.bonus_logits_indices.long()]
    return sampler._get_logprobs_tensors(most, metadata, logits, of_drafts, of_bonus, tokens)
