"""What operators take, from public arguments; `arguments` says what that is.

Every call goes through here. What is as by default is left out: each option costs a call a fifth of a microsecond.
Nothing is checked: operators in C++ check what they read, and `checks` names what is wrong.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import index
from typing import Any

import torch
from torch import Tensor

from specens_kernels.arguments import (
    PLAIN_SAMPLING,
    RAW_LOGPROBS,
    TARGET_LOGPROBS,
)
from specens_kernels.ensembles import Ensemble, Mixture
from specens_kernels.rules import ChosenRule, RuleKind
from specens_kernels.sampling import Processing, Sampling
from specens_kernels.values import is_integer

SamplingNumbers = tuple[Sequence[float], tuple[Tensor | None, ...] | None]  # and the rows, where there are any
NO_ROWS = (None, None, None, None)
LARGEST_EXACT = 2**53  # integers up to it are floats; larger settings mean the same


class Options(dict[str, Any]):
    """An operator's arguments by name."""

    copied: tuple[Any, ...] = ()  # what the caller gave of whose tensors the operator may have copies


def number_and_rows(value: float | Tensor) -> tuple[float, Tensor | None]:
    """A number for all requests and a tensor with one for each, of which one counts."""
    return (0.0, value) if isinstance(value, Tensor) else (float(value), None)


def whole(argument: str, value: Any) -> int:
    """An integer that a call was given. A truth value, or a tensor of one number, is none."""
    if type(value) is int:
        return value
    if not is_integer(value):
        raise ValueError(argument)  # the operation's check says what was expected
    return index(value)


def _integer(value: Any) -> float:
    return float(min(max(index(value), -LARGEST_EXACT), LARGEST_EXACT))


def sampling_numbers(sampling: Sampling) -> SamplingNumbers | None:
    """Those of the option `sampling`, and their rows; None where all are as by default."""
    if type(sampling.temperature) is float and sampling.temperature == 1.0 and not sampling.filters:
        return None
    temperature, temperatures = number_and_rows(sampling.temperature)
    if not sampling.filters:
        return (temperature, 0.0, 1.0, 0.0, 0.0), None if temperatures is None else (temperatures, None, None, None)
    given = 0 if sampling.top_k is None else sampling.top_k
    top_k, top_ks = (0.0, given) if isinstance(given, Tensor) else (max(_integer(given), 0.0), None)
    top_p, top_ps = number_and_rows(1.0 if sampling.top_p is None else sampling.top_p)
    min_p, min_ps = number_and_rows(0.0 if sampling.min_p is None else sampling.min_p)
    first = float(sampling.filter_order == "vllm")
    numbers = (temperature, top_k, top_p, min_p, first)
    if temperatures is None and top_ks is None and top_ps is None and min_ps is None:
        return numbers, None
    return numbers, (temperatures, top_ks, top_ps, min_ps)


def never_greedy(sampling: SamplingNumbers | None) -> SamplingNumbers | None:
    """The same, with 1 for a temperature of 0: for rules that draw nothing."""
    if sampling is None:
        return None
    (temperature, *settings), rows = sampling
    if rows is not None and rows[0] is not None:
        rows = (torch.where(rows[0] == 0, 1.0, rows[0]), *rows[1:])
    return (temperature or 1.0, *settings), rows


def add_processing(options: Options, processing: Processing, batch: int) -> None:
    """The options `processing` and `processing_rows`."""
    bias_tokens, bias_values = processing.logit_bias or (None, None)
    if bias_values is not None:
        options.copied += (bias_values,)
        bias_values = bias_values.to(torch.float32).contiguous()
    end_tokens = processing.end_tokens
    if end_tokens is not None and end_tokens.dim() == 1:
        end_tokens = end_tokens.expand(batch, -1)
    repetition, repetitions = number_and_rows(processing.repetition_penalty)
    frequency, frequencies = number_and_rows(processing.frequency_penalty)
    presence, presences = number_and_rows(processing.presence_penalty)
    held_back = processing.min_tokens
    min_tokens, min_tokens_rows = (0, held_back) if isinstance(held_back, Tensor) else (held_back, None)
    tables = (bias_tokens, bias_values, end_tokens, processing.prompt_tokens, processing.output_tokens)
    rows = [repetitions, frequencies, presences, min_tokens_rows, *tables]
    options["processing"] = [repetition, frequency, presence, _integer(min_tokens)]
    if any(tensor is not None for tensor in rows):
        options["processing_rows"] = rows


def target_options(
    members: Sequence[Tensor],
    ensemble: Ensemble | None,
    sampling: SamplingNumbers | None,
    processing: Processing | None = None,
    allowed: Tensor | None = None,
    row_offsets: Tensor | None = None,
    draft_sampling: SamplingNumbers | None = None,
) -> Options:
    """The options of the target, and the sampling parameters of the draft."""
    options = Options()
    if row_offsets is not None:
        options["row_offsets"] = row_offsets
    if allowed is not None:
        options["allowed"] = allowed
    weight_rows: Tensor | None = None
    rows: tuple[Tensor | None, ...] | None = None
    draft_rows: tuple[Tensor | None, ...] | None = None
    if ensemble is not None:
        filter_members = isinstance(ensemble, Mixture) and ensemble.filter == "members"
        numbers = [int(ensemble.kind), int(filter_members), float(ensemble.plausibility or 0.0)]
        weights = ensemble.weights
        if isinstance(weights, Tensor):
            options.copied += (weights,)
            weight_rows = weights.to(torch.float32).contiguous()
        else:
            numbers += weights
        options["ensemble"] = numbers
    if sampling is not None:
        options["sampling"], rows = sampling
    if draft_sampling is not None:
        options["draft_sampling"], draft_rows = draft_sampling
    if weight_rows is not None or rows is not None or draft_rows is not None:
        options["rows"] = [*(rows or NO_ROWS), weight_rows, *(draft_rows or NO_ROWS)]
    if processing is not None:
        add_processing(options, processing, members[0].shape[0] if row_offsets is None else row_offsets.shape[0] - 1)
    return options


def draft_numbers(sampling: Sampling | None) -> SamplingNumbers | None:
    """What drafts were drawn with; None: as the target."""
    return None if sampling is None else sampling_numbers(sampling) or (PLAIN_SAMPLING, None)


def add_draft(
    options: Options,
    drafter: int | Tensor | None,
    logits: Tensor | None,
    slots: Tensor | None,
    draft_len: int | None,
    process_drafts: bool,
) -> None:
    """The options of the draft. draft_len: of packed tokens."""
    if isinstance(drafter, Tensor):
        options["drafters"] = drafter
    elif drafter is not None:
        if (number := whole("drafter", drafter)) < 0:
            raise ValueError("drafter")  # -1 is what operators take for none
        options["drafter"] = number
    if logits is not None or slots is not None:
        options["draft_logits"] = [logits] if slots is None else [logits, slots]
    if draft_len is not None:
        if (most := whole("max_draft_len", draft_len)) < 0:
            raise ValueError("max_draft_len")  # likewise
        options["max_draft_len"] = most
    if process_drafts is not True:
        if process_drafts is not False:
            raise ValueError("process_drafts")
        options["process_drafts"] = False


def add_random(options: Options, uniforms: Tensor | None, seeds: Tensor | None, positions: Tensor | None) -> None:
    """The option `random`."""
    if uniforms is not None:
        if seeds is not None or positions is not None:
            raise ValueError("uniforms")
        options["random"] = [uniforms]
    elif seeds is not None and positions is not None:
        options["random"] = [seeds, positions]
    elif seeds is not None or positions is not None:
        raise ValueError("seeds")


def add_rule(options: Options, call: Any, rule: ChosenRule, draft_len: int) -> None:
    """The option `rule`, where it is not "token"."""
    kind = rule.kind
    if kind == RuleKind.TOKEN:
        return
    if kind.needs_draft and call.drafter is None and call.draft_logits is None:
        raise ValueError("drafter")  # `check_rule` says what was expected
    if any(getattr(call, name, None) is not None for name in kind.without):
        raise ValueError("rule")  # likewise
    options["rule"] = rule.numbers(draft_len)


REPORTS: dict[bool | str, int] = {False: 0, True: TARGET_LOGPROBS, "target": TARGET_LOGPROBS, "raw": RAW_LOGPROBS}


def add_report(options: Options, logprobs: bool | str, top_logprobs: int) -> None:
    """The option `logprobs`."""
    if logprobs is False and type(top_logprobs) is int and top_logprobs == 0:
        return
    top = whole("top_logprobs", top_logprobs)
    if top < 0:
        raise ValueError("top_logprobs")  # `check_report` says what was expected
    if logprobs is False and top == 0:  # an integer of another kind
        return
    if not isinstance(logprobs, bool | str) or logprobs not in REPORTS:
        raise ValueError("logprobs")  # likewise
    options["logprobs"] = [REPORTS[logprobs] or TARGET_LOGPROBS, top]
