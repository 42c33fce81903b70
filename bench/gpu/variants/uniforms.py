"""The launches of uniforms for compilation without a GPU."""

from __future__ import annotations

import torch

from specens_kernels.ops.uniforms.triton_kernel import launches
from specens_kernels.parts.launches import Launch


def variants() -> list[Launch]:
    """What is launched."""
    uniforms = torch.empty(1000, dtype=torch.float64, device="meta")
    numbers = torch.empty(1000, dtype=torch.int64, device="meta")
    return list(launches(uniforms, numbers, numbers, numbers, 0))
