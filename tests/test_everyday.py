"""The bench of engines beside each other: its rows, and what its table says of seeds, laws and missing engines."""

from __future__ import annotations

import random
import sys
from pathlib import Path

import pytest

from bench.end_to_end import everyday
from bench.end_to_end.everyday_engines import ENGINES, SETTINGS, measured, rows_of
from bench.end_to_end.rows import append, missing, read

LAW = {"1": 0.5, "2": 0.3, "3": 0.2}


JOB = {"repeats": 2, "tokens": 4, "samples": 30, "threads": 1}


def fake_runs(speculate, shift=0):
    """What an engine gives whose text is its seed, and with drafts a number more."""

    def generate(prompt, settings, seed, length):  # noqa: ARG001
        return [seed + shift * speculate] * length, 2.0, 1.0

    rows = [row for row in rows_of("specens", JOB) if (row["drafts"] == "lookup") == speculate]
    return [row | measured(row, [1], generate) for row in rows]


def test_every_setting_is_run_and_only_drafted_ones_are_judged_by_their_law():
    plain, drafted = fake_runs(False), fake_runs(True)
    assert {run["settings"] for run in plain} == set(SETTINGS)
    assert [run for run in plain if run["kind"] == "first"] == []
    assert sum(len(run["first"]) for run in drafted if run["kind"] == "first") == 2 * 30


def test_rows_that_are_there_are_not_measured_again(tmp_path):
    path, rows = tmp_path / "made" / "rows.jsonl", rows_of("vllm", JOB)
    assert read(path) == []
    for row in rows[:3]:
        append(path, row | {"seconds": 1.5})
    with path.open("a") as lines:
        lines.write('{"engine": "vll')  # of a run that was killed
    assert missing(rows, read(path)) == rows[3:]
    append(path, rows[3])
    assert missing(rows, read(path)) == rows[4:]
    assert missing(rows_of("vllm", JOB | {"tokens": 5}), read(path)) == rows_of("vllm", JOB | {"tokens": 5})


@pytest.mark.parametrize(("shift", "told"), [(0, "2 of 2"), (1, "0 of 2")])
def test_a_seed_is_compared_with_its_text_without_drafts(shift, told):
    text = everyday.table([*fake_runs(False), *fake_runs(True, shift)])
    row = next(line for line in text.splitlines() if "lookup" in line and "greedy" in line)
    assert told in row
    assert "2.0" in row  # 4 tokens in 2 seconds
    assert "250.0" in row  # of which one second passes outside of forwards


def test_a_law_is_told_from_another_one():
    generator = random.Random(0)
    drawn = generator.choices([1, 2, 3], LAW.values(), k=400)
    assert everyday.judged(drawn, LAW).startswith("the model's")
    assert everyday.judged([1] * 400, LAW).startswith("another one")
    assert everyday.judged([*drawn, 9], LAW).startswith("another one: tokens of probability 0")
    assert everyday.judged(drawn[:3], LAW) == "too few samples"


def test_laws_are_judged_once_and_told_in_the_table(tmp_path, monkeypatch):
    path, wanted = tmp_path / "rows.jsonl", [row for row in rows_of("specens", JOB) if row["kind"] == "first"]
    for row in [*fake_runs(False), *fake_runs(True)]:
        append(path, row | {"first": [1] * 400} if row["kind"] == "first" else row)
    monkeypatch.setattr(everyday, "model_law", lambda job: dict.fromkeys(SETTINGS, LAW))  # noqa: ARG005
    everyday.judge(wanted, JOB, path)
    monkeypatch.setattr(everyday, "model_law", None)
    everyday.judge(wanted, JOB, path)
    assert sum(row["kind"] == "law" for row in read(path)) == len(wanted) == 2
    assert everyday.table(read(path)).count("another one") == 2


def test_an_engine_that_is_not_installed_is_a_row_that_says_so():
    problem = everyday.run_engine(Path("nowhere/python"), {}, Path("rows.jsonl"))
    assert "not installed: nowhere/python" in everyday.table([{"engine": "vllm", "problem": problem}])


def test_an_engine_that_takes_too_long_is_a_row_that_says_so(tmp_path, monkeypatch):
    monkeypatch.setattr(everyday, "SECONDS", 0.01)
    job = {"threads": 1, "rows": rows_of("specens", JOB)[:1]}
    problem = everyday.run_engine(Path(sys.executable), job, tmp_path / "rows.jsonl")
    assert problem == "not finished in 0.01 s: the same command goes on"


def test_each_engine_has_one_whose_texts_it_is_compared_with():
    assert all(ENGINES[engine.without_drafts].plain for engine in ENGINES.values())
