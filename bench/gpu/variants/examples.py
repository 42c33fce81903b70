"""Arguments without data whose kernels are compiled ahead of time: every branch that is decided when compiling."""

from __future__ import annotations

import torch
from torch import Tensor

from specens_kernels.arguments import Draft, ProcessingArguments, Rule, SamplingArguments, Target
from specens_kernels.decision_tree import DecisionTree
from specens_kernels.ensembles import EnsembleKind
from specens_kernels.parts.draft import NO_DRAFTER, DraftView, draft_view
from specens_kernels.parts.target import TargetView, target_view
from specens_kernels.parts.uniforms import RandomView
from specens_kernels.rules import RuleKind

BATCH, STEPS, VOCAB = 8, 6, 151936


def _tensor(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def example_sampling(per_request: bool, filters: bool) -> SamplingArguments:
    """per_request: parameters are tensors. filters: all three are on."""
    temperatures = _tensor(BATCH) if per_request else None
    if not filters:
        return SamplingArguments(temperatures, None, None, None, 0, 0, 1.0, 1.0, 0.0)
    if per_request:
        ranks = _tensor(BATCH, dtype=torch.int64)
        return SamplingArguments(temperatures, ranks, _tensor(BATCH), _tensor(BATCH), 0, 1, 1.0, 1.0, 0.0)
    return SamplingArguments(None, None, None, None, 50, 0, 1.0, 0.9, 0.1)


def example_target(
    dtypes: list[torch.dtype], kind: EnsembleKind, per_request: bool, plausibility: float, filters: bool = False
) -> TargetView:
    """per_request: sampling parameters and weights are tensors."""
    members = [_tensor(BATCH, STEPS, VOCAB, dtype=dtype) for dtype in dtypes]
    weights = _tensor(BATCH, len(dtypes)) if per_request else None
    sampling = example_sampling(per_request, filters)
    own = (weights, None, None, kind, 0, plausibility)
    return target_view(Target(*own, members, (1.0,) * len(dtypes), sampling), STEPS)


def example_targets() -> list[TargetView]:
    """A lone member, mixtures, mixtures of logits and a contrast, in 1, 2 and 3 members."""
    wide, half, brain = torch.float32, torch.float16, torch.bfloat16
    return [
        example_target([brain], EnsembleKind.SINGLE, False, 0.0),
        example_target([wide], EnsembleKind.SINGLE, True, 0.0),
        example_target([wide, half], EnsembleKind.MIXTURE, True, 0.0),
        example_target([brain] * 3, EnsembleKind.MIXTURE, False, 0.0),
        example_target([brain] * 2, EnsembleKind.LOGIT_MIXTURE, False, 0.1),
        example_target([wide] * 3, EnsembleKind.LOGIT_MIXTURE, True, 0.0),
    ]


def filtered_targets() -> list[TargetView]:
    """A lone member, a mixture and a contrast whose filters are on."""
    wide, half, brain = torch.float32, torch.float16, torch.bfloat16
    return [
        example_target([brain], EnsembleKind.SINGLE, False, 0.0, filters=True),
        example_target([wide, half], EnsembleKind.MIXTURE, True, 0.0, filters=True),
        example_target([brain] * 2, EnsembleKind.LOGIT_MIXTURE, True, 0.1, filters=True),
    ]


def example_draft(target: TargetView, index: int) -> DraftView:
    """In turn from a member, from several members, from outside, and one-hot; filtered where the target is."""
    drafter = 0 if index % 4 == 0 else NO_DRAFTER.value
    drafters = _tensor(BATCH, STEPS - 1, dtype=torch.int64) if index % 4 == 1 else None
    logits = _tensor(BATCH, STEPS - 1, VOCAB, dtype=torch.bfloat16) if index % 4 == 2 else None
    tokens = _tensor(BATCH, STEPS - 1, dtype=torch.int64)
    lens = _tensor(BATCH, dtype=torch.int64) if index % 2 else None
    sampling = example_sampling(target.temperatures is not None, target.filters is not None)
    sampling = sampling._replace(temperatures=target.temperatures)
    draft = Draft(tokens, drafters, logits, None, lens, drafter, STEPS - 1, 1, sampling)
    return draft_view(target, draft)


def example_rule(kind: RuleKind, draft_len: int) -> Rule:
    """A rule with some settings."""
    tree = DecisionTree((0, -1, -1), (0.5, 0.0, 0.0), (1, -1, -1), (2, -1, -1), (True, True, False))
    tables = {RuleKind.SYNTHETIC: (0.8,) * draft_len, RuleKind.DECISION_TREE: tree.table}
    return Rule(int(kind), 0.09, 0.3, tables.get(kind, ()))


def edited_target() -> TargetView:
    """A lone member in packed rows whose logits are processed and masked in every way."""
    words, rows, numbers = _tensor(BATCH * STEPS, VOCAB // 32, dtype=torch.int32), _tensor(BATCH), _tensor(BATCH, 50)
    table = _tensor(BATCH, 50, dtype=torch.int64)
    tables = (table, numbers, rows, rows, rows, _tensor(BATCH, dtype=torch.int64), table, table, table)
    processing = ProcessingArguments(*tables, 0, 1.0, 0.0, 0.0)
    members = [_tensor(BATCH * STEPS, VOCAB, dtype=torch.bfloat16)]
    own = (None, _tensor(BATCH + 1, dtype=torch.int64), words, EnsembleKind.SINGLE, 0, 0.0)
    target = Target(*own, members, (1.0,), example_sampling(True, False), processing)
    return target_view(target, STEPS, _tensor(BATCH, STEPS - 1, dtype=torch.int64))


def edited_dense_target() -> TargetView:
    """The same, in dense rows."""
    target, rows = edited_target(), _tensor(BATCH, STEPS, VOCAB, dtype=torch.bfloat16)
    return target._replace(row_offsets=None, logits=(rows,), strides_batch=(rows.stride(0),))


def packed_draft(target: TargetView, outside: bool) -> DraftView:
    """Packed drafts of unedited logits: from slots, or drawn by a member a token."""
    drafts = BATCH * (STEPS - 1)
    tokens, drafters = _tensor(drafts, dtype=torch.int64), _tensor(drafts, dtype=torch.int64)
    logits, slots = _tensor(2 * BATCH, STEPS, VOCAB), _tensor(BATCH, dtype=torch.int64)
    source = (None, logits, slots) if outside else (drafters, None, None)
    return draft_view(
        target, Draft(tokens, *source, None, NO_DRAFTER.value, STEPS - 1, 0, example_sampling(True, False))
    )


def example_random(index: int) -> RandomView:
    """In turn from seeds and given."""
    if index % 2:
        return RandomView(_tensor(BATCH, STEPS, dtype=torch.float64), None, None)
    return RandomView(None, _tensor(BATCH, dtype=torch.int64), _tensor(BATCH, dtype=torch.int64))
