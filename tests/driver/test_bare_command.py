"""The command after `pip install .` alone, without the extra `driver`: doctor works, the rest says what is missing."""

from __future__ import annotations

import importlib.metadata
import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console
from specens.cli import bare
from specens.cli.doctor import Fact, report_table

# Imports of what the extra brings fail, as where it is not installed.
WITHOUT = """
import sys
class Hidden:
    def find_spec(self, name, path=None, target=None):
        if name in {hidden!r}:
            raise ModuleNotFoundError("No module named " + repr(name), name=name)
sys.meta_path.insert(0, Hidden())
import importlib.util
find = importlib.util.find_spec
importlib.util.find_spec = lambda name, package=None: None if name in {hidden!r} else find(name, package)
sys.argv = ["specens", *{arguments!r}]
from specens.__main__ import main
main()
"""
COMMANDS = ["generate", "compare", "plan", "show", "methods", "--help", ""]


def run(*arguments: str, hidden: tuple[str, ...] = bare.DRIVER) -> subprocess.CompletedProcess[str]:
    code = WITHOUT.format(hidden=hidden, arguments=arguments)
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)


def test_these_are_the_packages_of_the_extra():
    requirements = importlib.metadata.requires("specens-kernels") or []
    listed = {re.split(r"[^\w-]", line)[0] for line in requirements if re.search(r"; extra == .driver.$", line)}
    assert listed == set(bare.DRIVER)


def test_doctor_works():
    result = run("doctor")
    assert (result.returncode, result.stderr) == (0, "")
    assert re.search(r"^torch +yes ", result.stdout, re.M)
    assert re.search(r"^backend cpp +yes ", result.stdout, re.M)


def test_doctor_reports_for_an_issue():
    result = run("doctor", "--report")
    assert (result.returncode, result.stderr) == (0, "")
    assert re.fullmatch(r"```text\n.*^torch +yes .*\n```\n", result.stdout, re.S | re.M)


def test_doctor_prints_json_where_only_transformers_is_missing():
    result = run("doctor", "--json", hidden=("transformers",))
    facts = {fact["name"]: fact for fact in json.loads(result.stdout)["facts"]}
    assert facts["backend cpp"]["ok"]


@pytest.mark.parametrize("command", COMMANDS)
def test_every_other_command_says_what_to_install_in_one_line(command):
    result = run(*[command] * bool(command))
    assert result.returncode == 1
    assert result.stdout == ""
    assert result.stderr.count("\n") == 1
    assert "pip install 'specens-kernels[driver]'" in result.stderr
    assert "transformers, typer, rich, safetensors" in result.stderr


def test_the_line_that_installs_it_needs_no_index_for_this_package_and_no_folder(tmp_path):
    """So one line serves a wheel, a clone and an editable installation; README has it for later, too."""
    options = ["install", "--dry-run", "--no-index", "--no-deps", shlex.split(bare.INSTALL_DRIVER)[-1]]
    command = [sys.executable, "-m", "pip", *options]
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    assert "already satisfied: specens-kernels[driver]" in result.stdout
    assert bare.INSTALL_DRIVER in (Path(__file__).parents[2] / "README.md").read_text()


def test_what_is_missing_alone_is_named():
    assert "not installed: rich." in run("generate", "model", hidden=("rich",)).stderr


def test_the_table_shows_the_brackets_of_an_extra():
    console = Console(width=100)
    with console.capture() as shown:
        console.print(report_table([Fact("typer", "pip install 'x[driver]'", False)]))
    assert "x[driver]" in shown.get()
