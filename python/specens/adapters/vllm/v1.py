"""The V1 model runner of vLLM, on CPUs and GPUs: its rejection sampler, and the sampler of steps without drafts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from vllm import SamplingParams
from vllm.config.model import PROCESSED_LOGPROBS_MODES
from vllm.v1.outputs import LogprobsTensors, SamplerOutput
from vllm.v1.sample.logits_processor import BUILTIN_LOGITS_PROCESSORS, LogitsProcessors
from vllm.v1.sample.logits_processor.builtin import MinPLogitsProcessor
from vllm.v1.sample.metadata import SamplingMetadata
from vllm.v1.sample.rejection_sampler import RejectionSampler
from vllm.v1.sample.sampler import Sampler
from vllm.v1.spec_decode.metadata import SpecDecodeMetadata
from vllm.v1.worker import gpu_model_runner

from specens.adapters.vllm import arguments, v1_drafts, v1_ensemble
from specens.adapters.vllm.arguments import Target
from specens.adapters.vllm.ensemble_config import is_ensemble
from specens.adapters.vllm.replacements import Replacement
from specens.adapters.vllm.v1_edits import (
    edited_by_vllm,
    folded_edits,
    needs_vllm,
    processed_logprobs,
    raw_logprobs,
    sampling_of,
)
from specens_kernels import Sampling, Synthetic, sample, verify_chain

FIRST_POSITIONS = "first_draft_positions"  # left by the runner on its samplers, for the round
TARGET = "specens_target"  # likewise, of an ensemble


def replacements(rule: str) -> list[Replacement]:
    """What is replaced in vLLM, with the parameters that it is known to have; rule: "token" or "gumbel"."""
    runner = gpu_model_runner.GPUModelRunner
    validate = ("self", "speculative_config")
    build = ("vllm_config", "device", "is_pin_memory", "is_pooling_model", "custom_logitsprocs")
    forward = ("self", "metadata", "draft_probs", "logits", "sampling_metadata")
    draws = ("self", "logits", "sampling_metadata", "logprobs_mode_override")
    by_gumbel = [Replacement(Sampler, "sample", draws, _drawing_by_gumbel)] if rule == "gumbel" else []
    construct = ("self", "sampler", "spec_config", "device")
    keep_books = ("self", "scheduler_output", "sampler_output", "logits", "hidden_states", "num_scheduled_tokens")
    return [
        Replacement(RejectionSampler, "__init__", construct, partial(_keeping_its_rule, rule)),
        Replacement(RejectionSampler, "forward", forward, _verifying),
        Replacement(
            runner, "_sample", ("self", "logits", "spec_decode_metadata"), partial(_sampling_by_position, rule)
        ),
        Replacement(runner, "_bookkeeping_sync", keep_books, _keeping_generators),
        Replacement(gpu_model_runner, "build_logitsprocs", build, _with_all_processors),
        Replacement(SamplingParams, "_validate_spec_decode", validate, _allowing_all_parameters),
        *by_gumbel,
        *v1_ensemble.replacements(),
        *v1_drafts.replacements(rule),
    ]


def _keeping_its_rule(rule: str, original: Callable) -> Callable:
    def construct(self: Any, sampler: Any, spec_config: Any = None, device: torch.device | None = None) -> None:
        kept = arguments.chain_rule(rule, getattr(spec_config, "rejection_sample_method", "standard"))
        original(self, sampler, spec_config, device)
        self.rule = kept
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
        speculative = vllm_config.speculative_config is not None or is_ensemble(vllm_config.model_config)
        if is_pooling_model or custom_logitsprocs or not speculative:
            return original(vllm_config, device, is_pin_memory, is_pooling_model, custom_logitsprocs)
        return LogitsProcessors(kind(vllm_config, device, is_pin_memory) for kind in BUILTIN_LOGITS_PROCESSORS)

    return build


def _sampling_by_position(rule: str, original: Callable) -> Callable:
    """Rounds learn where they are; one in which no request has a draft is a round as well.

    So all tokens of a request with a seed come from that seed and their positions, whoever else has drafts. By the rule
    "gumbel" an engine without speculation has such rounds only, unless vLLM's own sampler has something to add; that of
    an ensemble has them always.
    """

    def sample_round(self: Any, logits: Tensor, spec_decode_metadata: SpecDecodeMetadata | None) -> SamplerOutput:
        speculative, gumbel = self.speculative_config is not None, rule == "gumbel"
        ensemble = is_ensemble(self.model_config)
        if not speculative and not gumbel and not ensemble:
            return original(self, logits, spec_decode_metadata)
        if spec_decode_metadata is None:
            batch, rows = self.input_batch.sampling_metadata, self.query_start_loc.gpu[1 : logits.shape[0] + 1] - 1
            if not ensemble and (batch.logprob_token_ids or (not speculative and needs_vllm(batch))):
                if gumbel:
                    setattr(self.sampler, FIRST_POSITIONS, self.positions[rows] + 1)
                return original(self, logits, None)
            spec_decode_metadata = no_drafts(rows)
        if not hasattr(self, "rejection_sampler"):
            self.rejection_sampler = RejectionSampler(self.sampler, device=logits.device)
        first_rows = arguments.row_offsets(spec_decode_metadata.cu_num_sampled_tokens)[:-1]
        positions = self.positions[spec_decode_metadata.logits_indices[first_rows]] + 1
        setattr(self.rejection_sampler, FIRST_POSITIONS, positions)
        if ensemble:
            setattr(self.rejection_sampler, TARGET, v1_ensemble.target_of(self, logits))
        return original(self, logits, spec_decode_metadata)

    return sample_round


def _keeping_generators(original: Callable) -> Callable:
    """On CPUs no generator is moved back where a token is thrown away, as it is of a prompt that has been read in part.

    It has no offset there, so that moving it would end the engine.
    """

    def keep_books(self: Any, *given: Any, **named: Any) -> Any:
        generators = self.input_batch.generators
        if self.device.type == "cpu":
            self.input_batch.generators = {}
        try:
            return original(self, *given, **named)
        finally:
            self.input_batch.generators = generators

    return keep_books


def _drawing_by_gumbel(original: Callable) -> Callable:
    """vLLM's sampler keeps its edits and reports, but not its draws."""

    def draw_and_report(
        self: Any, logits: Tensor, sampling_metadata: SamplingMetadata, logprobs_mode_override: str | None = None
    ) -> tuple[Tensor, Tensor | None]:
        first_positions = self.__dict__.pop(FIRST_POSITIONS, None)
        tokens = drawn_by_gumbel(self, logits, sampling_metadata, first_positions)
        reports = sampling_metadata.max_num_logprobs is not None or sampling_metadata.logprob_token_ids
        if not reports or (logprobs_mode_override or self.logprobs_mode) not in PROCESSED_LOGPROBS_MODES:
            return tokens, None
        return tokens, original(self, logits, sampling_metadata, logprobs_mode_override)[1]

    return draw_and_report


def drawn_by_gumbel(
    sampler: Sampler, logits: Tensor, batch: SamplingMetadata, first_positions: Tensor | None
) -> Tensor:
    """Tokens int64 [batch] of the best scores, of logits [batch, vocab] that vLLM has edited; not changed."""
    sampling = sampling_of(batch, logits.shape[1])
    others = [kind for kind in map(type, batch.logitsprocs.argmax_invariant) if kind is not MinPLogitsProcessor]
    if others and not sampling.greedy:  # between temperature and top-k
        logits = sampler.apply_temperature(logits.clone(), batch.temperature, batch.all_random)
        for processor in batch.logitsprocs.argmax_invariant:
            logits = processor.apply(logits)
        temperature = torch.as_tensor(sampling.temperature)
        sampling = replace(sampling, temperature=(temperature > 0).float(), min_p=None)
    seeds, positions = arguments.random_numbers(batch.generators, first_positions, logits.shape[0], logits.device)
    draw = sample(logits, sampling=sampling, seeds=seeds, positions=positions, method="gumbel")
    return arguments.some_token(draw.tokens)


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
        target = self.__dict__.pop(TARGET, None) or Target((logits,))  # vLLM's trial runs have no ensemble
        return verify(self, metadata, draft_probs, target, sampling_metadata, first_positions)

    return forward


def verify(
    sampler: RejectionSampler,
    metadata: SpecDecodeMetadata,
    draft_probs: Tensor | None,
    target: Target,
    batch: SamplingMetadata,
    first_positions: Tensor | None,
) -> SamplerOutput:
    """A round of vLLM by `verify_chain`.

    target: members' logits, each [drafts + batch, vocab], the rows of a request together and its bonus row last; not
    changed. draft_probs: float [drafts, vocab], or None for drafts without a distribution. first_positions: [batch] or
    None.
    """
    num_requests, logits = len(metadata.num_draft_tokens), target.members[0]
    edits = folded_edits(metadata, batch, logits.device)
    rows = edited_by_vllm(target.members, metadata, batch)
    sampling, rule = sampling_of(batch, logits.shape[1]), rule_of(sampler, metadata.max_spec_len)
    if rule == "gumbel":
        draft_probs = None  # how drafts were drawn plays no part
    without_random = sampling.greedy and not sampler.synthetic_mode
    seeds, positions = None, None
    if not without_random:
        seeds, positions = arguments.random_numbers(batch.generators, first_positions, num_requests, logits.device)
    verdict = verify_chain(
        rows,
        metadata.draft_token_ids,
        ensemble=target.ensemble,
        sampling=sampling,
        draft_logits=arguments.draft_logits(draft_probs),
        draft_sampling=None if draft_probs is None else Sampling(),
        process_drafts=False,  # vLLM's drafters know of the temperature alone
        rule=rule,
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
        logits = processed_logprobs(target._replace(members=rows), metadata, sampling, edits)
    elif target.ensemble is not None:
        logits = raw_logprobs(target, metadata)
    return SamplerOutput(tokens, _reported(sampler, metadata, logits, batch.max_num_logprobs, tokens))


def _reported(
    sampler: RejectionSampler, metadata: SpecDecodeMetadata, logits: Tensor, most: int, tokens: Tensor
) -> LogprobsTensors:
    """The report as vLLM makes it, with the ranks that it also asks for."""
    of_drafts, of_bonus = logits[metadata.target_logits_indices.long()], logits[metadata.bonus_logits_indices.long()]
    return sampler._get_logprobs_tensors(most, metadata, logits, of_drafts, of_bonus, tokens)
