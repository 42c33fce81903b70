"""README as a new user runs it: every block of Python and every line of the command, as they stand, on small models."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import torch
from driver.tiny_models import relative_of, tiny_llama, tiny_tokenizer
from specens.cli.main import app
from transformers import GenerationConfig
from typer.testing import CliRunner

README = (Path(__file__).parents[1] / "README.md").read_text()
BLOCKS = re.findall(r"^```(\w*)\n(.*?)^```$", README, flags=re.DOTALL | re.MULTILINE)
PYTHON = [block for language, block in BLOCKS if language == "python"]
COMMANDS = [line for _, block in BLOCKS for line in block.splitlines() if line.startswith("specens ")]
CHAT = "{% for message in messages %}{{ message['content'] }} {% endfor %}w1"
FOLDERS = ("path/to/model", "path/to/other", "Qwen/Qwen2.5-0.5B-Instruct", "MODEL", "OTHER", "SMALLER", "AMATEUR")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Where the names that README gives are small models, and short texts are what their configs ask for."""
    folder = tmp_path_factory.mktemp("readme")
    first, tokenizer = tiny_llama(0), tiny_tokenizer()
    tokenizer.chat_template = CHAT
    for seed, name in enumerate(FOLDERS):
        model = relative_of(first, seed, noise=0.2)
        model.generation_config = GenerationConfig(max_new_tokens=12)
        model.save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)
    lines = [json.dumps({"prompt": f"w{number} w3"}) for number in range(3)]
    (folder / "prompts.jsonl").write_text("\n".join(lines))
    return folder


@pytest.fixture
def there(folder, monkeypatch):
    monkeypatch.chdir(folder)
    return folder


def given_names() -> dict[str, Any]:
    """What the blocks take as there: models, prompts and the ids of one."""
    first = tiny_llama(0)
    names = ("base", "expert", "anti_expert", "small", "large", "model", "draft_model", "other")
    models = {name: relative_of(first, seed, noise=0.2) for seed, name in enumerate(names)}
    for model in models.values():
        model.generation_config = GenerationConfig(max_new_tokens=12, eos_token_id=None, pad_token_id=0)
    ids = torch.tensor([[5, 3, 8]])
    return models | {"prompts": ["w1 w2", "w3"], "inputs": {"input_ids": ids, "attention_mask": torch.ones_like(ids)}}


@pytest.mark.usefixtures("there")
def test_the_python_of_readme_runs_as_it_stands(capsys, recwarn):
    names = given_names()
    for block in PYTHON:
        exec(block, names)
    assert names["verdict"].path is not None
    assert len(re.findall(r"^[01] w", capsys.readouterr().out, re.M)) == 2 * 4
    assert [str(warning.message) for warning in recwarn] == []


@pytest.mark.parametrize("line", COMMANDS, ids=[f"{line.split()[1]}-{place}" for place, line in enumerate(COMMANDS)])
def test_each_command_of_readme_runs_as_it_stands(line, there, monkeypatch):
    monkeypatch.setattr("specens.analysis.planner.REPEATS", 1)  # simulations of each way; they take most of the time
    words = shlex.split(line, comments=True)
    while words:
        end = words.index("&&") if "&&" in words else len(words)
        result = CliRunner().invoke(app, words[1:end])
        assert result.exit_code == 0, (result.stderr, result.exception)
        assert "Warning" not in result.stderr
        words = words[end + 1 :]
    made = {"--output": "texts.jsonl", "--trace": "trace.html", "--plot": "speedup.png"}
    assert all((there / name).stat().st_size > 0 for option, name in made.items() if option in line)


def test_readme_shows_each_command():
    known = {command.name or command.callback.__name__ for command in app.registered_commands}
    assert {name for line in COMMANDS for name in re.findall(r"specens (\w+)", line)} == known


def test_the_table_of_operations_names_what_the_header_of_the_c_library_declares():
    table = README.split("## Operations")[1].split("\n\n")[1].splitlines()[2:]
    named = {row.split("|")[1].strip(" `"): set(re.findall(r"`(specens_\w+)`", row)) for row in table}
    header = (Path(__file__).parents[1] / "csrc" / "include" / "specens.h").read_text()
    declared = set(re.findall(r"SPECENS_API [^;(]*\b(specens_\w+)\(", header))
    assert set().union(*named.values()) <= declared
    assert {name for name, functions in named.items() if not functions} == {"tree_attention"}
