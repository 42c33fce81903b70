"""The command `specens chat`, with tiny saved models whose chat template joins what was said."""

import json
import os
import pty
import subprocess
import sys

import pytest
from driver.tiny_models import save_pair, tiny_tokenizer
from specens.cli.main import app
from specens.decoding.scorer import Scorer
from typer.testing import CliRunner

TEMPLATE = (
    "{% for m in messages %}w{{ {'system': 1, 'user': 2, 'assistant': 3}[m['role']] }} {{ m['content'] }} "
    "{% endfor %}w3"
)
JOB = ["--max-new-tokens", "6", "--seed", "1", "--dtype", "fp32"]


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    paths = save_pair(tmp_path_factory.mktemp("chat"))
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = TEMPLATE
    for path in paths:
        tokenizer.save_pretrained(path)
    return paths


def run(*arguments, **settings):
    return CliRunner().invoke(app, [str(argument) for argument in arguments], **settings)


def turns(result):
    assert result.exit_code == 0, result.stderr
    return [json.loads(line) for line in result.stdout.splitlines()]


def test_each_line_is_a_turn_that_is_read_with_all_before_it(models):
    first, second = turns(run("chat", *models, *JOB, "--json", "--system", "w9", input="w5 w8\n\n  w4\n"))
    assert (first["turn"], first["prompt"], second["turn"], second["prompt"]) == (1, "w5 w8", 2, "w4")
    whole = f"w1 w9 w2 w5 w8 w3 {first['text']} w2 w4 w3"
    for prompt, turn in (("w1 w9 w2 w5 w8 w3", first), (whole, second)):
        job = ["--prompt", prompt, "--no-chat", *JOB, "--seed", turn["seed"], "--json"]
        assert json.loads(run("generate", *models, *job).stdout)["tokens"] == turn["tokens"]
    assert first["seed"] == 1 != second["seed"]


def test_what_is_shown_are_the_answers_streamed_or_not(models):
    answers = "".join(turn["text"] + "\n" for turn in turns(run("chat", *models, *JOB, "--json", input="w5\nw4\n")))
    for options in ((), ("--no-stream",), ("--preset", "speculative-ensemble")):
        result = run("chat", *models, *JOB, *options, input="w5\nw4\n")
        assert result.stdout == answers
        assert result.stderr.count("6 tokens in") == 2


def test_reset_forgets_and_exit_ends(models):
    first, again = turns(run("chat", *models, *JOB, "--json", input="w5\n/reset\nw5\n/exit\nw5\n"))
    assert first["tokens"] == again["tokens"]
    assert (first["turn"], again["turn"]) == (1, 1)
    wrong = run("chat", *models, *JOB, input="/restart\n")
    assert wrong.exit_code == 2
    assert "/restart: no such command; /reset forgets what was said, /exit ends" in wrong.stderr


def test_ctrl_c_ends_an_answer_and_a_piped_chat(monkeypatch, models):
    score, calls = Scorer.score, []

    def interrupted_score(self, requests):
        calls.append(1)
        if len(calls) == 4:
            raise KeyboardInterrupt
        return score(self, requests)

    monkeypatch.setattr(Scorer, "score", interrupted_score)
    result = run("chat", *models, *JOB, "--json", input="w5\nw4\n")
    assert result.exit_code == 130
    assert json.loads(result.stdout)["interrupted"]


def test_a_chat_needs_a_chat_template(tmp_path):
    result = run("chat", *save_pair(tmp_path), *JOB, input="w5\n")
    assert result.exit_code == 2
    assert "MODELS: expected a tokenizer with a chat template, got none" in result.stderr


def test_at_a_terminal_an_error_is_told_and_the_chat_goes_on(models):
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "specens", "chat", *map(str, models), *JOB, "--json"]
    with subprocess.Popen(command, stdin=theirs, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        os.close(theirs)
        os.write(ours, b"/restart\nw5\n\x04")
        output, errors = process.communicate(timeout=120)
    os.close(ours)
    assert process.returncode == 0, errors
    assert [json.loads(line)["prompt"] for line in output.splitlines()] == ["w5"]
    assert "Error: /restart: no such command" in errors
    assert "/reset forgets what was said, /exit ends, as Ctrl-D does. Ctrl-C ends an answer." in errors
