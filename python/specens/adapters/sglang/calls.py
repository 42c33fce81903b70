"""What SGLang's callers share: two spellings of arguments, and where they look for a verdict."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from specens.adapters.shim_arguments import fail
from specens_kernels import Verdict


def both_spellings(function: Callable[..., None]) -> Callable[..., None]:
    """Releases of SGLang call these arguments retrive_index and so on, others retrieve_index: take either."""

    @functools.wraps(function)
    def take(*args: Any, **kwargs: Any) -> None:
        for name in [name for name in kwargs if name.startswith("retrieve_")]:
            spelling = name.replace("retrieve_", "retrive_", 1)
            if spelling in kwargs:
                fail(name, f"either {spelling} or {name}", "both")
            kwargs[spelling] = kwargs.pop(name)
        function(*args, **kwargs)

    return take


def write_verdict(
    verdict: Verdict, retrive_index: Tensor, predicts: Tensor, accept_index: Tensor, accept_token_num: Tensor
) -> None:
    """Write a verdict where SGLang's callers look for it. retrive_index: int64 [batch, nodes], of a chain in order."""
    steps = torch.arange(verdict.tokens.shape[1], device=retrive_index.device).expand_as(verdict.tokens)
    rows = steps if verdict.path is None else torch.nn.functional.pad(verdict.path + 1, (1, 0))  # node 0 comes first
    indices = retrive_index.gather(1, rows)
    used = steps <= verdict.num_accepted[:, None]
    width = rows.shape[1]
    accept_index[:, :width] = torch.where(used, indices, accept_index[:, :width]).to(accept_index.dtype)
    accept_token_num.copy_(verdict.num_accepted)
    end = len(predicts)  # where what is not used is scattered to
    padded = torch.cat([predicts, predicts.new_zeros(1)])
    padded.scatter_(0, torch.where(used, indices, end).flatten(), verdict.tokens.to(predicts.dtype).flatten())
    predicts.copy_(padded[:end])
