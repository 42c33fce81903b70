"""tree_attention: attention of draft trees over the committed prefix and their own ancestors."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

import specens_kernels
from bench import peers
from bench.case import DTYPES, Case, Options, Rival, Run, chosen_shapes
from bench.check import check_near
from bench.inputs import bytes_of
from specens_kernels import TokenTree

# batch, nodes, prefix; heads, kv_heads, dim of SmolLM2-135M, Llama-3-8B and again that
SHAPES = ((1, 16, 256), (1, 64, 1024), (1, 64, 4096), (4, 16, 2048))
HEADS = {(1, 16, 256): (9, 3, 64), (1, 64, 1024): (9, 3, 64)}
LARGE_HEADS = (32, 8, 128)
SPARE_SLOTS = 2  # how many times the slots in use a preallocated cache has


@dataclass(frozen=True)
class AttentionInputs:
    """query: [batch, heads, nodes, dim]. key, value: [batch, kv_heads, slots, dim]. parents: int64 [batch, nodes].
    prefix_lens: int64 [batch]. tree: that of every request."""

    query: Tensor
    key: Tensor
    value: Tensor
    parents: Tensor
    prefix_lens: Tensor
    tree: TokenTree

    @property
    def tensors(self) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        return self.query, self.key, self.value, self.parents, self.prefix_lens


def cases(options: Options) -> Iterator[Case]:
    """Caches that end with the tree, and preallocated ones that are half full.

    There is no C++ in this operation: "cpp" is the backend that a call without one takes on the CPU, "sdpa".
    """
    for batch, nodes, prefix in chosen_shapes(options, SHAPES):
        for spare in (1, SPARE_SLOTS):
            for dtype in options.dtypes:
                yield _case(options, _inputs(batch, nodes, prefix, spare, DTYPES[dtype]), dtype)


def _inputs(batch: int, nodes: int, prefix: int, spare: int, dtype: torch.dtype) -> AttentionInputs:
    generator = torch.Generator().manual_seed(nodes * prefix)
    heads, kv_heads, dim = HEADS.get((batch, nodes, prefix), LARGE_HEADS)
    tree = TokenTree.best_for_acceptance((0.6, 0.2, 0.1, 0.05), nodes)
    cache = (batch, kv_heads, spare * (prefix + nodes), dim)
    query = torch.randn(batch, heads, nodes, dim, generator=generator).to(dtype)
    key, value = (torch.randn(cache, generator=generator).to(dtype) for _ in range(2))
    parents = torch.from_numpy(tree.parents).expand(batch, nodes).contiguous()
    return AttentionInputs(query, key, value, parents, torch.full((batch,), prefix), tree)


def _case(options: Options, inputs: AttentionInputs, dtype: str) -> Case:
    batch, heads, nodes, dim = inputs.query.shape
    kv_heads, slots = inputs.key.shape[1:3]
    prefix = int(inputs.prefix_lens[0])
    used = slice(0, prefix + nodes)
    key, value = inputs.key[:, :, used], inputs.value[:, :, used]
    expected = specens_kernels.tree_attention(*inputs.tensors, backend="reference")
    backend = "reference" if options.backend == "reference" else "sdpa"
    return Case(
        shape={"batch": batch, "heads": heads, "kv_heads": kv_heads, "nodes": nodes, "prefix": prefix, "dim": dim},
        setting={"slots": slots},
        dtype=dtype,
        run=lambda: specens_kernels.tree_attention(*inputs.tensors, backend=backend),
        result=lambda result: result,
        check=lambda values: check_near(values, expected),
        bounds={"SDPA, no mask": lambda: _sdpa(inputs.query, key, value, None)},
        bytes_needed=bytes_of(key, value) + 2 * bytes_of(inputs.query),
        rivals={
            "SDPA, bool mask": Rival(_with_mask(inputs), checked=True),
            "a path at a time": Rival(lambda: _path_by_path(inputs), checked=True),
            **peers.rivals("tree_attention", options, inputs),
        },
    )


def _sdpa(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
    attend = torch.nn.functional.scaled_dot_product_attention
    return attend(query, key, value, attn_mask=mask, enable_gqa=True)


def _with_mask(inputs: AttentionInputs) -> Run:
    """All slots under one mask, which is made before: a model needs it once for all layers."""
    prefix, nodes, slots = int(inputs.prefix_lens[0]), inputs.query.shape[2], inputs.key.shape[2]
    full = specens_kernels.tree_mask(inputs.parents, inputs.prefix_lens, max_prefix=prefix).mask
    mask = torch.nn.functional.pad(full, (0, slots - prefix - nodes))[:, None]
    return lambda: _sdpa(inputs.query, inputs.key, inputs.value, mask)


def _path_by_path(inputs: AttentionInputs) -> Tensor:
    """Each line of text from the prefix to a leaf by itself, as without tree attention."""
    result = torch.empty_like(inputs.query)
    for request, prefix in enumerate(inputs.prefix_lens.tolist()):
        committed = torch.arange(prefix)
        for path in inputs.tree.path_matrix.tolist():
            nodes = torch.tensor([node for node in path if node >= 0])
            line = torch.cat([committed, prefix + nodes])
            causal = torch.ones(len(nodes), len(line), dtype=torch.bool).tril(prefix)
            key, value = (cache[request : request + 1, :, line] for cache in (inputs.key, inputs.value))
            query = inputs.query[request : request + 1, :, nodes]
            result[request, :, nodes] = _sdpa(query, key, value, causal)[0]
    return result
