"""The benches of the GPU kernels without a GPU: counts hold their bars, and the programs for a GPU run dry."""

from __future__ import annotations

import json

import pytest
import torch
from rich.table import Table

from bench.gpu import small, times, traffic

VOCAB = 32768


@pytest.mark.parametrize("reads", [traffic.UNFILTERED_READS, traffic.FILTERED_READS])
def test_verification_and_draws_read_the_logits_as_seldom_as_the_bars_say(reads):
    counted = [setting for setting in traffic.settings(VOCAB) if setting.reads == reads]
    assert {setting.room for setting in counted} == {"verify_chain", "sample"}
    table = Table(*"abcdef")
    assert [line for setting in counted for line in traffic.add_row(table, setting)] == []


def test_a_missed_bar_is_told():
    setting = next(setting for setting in traffic.settings(2048) if setting.room == "target_logprobs")
    table = Table(*"abcdef")
    missed = traffic.add_row(table, traffic.Setting(setting.room, "x", setting.logits, setting.call, 1.5, 1))
    assert [line.split(": ")[1].split(",")[0] for line in missed[:2]] == ["2.00 logit reads", "2 launches"]


def test_the_timing_program_runs_dry(tmp_path):
    path = tmp_path / "times.jsonl"
    times.main(json_path=path, dry=True)
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert {(line["operation"], line["way"]) for line in lines} >= {("verify_chain", "eager"), ("sample", "copy")}
    assert all(line["seconds"] > 0 for line in lines)


def test_the_program_for_sanitizers_runs():
    small.main(torch.device("cpu"))
