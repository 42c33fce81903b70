"""The arguments of operators, grouped: what the reference and Triton's launchers take them apart into.

The operators are defined in C++ (csrc/operators), once for all devices, with at most twenty arguments by name. Of those
that several share, all optional:

ensemble: its kind (`EnsembleKind`), whether members are filtered, plausibility, and, unless they are a tensor, weights.
sampling, draft_sampling: temperature, top-k (0: off), top-p, min-p, whether min-p comes first.
rows: tensors with a number for each request, None or one for each of: temperature, top-k, top-p, min-p, weights
    [batch, members], and the draft's own temperature, top-k, top-p and min-p.
processing: repetition, frequency and presence penalty, min_tokens. processing_rows: tensors for the same four, then
    bias_tokens, bias_values, end_tokens, prompt_tokens and output_tokens.
draft_logits: [logits], or [logits, slots]. parents: [parents], or [parents, num_nodes]. random: [uniforms], or [seeds,
    positions].
rule: its kind (`RuleKind`), then its settings. logprobs: which are told (TARGET_LOGPROBS, ...), and of how many tokens
    besides the emitted one.

`packing` makes them from public arguments.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from specens_kernels.ensembles import EnsembleKind
from specens_kernels.rules import RuleKind

NO_DRAFTER = -1  # no member drafted: one-hot
AS_TOKENS = -1  # of max_draft_len: the length of dense tokens
WEIGHT_ROW, DRAFT_ROWS = 4, 5  # places in `rows`
NO_LOGPROBS, TARGET_LOGPROBS, RAW_LOGPROBS = 0, 1, 2
DRAFT_STREAM = 2  # that `sample` draws from unless told otherwise
PLAIN_SAMPLING = (1.0, 0.0, 1.0, 0.0, 0.0)
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
    draft_len: int  # the most drafts of a request
    processed: int  # whether they were drawn from processed logits
    sampling: SamplingArguments


class RandomSource(NamedTuple):
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
    random_numbers: RandomSource
    rule: Rule
    report: Report

    @classmethod
    def of(cls, member_logits: list[Tensor], draft_tokens: Tensor, **options: Any) -> ChainArguments:
        """From what the operator was given."""
        target = target_of(member_logits, options)
        draft = draft_of(draft_tokens, target, options)
        return cls(target, draft, uniforms_of(options), rule_of(options), report_of(options))


class TreeArguments(NamedTuple):
    """The arguments of `verify_tree`'s operator, grouped; of the draft, lens are the nodes, logits have all rows."""

    target: Target
    draft: Draft
    tree: Tree
    random_numbers: RandomSource
    rule: Rule
    report: Report

    @classmethod
    def of(
        cls, member_logits: list[Tensor], draft_tokens: Tensor, parents: list[Tensor], max_levels: int, **options: Any
    ) -> TreeArguments:
        """From what the operator was given."""
        target = target_of(member_logits, options)
        draft = draft_of(draft_tokens, target, options | {"draft_lens": parents[1] if len(parents) == 2 else None})
        tree = Tree(parents[0], max_levels, int(options.get("without_replacement", False)))
        return cls(target, draft, tree, uniforms_of(options), rule_of(options), report_of(options))


def target_of(member_logits: list[Tensor], options: dict[str, Any]) -> Target:
    """The target, from an operator's options."""
    kind, filter_members, plausibility, *weights = options.get("ensemble") or (EnsembleKind.SINGLE, 0, 0.0, 1.0)
    rows = _rows(options)
    weight_rows = rows[WEIGHT_ROW]
    return Target(
        weight_rows,
        options.get("row_offsets"),
        options.get("allowed"),
        int(kind),
        int(filter_members),
        plausibility,
        member_logits,
        tuple(weights) if weight_rows is None else (1.0,) * len(member_logits),
        _sampling_of(options.get("sampling"), rows[:WEIGHT_ROW]),
        _processing_of(options),
    )


def draft_of(tokens: Tensor, target: Target, options: dict[str, Any]) -> Draft:
    """The draft, from an operator's options."""
    logits, slots = (*(options.get("draft_logits") or ()), None, None)[:2]
    own_sampling, draft_len = options.get("draft_sampling"), options.get("max_draft_len", AS_TOKENS)
    return Draft(
        tokens,
        options.get("drafters"),
        logits,
        slots,
        options.get("draft_lens"),
        options.get("drafter", NO_DRAFTER),
        tokens.shape[1] if draft_len == AS_TOKENS else draft_len,
        int(options.get("process_drafts", True)),
        target.sampling if own_sampling is None else _sampling_of(own_sampling, _rows(options)[DRAFT_ROWS:]),
    )


def uniforms_of(options: dict[str, Any]) -> RandomSource:
    """The random numbers, from an operator's options."""
    numbers: Sequence[Tensor] = options.get("random") or ()
    if len(numbers) == 2:
        return RandomSource(None, numbers[0].long(), numbers[1].long())
    return RandomSource(numbers[0] if numbers else None, None, None)


def rule_of(options: dict[str, Any]) -> Rule:
    """The rule, from an operator's options."""
    kind, *settings = options.get("rule") or (RuleKind.TOKEN,)
    if RuleKind(int(kind)).has_table:
        return Rule(int(kind), 0.0, 0.0, tuple(settings))
    return Rule(int(kind), *(*settings, 0.0, 0.0)[:2])


def report_of(options: dict[str, Any]) -> Report:
    """What is reported, from an operator's options."""
    return Report(*options.get("logprobs") or (NO_LOGPROBS, 0))


def stream_of(options: dict[str, Any]) -> Stream:
    """Which random number is drawn, from an operator's options."""
    return Stream(options.get("step", 0), options.get("stream", DRAFT_STREAM), options.get("gumbel_count", 0))


def _rows(options: dict[str, Any]) -> list[Tensor | None]:
    rows = options.get("rows") or []
    return [*rows, *[None] * (DRAFT_ROWS + 4 - len(rows))]


def _sampling_of(numbers: Sequence[float] | None, rows: Sequence[Tensor | None]) -> SamplingArguments:
    temperature, top_k, top_p, min_p, first = numbers or PLAIN_SAMPLING
    temperatures, top_ks, top_ps, min_ps = rows
    return SamplingArguments(temperatures, top_ks, top_ps, min_ps, int(top_k), int(first), temperature, top_p, min_p)


def _processing_of(options: dict[str, Any]) -> ProcessingArguments:
    if options.get("processing") is None:
        return NO_PROCESSING
    repetition, frequency, presence, min_tokens = options["processing"]
    rows = options.get("processing_rows") or (None,) * 9
    repetitions, frequencies, presences, min_tokens_rows, bias_tokens, bias_values, end, prompt, output = rows
    return ProcessingArguments(
        bias_tokens,
        bias_values,
        repetitions,
        frequencies,
        presences,
        min_tokens_rows,
        end,
        prompt,
        output,
        int(min_tokens),
        repetition,
        frequency,
        presence,
    )


def ready_for_kernels(group: Any) -> Any:
    """The group with its tensors contiguous, in float32, int64, or float64 for uniforms: as kernels read them."""
    if isinstance(group, Target):
        own = {"sampling": ready_for_kernels(group.sampling), "processing": ready_for_kernels(group.processing)}
        return group._replace(**own, row_offsets=_in_dtype(group.row_offsets, torch.int64))
    if isinstance(group, Draft):
        own = {name: _in_dtype(getattr(group, name), torch.int64) for name in ("drafters", "slots", "lens")}
        return group._replace(**own, sampling=ready_for_kernels(group.sampling))
    if isinstance(group, RandomSource):
        uniforms, seeds, positions = group
        own = {"uniforms": _in_dtype(uniforms, torch.float64)}
        return RandomSource(**own, seeds=_in_dtype(seeds, torch.int64), positions=_in_dtype(positions, torch.int64))
    tensors = {name: value for name, value in zip(group._fields, group) if isinstance(value, Tensor)}
    wanted = {name: torch.float32 if value.is_floating_point() else torch.int64 for name, value in tensors.items()}
    return group._replace(**{name: _in_dtype(value, wanted[name]) for name, value in tensors.items()})


def _in_dtype(value: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    if value is None:
        return None
    if value.dtype == torch.float64 and dtype == torch.float32:
        size = value.abs().clamp(SMALLEST_NUMBER, LARGEST_NUMBER) * value.sign()
        value = torch.where(value.isfinite() & (value != 0), size, value)
    return value.to(dtype).contiguous()
