"""The launches of tree_mask for compilation without a GPU."""

from __future__ import annotations

import torch
import triton.language as tl
from torch import Tensor

from specens_kernels.ops.tree_mask.reference import Layout
from specens_kernels.ops.tree_mask.triton_kernel import LARGEST_WINDOW, MaskCall, mask_launch
from specens_kernels.parts.launches import Launch
from specens_kernels.parts.sampling import any_size


def variants() -> list[Launch]:
    """What is launched."""
    return [
        mask_launch(_example_call(layout, dtype))
        for layout, dtype in (
            (Layout.FULL, torch.int8),
            (Layout.PACKED, torch.int8),
            (Layout.ADDITIVE, torch.bfloat16),
        )
    ]


def _example_call(layout: Layout, dtype: torch.dtype) -> MaskCall:
    batch, nodes, prefix = 8, 60, 4096

    def tensor(*shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    width = (nodes + 7) // 8 if layout == Layout.PACKED else prefix + nodes
    return MaskCall(
        parents=tensor(batch, nodes),
        prefix_lens=tensor(batch),
        num_nodes=tensor(batch),
        nodes=nodes,
        max_prefix=any_size(0 if layout == Layout.PACKED else prefix),
        window=LARGEST_WINDOW,
        positions=tensor(batch, nodes),
        mask=tensor(batch * nodes, width, dtype=dtype),
        width=width,
        PACKED=tl.constexpr(layout == Layout.PACKED),
        ADDITIVE=tl.constexpr(layout == Layout.ADDITIVE),
    )
