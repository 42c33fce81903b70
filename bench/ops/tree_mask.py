"""tree_mask: attention masks of draft trees."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

import specens_kernels
from bench import bounds, peers
from bench.case import DTYPES, Case, Options, chosen_shapes
from bench.check import check_equal
from specens_kernels import TokenTree, TreeMask

SHAPES = ((1, 64, 1024), (32, 64, 4096), (1, 1024, 1024))  # batch, nodes, prefix
LAYOUTS = ("full", "tree", "packed", "additive")


def cases(options: Options) -> Iterator[Case]:
    """The trees that are best for a falling acceptance, in every layout."""
    for batch, nodes, prefix in chosen_shapes(options, SHAPES):
        tree = TokenTree.best_for_acceptance((0.6, 0.2, 0.1, 0.05), nodes)
        parents = torch.from_numpy(tree.parents).expand(batch, nodes)
        prefix_lens = torch.full((batch,), prefix)
        for layout in LAYOUTS:
            for dtype in options.dtypes if layout == "additive" else ("-",):
                yield _case(options, parents, prefix_lens, layout, dtype)


def _case(options: Options, parents: Tensor, prefix_lens: Tensor, layout: str, dtype: str) -> Case:
    batch, nodes = parents.shape
    prefix = int(prefix_lens[0])
    element = DTYPES.get(dtype, torch.float32)

    def mask(backend: str) -> TreeMask:
        return specens_kernels.tree_mask(
            parents, prefix_lens, layout=layout, max_prefix=prefix, dtype=element, backend=backend
        )

    expected = mask("reference").mask
    return Case(
        shape={"batch": batch, "nodes": nodes, "prefix": prefix},
        setting={"layout": layout},
        dtype=dtype,
        run=lambda: mask(options.backend),
        result=lambda result: result.mask,
        check=lambda values: check_equal(values, expected),
        bounds=bounds.filling(expected),
        bytes_needed=expected.nbytes + 2 * parents.numel() * parents.element_size(),
        rivals=peers.rivals("tree_mask", options, (parents, prefix_lens, layout)),
    )
