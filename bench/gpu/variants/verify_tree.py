"""The launches of verify_tree for compilation without a GPU."""

from __future__ import annotations

import torch
from torch import Tensor

from bench.gpu.variants.examples import (
    edited_dense_target,
    example_draft,
    example_random,
    example_targets,
    filtered_targets,
)
from specens_kernels.arguments import (
    Rule,
    Tree,
)
from specens_kernels.ops.verify_tree.triton_kernel import (
    drafters_apart,
    score_launches,
    tree_call,
    tree_found,
    weighing_launches,
)
from specens_kernels.parts.draft import DraftView, without_distribution
from specens_kernels.parts.launches import Launch
from specens_kernels.parts.target import TargetView, batch_of
from specens_kernels.rules import RuleKind


def variants() -> list[Launch]:
    """What is launched: what knows trees, by every rule, siblings drawn in every way."""
    lone, _, mixture, _, contrast, _ = example_targets()
    filtered, *_ = filtered_targets()
    found = [
        *_example_launches(lone, example_draft(lone, 2), RuleKind.TOKEN, True),
        *_example_launches(mixture, example_draft(mixture, 1), RuleKind.TRAVERSAL, True)[-1:],
        *_example_launches(contrast, example_draft(contrast, 3), RuleKind.TYPICAL, False)[-2:],
        *_example_launches(filtered, example_draft(filtered, 3), RuleKind.TOKEN, False)[-1:],
        *_example_launches(lone, example_draft(lone, 3), RuleKind.GUMBEL, False),
    ]
    edited = edited_dense_target()
    edited = edited._replace(edits=edited.edits._replace(parents=_example_parents(), num_drafts=lone.steps - 1))
    found += _example_launches(edited, example_draft(edited, 2), RuleKind.TOKEN, False)[1:]
    for target, index in ((lone, 2), (mixture, 1)):
        found += _example_launches(target, example_draft(target, index), RuleKind.K_SEQ, False)[-1:]
    return found


def _example_parents() -> Tensor:
    target = example_targets()[0]
    return torch.empty(batch_of(target), target.steps - 1, dtype=torch.int64, device="meta")


def _example_launches(target: TargetView, drawn: DraftView, kind: RuleKind, no_repeats: bool) -> list[Launch]:
    draft = drawn._replace(parents=_example_parents())
    if kind in (RuleKind.TYPICAL, RuleKind.GUMBEL):
        draft = without_distribution(draft)
    levels, batch = target.steps - 1, batch_of(target)
    apart, tree = drafters_apart(target, draft), Tree(draft.parents, levels, no_repeats)
    random = example_random(0 if kind == RuleKind.GUMBEL else 1)
    call = tree_call(target, draft, apart, tree, random, Rule(int(kind), 0.09, 0.3))
    sizes = [(batch, levels + 1), (batch,), (batch,), (batch,), (batch,), (batch, levels)]
    dtypes = [torch.int64] * 4 + [torch.int32, torch.int64]
    results = [torch.empty(size, dtype=dtype, device="meta") for size, dtype in zip(sizes, dtypes, strict=True)]
    found = tree_found(results, levels)
    return list(score_launches(found, call) if kind == RuleKind.GUMBEL else weighing_launches(found, call, apart, kind))
