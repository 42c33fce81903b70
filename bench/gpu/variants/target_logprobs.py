"""The launches of target_logprobs for compilation without a GPU."""

from __future__ import annotations

import torch
from torch import Tensor

from bench.gpu.variants.examples import edited_target, example_draft, example_targets, filtered_targets
from specens_kernels.ops.target_logprobs.triton_edits import edit_launch
from specens_kernels.ops.target_logprobs.triton_kernel import filter_launch, launches
from specens_kernels.parts.launches import Launch
from specens_kernels.parts.statistics import (
    new_statistics,
)
from specens_kernels.parts.target import (
    TargetView,
)


def variants() -> list[Launch]:
    """What is launched.

    Of filtered targets the search, and what reads a whole mixture; of processing what sums its tables.
    """
    found = []
    for target in example_targets():
        found += launches(_meta_logprobs(target), target)
    lone, mixture, contrast = filtered_targets()
    for target, index in ((lone, 0), (mixture, 2), (contrast, 1)):
        draft = example_draft(target, index)
        found.append(filter_launch(new_statistics(target, draft), target, draft))
    *_, last = launches(_meta_logprobs(mixture), mixture)
    return [*found, last, edit_launch(edited_target().edits)]


def _meta_logprobs(target: TargetView) -> Tensor:
    return torch.empty(*target.logits[0].shape[:2], target.vocab, device="meta")
