"""The bench of pairs by llama.cpp beside transformers: its rows, and what its table says of them."""

from __future__ import annotations

from rich.console import Console
from specens.analysis.planner import candidates

from bench.end_to_end import llama_cpp
from bench.end_to_end.llama_cpp import ENGINES, SCHEDULES, wanted
from bench.end_to_end.rows import append, missing, read

JOB = {"tokens": 12, "threads": 1}
RATES = {"transformers": 2.0, "llama_cpp": 8.0}


def measured(row):
    """What a row might become."""
    if row["kind"] == "plan":
        return row | {"predicted": dict.fromkeys(SCHEDULES, 3.25), "picked": "standard", "picked_speedup": 1.0}
    seconds = 12 / (RATES[row["engine"]] + row["seed"])
    decode = seconds * 0.9 * (row["engine"] == "llama_cpp")
    return row | {"seconds": seconds, "llama_decode": decode, "forwards": [12, 12], "acceptance": 0.5}


def test_rows_that_are_there_are_not_measured_again(tmp_path):
    rows, path = wanted("Q8_0", JOB, 3), tmp_path / "rows.jsonl"
    assert len(rows) == len(ENGINES) * (1 + 3 * len(SCHEDULES))
    for row in rows[:4]:
        append(path, measured(row))
    assert missing(rows, read(path)) == rows[4:]
    assert missing(wanted("Q4_0", JOB, 3), read(path)) == wanted("Q4_0", JOB, 3)


def test_every_schedule_of_the_table_is_one_that_is_planned_for():
    assert {str(own) for own in SCHEDULES.values()} <= {str(own) for own in candidates(2, llama_cpp.LONGEST)}


def test_the_table_has_a_row_for_each_schedule_of_each_engine_and_compares_engines():
    table, console = llama_cpp.table_of([measured(row) for row in wanted("Q8_0", JOB, 3)]), Console(width=140)
    assert table.row_count == len(ENGINES) * len(SCHEDULES)
    with console.capture() as capture:
        console.print(table)
    lines = [line for line in capture.get().splitlines() if "llama_cpp" in line and "fixed 2" in line]
    assert len(lines) == 1
    assert all(cell in lines[0] for cell in ("9.00", "3.25", "3.00", "90.0%", "0.50"))  # of seeds 0 to 2 the middle one
    assert "picks" in capture.get()
