"""Trees grown by draft probability, and the best tree for an acceptance, against exhaustive search."""

from __future__ import annotations

import heapq
import itertools

import numpy as np
import pytest

from specens_kernels import TokenTree


def path_to(parents, node):
    """The nodes from below the root position to this one."""
    path = []
    while node >= 0:
        path.insert(0, node)
        node = parents[node]
    return path


def draft(path, vocab=5):
    """The draft distribution after a path of tokens: the same for the same path."""
    return np.random.default_rng([17, len(path), *path]).dirichlet(np.full(vocab, 0.5))


def grow(nodes, width, vocab=5, steps=None, **options):
    """Grow a tree with `draft`; return its {path of tokens: path probability} and the number of candidates."""
    growth = TokenTree.grow(nodes, width, **options)
    paths: list[tuple[int, ...]] = []
    for _ in itertools.count() if steps is None else range(steps):
        if len(growth.frontier) == 0:
            break
        above = [() if candidate < 0 else paths[candidate] for candidate in growth.frontier]
        probabilities = np.array([draft(path, vocab) for path in above])
        growth.add(np.tile(np.arange(vocab), (len(above), 1)), probabilities)
        paths += [(*path, token) for path in above for token in range(vocab)]
    tree, tokens, candidates = growth.prune()
    kept = [tuple(tokens[node] for node in path_to(tree.parents, last)) for last in range(len(tree))]
    assert kept == [paths[candidate] for candidate in candidates]
    assert tree.child_ranks.tolist() == tokens.tolist()  # here the candidate's place is its token
    found = {path: probability(path, vocab) for path in kept}
    assert growth.expected_length == pytest.approx(sum(found.values()))
    return found, len(paths)


def probability(path, vocab=5):
    return float(np.prod([draft(path[:level], vocab)[token] for level, token in enumerate(path)]))


def most_probable(paths, count):
    return dict(sorted(((path, probability(path)) for path in paths), key=lambda item: -item[1])[:count])


@pytest.mark.parametrize(("nodes", "width", "steps"), [(1, 1, 3), (10, 3, 4), (24, 4, 5), (60, 10, 4), (200, 3, 3)])
def test_growth_by_levels_keeps_what_eagle_2_keeps(nodes, width, steps):
    """Every candidate is kept to the end, and the tree is chosen once, as the paper says."""
    everything, level = [], [()]
    for _ in range(steps):
        newest = [(*path, token) for path in level for token in range(5)]
        everything += newest
        level = list(most_probable(newest, width))
    expected = most_probable(everything, nodes)
    found, _ = grow(nodes, width, steps=steps)
    assert found == pytest.approx(expected)


@pytest.mark.parametrize(("nodes", "width"), [(1, 1), (7, 1), (20, 4), (50, 50)])
def test_the_best_first_search_finds_the_most_probable_paths_of_all(nodes, width):
    everything = [path for length in (1, 2, 3, 4) for path in itertools.product(range(5), repeat=length)]
    found, candidates = grow(nodes, width, order="best", max_levels=4)
    assert found == pytest.approx(most_probable(everything, nodes))
    assert candidates < len(everything)


def test_growth_ends_where_no_path_can_enter_the_tree():
    growth = TokenTree.grow(2, 2)
    assert growth.frontier.tolist() == [-1]
    growth.add([[5, 6, 7]], np.array([[0.2, 0.5, 0.3]]))
    assert growth.frontier.tolist() == [1, 2]
    growth.add([[8], [9]], np.array([[0.1], [0.9]]))
    assert growth.frontier.tolist() == []
    assert growth.expected_length == pytest.approx(0.8)
    tree, tokens, candidates = growth.prune()
    assert (tree.parents.tolist(), tokens.tolist(), candidates.tolist()) == ([-1, -1], [6, 7], [1, 2])
    assert tree.child_ranks.tolist() == [1, 2]


def test_ties_go_to_the_earlier_candidate_and_impossible_ones_are_never_kept():
    growth = TokenTree.grow(4, 4)
    growth.add([[1, 2, 3]], np.array([[1.0, 0.0, 0.0]]))
    growth.add([[4, 5]], np.array([[0.5, 0.5]]))
    growth.add([[6], [7]], np.array([[1.0], [1.0]]))
    tree, tokens, _ = growth.prune()
    assert tokens.tolist() == [1, 4, 5, 6]
    assert tree.parents.tolist() == [-1, 0, 0, 1]


def test_growth_by_levels_leaves_older_nodes_alone():
    growth = TokenTree.grow(9, 1)
    growth.add([[1, 2]], np.array([[0.6, 0.4]]))
    growth.add([[3, 4]], np.array([[0.5, 0.5]]))
    assert growth.frontier.tolist() == [2]
    best = TokenTree.grow(9, 1, order="best")
    best.add([[1, 2]], np.array([[0.6, 0.4]]))
    best.add([[3, 4]], np.array([[0.5, 0.5]]))
    assert best.frontier.tolist() == [1]


@pytest.mark.parametrize("levels", [1, 2, 3])
def test_no_path_is_longer_than_asked_for(levels):
    for order in ("level", "best"):
        found, _ = grow(30, 5, order=order, max_levels=levels)
        assert max(map(len, found)) == levels


def expected_length(parents, acceptance):
    tree = TokenTree(parents)
    ranks = tree.child_ranks
    return sum(
        np.prod([acceptance[ranks[node]] if ranks[node] < len(acceptance) else 0.0 for node in path_to(parents, last)])
        for last in range(len(parents))
    )


ACCEPTANCES = [[0.6, 0.2, 0.1], [0.3, 0.3, 0.3], [0.9], [0.1, 0.6, 0.2], [0.0, 0.7], [0.5, 0.0, 0.4], [0.25] * 4]


@pytest.mark.parametrize("acceptance", ACCEPTANCES, ids=str)
@pytest.mark.parametrize("max_levels", [None, 1, 2, 3])
def test_the_best_tree_is_the_best_of_all_trees(acceptance, max_levels):
    limit = max_levels or 99
    for nodes in range(7):
        every = itertools.product(*(range(-1, node) for node in range(nodes)))
        low_enough = (parents for parents in every if TokenTree(parents).num_levels <= limit)
        best = max(expected_length(parents, acceptance) for parents in low_enough)
        tree = TokenTree.best_for_acceptance(acceptance, nodes, max_levels)
        assert len(tree) <= nodes
        assert tree.num_levels <= limit
        assert expected_length(tree.parents, acceptance) == pytest.approx(tree.expected_length(acceptance))
        assert tree.expected_length(acceptance) >= best - 1e-12


@pytest.mark.parametrize(("nodes", "max_levels"), [(64, None), (64, 5), (200, 9)])
def test_where_lower_ranks_are_likelier_the_best_tree_is_greedy(nodes, max_levels):
    acceptance = [0.55, 0.2, 0.1, 0.05, 0.04, 0.01]
    heap, total = [(-chance, 1) for chance in acceptance], 0.0
    heapq.heapify(heap)
    for _ in range(nodes):
        chance, levels = heapq.heappop(heap)
        total -= chance
        if levels < (max_levels or nodes):
            for rank in acceptance:
                heapq.heappush(heap, (chance * rank, levels + 1))
    tree = TokenTree.best_for_acceptance(acceptance, nodes, max_levels)
    assert len(tree) == nodes
    assert tree.expected_length(acceptance) == pytest.approx(total)


def test_nodes_that_add_nothing_are_left_out():
    assert len(TokenTree.best_for_acceptance([], 5)) == 0
    assert len(TokenTree.best_for_acceptance([0.0, 0.0], 5)) == 0
    assert TokenTree.best_for_acceptance([0.5, 0.2], 50, max_levels=2) == TokenTree.branching([2, 2])
    assert TokenTree.best_for_acceptance([1.0], 12) == TokenTree.chains(1, 12)


def test_candidates_that_were_refused_leave_no_trace():
    growth = TokenTree.grow(4, 2)
    with pytest.raises(ValueError, match="probabilities"):
        growth.add([[1, 2]], np.array([[0.5, 1.5]]))
    growth.add([[1, 2]], np.array([[0.5, 0.5]]))
    assert growth.prune()[2].tolist() == [0, 1]
