"""uniforms: uniforms from seeds and positions."""

from __future__ import annotations

from collections.abc import Iterator

import torch

import specens_kernels
from bench import bounds, peers
from bench.case import Case, Options, chosen_shapes
from bench.check import check_equal

SHAPES = ((1,), (64,), (4096,), (1_000_000,))  # batch; the first is the fixed cost
BYTES = 8 + 8 + 8  # of a seed, a position and a uniform


def cases(options: Options) -> Iterator[Case]:
    """One uniform a request."""
    for (batch,) in chosen_shapes(options, SHAPES):
        seeds = torch.randint(2**62, (batch,), generator=torch.Generator().manual_seed(0))
        positions = torch.arange(batch)
        yield _case(options, seeds, positions)


def _case(options: Options, seeds: torch.Tensor, positions: torch.Tensor) -> Case:
    def random_numbers(backend: str) -> torch.Tensor:
        return specens_kernels.uniforms(seeds, positions, backend=backend)

    return Case(
        shape={"batch": seeds.shape[0]},
        setting={},
        dtype="-",
        run=lambda: random_numbers(options.backend),
        result=lambda values: values,
        check=lambda values: check_equal(values, random_numbers("reference")),
        bounds=bounds.adding(seeds, positions),
        bytes_needed=seeds.shape[0] * BYTES,
        rivals=peers.rivals("uniforms", options, seeds.shape[0]),
    )
