"""Random caches with draft trees after their prefixes, and how near two results must be."""

from __future__ import annotations

import random

import torch
from ops.test_tree_mask import random_trees

from specens_kernels import tree_attention

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
WINDOWS = (None, 1, 2, 4, 1000)
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 2**-7, torch.float16: 2**-10}  # of the largest value
SLOTS_BEHIND = 3


def random_problem(seed, batch=3, nodes=9, heads=4, kv_heads=2, dim=8, dtype=torch.float32, faults=0.0):
    """Trees after prefixes of 0 to 8 tokens, and caches whose last slots nobody wrote."""
    parents, prefix_lens = random_trees(batch, nodes, seed, faults)
    slots = max(prefix_lens.tolist(), default=0) + nodes + SLOTS_BEHIND
    generator = torch.Generator().manual_seed(seed)
    query = torch.randn(batch, heads, nodes, dim, generator=generator)
    # As engines lay caches out, heads after slots; the scores differ much between keys.
    key, value = (torch.randn(batch, slots, kv_heads, dim, generator=generator).transpose(1, 2) for _ in range(2))
    return {
        "query": (2 * query).to(dtype),
        "key": key.to(dtype),
        "value": value.to(dtype),
        "parents": parents,
        "prefix_lens": prefix_lens,
    }


def random_settings(seed):
    rng = random.Random(seed)
    batch, nodes, kv_heads = rng.choice([1, 2, 5]), rng.choice([1, 7, 8, 33]), rng.choice([1, 2, 3])
    sizes = {
        "batch": batch,
        "nodes": nodes,
        "kv_heads": kv_heads,
        "heads": kv_heads * rng.choice([1, 3, 4]),
        "dim": rng.choice([8, 24, 64]),
    }
    num_nodes = torch.tensor([rng.randint(0, nodes + 1) for _ in range(batch)])
    starts = torch.tensor([rng.randint(0, 8) for _ in range(batch)])
    options = {
        "num_nodes": rng.choice([None, num_nodes]),
        "prefix_starts": rng.choice([None, starts]),
        "window": rng.choice(WINDOWS),
        "scale": rng.choice([None, 0.25]),
    }
    return sizes, options


def random_call(seed, dtype):
    """A problem, the options of the call, and its reference."""
    sizes, options = random_settings(seed)
    problem = random_problem(seed, dtype=dtype, faults=0.05, **sizes)
    if options["prefix_starts"] is not None:
        options["prefix_starts"] = torch.minimum(options["prefix_starts"], problem["prefix_lens"])
    return problem, options, tree_attention(**problem, **options, backend="reference")


def operands(problem, *, num_nodes=None, prefix_starts=None, window=None, scale=None):
    """What an implementation takes, in its order."""
    scale = scale or problem["query"].shape[3] ** -0.5
    return *problem.values(), num_nodes, prefix_starts, window or 0, scale


def assert_near(result, expected):
    assert result.dtype == expected.dtype
    assert result.shape == expected.shape
    assert result.is_contiguous()
    error = (result.double() - expected.double()).abs().max()
    assert error <= TOLERANCE[result.dtype] * expected.double().abs().max().clamp(min=1), float(error)
