"""The flat form in which operators take their arguments, and how the doors make it from public ones.

An operator takes the members' logits and three lists: tensors, integers, numbers. One operator argument costs a call a
fifth of a microsecond, and there are more than fifty. A group below names its fields in the order of the lists: first
tensors, then integers, then numbers; the C++ reads them with `ArgumentReader` in the same order. integers[0] has a bit
for each optional tensor, whether it is in the list, and integers[1] a bit for each group that may be left out.

Nothing is checked here: operators in C++ check what they read, and `checks` names what is wrong.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from specens_kernels.types import Ensemble, Mixture, Processing, Sampling

SCHEMA = "Tensor[] member_logits, Tensor[] tensors, int[] integers, float[] numbers"
NO_DRAFTER = -1  # no member drafted: one-hot
NO_LOGPROBS, TARGET_LOGPROBS, RAW_LOGPROBS = 0, 1, 2


class SamplingArguments(NamedTuple):
    """Sampling parameters; the tensors [batch], of any floating-point or integer dtype, win where they are given."""

    temperatures: Tensor | None
    top_ks: Tensor | None  # 0 and less is off
    top_ps: Tensor | None
    min_ps: Tensor | None
    top_k: int  # 0 is off
    min_p_first: int  # a truth value, like all flags
    temperature: float
    top_p: float  # 1 is off
    min_p: float  # 0 is off

    @property
    def filters(self) -> bool:
        """Whether any request may be filtered."""
        tensors = self.top_ks is not None or self.top_ps is not None or self.min_ps is not None
        return tensors or self.top_k > 0 or self.top_p < 1 or self.min_p > 0


class ProcessingArguments(NamedTuple):
    """Logit processing; see `Processing`. The tensors [batch] win where they are given."""

    bias_tokens: Tensor | None  # int64 or int32 [batch, n], like the other tables
    bias_values: Tensor | None  # float32 [batch, n]
    repetition_penalties: Tensor | None  # floating-point [batch]
    frequency_penalties: Tensor | None
    presence_penalties: Tensor | None
    min_tokens_rows: Tensor | None  # int64 or int32 [batch]
    end_tokens: Tensor | None
    prompt_tokens: Tensor | None
    output_tokens: Tensor | None
    min_tokens: int
    repetition_penalty: float
    frequency_penalty: float
    presence_penalty: float

    @property
    def active(self) -> bool:
        """Whether any logit may be changed."""
        return any(tensor is not None for tensor in self[:9]) or self[10:] != (1.0, 0.0, 0.0)


NO_PROCESSING = ProcessingArguments(None, None, None, None, None, None, None, None, None, 0, 1.0, 0.0, 0.0)


class Target(NamedTuple):
    """The target distribution."""

    weight_rows: Tensor | None  # float32 [batch, members]; wins over weights where it is given
    row_offsets: Tensor | None  # int64 or int32 [batch + 1]: the logits are packed rows
    allowed: Tensor | None  # int32 [batch, steps, words], or [rows, words] where they are packed
    ensemble: int
    filter_members: int
    plausibility: float  # 0 is off
    member_logits: list[Tensor]
    weights: tuple[float, ...]
    sampling: SamplingArguments
    processing: ProcessingArguments = NO_PROCESSING


class Draft(NamedTuple):
    """The draft tokens and what they were drawn from."""

    tokens: Tensor  # int64 or int32 [batch, draft_len], or [drafts] where they are packed
    drafters: Tensor | None  # int64 or int32 like tokens
    logits: Tensor | None  # [batch, draft_len, vocab], [drafts, vocab], or [slots, draft_len, vocab]
    slots: Tensor | None  # int64 or int32 [batch]: the place of a request's logits
    lens: Tensor | None  # int64 or int32 [batch]
    drafter: int  # a member, or NO_DRAFTER
    draft_len: int  # the most drafts of a request
    processed: int  # whether they were drawn from processed logits
    sampling: SamplingArguments


class Drafts(NamedTuple):
    """The tokens before the rows of a target."""

    drafts: Tensor | None  # int64 or int32 [batch, n]


class Coins(NamedTuple):
    """Where random numbers come from: given, or seeds and positions, or none (all greedy)."""

    uniforms: Tensor | None  # float64 or float32
    seeds: Tensor | None  # int64 [batch]
    positions: Tensor | None  # int64 [batch]


class Tree(NamedTuple):
    """The draft trees of a batch, and how the children of a node were drawn."""

    parents: Tensor  # int64 or int32 [batch, nodes]
    levels: int  # the most nodes of a path; what lies deeper is padding
    without_replacement: int


class Rule(NamedTuple):
    """The acceptance rule of a chain or a tree."""

    kind: int
    threshold: float  # of typical and threshold acceptance; a replacement's alpha
    alpha: float  # of typical acceptance; a replacement's beta
    table: tuple[float, ...] = ()  # rates of synthetic acceptance; nodes of a decision tree


class Report(NamedTuple):
    """What is told of the emitted tokens besides the tokens."""

    logprobs: int  # NO_LOGPROBS, TARGET_LOGPROBS or RAW_LOGPROBS
    top: int  # alternatives


class Stream(NamedTuple):
    """Which random number of a seed and position is used."""

    step: int
    stream: int


class ChainArguments(NamedTuple):
    """The arguments of `verify_chain`'s operators, grouped."""

    target: Target
    draft: Draft
    coins: Coins
    rule: Rule
    report: Report

    @classmethod
    def unpack(cls, flat: Sequence[Any]) -> ChainArguments:
        """From what the operator was given."""
        unpacker = Unpacker(flat)
        target = unpacker.target()
        draft = unpacker.draft(target)
        coins, rule, report = unpacker.group(Coins), unpacker.group(Rule), unpacker.group(Report)
        target = unpacker.weighted(target)
        return cls(target, draft, coins, rule._replace(table=unpacker.rest()), report)


class TreeArguments(NamedTuple):
    """The arguments of `verify_tree`'s operator, grouped; of the draft, lens are the nodes, logits have all rows."""

    target: Target
    draft: Draft
    tree: Tree
    coins: Coins
    rule: Rule
    report: Report

    @classmethod
    def unpack(cls, flat: Sequence[Any]) -> TreeArguments:
        """From what the operator was given."""
        unpacker = Unpacker(flat)
        target = unpacker.target()
        draft = unpacker.draft(target)
        rest = [unpacker.group(kind) for kind in (Tree, Coins, Rule, Report)]
        return cls(unpacker.weighted(target), draft, *rest)


# How many fields of a group are tensors, integers and numbers; those behind them are not in the lists.
LISTS: dict[type, tuple[int, int, int]] = {
    SamplingArguments: (4, 2, 3),
    ProcessingArguments: (9, 1, 3),
    Target: (3, 2, 1),
    Draft: (5, 3, 0),
    Drafts: (1, 0, 0),
    Coins: (3, 0, 0),
    Tree: (1, 2, 0),
    Rule: (0, 1, 2),
    Report: (0, 2, 0),
    Stream: (0, 2, 0),
}
SLICES = {
    kind: (slice(first), slice(first, first + second), slice(first + second, first + second + third))
    for kind, (first, second, third) in LISTS.items()
}
Flat = tuple[list[Tensor], list[Tensor], list[int], list[float]]


PROCESSING, DRAFT_SAMPLING = 1, 2  # bits of the groups that may be left out


def pack(target: Target, *groups: Any, table: tuple[float, ...] = ()) -> Flat:
    """The arguments of an operator: the target's, then those of other groups, and a rule's table."""
    optional: list[Tensor | None] = []
    integers, numbers = [0, 0], []
    packed: list[Any] = [target, target.sampling]
    left_in = 0
    if target.processing is not NO_PROCESSING:
        packed.append(target.processing)
        left_in |= PROCESSING
    for group in groups:
        packed.append(group)
        if type(group) is Draft and group.sampling is not target.sampling:
            packed.append(group.sampling)
            left_in |= DRAFT_SAMPLING
    for group in packed:
        tensor_fields, integer_fields, number_fields = SLICES[type(group)]
        optional += group[tensor_fields]
        integers += group[integer_fields]
        numbers += group[number_fields]
    tensors, present, bit = [], 0, 1
    meta = target.member_logits[0].is_meta
    for tensor in optional:
        if tensor is not None:
            if tensor.is_meta is not meta:  # torch would run the fake kernel, and nothing would be computed
                raise ValueError("device")
            tensors.append(tensor)
            present |= bit
        bit += bit
    integers[0], integers[1] = present, left_in
    return target.member_logits, tensors, integers, [*numbers, *target.weights, *table]


class Unpacker:
    """Takes groups from an operator's arguments, in the order in which they were packed."""

    def __init__(self, flat: Sequence[Any]) -> None:
        self.member_logits, self._tensors, self._integers, self._numbers = (list(part) for part in flat[:4])
        self._present, self._groups = self._integers.pop(0), self._integers.pop(0)

    def _tensor(self) -> Tensor | None:
        present = self._present & 1
        self._present >>= 1
        return self._tensors.pop(0) if present else None

    def group(self, kind: Any, *rest: Any) -> Any:
        """The next group, an instance of kind; rest: its fields that are not in the lists."""
        first, second, third = LISTS[kind]
        own = [self._tensor() for _ in range(first)]
        own += [self._integers.pop(0) for _ in range(second)]
        return kind(*own, *[self._numbers.pop(0) for _ in range(third)], *rest)

    def target(self) -> Target:
        """The target, but for its weights, which follow all groups."""
        target = self.group(Target, self.member_logits, (), None)
        target = target._replace(sampling=self.group(SamplingArguments))
        processed = self._groups & PROCESSING
        return target._replace(processing=self.group(ProcessingArguments) if processed else NO_PROCESSING)

    def draft(self, target: Target) -> Draft:
        """The draft; the target has been unpacked."""
        draft = self.group(Draft, target.sampling)
        return draft._replace(sampling=self.group(SamplingArguments)) if self._groups & DRAFT_SAMPLING else draft

    def weighted(self, target: Target) -> Target:
        """The target with its weights; after all groups."""
        return target._replace(weights=tuple(self._numbers.pop(0) for _ in self.member_logits))

    def rest(self) -> tuple[float, ...]:
        """The numbers behind the weights."""
        return tuple(self._numbers)


def member_list(member_logits: Tensor | Sequence[Tensor]) -> list[Tensor]:
    return [member_logits] if isinstance(member_logits, Tensor) else list(member_logits)


def number_and_rows(value: float | Tensor) -> tuple[float, Tensor | None]:
    """A number for all requests and a tensor with one for each, of which one counts."""
    return (0.0, value) if isinstance(value, Tensor) else (float(value), None)


def drafter_arguments(drafter: int | Tensor | None) -> tuple[int, Tensor | None]:
    """Who drafted: a member or NO_DRAFTER, and perhaps one a token."""
    if drafter is None or isinstance(drafter, Tensor):
        return NO_DRAFTER, drafter
    if drafter < 0:
        raise ValueError("drafter")  # -1 is what operators take for none
    return drafter, None


def sampling_arguments(sampling: Sampling) -> SamplingArguments:
    """Flatten sampling parameters."""
    temperature, temperatures = number_and_rows(sampling.temperature)
    if not sampling.filters:
        return SamplingArguments(temperatures, None, None, None, 0, 0, temperature, 1.0, 0.0)
    top_k = 0 if sampling.top_k is None else sampling.top_k
    top_k, top_ks = (0, top_k) if isinstance(top_k, Tensor) else (max(top_k, 0), None)
    top_p, top_ps = number_and_rows(1.0 if sampling.top_p is None else sampling.top_p)
    min_p, min_ps = number_and_rows(0.0 if sampling.min_p is None else sampling.min_p)
    first = int(sampling.filter_order == "vllm")
    return SamplingArguments(temperatures, top_ks, top_ps, min_ps, top_k, first, temperature, top_p, min_p)


def never_greedy(sampling: SamplingArguments) -> SamplingArguments:
    """The same, with 1 for a temperature of 0: for rules that draw nothing."""
    temperatures = sampling.temperatures
    if temperatures is not None:
        temperatures = torch.where(temperatures == 0, 1.0, temperatures)
    return sampling._replace(temperatures=temperatures, temperature=sampling.temperature or 1.0)


def processing_arguments(processing: Processing | None, batch: int) -> ProcessingArguments:
    """Flatten logit processing."""
    if processing is None:
        return NO_PROCESSING
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
    return ProcessingArguments(*tensors, *tables, min_tokens, repetition, frequency, presence)


def target_arguments(
    members: list[Tensor],
    ensemble: Ensemble | None,
    sampling: Sampling,
    processing: Processing | None = None,
    allowed: Tensor | None = None,
    row_offsets: Tensor | None = None,
) -> Target:
    """Flatten what makes the target distribution."""
    edits = NO_PROCESSING
    if processing is not None:
        batch = members[0].shape[0] if row_offsets is None else row_offsets.shape[0] - 1
        edits = processing_arguments(processing, batch)
    if ensemble is None:
        own = (None, row_offsets, allowed, 0, 0, 0.0)
        return Target(*own, members, (1.0,), sampling_arguments(sampling), edits)
    weight_rows = None
    if isinstance(ensemble.weights, Tensor):
        weights: tuple[float, ...] = (1.0,) * len(members)
        weight_rows = ensemble.weights.to(torch.float32).contiguous()
    else:
        weights = ensemble.weights
    filter_members = int(isinstance(ensemble, Mixture) and ensemble.filter == "members")
    shape = (int(ensemble.kind), filter_members, ensemble.plausibility or 0.0)
    return Target(weight_rows, row_offsets, allowed, *shape, members, weights, sampling_arguments(sampling), edits)


NOTHING_REPORTED = Report(NO_LOGPROBS, 0)
REPORTS: dict[bool | str, int] = {False: 0, True: TARGET_LOGPROBS, "target": TARGET_LOGPROBS, "raw": RAW_LOGPROBS}


def report_arguments(logprobs: bool | str, top_logprobs: int) -> Report:
    """Flatten what is asked for of log-probabilities."""
    if type(top_logprobs) is not int or not isinstance(logprobs, bool | str) or logprobs not in REPORTS:
        raise ValueError("logprobs")  # `check_report` says what was expected
    if logprobs is False and top_logprobs == 0:
        return NOTHING_REPORTED
    return Report(REPORTS[logprobs] or TARGET_LOGPROBS, top_logprobs)


def ready_for_kernels(group: Any) -> Any:
    """The group with its tensors contiguous, in float32, float64 for coins, or int64: as Triton kernels read them."""
    if isinstance(group, Target):
        own = {"sampling": ready_for_kernels(group.sampling), "processing": ready_for_kernels(group.processing)}
        return group._replace(**own, row_offsets=_in_dtype(group.row_offsets, torch.int64))
    if isinstance(group, Draft):
        own = {name: _in_dtype(getattr(group, name), torch.int64) for name in ("drafters", "slots", "lens")}
        return group._replace(**own, sampling=ready_for_kernels(group.sampling))
    if isinstance(group, Coins):
        uniforms, seeds, positions = group
        own = {"uniforms": _in_dtype(uniforms, torch.float64)}
        return Coins(**own, seeds=_in_dtype(seeds, torch.int64), positions=_in_dtype(positions, torch.int64))
    tensors = {name: value for name, value in zip(group._fields, group) if isinstance(value, Tensor)}
    wanted = {name: torch.float32 if value.is_floating_point() else torch.int64 for name, value in tensors.items()}
    return group._replace(**{name: _in_dtype(value, wanted[name]) for name, value in tensors.items()})


def _in_dtype(value: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    return None if value is None else value.to(dtype).contiguous()
