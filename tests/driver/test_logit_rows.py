"""Rows of logits go to the operations as they lie, and results come back at once."""

import pytest
import torch
from specens.decoding.draws import _as_lists, largest, on_host
from specens.decoding.logit_rows import LogitRows, joined


@pytest.mark.parametrize(
    ("pieces", "is_view"),
    [
        (lambda table: [table[0, 1:3]], True),
        (lambda table: [table[0], table[1], table[2]], True),
        (lambda table: [table[request, -1:] for request in range(3)], True),
        (lambda table: [table[0, 2:], table[1, 2:]], False),
        (lambda table: [table[0, 1:2], table[0, 3:4], table[1, 1:2]], True),
        (lambda table: [table[0, 0:1], table[0, 1:2], table[0, 3:4]], False),
        (lambda table: [table[1], table[0]], False),
        (lambda table: [table[0, :1], table[0, :1]], False),
        (lambda table: [table[0], table[1].clone()], False),
        (lambda table: [table[0, :, :5], table[1, :, 1:6]], False),
    ],
    ids=[
        "one",
        "consecutive",
        "last of each",
        "ends",
        "every other",
        "uneven",
        "back",
        "twice",
        "two buffers",
        "shifted",
    ],
)
def test_rows_at_equal_distances_are_joined_without_a_copy(pieces, is_view):
    table = torch.randn(3, 4, 7)
    parts = pieces(table)
    whole = joined(parts)
    assert torch.equal(whole, torch.cat(parts))
    assert (whole.untyped_storage().data_ptr() == table.untyped_storage().data_ptr()) is is_view


def test_a_stretch_over_several_forwards_is_the_one_that_was_asked_for():
    rows, table = LogitRows(), torch.randn(9, 5)
    for start, end in ((0, 3), (3, 4), (4, 9)):
        rows.add(start, table[start:end].clone())
    for start in range(9):
        for end in range(start + 1, 10):
            assert torch.equal(rows.take(start, end), table[start:end])


def test_results_that_come_at_once_are_those_that_come_one_by_one():
    columns = (torch.tensor([1, -1]), torch.tensor([[2, 3, -1], [4, 5, 6]]), torch.tensor([7, 8], dtype=torch.int32))
    assert _as_lists(columns) == on_host(*columns) == [[1, -1], [[2, 3, -1], [4, 5, 6]], [7, 8]]


@pytest.mark.parametrize("vocab", [5, 64, 65, 1000, 50257])
def test_the_largest_numbers_of_rows_are_those_of_topk(vocab):
    rows = torch.randn(3, vocab, generator=torch.Generator().manual_seed(vocab))
    rows[:, ::3] = -torch.inf
    for count in (1, 2, 7, 40):
        scores, tokens = largest(rows, count)
        assert torch.equal(scores, rows.topk(min(count, vocab)).values)
        assert torch.equal(rows.gather(1, tokens), scores)
        assert all(len(set(line)) == len(line) for line in tokens.tolist())
