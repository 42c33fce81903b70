"""Draft trees: every array against brute force, the builders, and what trees are as Python objects."""

from __future__ import annotations

import copy
import pickle
import sys
import time

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import specens_kernels
from specens_kernels import TokenTree

# Parents and the other arrays of a tree that was drawn by hand:
#   root -> 0, 1;  0 -> 2, 3;  1 -> 4;  2 -> 5
DRAWN = [-1, -1, 0, 0, 1, 2]


@st.composite
def parent_lists(draw, max_nodes=40):
    nodes = draw(st.integers(0, max_nodes))
    return [draw(st.integers(-1, node - 1)) for node in range(nodes)]


def path_to(parents, node):
    """The nodes from below the root position to this one."""
    path = []
    while node >= 0:
        path.insert(0, node)
        node = parents[node]
    return path


def random_parents(nodes, seed=0):
    rng = np.random.default_rng(seed)
    return np.array([rng.integers(-1, node) for node in range(nodes)], dtype=np.int64)


def all_arrays(parents):
    tree = TokenTree(parents)
    links = tree.parents, tree.child_ranks, tree.depth, tree.first_child, tree.next_sibling
    return *links, tree.path_matrix, tree.position_ids(7), tree.ancestor_bits


def test_the_arrays_of_a_drawn_tree():
    tree = TokenTree(DRAWN)
    assert (tree.num_nodes, tree.num_leaves, tree.num_levels) == (6, 3, 3)
    assert tree.parents.tolist() == DRAWN
    assert tree.child_ranks.tolist() == [0, 1, 0, 1, 0, 0]
    assert tree.depth.tolist() == [0, 0, 1, 1, 1, 2]
    assert tree.first_child.tolist() == [2, 4, 5, -1, -1, -1]
    assert tree.next_sibling.tolist() == [1, -1, 3, -1, -1, -1]
    assert tree.path_matrix.tolist() == [[0, 3, -1], [1, 4, -1], [0, 2, 5]]
    assert tree.position_ids(100).tolist() == [100, 100, 101, 101, 101, 102]
    assert tree.ancestor_bits.tolist() == [[0b1], [0b10], [0b101], [0b1001], [0b10010], [0b100101]]
    assert [tree.children(node).tolist() for node in range(-1, 6)] == [[0, 1], [2, 3], [4], [5], [], [], []]


def test_dtypes_are_what_is_documented():
    tree = TokenTree(DRAWN)
    for name in ("parents", "child_ranks", "first_child", "next_sibling", "path_matrix"):
        assert getattr(tree, name).dtype == np.int64, name
    assert tree.depth.dtype == np.int32
    assert tree.ancestor_bits.dtype == np.uint8
    assert tree.position_ids(0).dtype == tree.children(-1).dtype == np.int64


@given(parent_lists())
def test_every_array_equals_brute_force(parents):
    tree = TokenTree(parents)
    nodes = range(len(parents))
    paths = [path_to(parents, node) for node in nodes]
    children = {node: [child for child in nodes if parents[child] == node] for node in (-1, *nodes)}
    assert tree.depth.tolist() == [len(path) - 1 for path in paths]
    assert tree.child_ranks.tolist() == [children[parents[node]].index(node) for node in nodes]
    assert tree.num_levels == max(map(len, paths), default=0)
    for node in nodes:
        assert tree.children(node).tolist() == children[node]
        assert tree.first_child[node] == (children[node][0] if children[node] else -1)
        siblings = children[parents[node]]
        later = siblings[siblings.index(node) + 1 :]
        assert tree.next_sibling[node] == (later[0] if later else -1)
    leaves = [node for node in nodes if not children[node]]
    padded = [paths[leaf] + [-1] * (tree.num_levels - len(paths[leaf])) for leaf in leaves]
    assert tree.num_leaves == len(leaves)
    assert tree.path_matrix.shape == (len(leaves), tree.num_levels)
    assert tree.path_matrix.tolist() == padded
    bits = np.unpackbits(tree.ancestor_bits, axis=1, bitorder="little")
    assert [np.flatnonzero(row).tolist() for row in bits] == [sorted(path) for path in paths]


@given(parent_lists())
def test_the_root_becomes_node_0(parents):
    rooted = TokenTree(parents).with_root()
    assert rooted == TokenTree([-1] + [parent + 1 for parent in parents])
    assert rooted.depth.tolist() == [0] + [depth + 1 for depth in TokenTree(parents).depth]


def test_the_arrays_with_the_root_are_those_of_the_engines():
    """What a verifier that walks first children and siblings from node 0 visits, and the path matrix with node 0."""
    rooted = TokenTree(DRAWN).with_root()
    assert rooted.first_child.tolist() == [1, 3, 5, 6, -1, -1, -1]
    assert rooted.next_sibling.tolist() == [-1, 2, -1, 4, -1, -1, -1]
    assert rooted.path_matrix.tolist() == [[0, 1, 4, -1], [0, 2, 5, -1], [0, 1, 3, 6]]
    assert rooted.position_ids(99).tolist() == [99, *TokenTree(DRAWN).position_ids(100)]


@given(st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=4), max_size=12), st.randoms())
def test_a_tree_from_paths_has_these_paths_in_level_order(ends, random):
    paths = sorted({tuple(end[: length + 1]) for end in ends for length in range(len(end))}, key=lambda p: (len(p), p))
    tree = TokenTree.from_paths(random.sample(paths, len(paths)))
    ranks = tree.child_ranks
    assert [tuple(ranks[node] for node in path_to(tree.parents, last)) for last in range(len(paths))] == paths


def test_chains_and_branchings_are_numbered_level_by_level():
    assert TokenTree.chains(3, 2).parents.tolist() == [-1, -1, -1, 0, 1, 2]
    assert TokenTree.chains(1, 4).parents.tolist() == [-1, 0, 1, 2]
    assert TokenTree.chains(3, 0) == TokenTree.chains(0, 3) == TokenTree.branching([]) == TokenTree([])
    assert TokenTree.branching([2, 1, 2]).parents.tolist() == [-1, -1, 0, 1, 2, 2, 3, 3]
    assert TokenTree.branching([4, 2, 2]).num_nodes == 4 + 8 + 16
    assert TokenTree.branching([1, 1, 1]) == TokenTree.chains(1, 3)


def test_trees_compare_by_parents_and_ranks_and_have_no_hash():
    tree = TokenTree.from_paths([[0], [2]])
    assert tree == TokenTree([-1, -1], child_ranks=[0, 2])
    assert tree != TokenTree([-1, -1])
    assert tree != TokenTree([-1, 0], child_ranks=[0, 2])
    assert tree != [-1, -1]
    with pytest.raises(TypeError, match="unhashable"):
        hash(tree)


def test_trees_pickle_copy_and_describe_themselves():
    for tree in (TokenTree([]), TokenTree(DRAWN), TokenTree.from_paths([[1], [3], [1, 2]])):
        for protocol in range(2, pickle.HIGHEST_PROTOCOL + 1):
            assert pickle.loads(pickle.dumps(tree, protocol)) == tree
        assert copy.deepcopy(tree) == tree
        assert len(tree) == tree.num_nodes
    assert repr(TokenTree(DRAWN)) == "<TokenTree: 6 nodes, 3 leaves, 3 levels>"


def test_parents_may_be_any_integers_and_results_are_copies():
    for parents in (np.array(DRAWN, dtype=np.int32), torch.tensor(DRAWN), tuple(DRAWN), np.repeat(DRAWN, 2)[::2]):
        assert TokenTree(parents) == TokenTree(DRAWN)
    tree = TokenTree(DRAWN)
    tree.parents[:] = 99
    tree.path_matrix[:] = 99
    assert tree == TokenTree(DRAWN)
    torch.from_numpy(tree.parents)  # a read-only array would warn


@given(st.lists(parent_lists(max_nodes=12), max_size=4))
def test_a_batch_holds_each_tree_and_padding(parent_lists):
    trees = [TokenTree(parents) for parents in parent_lists]
    batch = TokenTree.batch(trees)
    assert batch["num_nodes"].tolist() == [len(tree) for tree in trees]
    padding = {"parents": -2, "depth": 0, "child_ranks": -1, "first_child": -1, "next_sibling": -1}
    for name, value in padding.items():
        assert batch[name].shape == (len(trees), max(map(len, trees), default=0))
        for row, tree in zip(batch[name], trees, strict=True):
            own = getattr(tree, name)
            assert row.dtype == own.dtype
            assert row.tolist() == own.tolist() + [value] * (len(row) - len(own))
    for matrix, tree in zip(batch["path_matrix"], trees, strict=True):
        assert np.array_equal(matrix[: tree.num_leaves, : tree.num_levels], tree.path_matrix)
        assert (matrix[tree.num_leaves :] == -1).all()
        assert (matrix[:, tree.num_levels :] == -1).all()


GROWTH = TokenTree.grow(4, 2)
ONE_ROW = np.array([[0.5, 0.5]])


@pytest.mark.parametrize(
    ("argument", "call"),
    [
        ("parents[0]", lambda: TokenTree([0])),
        ("parents[1]", lambda: TokenTree([-1, 2, 0])),
        ("parents[0]", lambda: TokenTree([-2])),
        ("parents", lambda: TokenTree([0.5])),
        ("parents", lambda: TokenTree([[-1]])),
        ("parents", lambda: TokenTree([True])),
        ("parents", lambda: TokenTree(None)),
        ("parents", lambda: TokenTree(np.full(20_000, -1))),
        ("child_ranks", lambda: TokenTree([-1, -1], child_ranks=[0])),
        ("child_ranks[1]", lambda: TokenTree([-1, -1], child_ranks=[1, 1])),
        ("child_ranks[0]", lambda: TokenTree([-1], child_ranks=[-1])),
        ("paths", lambda: TokenTree.from_paths([[0], [0]])),
        ("paths", lambda: TokenTree.from_paths([[0], [1, 0]])),
        ("paths", lambda: TokenTree.from_paths([[]])),
        ("paths", lambda: TokenTree.from_paths([[-1]])),
        ("parents", lambda: TokenTree([2**70])),
        ("parents", lambda: TokenTree(np.array([2**64 - 1], dtype=np.uint64))),
        ("paths[1]", lambda: TokenTree.from_paths([[0], [2**70]])),
        ("count", lambda: TokenTree.chains(2**63, 2)),
        ("length", lambda: TokenTree.chains(1, 2**63)),
        ("branches", lambda: TokenTree.branching([2**70])),
        ("nodes", lambda: TokenTree.grow(2**63, 1)),
        ("nodes", lambda: TokenTree.grow(None, 1)),
        ("width", lambda: TokenTree.grow(4, 2**63)),
        ("max_levels", lambda: TokenTree.grow(4, 1, max_levels=2**63)),
        ("nodes", lambda: TokenTree.best_for_acceptance([0.5], 2**63)),
        ("max_levels", lambda: TokenTree.best_for_acceptance([0.5], 4, 2**63)),
        ("node", lambda: TokenTree([-1]).children(2**63)),
        ("prefix_len", lambda: TokenTree([-1]).position_ids(2**63)),
        ("count", lambda: TokenTree.chains(-1, 2)),
        ("length", lambda: TokenTree.chains(1, 2**62)),
        ("count * length", lambda: TokenTree.chains(10_000, 10_000)),
        ("branches", lambda: TokenTree.branching([2, 0])),
        ("branches", lambda: TokenTree.branching([4] * 40)),
        ("nodes", lambda: TokenTree.grow(-1, 1)),
        ("width", lambda: TokenTree.grow(4, 0)),
        ("max_levels", lambda: TokenTree.grow(4, 1, max_levels=0)),
        ("order", lambda: TokenTree.grow(4, 1, order="depth")),
        ("tokens", lambda: GROWTH.add([1, 2], ONE_ROW)),
        ("tokens", lambda: GROWTH.add([[1, 2], [3, 4]], ONE_ROW)),
        ("tokens", lambda: GROWTH.add([[1.0, 2.0]], ONE_ROW)),
        ("probabilities", lambda: GROWTH.add([[1, 2]], [[1, 0]])),
        ("probabilities", lambda: GROWTH.add([[1, 2, 3]], ONE_ROW)),
        ("probabilities", lambda: GROWTH.add([[1, 2]], ONE_ROW * 3)),
        ("probabilities", lambda: GROWTH.add([[1, 2]], ONE_ROW * np.nan)),
        ("acceptance", lambda: TokenTree.best_for_acceptance([0.6, 0.6], 4)),
        ("acceptance", lambda: TokenTree.best_for_acceptance([-0.1], 4)),
        ("acceptance", lambda: TokenTree([-1]).expected_length([np.nan])),
        ("nodes", lambda: TokenTree.best_for_acceptance([0.01] * 99, 16_000)),
        ("max_levels", lambda: TokenTree.best_for_acceptance([0.5], 4, 0)),
        ("node", lambda: TokenTree([-1]).children(1)),
        ("trees[1]", lambda: TokenTree.batch([TokenTree([]), None])),
        ("trees[0]", lambda: TokenTree.batch([[-1, 0]])),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_bad_argument_is_named(argument, call):
    with pytest.raises(ValueError, match=r"expected .*got") as error:
        call()
    assert str(error.value).startswith(f"{argument}: expected")


def test_a_missing_extension_is_named_where_a_tree_is_wanted_and_not_before(monkeypatch):
    assert "TokenTree" not in vars(specens_kernels)
    monkeypatch.delattr(specens_kernels, "_host", raising=False)
    monkeypatch.setitem(sys.modules, "specens_kernels._host", None)
    with pytest.raises(ImportError, match="_host"):
        _ = specens_kernels.TokenTree
    with pytest.raises(AttributeError, match="no attribute 'no_such_name'"):
        _ = specens_kernels.no_such_name


@pytest.mark.parametrize(("nodes", "seconds"), [(64, 200e-6), (1024, 10e-3)])
def test_building_takes_no_time_that_counts(nodes, seconds):
    """Ten times what is promised (20 us, 1 ms), so that a busy machine cannot fail it; the bench measures."""
    parents = random_parents(nodes)

    def once():
        begin = time.perf_counter()
        all_arrays(parents)
        return time.perf_counter() - begin

    assert min(once() for _ in range(50)) < seconds
