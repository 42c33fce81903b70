"""target_logprobs: the dense log target distribution, read and written once."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache

import torch
from torch import Tensor

import specens_kernels
from bench import bounds, peers
from bench.case import DTYPES, Case, Options, chosen_shapes
from bench.check import check_logprobs
from bench.inputs import PAIR_WEIGHTS, bytes_of, random_logits

SHAPES = ((1, 16), (1, 32000), (1, 262144), (8, 128256), (32, 151936))  # batch, vocab; first: fixed cost


def cases(options: Options) -> Iterator[Case]:
    """Temperature 1, no filter; one member, and an even mixture of two."""
    for dtype in options.dtypes:
        for weights in ((1.0,), PAIR_WEIGHTS):
            for batch, vocab in chosen_shapes(options, SHAPES):
                members = [random_logits(batch, vocab, dtype=DTYPES[dtype], seed=seed) for seed in range(len(weights))]
                yield _case(options, members, weights, dtype)


def _case(options: Options, members: list[Tensor], weights: tuple[float, ...], dtype: str) -> Case:
    ensemble = specens_kernels.Mixture(weights) if len(weights) > 1 else None

    def logprobs(backend: str) -> Tensor:
        return specens_kernels.target_logprobs(members, ensemble=ensemble, backend=backend)

    reference = cache(lambda: logprobs("reference"))
    batch, vocab = members[0].shape
    output_bytes = batch * vocab * torch.float32.itemsize
    return Case(
        shape={"batch": batch, "vocab": vocab},
        setting={"target": "single" if ensemble is None else f"mixture of {len(weights)}"},
        dtype=dtype,
        run=lambda: logprobs(options.backend),
        result=lambda values: values,
        check=lambda values: check_logprobs(values, reference()),
        bounds=bounds.copying(members),
        bytes_needed=bytes_of(*members) + output_bytes,
        rivals=peers.rivals("target_logprobs", options, (members, weights)),
    )
