"""The benches of the GPU kernels without a GPU: counts hold their bars, and the programs for a GPU run dry."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import typer
from cases import FULL
from rich.table import Table
from typer.testing import CliRunner

import bench.__main__
from bench.gpu import checks, kernels, model, times, traffic
from specens_kernels import sample

VOCAB = 32768
ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize("bar", ["UNFILTERED_READS", "FILTERED_READS", "FILTERED_MIXTURE_READS", "FILTERED_DRAW_READS"])
def test_verification_and_draws_read_the_logits_as_seldom_as_the_bars_say(bar):
    counted = [setting for setting in traffic.settings(VOCAB) if setting.reads == getattr(traffic, bar)]
    assert counted != []
    table = Table(*"abcdef")
    assert [line for setting in counted for line in traffic.add_row(table, setting)] == []


@pytest.mark.parametrize("name", ["chosen children", "drawn children", "drawn children, k_seq"])
def test_a_tree_costs_one_read_and_one_of_a_row_for_each_rejected_child_that_was_drawn(name):
    """By k_seq five at most of a row whose three children are rejected alike."""
    setting = next(setting for setting in traffic.tree_settings(VOCAB // 4) if setting.name == name)
    assert traffic.add_row(Table(*"abcdef"), setting) == []
    assert setting.reads < 1.85


def test_a_missed_bar_is_told():
    setting = next(setting for setting in traffic.settings(2048) if setting.operation == "target_logprobs")
    table = Table(*"abcdef")
    missed = traffic.add_row(table, traffic.Setting(setting.operation, "x", setting.logits, setting.call, 1.5, 1))
    assert [line.split(": ")[1].split(",")[0] for line in missed[:2]] == ["2.00 logit reads", "2 launches"]


def test_the_model_of_time_predicts_what_was_measured_of_a_draw():
    inputs = times.make_inputs(model.COUNTED_BATCH, model.VOCAB, 1, False, torch.device("cpu"), 0)
    draw = next(found for found in times.operations(inputs, backend="triton") if found.name == "sample")
    with traffic.counted() as counted:
        draw.call()
    before = model.measured("h200")
    for batch in times.BATCHES:
        predicted = model.call_time(model.DEVICES["h200"], counted.kernels, batch / model.COUNTED_BATCH)
        assert 0.6 < predicted / before["sample", False, batch] < 1.7


def test_the_profiling_program_runs_dry(tmp_path):
    path = tmp_path / "kernels.jsonl"
    kernels.main(json_path=path, dry=True)
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert {line["operation"] for line in lines} >= {"verify_chain", "sample", "verify_tree", "compact_kv"}
    assert all(line["microseconds"] > 0 for line in lines)


def test_the_timing_program_runs_dry(tmp_path):
    path = tmp_path / "times.jsonl"
    times.main(json_path=path, dry=True)
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert {(line["operation"], line["way"]) for line in lines} >= {
        ("verify_chain", "eager"),
        ("sample", "read"),
        ("verify_tree", "eager"),
        ("compact_kv", "eager"),
    }
    assert all(line["seconds"] > 0 for line in lines)


def test_a_case_that_fails_is_a_row_and_leaves_the_others(tmp_path, monkeypatch):
    def broken(*_, **__):
        raise RuntimeError("broken on purpose")

    monkeypatch.setattr(times, "sample", broken, raising=True)
    monkeypatch.setattr(times, "make_inputs", inputs_with(times.make_inputs))
    path = tmp_path / "times.jsonl"
    with pytest.raises(SystemExit):
        times.main(json_path=path, dry=True)
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert {line["operation"] for line in lines if line["problem"]} == {"sample"}
    assert {line["operation"] for line in lines if not line["problem"]} >= {"verify_chain", "compact_kv"}


def inputs_with(make):
    """Inputs are made by `sample` too, which is broken for what is timed alone."""

    def made(*arguments, **named):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(times, "sample", sample)
            return make(*arguments, **named)

    return made


CASES = list(checks.cases()) if FULL else list(checks.cases())[::8]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_the_checks_of_a_gpu_pass_on_the_processor(case):
    checks.run_eager(case, torch.device("cpu"), None, launch_only=False)


def test_checks_tell_a_wrong_token():
    case = next(case for case in checks.cases() if case.operation == "verify_chain")
    results = checks.expected(case, 0)
    results[0][:2] += 1
    with pytest.raises(AssertionError, match="differ"):
        checks.judge(case, results, 0)


@pytest.mark.skipif(not FULL, reason="a minute, after SPECENS_TEST_FULL")
def test_the_whole_script_runs_where_a_stub_stands_for_the_gpu(tmp_path):
    environment = {**os.environ, "STUB": "1", "JOBS": "2", "OUT": str(tmp_path), "PYTHON": sys.executable}
    environment.pop("TRITON_INTERPRET", None)
    run = subprocess.run([ROOT / "bench/gpu/run.sh"], env=environment, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stdout + run.stderr
    passed = [line.split(":")[0] for line in run.stdout.splitlines() if ": passed, " in line]
    assert sorted(passed) == ["checks", "compile", "dependent", "kernels", "memcheck", "racecheck", "times"]


def test_a_count_takes_its_own_options_and_refuses_those_of_the_benches(monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    command = [sys.executable, "-m", "bench", "model", "--device", "nope"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.returncode, "expected one of h200, got nope" in done.stderr) == (2, True)
    benches = typer.Typer()
    benches.command()(bench.__main__.main)
    refused = CliRunner().invoke(benches, ["traffic", "--quick"])
    assert (refused.exit_code, "traffic counts, and takes no option of the benches" in refused.stderr) == (2, True)
