"""The flat form in which operators take their arguments.

An operator takes three lists: tensors, integers, numbers. One operator argument costs a call a fifth of a microsecond,
and there are more than fifty. A group below names its fields in the order of the lists: first tensors, then integers,
then numbers; the C++ reads them with `ArgumentReader` in the same order. A group that is as by default is left out:
integers[0] has a bit for each group, whether it is there, and integers[1] a bit for each tensor of those that are. The
members' logits are the last tensors; the weights of an ensemble follow the numbers of all groups, then a rule's table.
Where there are no numbers there is no such list: each costs a call a third of a microsecond.

`packing` makes the lists from public arguments, and `Unpacker` makes groups of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from specens_kernels.types import EnsembleKind

SCHEMA = "Tensor[] tensors, int[] integers, float[]? numbers"
NO_DRAFTER = -1  # no member drafted: one-hot
AS_TOKENS = -1  # of draft_len: that of dense tokens
NO_LOGPROBS, TARGET_LOGPROBS, RAW_LOGPROBS = 0, 1, 2
SMALLEST_NUMBER = 1e-37  # of kernels with float32 parameters: a number below it could become 0, a greedy temperature
LARGEST_NUMBER = 3.4028234663852886e38  # of float32


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
    draft_len: int  # the most drafts of a request; in the lists AS_TOKENS, unless they are packed
    processed: int  # whether they were drawn from processed logits
    sampling: SamplingArguments


class Drafts(NamedTuple):
    """The tokens before the rows of a target."""

    drafts: Tensor | None  # int64 or int32 [batch, n]


class Coins(NamedTuple):
    """Where random numbers come from: given, or seeds and positions, or none (all greedy)."""

    uniforms: Tensor | None  # float64 or float32
    seeds: Tensor | None  # int64 [batch]; operators take int32 too
    positions: Tensor | None  # likewise


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
    best: int  # so many tokens of the best Gumbel scores; 0: one token by inverse CDF


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
        coins, rule, report = unpacker.coins(), unpacker.group(Rule), unpacker.group(Report)
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
        tree, coins, rule, report = unpacker.group(Tree), unpacker.coins(), unpacker.group(Rule), unpacker.group(Report)
        return cls(unpacker.weighted(target), draft, tree, coins, rule, report)


# The tensors of a group, and the defaults of its integers and numbers; fields behind them are not in the lists.
LISTS: dict[type, tuple[int, tuple[int, ...], tuple[float, ...]]] = {
    SamplingArguments: (4, (0, 0), (1.0, 1.0, 0.0)),
    ProcessingArguments: (9, (0,), (1.0, 0.0, 0.0)),
    Target: (3, (int(EnsembleKind.SINGLE), 0), (0.0,)),
    Draft: (5, (NO_DRAFTER, AS_TOKENS, 1), ()),
    Drafts: (1, (), ()),
    Coins: (3, (), ()),
    Tree: (1, (0, 0), ()),
    Rule: (0, (0,), (0.0, 0.0)),
    Report: (0, (NO_LOGPROBS, 0), ()),
    Stream: (0, (0, 0, 0), ()),
}
Flat = tuple[list[Tensor], list[int], list[float] | None]


class Unpacker:
    """Takes groups from an operator's arguments, in the order in which they were packed."""

    def __init__(self, flat: Sequence[Any]) -> None:
        self._tensors, self._integers, self._numbers = (list(part or ()) for part in flat[:3])
        self._groups, self._present = self._integers.pop(0), self._integers.pop(0)
        self.member_logits = self._tensors[self._present.bit_count() :]

    def _group_given(self) -> bool:
        given = bool(self._groups & 1)
        self._groups >>= 1
        return given

    def _tensor(self) -> Tensor | None:
        present = self._present & 1
        self._present >>= 1
        return self._tensors.pop(0) if present else None

    def group(self, kind: Any, *rest: Any) -> Any:
        """The next group, an instance of kind; rest: its fields that are not in the lists."""
        tensors, integers, numbers = LISTS[kind]
        if not self._group_given():
            return kind(*(None,) * tensors, *integers, *numbers, *rest)
        own: list[Any] = [self._tensor() for _ in range(tensors)]
        own += [self._integers.pop(0) for _ in integers]
        return kind(*own, *[self._numbers.pop(0) for _ in numbers], *rest)

    def target(self) -> Target:
        """The target, but for its weights, which follow all groups."""
        target = self.group(Target, self.member_logits, (), None)
        return target._replace(sampling=self.group(SamplingArguments), processing=self.group(ProcessingArguments))

    def draft(self, target: Target) -> Draft:
        """The draft; the target has been unpacked."""
        draft = self.group(Draft, target.sampling)
        if draft.draft_len == AS_TOKENS:
            draft = draft._replace(draft_len=draft.tokens.shape[1])
        own_sampling = self._groups & 1
        sampling = self.group(SamplingArguments)
        return draft._replace(sampling=sampling) if own_sampling else draft

    def coins(self) -> Coins:
        """The random numbers."""
        uniforms, seeds, positions = self.group(Coins)
        return Coins(uniforms, _in_int64(seeds), _in_int64(positions))

    def weighted(self, target: Target) -> Target:
        """The target with its weights; after all groups."""
        if target.ensemble == EnsembleKind.SINGLE or target.weight_rows is not None:
            return target._replace(weights=(1.0,) * len(target.member_logits))
        return target._replace(weights=tuple(self._numbers.pop(0) for _ in target.member_logits))

    def rest(self) -> tuple[float, ...]:
        """The numbers behind the weights."""
        return tuple(self._numbers)


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


def _in_int64(value: Tensor | None) -> Tensor | None:
    return None if value is None else value.long()


def _in_dtype(value: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    if value is None:
        return None
    if value.dtype == torch.float64 and dtype == torch.float32:
        size = value.abs().clamp(SMALLEST_NUMBER, LARGEST_NUMBER) * value.sign()
        value = torch.where(value.isfinite() & (value != 0), size, value)
    return value.to(dtype).contiguous()
