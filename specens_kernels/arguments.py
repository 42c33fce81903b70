"""The flat form in which operators take their arguments, and how the doors make it from public ones.

An operator takes the members' logits and three lists: tensors, integers, numbers. One operator argument costs a call a
fifth of a microsecond, and there are more than fifty. A group below names its fields in the order of the lists: first
tensors, then integers, then numbers; the C++ reads them with `ArgumentReader` in the same order. integers[0] has a bit
for each optional tensor: whether it is in the list.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from specens_kernels.checks import (
    PARAMETER_DTYPES,
    check_coins,
    check_tensor,
    fail,
)
from specens_kernels.types import INTEGER_DTYPES, Contrastive, Ensemble, LogitMixture, Mixture, Processing, Sampling

SCHEMA = "Tensor[] member_logits, Tensor[] tensors, int[] integers, float[] numbers"
NO_DRAFTER = -1  # no member drafted: one-hot
NO_LOGPROBS, TARGET_LOGPROBS, RAW_LOGPROBS = 0, 1, 2


class SamplingArguments(NamedTuple):
    """Sampling parameters; the tensors [batch] win where they are given."""

    temperatures: Tensor | None  # float32
    top_ks: Tensor | None  # int64, 0 and less is off
    top_ps: Tensor | None  # float32
    min_ps: Tensor | None  # float32
    top_k: int  # 0 is off
    min_p_first: int  # a truth value, like all flags
    temperature: float
    top_p: float  # 1 is off
    min_p: float  # 0 is off

    @property
    def greedy(self) -> bool:
        """Whether every request is known to be greedy."""
        return self.temperatures is None and self.temperature == 0

    @property
    def filters(self) -> bool:
        """Whether any request may be filtered."""
        tensors = self.top_ks is not None or self.top_ps is not None or self.min_ps is not None
        return tensors or self.top_k > 0 or self.top_p < 1 or self.min_p > 0


class ProcessingArguments(NamedTuple):
    """Logit processing; see `Processing`. The tensors [batch] win where they are given."""

    bias_tokens: Tensor | None  # int64 or int32 [batch, n], like the other tables
    bias_values: Tensor | None  # float32 [batch, n]
    repetition_penalties: Tensor | None  # float32 [batch]
    frequency_penalties: Tensor | None
    presence_penalties: Tensor | None
    min_tokens_rows: Tensor | None  # int64 [batch]
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
    row_offsets: Tensor | None  # int64 [batch + 1]: the logits are packed rows
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
    drafters: Tensor | None  # int64 like tokens
    logits: Tensor | None  # [batch, draft_len, vocab], [drafts, vocab], or [slots, draft_len, vocab]
    slots: Tensor | None  # int64 [batch]: the place of a request's logits
    lens: Tensor | None  # int64 [batch]
    drafter: int  # a member, or NO_DRAFTER
    draft_len: int  # the most drafts of a request
    processed: int  # whether they were drawn from processed logits
    sampling: SamplingArguments


class Drafts(NamedTuple):
    """The tokens before the rows of a target."""

    drafts: Tensor | None  # int64 or int32 [batch, n]


class Coins(NamedTuple):
    """Where random numbers come from: given, or seeds and positions, or none (all greedy)."""

    uniforms: Tensor | None  # float64
    seeds: Tensor | None  # int64 [batch]
    positions: Tensor | None  # int64 [batch]


class Tree(NamedTuple):
    """The draft trees of a batch, and how the children of a node were drawn."""

    parents: Tensor  # int64 [batch, nodes]
    levels: int  # the most nodes of a path; what lies deeper is padding
    without_replacement: int


class Rule(NamedTuple):
    """The acceptance rule of a chain or a tree."""

    kind: int
    threshold: float  # of the typical rule
    alpha: float
    rates: tuple[float, ...] = ()  # of synthetic acceptance


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
        draft = unpacker.group(Draft, None)
        draft = draft._replace(sampling=unpacker.group(SamplingArguments))
        coins, rule, report = unpacker.group(Coins), unpacker.group(Rule), unpacker.group(Report)
        target = unpacker.weighted(target)
        return cls(target, draft, coins, rule._replace(rates=unpacker.rest()), report)


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
        draft = unpacker.group(Draft, None)
        draft = draft._replace(sampling=unpacker.group(SamplingArguments))
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
Flat = tuple[list[Tensor], list[Tensor], list[int], list[float]]


def pack(target: Target, *groups: Any, rates: tuple[float, ...] = ()) -> Flat:
    """The arguments of an operator: the target's, then those of other groups."""
    optional: list[Tensor | None] = []
    integers, numbers = [0], []
    for group in (target, target.sampling, target.processing, *groups):
        first, second, third = LISTS[type(group)]
        optional += group[:first]
        integers += group[first : first + second]
        numbers += group[first + second : first + second + third]
    tensors, present, bit = [], 0, 1
    for tensor in optional:
        if tensor is not None:
            tensors.append(tensor)
            present |= bit
        bit += bit
    integers[0] = present
    return target.member_logits, tensors, integers, [*numbers, *target.weights, *rates]


class Unpacker:
    """Takes groups from an operator's arguments, in the order in which they were packed."""

    def __init__(self, flat: Sequence[Any]) -> None:
        self.member_logits, self._tensors, self._integers, self._numbers = (list(part) for part in flat[:4])
        self._present = self._integers.pop(0)

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
        sampling = self.group(SamplingArguments)
        return target._replace(sampling=sampling, processing=self.group(ProcessingArguments))

    def weighted(self, target: Target) -> Target:
        """The target with its weights; after all groups."""
        return target._replace(weights=tuple(self._numbers.pop(0) for _ in self.member_logits))

    def rest(self) -> tuple[float, ...]:
        """The numbers behind the weights."""
        return tuple(self._numbers)


def per_request(argument: str, value: float | Tensor, batch: int, device: torch.device) -> tuple[float, Tensor | None]:
    """A number for all requests, or one a request: (number, None) or (0.0, float32 tensor [batch])."""
    if not isinstance(value, Tensor):
        return float(value), None
    check_tensor(argument, value, (batch,), PARAMETER_DTYPES, device)
    return 0.0, value.to(torch.float32).contiguous()


def integer_per_request(
    argument: str, value: int | Tensor, batch: int, device: torch.device
) -> tuple[int, Tensor | None]:
    """As `per_request`: (integer, None) or (0, int64 tensor [batch])."""
    if not isinstance(value, Tensor):
        return value, None
    check_tensor(argument, value, (batch,), INTEGER_DTYPES, device)
    return 0, value.to(torch.int64).contiguous()


UNFILTERED = (None, None, None, None, 0, 0)


def sampling_arguments(argument: str, sampling: Sampling, batch: int, device: torch.device) -> SamplingArguments:
    """Check sampling parameters against the batch and flatten them."""
    if not isinstance(sampling, Sampling):
        fail(argument, "a Sampling", type(sampling).__name__)
    prefix = "" if argument == "sampling" else f"{argument}."
    if not sampling.filters and not isinstance(sampling.temperature, Tensor):
        return SamplingArguments(*UNFILTERED, float(sampling.temperature), 1.0, 0.0)
    temperature, temperatures = per_request(f"{prefix}temperature", sampling.temperature, batch, device)
    top_k, top_ks = integer_per_request(
        f"{prefix}top_k", 0 if sampling.top_k is None else sampling.top_k, batch, device
    )
    top_p, top_ps = per_request(f"{prefix}top_p", 1.0 if sampling.top_p is None else sampling.top_p, batch, device)
    min_p, min_ps = per_request(f"{prefix}min_p", 0.0 if sampling.min_p is None else sampling.min_p, batch, device)
    first = sampling.filter_order == "vllm"
    return SamplingArguments(temperatures, top_ks, top_ps, min_ps, max(top_k, 0), int(first), temperature, top_p, min_p)


def processing_arguments(processing: Processing | None, batch: int, device: torch.device) -> ProcessingArguments:
    """Check logit processing against the batch and flatten it."""
    if processing is None:
        return NO_PROCESSING
    if not isinstance(processing, Processing):
        fail("processing", "None or a Processing", type(processing).__name__)
    bias_tokens, bias_values = processing.logit_bias or (None, None)
    end_tokens = processing.end_tokens
    if end_tokens is not None and end_tokens.dim() == 1:
        end_tokens = end_tokens.expand(batch, -1)
    prompt_tokens, output_tokens = processing.prompt_tokens, processing.output_tokens
    tables = {"logit_bias[0]": bias_tokens, "end_tokens": end_tokens}
    tables |= {"prompt_tokens": prompt_tokens, "output_tokens": output_tokens}
    for name, table in tables.items():
        if table is not None:
            check_tensor(name, table, (batch, None), INTEGER_DTYPES, device)
    if bias_values is not None:
        check_tensor("logit_bias[1]", bias_values, (batch, None), PARAMETER_DTYPES, device)
        bias_values = bias_values.to(torch.float32).contiguous()
    repetition = per_request("repetition_penalty", processing.repetition_penalty, batch, device)
    frequency = per_request("frequency_penalty", processing.frequency_penalty, batch, device)
    presence = per_request("presence_penalty", processing.presence_penalty, batch, device)
    min_tokens, min_tokens_rows = integer_per_request("min_tokens", processing.min_tokens, batch, device)
    return ProcessingArguments(
        bias_tokens,
        bias_values,
        repetition[1],
        frequency[1],
        presence[1],
        min_tokens_rows,
        end_tokens,
        prompt_tokens,
        output_tokens,
        min_tokens,
        repetition[0],
        frequency[0],
        presence[0],
    )


def target_arguments(
    members: list[Tensor],
    ensemble: Ensemble | None,
    sampling: Sampling,
    processing: Processing | None = None,
    allowed: Tensor | None = None,
    row_offsets: Tensor | None = None,
) -> Target:
    """Check what makes the target distribution against the members, and flatten it. row_offsets have been checked."""
    first = members[0]
    device = first.device
    batch = first.shape[0] if row_offsets is None else row_offsets.shape[0] - 1
    if allowed is not None:
        check_tensor("allowed", allowed, (*first.shape[:-1], None), (torch.int32,), device)
        if allowed.shape[-1] < 1 or (allowed.stride(-1) != 1 and allowed.shape[-1] > 1):
            fail("allowed", "contiguous words, at least one", f"{list(allowed.shape)}, stride {allowed.stride(-1)}")
    rest = (
        members,
        sampling_arguments("sampling", sampling, batch, device),
        processing_arguments(processing, batch, device),
    )
    if ensemble is None:
        if len(members) > 1:
            fail("ensemble", f"an ensemble for {len(members)} members", None)
        return Target(None, row_offsets, allowed, 0, 0, 0.0, rest[0], (1.0,), *rest[1:])
    if not isinstance(ensemble, Mixture | LogitMixture | Contrastive):
        fail("ensemble", "None, a Mixture, a LogitMixture or a Contrastive", type(ensemble).__name__)
    weight_rows = None
    if isinstance(ensemble.weights, Tensor):
        check_tensor("weights", ensemble.weights, (batch, len(members)), PARAMETER_DTYPES, device)
        weights: tuple[float, ...] = (1.0,) * len(members)
        weight_rows = ensemble.weights.to(torch.float32).contiguous()
    else:
        weights = ensemble.weights
        if len(weights) != len(members):
            fail("weights", f"one weight for each of {len(members)} members", f"{len(weights)} weights")
    filter_members = isinstance(ensemble, Mixture) and ensemble.filter == "members"
    plausibility = ensemble.plausibility or 0.0
    kind = int(ensemble.kind)
    own = (weight_rows, row_offsets, allowed, kind, int(filter_members), plausibility)
    return Target(*own, members, weights, *rest[1:])


def coin_arguments(
    uniforms: Tensor | None,
    seeds: Tensor | None,
    positions: Tensor | None,
    shape: tuple[int, ...],
    device: torch.device,
    needed: bool,
) -> Coins:
    """Check that exactly one source of random numbers is given, or none where none is needed; shape: of uniforms."""
    check_coins(uniforms, seeds, positions, shape, device, needed)
    if uniforms is not None:
        return Coins(uniforms.to(torch.float64).contiguous(), None, None)
    if seeds is None or positions is None:
        return Coins(None, None, None)
    return Coins(None, seeds.contiguous(), positions.contiguous())


def report_arguments(logprobs: bool | str, top_logprobs: int) -> Report:
    """Check what is asked for of log-probabilities."""
    if logprobs not in (False, True, "target", "raw"):
        fail("logprobs", "False, True, 'target' or 'raw'", repr(logprobs))
    if isinstance(top_logprobs, bool) or not isinstance(top_logprobs, int) or top_logprobs < 0:
        fail("top_logprobs", "an integer >= 0", repr(top_logprobs))
    if logprobs == "raw":
        return Report(RAW_LOGPROBS, top_logprobs)
    return Report(TARGET_LOGPROBS if logprobs or top_logprobs else NO_LOGPROBS, top_logprobs)
