"""How doors make the flat form of operators' arguments, which `arguments` describes.

Every call goes through here, so no group is made of what it puts into the lists: that would take as long as the lists.
Nothing is checked: operators in C++ check what they read, and `checks` names what is wrong.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import index

import torch
from torch import Tensor

from specens_kernels.arguments import AS_TOKENS, NO_DRAFTER, RAW_LOGPROBS, TARGET_LOGPROBS, Flat
from specens_kernels.types import Ensemble, Mixture, Processing, Sampling

# What a group has in the lists.
Part = tuple[tuple[Tensor | None, ...], tuple[int, ...], tuple[float, ...]]


def pack(
    members: Sequence[Tensor], ensemble: Ensemble | None, parts: Sequence[Part | None], table: Sequence[float] = ()
) -> Flat:
    """The arguments of an operator.

    parts: of its groups, in order; None for one that is as by default. table: of the rule.
    """
    tensors: list[Tensor] = []
    integers: list[int] = [0, 0]
    numbers: list[float] = []
    groups, present, group_bit, tensor_bit = 0, 0, 1, 1
    for part in parts:
        if part is not None:
            own_tensors, own_integers, own_numbers = part
            for tensor in own_tensors:
                if tensor is not None:
                    tensors.append(tensor)
                    present |= tensor_bit
                tensor_bit += tensor_bit
            integers += own_integers
            numbers += own_numbers
            groups |= group_bit
        group_bit += group_bit
    integers[0], integers[1] = groups, present
    tensors += members
    if ensemble is not None and not isinstance(ensemble.weights, Tensor):
        numbers += ensemble.weights
    numbers += table
    return tensors, integers, numbers or None


def number_and_rows(value: float | Tensor) -> tuple[float, Tensor | None]:
    """A number for all requests and a tensor with one for each, of which one counts."""
    return (0.0, value) if isinstance(value, Tensor) else (float(value), None)


PLAIN_SAMPLING: Part = (None, None, None, None), (0, 0), (1.0, 1.0, 0.0)


def sampling_part(sampling: Sampling) -> Part | None:
    """The part of `SamplingArguments`."""
    if type(sampling.temperature) is float and sampling.temperature == 1.0 and not sampling.filters:
        return None
    temperature, temperatures = number_and_rows(sampling.temperature)
    if not sampling.filters:
        return (temperatures, None, None, None), (0, 0), (temperature, 1.0, 0.0)
    top_k = 0 if sampling.top_k is None else sampling.top_k
    top_k, top_ks = (0, top_k) if isinstance(top_k, Tensor) else (max(index(top_k), 0), None)
    top_p, top_ps = number_and_rows(1.0 if sampling.top_p is None else sampling.top_p)
    min_p, min_ps = number_and_rows(0.0 if sampling.min_p is None else sampling.min_p)
    first = int(sampling.filter_order == "vllm")
    return (temperatures, top_ks, top_ps, min_ps), (top_k, first), (temperature, top_p, min_p)


def never_greedy(sampling: Part | None) -> Part | None:
    """The same, with 1 for a temperature of 0: for rules that draw nothing."""
    if sampling is None:
        return None
    (temperatures, *filters), integers, (temperature, *settings) = sampling
    if temperatures is not None:
        temperatures = torch.where(temperatures == 0, 1.0, temperatures)
    return (temperatures, *filters), integers, (temperature or 1.0, *settings)


def processing_part(processing: Processing, batch: int) -> Part:
    """The part of `ProcessingArguments`."""
    bias_tokens, bias_values = processing.logit_bias or (None, None)
    if bias_values is not None:
        bias_values = bias_values.to(torch.float32).contiguous()
    end_tokens = processing.end_tokens
    if end_tokens is not None and end_tokens.dim() == 1:
        end_tokens = end_tokens.expand(batch, -1)
    repetition, repetitions = number_and_rows(processing.repetition_penalty)
    frequency, frequencies = number_and_rows(processing.frequency_penalty)
    presence, presences = number_and_rows(processing.presence_penalty)
    held_back = processing.min_tokens
    min_tokens, min_tokens_rows = (0, held_back) if isinstance(held_back, Tensor) else (held_back, None)
    tensors = (bias_tokens, bias_values, repetitions, frequencies, presences, min_tokens_rows, end_tokens)
    tables = (processing.prompt_tokens, processing.output_tokens)
    return (*tensors, *tables), (index(min_tokens),), (repetition, frequency, presence)


def target_parts(
    members: Sequence[Tensor],
    ensemble: Ensemble | None,
    sampling: Sampling,
    processing: Processing | None = None,
    allowed: Tensor | None = None,
    row_offsets: Tensor | None = None,
) -> tuple[Part | None, Part | None, Part | None]:
    """The parts of `Target`, `SamplingArguments` and `ProcessingArguments`."""
    own: Part | None = None
    edits: Part | None = None
    if processing is not None:
        batch = members[0].shape[0] if row_offsets is None else row_offsets.shape[0] - 1
        edits = processing_part(processing, batch)
    if ensemble is not None:
        weights = ensemble.weights
        weight_rows = weights.to(torch.float32).contiguous() if isinstance(weights, Tensor) else None
        filter_members = int(isinstance(ensemble, Mixture) and ensemble.filter == "members")
        settings = (int(ensemble.kind), filter_members)
        own = (weight_rows, row_offsets, allowed), settings, (float(ensemble.plausibility or 0.0),)
    elif row_offsets is not None or allowed is not None:
        own = (None, row_offsets, allowed), (0, 0), (0.0,)
    return own, sampling_part(sampling), edits


def draft_parts(
    tokens: Tensor,
    drafter: int | Tensor | None,
    logits: Tensor | None,
    slots: Tensor | None,
    lens: Tensor | None,
    draft_len: int | None,
    process_drafts: bool,
    sampling: Sampling | None,
) -> tuple[Part, Part | None]:
    """The parts of `Draft` and of its own `SamplingArguments`. draft_len: of packed tokens."""
    drafters = None
    if drafter is None:
        drafter = NO_DRAFTER
    elif isinstance(drafter, Tensor):
        drafters, drafter = drafter, NO_DRAFTER
    elif drafter < 0 or isinstance(drafter, bool):
        raise ValueError("drafter")  # -1 is what operators take for none
    if draft_len is None:
        draft_len = AS_TOKENS
    elif draft_len < 0 or isinstance(draft_len, bool):
        raise ValueError("max_draft_len")  # likewise
    if not isinstance(process_drafts, bool):
        raise ValueError("process_drafts")
    own_sampling = None
    if sampling is not None:
        own_sampling = sampling_part(sampling) or PLAIN_SAMPLING  # None is what the target is sampled with
    return ((tokens, drafters, logits, slots, lens), (index(drafter), draft_len, int(process_drafts)), ()), own_sampling


def rule_part(kind: int, threshold: float = 0.0, alpha: float = 0.0) -> Part:
    """The part of `Rule`."""
    return (), (int(kind),), (float(threshold), float(alpha))


REPORTS: dict[bool | str, int] = {False: 0, True: TARGET_LOGPROBS, "target": TARGET_LOGPROBS, "raw": RAW_LOGPROBS}


def report_part(logprobs: bool | str, top_logprobs: int) -> Part | None:
    """The part of `Report`."""
    if isinstance(top_logprobs, bool) or top_logprobs < 0:
        raise ValueError("top_logprobs")  # `check_report` says what was expected
    if logprobs is False and top_logprobs == 0:
        return None
    if not isinstance(logprobs, bool | str) or logprobs not in REPORTS:
        raise ValueError("logprobs")  # likewise
    return (), (REPORTS[logprobs] or TARGET_LOGPROBS, top_logprobs), ()
