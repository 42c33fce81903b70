"""The V2 model runner of vLLM, on GPUs: its rejection sampler and, by the rule "gumbel", its sampler."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from specens.adapters.vllm import arguments
from specens.adapters.vllm.arguments import Target
from specens.adapters.vllm.replacements import Replacement
from specens_kernels import Sampling, sample, target_logprobs, verify_chain

# vLLM's drafter draws by Philox from the same seeds and positions: another key keeps its numbers apart from these.
# The rule "gumbel" is lossless whatever the drafts depend on, and a seed gives V1's text.
SEED_SALT = 0x5370_6563_456E_73
ROWS = ("expanded_idx_mapping", "idx_mapping", "idx_mapping_np", "pos", "input_ids", "expanded_local_pos")
CONTEXT = (*ROWS, "seq_lens_upper_bound_np")  # what vLLM's sampler and its logits processors are told of a step


def replacements(rule: str) -> list[Replacement]:
    """What is replaced in vLLM, with the parameters that it is known to have; rule: "token" or "gumbel"."""
    from vllm.v1.watermarking.gpu_sampler import GPUWatermarkSampler
    from vllm.v1.worker.gpu.sample.sampler import Sampler
    from vllm.v1.worker.gpu.spec_decode.rejection_sampler import RejectionSampler

    rows = ("self", "logits", "draft_logits", "draft_sampled", "pos", "cu_num_logits")
    requests = ("idx_mapping", "idx_mapping_np", "expanded_idx_mapping", "expanded_local_pos")
    verifies = (*rows, *requests, "seq_lens_upper_bound_np", "verify_draft_sampled")
    constructs = ("self", "sampler", "spec_config", "device", "watermark_key")
    deduplicates = ("deduplicate_contexts", "deduplicate_contexts_max_history")
    watermarks = ("self", "watermarker", "args", *deduplicates, "kwargs")
    by_gumbel = [
        Replacement(Sampler, "sample", ("self", "logits", *CONTEXT, "return_logprobs"), _drawing_by_gumbel),
        Replacement(GPUWatermarkSampler, "__init__", watermarks, _refused),
    ]
    return [
        Replacement(RejectionSampler, "__init__", constructs, partial(_keeping_its_rule, rule)),
        Replacement(RejectionSampler, "_verify", verifies, _verifying),
        *(by_gumbel if rule == "gumbel" else []),
    ]


def _keeping_its_rule(rule: str, original: Callable) -> Callable:
    def construct(self: Any, sampler: Any, spec_config: Any, device: torch.device, **settings: Any) -> None:
        self.rule = arguments.chain_rule(rule, spec_config.rejection_sample_method)
        original(self, sampler, spec_config, device, **settings)

    return construct


def _refused(_original: Callable) -> Callable:
    def construct(*_arguments: Any, **_settings: Any) -> None:
        raise ValueError(
            "watermark_config: expected none with SPECENS_VLLM_RULE=gumbel, whose draws carry no watermark"
        )

    return construct


def _verifying(original: Callable) -> Callable:
    def verify_or_leave(self: Any, *call: Any) -> tuple[Tensor, Tensor, Tensor]:
        if self.synthetic_conditional_rates is not None or self.watermark_key is not None:
            return original(self, *call)
        return verify(self, *of_vllm(), *call)

    return verify_or_leave


def _drawing_by_gumbel(_original: Callable) -> Callable:
    def draw(self: Any, logits: Tensor, *context: Any, **_reports: bool) -> tuple[Tensor, Tensor]:
        return draw_by_gumbel(self, *of_vllm(), logits, dict(zip(CONTEXT, context, strict=True)))

    return draw


def of_vllm() -> tuple[Callable[..., Any], Any]:
    """What makes the context of logits processors, and the modes of reports after all processing."""
    from vllm.config.model import PROCESSED_LOGPROBS_MODES
    from vllm.v1.worker.gpu.sample.logits_processor.interface import LogitsContext

    return LogitsContext, PROCESSED_LOGPROBS_MODES


def draw_by_gumbel(
    sampler: Any,
    make_context: Callable[..., Any],
    processed_modes: Any,
    logits: Tensor,
    context: dict[str, Any],
) -> tuple[Tensor, Tensor]:
    """A step of vLLM without drafts: tokens int64 [rows] of the best scores, and logits to report from.

    logits: [rows, vocab]. context, by the names in CONTEXT: expanded_idx_mapping and pos [rows], the slot of a row's
    request and the position of the token that went into the row, and more for vLLM's logits processors.
    """
    slots, slots_on_host = context["expanded_idx_mapping"], context["idx_mapping_np"]
    states = sampler.sampling_states
    draw = sample(
        edited_by_vllm(sampler, logits, slots_on_host, lambda: make_context(**context)),
        sampling=sampling_of(states, slots, slots_on_host, logits.shape[1]),
        seeds=states.seeds.gpu[slots],
        positions=context["pos"].long() + 1,
        method="gumbel",
    )
    return arguments.some_token(draw.tokens), reported(sampler, processed_modes, logits, context)


def verify(
    rejection_sampler: Any,
    make_context: Callable[..., Any],
    processed_modes: Any,
    logits: Tensor,
    draft_logits: Tensor | None,
    draft_sampled: Tensor,
    pos: Tensor,
    cu_num_logits: Tensor,
    idx_mapping: Tensor,
    idx_mapping_np: np.ndarray,
    expanded_idx_mapping: Tensor,
    expanded_local_pos: Tensor,
    seq_lens_upper_bound_np: np.ndarray,
    verify_draft_sampled: Tensor,
    target: Target | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """A round of vLLM by `verify_chain`: logits to report from, tokens int64 [batch, steps + 1], counts int32 [batch].

    logits: [rows, vocab], packed by cu_num_logits [batch + 1]. draft_logits: [slots, steps, vocab] before temperature,
    or None. draft_sampled, pos: [rows], the token that went into a row, and where. verify_draft_sampled: the same
    tokens, -1 where a grammar forbids them. idx_mapping: [batch], the slot of each request. target: of an ensemble, its
    members' logits; `logits` are then what is reported.
    """
    target = target or Target((logits,))
    sampler, steps = rejection_sampler.sampler, rejection_sampler.num_speculative_steps
    context = {
        "expanded_idx_mapping": expanded_idx_mapping,
        "idx_mapping": idx_mapping,
        "idx_mapping_np": idx_mapping_np,
        "expanded_local_pos": expanded_local_pos,
        "input_ids": draft_sampled,
        "pos": pos,
        "seq_lens_upper_bound_np": seq_lens_upper_bound_np,
    }
    rule, seeds = rejection_sampler.rule, sampler.sampling_states.seeds.gpu[idx_mapping]
    if rule == "gumbel":
        draft_logits = None  # how drafts were drawn plays no part
    else:
        seeds = seeds ^ SEED_SALT
    temperature = sampler.sampling_states.temperature.gpu[idx_mapping]
    rows = [edited_by_vllm(sampler, own, idx_mapping_np, lambda: make_context(**context)) for own in target.members]
    verdict = verify_chain(
        rows,
        padded_drafts(verify_draft_sampled, cu_num_logits, steps),
        ensemble=target.ensemble,
        sampling=sampling_of(sampler.sampling_states, idx_mapping, idx_mapping_np, logits.shape[1]),
        draft_logits=draft_logits,
        draft_slots=None if draft_logits is None else idx_mapping,
        draft_sampling=None if draft_logits is None else Sampling(temperature),
        process_drafts=False,
        rule=rule,
        row_offsets=cu_num_logits,
        seeds=seeds,
        positions=pos[cu_num_logits[:-1].long()].long() + 1,
    )
    tokens, num_tokens = arguments.emitted(verdict)
    if target.ensemble is None:
        logits = reported(sampler, processed_modes, logits, context)
    elif reports_processed(sampler, processed_modes):
        owners = requests_of_rows(cu_num_logits, logits.shape[0])
        logits = processed_logprobs(sampler, Target(tuple(rows), target.of_requests(owners)), context)
    return logits, tokens, num_tokens.int()


def reported(sampler: Any, processed_modes: Any, logits: Tensor, context: dict[str, Any]) -> Tensor:
    """The logits to report from: as they came, or after all that shapes the distribution."""
    if reports_processed(sampler, processed_modes):
        return sampler.apply_sampling_params(logits, **context)
    return logits


def reports_processed(sampler: Any, processed_modes: Any) -> bool:
    """Whether reports are after all that shapes the distribution."""
    return sampler.logprobs_mode in processed_modes or sampler.return_sampling_mask


def processed_logprobs(sampler: Any, rows: Target, context: dict[str, Any]) -> Tensor:
    """Log target distribution [rows, vocab] of an ensemble; of greedy requests, at temperature 1.

    rows: members' logits after vLLM's logits processors, and the ensemble of each row.
    """
    slots, vocab = context["expanded_idx_mapping"], rows.members[0].shape[1]
    sampling = sampling_of(sampler.sampling_states, slots, context["idx_mapping_np"], vocab)
    temperature = torch.as_tensor(sampling.temperature)
    sampling = replace(sampling, temperature=torch.where(temperature == 0, 1.0, temperature))
    return target_logprobs(rows.members, ensemble=rows.ensemble, sampling=sampling)


def requests_of_rows(row_offsets: Tensor, rows: int) -> Tensor:
    """int64 [rows]: whose each packed row is, by offsets [batch + 1] that only the device knows."""
    return torch.searchsorted(row_offsets[1:].long(), torch.arange(rows, device=row_offsets.device), right=True).clamp(
        max=row_offsets.shape[0] - 2
    )


def padded_drafts(tokens: Tensor, row_offsets: Tensor, draft_len: int) -> Tensor:
    """Drafts [batch, draft_len] of tokens [rows], each row's input: the drafts went into all rows but the first.

    What stands after a request's last row is another's, and not looked at.
    """
    steps = torch.arange(1, draft_len + 1, device=tokens.device)
    return tokens[(row_offsets[:-1, None].long() + steps).clamp(max=tokens.shape[0] - 1)]


def sampling_of(states: Any, slots: Tensor, slots_on_host: np.ndarray, vocab: int) -> Sampling:
    """Sampling parameters of the requests in these slots; filters that none of them uses are left out."""

    def used(name: str, off: float) -> Tensor | None:
        held = getattr(states, name)
        return held.gpu[slots] if np.any(held.np[slots_on_host] != off) else None

    top_k, top_p, min_p = used("top_k", vocab), used("top_p", 1.0), used("min_p", 0.0)
    return arguments.sampling(states.temperature.gpu[slots], top_k, top_p, min_p, vocab)


def edited_by_vllm(sampler: Any, logits: Tensor, slots_on_host: np.ndarray, context: Callable[[], Any]) -> Tensor:
    """A float32 copy of the logits after vLLM's logits processors, or the logits where no request uses one.

    The V2 model runner keeps counts of tokens instead of their lists, so that penalties are applied by vLLM.
    """
    if not any(_uses(processor, slots_on_host) for processor in _processors(sampler)):
        return logits
    rows, call = logits.to(torch.float32, copy=True), context()
    for processor in sampler.logits_processors:
        rows = processor.apply(rows, call)
    sampler.thinking_budget_state.apply(rows, call)
    return rows


def _processors(sampler: Any) -> list[Any]:
    thinking = sampler.thinking_budget_state  # one of an engine without budgets has no flags
    return [*sampler.logits_processors, *([thinking] if thinking.enabled else [])]


def _uses(processor: Any, slots: np.ndarray) -> bool:
    """Whether a request in these slots uses a processor; one that is not vLLM's own always counts."""
    flags: dict[str, Callable[[], np.ndarray]] = {
        "LogitBiasState": lambda: processor.use_logit_bias,
        "PenaltiesState": lambda: processor.use_penalty,
        "ThinkingBudgetState": lambda: processor.use_thinking_budget,
        "BadWordsState": lambda: processor.num_bad_words.np,
    }
    flag = flags.get(type(processor).__name__)
    return flag is None or bool(np.any(flag()[slots]))
