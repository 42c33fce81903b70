"""token_tree: a draft tree with all its arrays, from parents."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from numpy.typing import NDArray

from bench import bounds, peers
from bench.case import Case, Options, chosen_shapes
from bench.check import check_equal
from specens_kernels import TokenTree

SHAPES = ((8,), (64,), (256,), (1024,))  # nodes
PREFIX_LEN = 100
Arrays = list[NDArray[np.integer]]


def cases(options: Options) -> Iterator[Case]:
    """Random trees: links, depth, path matrix, positions and ancestors as bits. The reference is plain Python."""
    if options.backend not in BUILDERS:
        raise RuntimeError(f"token_tree: there is no backend {options.backend!r} of a host object")
    for (nodes,) in chosen_shapes(options, SHAPES):
        generator = np.random.default_rng(0)
        parents = np.array([generator.integers(-1, node) for node in range(nodes)], dtype=np.int64)
        yield _case(options, parents)


def _arrays(parents: NDArray[np.int64]) -> Arrays:
    tree = TokenTree(parents)
    links = [tree.parents, tree.child_ranks, tree.depth, tree.first_child, tree.next_sibling]
    return [*links, tree.position_ids(PREFIX_LEN), tree.path_matrix, tree.ancestor_bits]


def _together(arrays: Arrays) -> torch.Tensor:
    return torch.from_numpy(np.concatenate([array.astype(np.int64).ravel() for array in arrays]))


def _walked(parents: NDArray[np.int64]) -> Arrays:
    """The same arrays by walking up from each node."""
    nodes = range(len(parents))
    paths: list[list[int]] = []
    for node in nodes:
        paths.append([*(paths[parents[node]] if parents[node] >= 0 else []), node])
    depth = np.array([len(path) - 1 for path in paths])
    children = {parent: np.flatnonzero(parents == parent).tolist() for parent in (-1, *nodes)}
    siblings = [children[int(parents[node])] for node in nodes]
    ranks = np.array([family.index(node) for node, family in zip(nodes, siblings, strict=True)])
    first = np.array([children[node][0] if children[node] else -1 for node in nodes])
    following = np.array([[*family, -1][rank + 1] for rank, family in zip(ranks, siblings, strict=True)])
    leaves = [path for node, path in zip(nodes, paths, strict=True) if not children[node]]
    matrix = np.array([path + [-1] * (depth.max() + 1 - len(path)) for path in leaves])
    ancestors = np.array([np.isin(nodes, path) for path in paths])
    bits = np.packbits(ancestors, axis=1, bitorder="little")
    return [parents, ranks, depth, first, following, depth + PREFIX_LEN, matrix, bits]


BUILDERS = {"cpp": _arrays, "reference": _walked}


def _case(options: Options, parents: NDArray[np.int64]) -> Case:
    build, arrays = BUILDERS[options.backend], _arrays(parents)
    expected = _together(_walked(parents))
    return Case(
        shape={"nodes": len(parents)},
        setting={},
        dtype="-",
        run=lambda: build(parents),
        result=_together,
        check=lambda values: check_equal(values, expected),
        bounds=bounds.copying_arrays(arrays),
        bytes_needed=sum(array.nbytes for array in arrays),
        rivals=peers.rivals("token_tree", options, parents),
    )
