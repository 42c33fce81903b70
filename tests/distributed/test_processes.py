"""Processes that share a vocabulary over gloo: one to four of them, dealt their shards in any order."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from ranks import LARGEST_GROUP, LOST, SEEDS, arguments_of, work
from torch.multiprocessing.spawn import spawn

from specens_kernels import Verdict, verify_chain


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the processes left; they are started once."""
    path = tmp_path_factory.mktemp("ranks")
    spawn(work, (str(path),), nprocs=LARGEST_GROUP)
    return path


@pytest.mark.parametrize("size", range(1, LARGEST_GROUP + 1))
def test_every_process_gets_the_verdict_of_whole_rows(folder, size):
    verdicts = [torch.load(folder / f"{size}-{rank}.pt") for rank in range(size)]
    for seed in SEEDS:
        expected = verify_chain(**arguments_of(seed), backend="reference")
        assert expected.num_accepted.sum() > 0
        for name, own in zip(Verdict._fields, zip(*[own[seed] for own in verdicts], strict=True)):
            wanted = getattr(expected, name)
            if wanted is None:
                continue
            assert all(torch.equal(other, own[0]) for other in own), name
            torch.testing.assert_close(own[0], wanted, atol=5e-5 if name == "logprobs" else 0, rtol=0)


def test_a_process_that_dies_ends_the_others_with_an_error(folder):
    for rank in set(range(LARGEST_GROUP)) - {LOST}:
        assert "Error" in (folder / f"lost-{rank}").read_text()
