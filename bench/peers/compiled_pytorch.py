"""The operations of `plain_pytorch` under torch.compile."""

from __future__ import annotations

from typing import Any

import torch
import torch._dynamo
import torch._inductor.config

from bench.case import Rival
from bench.peers import plain_pytorch

torch._dynamo.config.recompile_limit = 64  # one a shape: beyond it the rest would run uncompiled
torch._inductor.config.compile_threads = 1  # no pool of processes beside the timings


def compiled(function: Any) -> Any:
    return torch.compile(function, fullgraph=True, dynamic=False)


def verify_chain(inputs: Any) -> Rival | None:
    return plain_pytorch.verify_chain(inputs, compiled)


def sample(inputs: Any) -> Rival:
    return plain_pytorch.sample(inputs, compiled(plain_pytorch.draw_from_softmax))


def target_logprobs(inputs: Any) -> Rival:
    return plain_pytorch.target_logprobs(inputs, compiled(plain_pytorch.mixture_logprobs))
