"""The programs of examples/ensembles and the cells of the notebook run as they stand, on small models."""

from __future__ import annotations

import json
import runpy
import sys
from pathlib import Path

import pytest
from driver.test_grammars import TOKENIZER
from driver.tiny_models import relative_of, tiny_llama

EXAMPLES = Path(__file__).parents[2] / "examples"
PROGRAMS = sorted((EXAMPLES / "ensembles").glob("*.py"))


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    first = tiny_llama(0, vocab=257)
    for name, model in (("one", first), ("two", relative_of(first, 1, noise=0.2))):
        model.save_pretrained(folder / name)
        TOKENIZER.save_pretrained(folder / name)
    return [str(folder / "one"), str(folder / "two")]


def test_the_page_names_every_example():
    page = (EXAMPLES / "README.md").read_text()
    assert len(PROGRAMS) == 7
    assert [path.name for path in PROGRAMS if f"(ensembles/{path.name})" not in page] == []


@pytest.mark.parametrize("path", PROGRAMS, ids=lambda path: path.stem)
def test_a_program_runs_as_it_stands(path, models, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", [str(path), *models])
    runpy.run_path(str(path), run_name="__main__")
    assert len(capsys.readouterr().out) > 20


def test_the_cells_of_the_notebook_run_in_order(models, capsys):
    notebook = json.loads((EXAMPLES / "notebook.ipynb").read_text())
    cells = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    names = {}
    for cell in cells:
        assert cell["outputs"] == []
        exec("".join(cell["source"]), names)
        if "MODELS" in names:
            names["MODELS"] = models
    assert capsys.readouterr().out.splitlines()[-1] == "True"
