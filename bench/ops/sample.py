"""sample: one token a request from raw logits."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache

import torch
from torch import Tensor

import specens_kernels
from bench import bounds, peers
from bench.case import DTYPES, Case, Options, chosen_shapes
from bench.check import check_tokens, shifted
from bench.inputs import bytes_of, random_logits

SHAPES = ((1, 16), (1, 32000), (1, 49152), (1, 262144), (8, 128256), (32, 151936))  # batch, vocab; first: fixed cost


def cases(options: Options) -> Iterator[Case]:
    """Temperature 1, no filter, one member."""
    for dtype in options.dtypes:
        for batch, vocab in chosen_shapes(options, SHAPES):
            logits = random_logits(batch, vocab, dtype=DTYPES[dtype])
            uniforms = torch.rand(batch, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
            yield _case(options, logits, uniforms, dtype)


def _case(options: Options, logits: Tensor, uniforms: Tensor, dtype: str) -> Case:
    @cache
    def reference(request: int, shift: float) -> Tensor:
        random_numbers = shifted(uniforms[request : request + 1], shift)
        return specens_kernels.sample(
            logits[request : request + 1], uniforms=random_numbers, backend="reference"
        ).tokens[0]

    batch, vocab = logits.shape
    return Case(
        shape={"batch": batch, "vocab": vocab},
        setting={"target": "single"},
        dtype=dtype,
        run=lambda: specens_kernels.sample(logits, uniforms=uniforms, backend=options.backend),
        result=lambda draw: draw.tokens,
        check=lambda tokens: check_tokens(tokens, reference),
        bounds=bounds.reading([logits]),
        bytes_needed=bytes_of(logits),
        rivals=peers.rivals("sample", options, (logits, uniforms)),
    )
