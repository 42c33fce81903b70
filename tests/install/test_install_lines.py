"""Every pip line of README and the Makefile resolves where pip knows the public index only (`make test-install`).

Dry runs of pip, which is recent enough to read what packages require without downloading them.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
# What a machine may have beside the public index, and the releases that it may prefer there.
OWN_SETTINGS = ("PIP_EXTRA_INDEX_URL", "PIP_FIND_LINKS", "PIP_CONSTRAINT", "PIP_NO_INDEX")
NO_CONNECTION = ("NewConnectionError", "NameResolutionError", "ConnectTimeoutError", "ProxyError", "SSLError")
SECONDS = 300


def readme_lines() -> list[str]:
    """The arguments of `pip install` in code blocks and in the text."""
    text = (ROOT / "README.md").read_text()
    return [line.split("  #")[0].strip() for line in re.findall(r"(?:^|`)pip install ([^`\n]+)", text, re.M)]


def makefile_lines() -> list[str]:
    """The arguments of what the Makefile installs, its variables filled in."""
    text = (ROOT / "Makefile").read_text().replace("\\\n", " ")
    variables = dict(re.findall(r"^(\w+) [:?]= (.*)$", text, re.M))
    recipes = re.findall(r"\$\((?:VLLM_)?PIP\) install ([^&|;\n]+)", text.replace("triton==$*", "triton"))
    for name, value in variables.items():
        recipes = [recipe.replace(f"$({name})", value) for recipe in recipes]
    return recipes


def dry_run(arguments: list[str]) -> tuple[subprocess.CompletedProcess[str], dict[str, str]]:
    """What pip says, and the releases that it would install where nothing is installed."""
    settings = {name: value for name, value in os.environ.items() if name not in OWN_SETTINGS}
    options = ["--dry-run", "--ignore-installed", "--use-feature=fast-deps", "--quiet", "--report", "-"]
    if "--no-build-isolation" not in arguments:
        options.append("--no-build-isolation")  # no torch is fetched to read this package's own requirements
    command = [sys.executable, "-m", "pip", "install", *options, *arguments]
    result = subprocess.run(
        command,
        cwd=ROOT,
        env=settings | {"PIP_CONFIG_FILE": os.devnull},
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
    )
    if any(sign in result.stderr for sign in NO_CONNECTION):
        pytest.fail(f"NOTHING WAS CHECKED: the package index cannot be reached\n{result.stderr}", pytrace=False)
    items = json.loads(result.stdout)["install"] if result.returncode == 0 else []
    return result, {item["metadata"]["name"].lower(): item["metadata"]["version"] for item in items}


def arguments_of(line: str) -> list[str]:
    """Without files that an earlier step writes, and settings of builds, of which there is none."""
    line = re.sub(r"-r \S+|--config-settings \S+|--target \S+|--upgrade", "", line)
    return shlex.split(line)


LINES = sorted({" ".join(map(shlex.quote, arguments_of(line))) for line in readme_lines() + makefile_lines()})


def test_the_lines_are_found():
    assert "torch" in LINES
    assert "-c constraints.txt triton" in LINES
    assert len(LINES) >= 10


@pytest.mark.parametrize("line", LINES)
def test_a_line_resolves(line):
    result, _ = dry_run(shlex.split(line))
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize(
    ("line", "triton"),
    [
        ("-c constraints.txt torch triton '.[test]'", "3.7.1"),
        ("torch==2.11.0 '.[driver,triton]'", "3.6.0"),
    ],
    ids=["what the Makefile installs", "the oldest torch"],
)
def test_the_lines_together_take_the_triton_that_torch_brings(line, triton):
    result, releases = dry_run(shlex.split(line))
    assert result.returncode == 0, result.stderr
    assert releases["triton"].startswith(triton)
