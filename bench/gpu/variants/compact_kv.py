"""The launches of compact_kv for compilation without a GPU."""

from __future__ import annotations

import torch
from torch import Tensor

from specens_kernels.ops.compact_kv.triton_kernel import Moves, launches
from specens_kernels.parts.launches import Launch


def variants() -> list[Launch]:
    """What is launched: dense and paged caches."""

    def tensor(*shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    dense, paged = (tensor(*shape, dtype=torch.bfloat16) for shape in ((8, 8, 4096, 128), (2, 512, 16, 8, 128)))
    plain = Moves(tensor(8, 6), 6, tensor(8), None, None, None, 0, 8, 4096, tensor(8), tensor(8, dtype=torch.int32))
    in_blocks = plain._replace(num_kept=tensor(8), block_table=tensor(8, 64), columns=64, blocks=512, block_size=16)
    mapped = in_blocks._replace(block_table=None, slot_mapping=tensor(8, 64))
    in_slots = launches([paged], mapped, -4, -3)
    return [*launches([dense] * 4, plain, -4, -2), *launches([paged], in_blocks, -4, -3), *in_slots]
