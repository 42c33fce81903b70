"""Processes that share a vocabulary over gloo: one to four of them, dealt their shards in any order."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from cases import FULL
from ranks import LARGEST_GROUP, LOST, SEEDS, arguments_of, work
from torch.multiprocessing.spawn import spawn

from specens_kernels import Verdict, verify_chain

ROOT = Path(__file__).parents[2]


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


@pytest.mark.skipif(not FULL, reason="seven processes that load torch: make test-full")
def test_the_commands_of_the_page_print_the_tokens_of_the_whole_vocabulary():
    page = (ROOT / "docs" / "distributed.md").read_text()
    commands = re.search(r"^```bash\n(torchrun .*?)^```$", page, re.DOTALL | re.MULTILINE)[1]
    commands = re.sub(
        "^torchrun", "python -m torch.distributed.run", commands, flags=re.M
    )  # what it is, wherever it lies
    commands = re.sub("^python", sys.executable, commands, flags=re.M)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(name for name in sys.path if name)}
    done = subprocess.run(
        ["bash", "-ec", f"{commands}wait"], cwd=ROOT, env=environment, capture_output=True, text=True, check=True
    )
    printed = re.findall(r"rank \d of (\d): (\[[^]]*\])", done.stdout)  # lines of ranks may run together
    assert sorted(ranks for ranks, _ in printed) == ["1", "4", "4", "4", "4"]
    assert len({tokens for _, tokens in printed}) == 1
