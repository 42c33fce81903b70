"""README as a new user runs it: every block of Python and every line of the command, as they stand, on small models."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
from driver.tiny_models import relative_of, tiny_llama, tiny_tokenizer
from specens.cli.main import app
from transformers import GenerationConfig
from typer.testing import CliRunner

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"^```(\w*)\n(.*?)^```$", README, flags=re.DOTALL | re.MULTILINE)
PYTHON = [block for language, block in BLOCKS if language == "python"]
COMMANDS = [line for _, block in BLOCKS for line in block.splitlines() if line.startswith("specens ")]
CHAT = "{% for message in messages %}{{ message['content'] }} {% endfor %}w1"
SMOLLM2 = [f"HuggingFaceTB/SmolLM2-{size}-Instruct" for size in ("135M", "360M")]
FOLDERS = (*SMOLLM2, "MODEL", "OTHER", "SMALLER", "AMATEUR")


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


@pytest.mark.usefixtures("there")
def test_the_python_of_readme_runs_as_it_stands_in_order(capsys, recwarn):
    names: dict[str, Any] = {}
    for block in PYTHON:
        exec(block, names)
    assert len(PYTHON) == 3
    assert names["verdict"].tokens.shape == (4, 6)
    out = capsys.readouterr().out
    assert "tensor([" in out
    assert re.search(r"^Generation\('.*', 128 tokens, length, .*, seed 7\)$", out, re.M)
    assert [str(warning.message) for warning in recwarn] == []


def test_readme_fits_a_few_screens_and_its_links_lead_somewhere():
    assert len(README.splitlines()) <= 170
    links = [link.partition("#") for link in re.findall(r"\]\(([^)\s]+)\)", README) if "://" not in link]
    headings = {re.sub(r"[^\w -]", "", line.lstrip("# ")).lower().replace(" ", "-") for line in README.splitlines()}
    assert [path for path, _, _ in links if path and not (ROOT / path).exists()] == []
    assert [anchor for path, _, anchor in links if not path and anchor not in headings] == []


@pytest.mark.parametrize("line", COMMANDS, ids=[f"{line.split()[1]}-{index}" for index, line in enumerate(COMMANDS)])
def test_each_command_of_readme_runs_as_it_stands(line, there, monkeypatch):
    monkeypatch.setattr("specens.analysis.planner.REPEATS", 1)  # simulations of each way; they take most of the time
    words = shlex.split(line, comments=True)
    while words:
        end = words.index("&&") if "&&" in words else len(words)
        result = CliRunner().invoke(app, words[1:end])
        assert result.exit_code == 0, (result.stderr, result.exception)
        assert "Warning" not in result.stderr
        words = words[end + 1 :]
    made = {"--output": "texts.jsonl", "--trace": "trace.html", "--plot": "speedup.png", "--save-config": "run.toml"}
    assert all((there / name).stat().st_size > 0 for option, name in made.items() if option in line)


def test_readme_shows_each_command():
    known = {command.name or command.callback.__name__ for command in app.registered_commands}
    assert {name for line in COMMANDS for name in re.findall(r"specens ([\w-]+)", line)} == known


def test_the_table_of_operations_names_what_the_header_of_the_c_library_declares():
    table = (
        (ROOT / "docs" / "api" / "kernels.md").read_text().split("## Operations")[1].split("\n\n")[1].splitlines()[2:]
    )
    named = {row.split("|")[1].strip(" `"): set(re.findall(r"`(specens_\w+)`", row)) for row in table}
    header = (ROOT / "csrc" / "include" / "specens.h").read_text()
    declared = set(re.findall(r"SPECENS_API [^;(]*\b(specens_\w+)\(", header))
    assert set().union(*named.values()) <= declared
    assert {name for name, functions in named.items() if not functions} == {"tree_attention"}
