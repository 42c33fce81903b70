"""The command `specens` between other programs: pipes, streams that end, Ctrl-C at any time."""

import io
import json
import logging
import os
import shlex
import signal
import subprocess
import sys
import threading
import time

import pytest
from driver.tiny_models import save_pair
from rich.console import Console
from specens.cli.main import app
from specens.cli.progress import loading
from specens.engines.transformers import load
from specens.files.json_lines import JsonLines
from specens.generate import SpeculativeEnsemble
from typer.testing import CliRunner

JOB = ["--max-new-tokens", "6", "--seed", "1", "--dtype", "fp32"]
SPECENS = [sys.executable, "-m", "specens"]


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    return save_pair(tmp_path_factory.mktemp("models"))


def run(*arguments, **settings):
    return CliRunner().invoke(app, [str(argument) for argument in arguments], **settings)


def texts_of(lines):
    return {(text["index"], text["sample"]): text["tokens"] for text in map(json.loads, lines.splitlines())}


def test_texts_and_prompts_go_through_standard_output_and_input(monkeypatch, models, tmp_path):
    monkeypatch.chdir(tmp_path)
    prompts = '{"prompt": "w5"}\n{"prompt": "w3"}\n'
    (tmp_path / "prompts.jsonl").write_text(prompts)
    written = run("generate", *models, *JOB, "--input", "prompts.jsonl")
    piped = run("generate", *models, *JOB, "--input", "-", "--output", "-", input=prompts)
    assert piped.exit_code == 0, piped.stderr
    assert texts_of(piped.stdout) == texts_of(written.stdout)
    assert os.listdir(tmp_path) == ["prompts.jsonl"]
    traced = run("generate", *models, *JOB, "--input", "prompts.jsonl", "--output", "texts.jsonl", "--trace", "-")
    assert traced.exit_code == 0, traced.stderr
    page = run("show", "-", input=traced.stdout)
    assert page.stdout.startswith("<!DOCTYPE html>")
    assert run("show", "-", "--output", "page.html", input=traced.stdout).stdout == "page.html\n"
    assert (tmp_path / "page.html").read_text() == page.stdout


def test_texts_and_the_trace_do_not_mix(models):
    for options in ([], ["--samples", "2"], ["--output", "-"]):
        result = run("generate", *models, "--prompt", "w5", *JOB, "--trace", "-", *options)
        assert result.exit_code == 2
        assert "--trace: expected another place" in result.stderr


def test_texts_go_into_a_named_pipe_and_nothing_is_left_beside_it(models, tmp_path):
    pipe, read = tmp_path / "pipe", []
    os.mkfifo(pipe)
    reader = threading.Thread(target=lambda: read.append(pipe.read_text()))
    reader.start()
    result = run("generate", *models, "--prompt", "w5", *JOB, "--samples", "2", "--output", pipe)
    reader.join(timeout=30)
    assert result.exit_code == 0, result.stderr
    assert texts_of(read[0]).keys() == {(0, 0), (0, 1)}
    assert os.listdir(tmp_path) == ["pipe"]


def test_a_reader_that_goes_away_ends_the_command_quietly(models):
    arguments = [*SPECENS, "generate", *models, "--prompt", "w5", *JOB, "--max-new-tokens", "150000"]
    with subprocess.Popen(arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        process.stdout.close()
        complaints = process.stderr.read().decode()
    assert process.returncode == 141
    assert "Error" not in complaints
    assert "Traceback" not in complaints


@pytest.mark.parametrize("options", [["--no-stream"], ["--json"], ["--samples", "2"]], ids=str)
def test_whatever_is_printed_may_lose_its_reader(monkeypatch, models, options):
    def broken(*_):
        raise BrokenPipeError

    monkeypatch.setattr("rich.console.Console._write_buffer", broken)
    monkeypatch.setattr("specens.files.json_lines.StreamLines.append", broken)
    monkeypatch.setattr("specens.cli.commands.print_json", broken)
    result = run("generate", *models, "--prompt", "w5", *JOB, *options)
    assert (result.exit_code, result.stderr) == (141, "")


def test_a_full_disk_is_one_clear_line():
    with open("/dev/full", "w") as full:
        done = subprocess.run([*SPECENS, "methods"], stdout=full, stderr=subprocess.PIPE, text=True, timeout=120)
    assert done.returncode == 1
    assert done.stderr.startswith("Error: [Errno 28]")
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize("seconds", [0.3, 1.5])
def test_ctrl_c_before_anything_is_there_is_one_line(models, seconds):
    arguments = [*SPECENS, "compare", *models, *JOB, "--max-new-tokens", "150000"]
    start = "import time, os, signal, threading; signal.signal(signal.SIGINT, signal.default_int_handler); "
    start += f"threading.Timer({seconds}, os.kill, (os.getpid(), 2)).start(); "
    start += f"from specens.__main__ import main; import sys; sys.argv = {arguments[2:]}; main()"
    done = subprocess.run([sys.executable, "-c", start], capture_output=True, text=True, timeout=60)
    assert done.returncode == 130
    assert done.stdout == ""
    assert done.stderr.count("\n") <= 1


def heed_ctrl_c():
    """A shell lets what it starts in the background ignore Ctrl-C, and its children with it."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def test_a_second_ctrl_c_loses_nothing(models):
    arguments = [*SPECENS, "generate", *models, "--prompt", "w5", *JOB, "--max-new-tokens", "150000", "--json"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "preexec_fn": heed_ctrl_c}
    with subprocess.Popen(arguments, **pipes) as process:
        threading.Timer(8, process.send_signal, (signal.SIGINT,)).start()
        threading.Timer(8.02, process.send_signal, (signal.SIGINT,)).start()
        limit = threading.Timer(60, process.kill)  # so that a failure ends
        limit.start()
        printed, complaints = process.communicate()
        limit.cancel()
    assert process.returncode == 130
    assert json.loads(printed)["interrupted"]
    assert b"Traceback" not in complaints


def interrupt(monkeypatch, owner, name, number):
    """Let Ctrl-C come in front of a call with this number."""
    plain, calls = getattr(owner, name), []

    def interrupted(*arguments, **settings):
        calls.append(1)
        if len(calls) == number:
            raise KeyboardInterrupt
        return plain(*arguments, **settings)

    monkeypatch.setattr(owner, name, interrupted)


def test_ctrl_c_between_two_runs_keeps_those_that_are_complete(monkeypatch, models):
    interrupt(monkeypatch, SpeculativeEnsemble, "generate", 7)
    result = run("compare", *models, "--prompt", "w5", *JOB, "--json")
    assert result.exit_code == 130, (result.stderr, result.exception)
    assert [row["schedule"] for row in json.loads(result.stdout)["rows"]] == ["standard", "fixed", "alternate"]


def test_ctrl_c_while_the_text_is_printed_loses_none_of_it(monkeypatch, models):
    interrupt(monkeypatch, sys.modules["specens.cli.display"], "print_events", 3)
    result = run("generate", *models, "--prompt", "w5", *JOB, "--schedule", "standard")
    assert result.exit_code == 130, (result.stderr, result.exception)
    assert len(result.stdout.split("w")) - 1 == 3


def test_ctrl_c_while_texts_are_written_says_how_many_are(monkeypatch, models, tmp_path):
    interrupt(monkeypatch, JsonLines, "append", 3)
    given = ["generate", *models, "--prompt", "w5", *JOB, "--samples", "5", "--output", tmp_path / "texts.jsonl"]
    result = run(*given, "--batch-size", "1")
    assert result.exit_code == 130, (result.stderr, result.exception)
    assert "2 of 5 texts are written" in result.stderr
    assert len(texts_of((tmp_path / "texts.jsonl").read_text())) == 2
    assert run(*given).exit_code == 0
    assert len(texts_of((tmp_path / "texts.jsonl").read_text())) == 5


def test_without_a_terminal_progress_is_a_line_now_and_then(monkeypatch, models):
    monkeypatch.setattr("specens.cli.progress.FIRST_GAP", 0.01)
    result = run("plan", *models, "--prompt", "w5", *JOB, "--repeats", "1", "--longest", "2")
    assert result.exit_code == 0
    assert "s)" in result.stderr
    assert 1 <= result.stderr.count("\n") < 20


@pytest.mark.parametrize(("command", "closed", "code"), [("generate", ">&-", 0), ("show -", "<&- 2>&-", 2)])
def test_a_stream_that_the_shell_closed_is_nowhere(models, command, closed, code):
    job = shlex.join([*models, *JOB, "--prompt", "w5"]) if command == "generate" else ""  # `show` loads no models
    line = f"{shlex.join(SPECENS)} {command} {job} {closed}"
    ran = subprocess.run(["sh", "-c", line], capture_output=True, text=True, timeout=120, check=False)
    assert ran.returncode == code, ran.stderr
    assert "Traceback" not in ran.stderr
    assert ("6 tokens in" in ran.stderr) is (command == "generate")


def test_loading_shows_its_steps_and_keeps_its_warnings():
    console, logger = Console(file=io.StringIO(), force_terminal=True, width=80), logging.getLogger(load.__name__)
    with loading(console, "loading a"):
        logger.warning("converting a.gguf")
        logger.info("a.gguf: writing the copy, step 3 of 3")
        time.sleep(0.2)  # two pictures of a terminal
    shown = console.file.getvalue()
    assert "converting a.gguf" in shown
    assert "a.gguf: writing the copy, step 3 of 3" in shown
    assert not logger.handlers
