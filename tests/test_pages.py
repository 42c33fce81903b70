"""README and the pages as a reader pastes them: blocks of Python in order, and commands, on small models.

What asks for another engine is marked in the page before its block, `<!-- engine: FOLDER OF ITS TESTS -->`.
"""

from __future__ import annotations

import importlib
import itertools
import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import torch
import typer
from cases import FULL
from driver.test_grammars import SCHEMA, byte_tokenizer
from driver.tiny_models import Bigram, relative_of, tiny_llama
from packaging.requirements import Requirement
from specens import SpeculativeEnsemble
from specens.cli.main import app
from test_install import tomllib
from transformers import GenerationConfig
from typer.testing import CliRunner

import bench.__main__

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
PAGES = {
    str(path.relative_to(ROOT)): path.read_text()
    for path in (
        *(ROOT / name for name in ("README.md", "CONTRIBUTING.md")),
        ROOT / "python" / "specens" / "adapters" / "vllm" / "README.md",
        *sorted(ROOT.joinpath("docs").rglob("*.md")),
    )
}
BLOCK = re.compile(r"(?:^<!-- engine: (\S+) -->\n\n?)?^```(\w*)\n(.*?)^```$", flags=re.DOTALL | re.MULTILINE)
ENGINES = {
    "tests/engines/llama_cpp": 2,
    "tests/engines/ray": 6,
    "tests/engines/vllm": 6,
    "tests/adapters": 1,
    "tests/distributed": 1,
    "tests/ops": 1,
}
CHAT = "{% for message in messages %}{{ message['content'] }} {% endfor %}w1"
SMOLLM2 = [f"HuggingFaceTB/SmolLM2-{size}-Instruct" for size in ("135M", "360M")]
FOLDERS = (*SMOLLM2, "MODEL", "OTHER", "SMALLER", "AMATEUR")
WRITE = ("--output", "--trace", "--plot", "--save-config", "--out")
LONG = ("compare", "plan")  # of README alone, and on short texts, but in `make test-full`
SHORT = [] if FULL else ["--max-new-tokens", "12"]


def blocks(page: str, *languages: str) -> list[str]:
    """The blocks of a page that run here."""
    return [code for engine, language, code in BLOCK.findall(PAGES[page]) if language in languages and not engine]


def commands(page: str) -> list[list[str]]:
    """The words of each command: what `&&` joins are several."""
    found: list[list[str]] = []
    for line in "".join(blocks(page, "bash")).replace("\\\n", " ").splitlines():
        words = shlex.split(line, comments=True)
        while words:
            end = words.index("&&") if "&&" in words else len(words)
            found, words = [*found, words[:end]], words[end + 1 :]
    return found


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Where the names that pages give are small models, and short texts are what their configs ask for."""
    folder = tmp_path_factory.mktemp("models")
    first, tokenizer = tiny_llama(0, vocab=257, num_hidden_layers=2), byte_tokenizer()
    tokenizer.chat_template = CHAT
    for seed, name in enumerate(FOLDERS):
        model = relative_of(first, seed, noise=0.2)
        model.generation_config = GenerationConfig(max_new_tokens=12)
        model.save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)
    return folder


@pytest.fixture
def there(models, tmp_path, monkeypatch):
    """A folder of its own for each page, with the models and the files that its commands read."""
    for name in {Path(name).parts[0] for name in FOLDERS}:
        (tmp_path / name).symlink_to(models / name)
    lines = [json.dumps({"prompt": f"w{number} w3"}) for number in range(3)]
    (tmp_path / "prompts.jsonl").write_text("\n".join(lines))
    (tmp_path / "person.json").write_text(json.dumps(SCHEMA))
    monkeypatch.chdir(tmp_path)
    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}.items():
        monkeypatch.setenv(name, value)  # as torchrun does for a rank alone
    return tmp_path


def checks_of_readme(names: dict[str, Any], out: str) -> None:
    assert names["verdict"].tokens.shape == (4, 6)
    assert "tensor([" in out
    assert re.search(r"^Generation\(.*, 128 tokens, length, .*, seed 7\)$", out, re.M | re.S)


def checks_of_drafters(names: dict[str, Any], out: str) -> None:
    assert len(out.splitlines()) == 4
    ensemble = SpeculativeEnsemble([Bigram(torch.eye(61) * 90)], draft_lens=3, drafter=names["Again"]())
    assert ensemble.generate([5], max_new_tokens=40, seed=0).statistics.acceptance_rate == 1.0


CHECKS = {"README.md": checks_of_readme, "docs/drafters.md": checks_of_drafters}


@pytest.mark.usefixtures("there")
@pytest.mark.parametrize("page", [page for page in PAGES if blocks(page, "python")])
def test_the_python_of_a_page_runs_as_it_stands_in_order(page, capsys, recwarn):
    names: dict[str, Any] = {"__name__": "page"}
    for block in blocks(page, "python"):
        exec(block, names)
    CHECKS.get(page, lambda *_: None)(names, capsys.readouterr().out)
    assert [str(warning.message) for warning in recwarn] == []


@pytest.mark.usefixtures("there")
@pytest.mark.parametrize("page", [page for page in PAGES if commands(page)])
def test_the_commands_of_a_page_run_or_would_be_understood(page, monkeypatch):
    """Those of specens run in order; what installs, builds or measures is taken apart."""
    monkeypatch.setattr("specens.analysis.planner.REPEATS", 1)  # simulations of each way; they take most of the time
    checks = {"pip": check_pip, ".venv/bin/pip": check_pip, "make": check_make, "python": check_python}
    for name, *words in commands(page):
        if name == "specens" and words[0] in LONG and page != "README.md" and not FULL:
            parsed = typer.main.get_command(app).commands[words[0]].make_context(name, words[1:])
            assert parsed.params
        elif name == "specens":
            run_specens([*words, *SHORT] if words[0] in LONG else words)
        elif name in checks:
            checks[name](words)
        else:  # a script, after a variable of its environment
            assert (ROOT / words[0]).is_file(), (name, words)


def run_specens(words):
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 0, (words, result.stderr, result.exception)
    assert "Warning" not in result.stderr
    assert all(Path(name).stat().st_size > 0 for option, name in itertools.pairwise(words) if option in WRITE)


def check_pip(words):
    """A requirement is torch, or this package with extras that it has; `make test-install` asks the index."""
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert words[0] == "install"
    for word in words[1:]:
        if word not in ("torch", "-e", "--no-build-isolation", "--no-deps"):
            own = Requirement(word.replace(".", "specens-kernels", 1) if word.startswith(".") else word)
            assert own.name == "specens-kernels"
            assert own.extras <= set(extras)


def check_make(words):
    targets = re.search(r"^\.PHONY: (.*)$", (ROOT / "Makefile").read_text(), re.M)[1].split()
    assert set(words) <= set(targets)


def check_python(words):
    """A file of the repository that is there, or a bench that takes these words."""
    if words[0] != "-m":
        assert (ROOT / words[0]).is_file()
        return
    name, *words = words[1:]
    if name == "bench" and words[0] in bench.__main__.COUNTS:
        return
    module = importlib.import_module("bench.__main__" if name == "bench" else name)
    command = typer.Typer(pretty_exceptions_enable=False)
    command.command()(module.main)
    typer.main.get_command(command).make_context(name, words)


def test_every_block_says_what_it_is_and_engines_are_marked():
    marked = [(engine, code) for text in PAGES.values() for engine, _, code in BLOCK.findall(text) if engine]
    assert {engine: sum(one == engine for one, _ in marked) for engine, _ in marked} == ENGINES
    assert [engine for engine in ENGINES if not (ROOT / engine).is_dir()] == []
    languages = {language for text in PAGES.values() for _, language, _ in BLOCK.findall(text)}
    assert languages == {"bash", "cmake", "python", "text", "toml"}
    fences = sum(text.count("\n```") for text in PAGES.values())
    assert fences == 2 * sum(len(BLOCK.findall(text)) for text in PAGES.values())


def test_readme_fits_a_few_screens_and_its_links_lead_somewhere():
    assert len(README.splitlines()) <= 170
    links = [link.partition("#") for link in re.findall(r"\]\(([^)\s]+)\)", README) if "://" not in link]
    headings = {re.sub(r"[^\w -]", "", line.lstrip("# ")).lower().replace(" ", "-") for line in README.splitlines()}
    assert [path for path, _, _ in links if path and not (ROOT / path).exists()] == []
    assert [anchor for path, _, anchor in links if not path and anchor not in headings] == []


def test_readme_shows_each_command():
    known = {command.name or command.callback.__name__ for command in app.registered_commands}
    assert set(re.findall(r"specens ([\w-]+)", "".join(code for _, _, code in BLOCK.findall(README)))) >= known


def test_the_table_of_operations_names_what_the_header_of_the_c_library_declares():
    table = PAGES["docs/api/kernels.md"].split("## Operations")[1].split("\n\n")[1].splitlines()[2:]
    named = {row.split("|")[1].strip(" `"): set(re.findall(r"`(specens_\w+)`", row)) for row in table}
    header = (ROOT / "csrc" / "include" / "specens.h").read_text()
    declared = set(re.findall(r"SPECENS_API [^;(]*\b(specens_\w+)\(", header))
    assert set().union(*named.values()) <= declared
    assert {name for name, functions in named.items() if not functions} == {"tree_attention"}
