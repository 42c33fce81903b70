"""examples/c: the C program writes the text of the Python one."""

from __future__ import annotations

import os
import re
import runpy
import shutil
import subprocess
import sys
from pathlib import Path

import torch

from specens_kernels import Sampling

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"


def test_the_commands_in_the_c_decoder_write_the_text_of_the_python_decoder(tmp_path):
    comment = (EXAMPLES / "c" / "batched_decoder.c").read_text().partition("*/")[0]
    commands = "\n".join(line for line in comment.splitlines() if line.startswith(" " * 7))
    strict = commands.replace("cc ", "cc -std=c11 -Wall -Wextra -pedantic -Werror ").replace(
        "examples/", f"{EXAMPLES}/"
    )
    assert "-Werror" in strict
    shell = f'python() {{ "{sys.executable}" "$@"; }}\nset -e\n{strict}'
    found = subprocess.run(["sh", "-c", shell], cwd=tmp_path, capture_output=True, text=True, check=True).stdout
    decoder = runpy.run_path(str(EXAMPLES / "batched_decoder.py"))
    lengths, ends = torch.tensor([3, 9, 5, 2]), torch.tensor([60, 40, 80, 100])
    text = torch.randint(decoder["VOCAB"], (4, decoder["SLOTS"]), generator=torch.Generator().manual_seed(1))
    models = [decoder["ToyModel"](width=width, batch=4) for width in (16, 14)]
    decoder["generate"](*models, text, lengths, ends, Sampling(temperature=0.8), seeds=torch.arange(4))
    rows = [" ".join(map(str, row[:end].tolist())) for row, end in zip(text, ends, strict=True)]
    assert found.splitlines() == rows


def test_the_commands_of_the_page_build_it_by_cmake(tmp_path):
    page = (ROOT / "docs" / "embedding.md").read_text()
    (project,) = re.findall(r"^```cmake\n(.*?)^```$", page, re.DOTALL | re.MULTILINE)
    commands = re.search(r"^```bash\n(cmake -B .*?)^```$", page, re.DOTALL | re.MULTILINE)[1]
    (tmp_path / "CMakeLists.txt").write_text(project)
    shutil.copy(EXAMPLES / "c" / "batched_decoder.c", tmp_path)
    shell = f'python() {{ "{sys.executable}" "$@"; }}\nset -e\n{commands}'
    path = os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"]))  # where pip puts cmake
    subprocess.run(["sh", "-c", shell], cwd=tmp_path, env={**os.environ, "PATH": path}, capture_output=True, check=True)
    assert (tmp_path / "build" / "decoder").is_file()
