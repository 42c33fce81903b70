"""The site: every public name is on it, figures and tables are those of the sources, it builds without a warning."""

from __future__ import annotations

import importlib
import re
import subprocess
import sys
from pathlib import Path

import pytest
import specens

import specens_kernels

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
TOOLS = [ROOT / "build" / "docs-tools" / "bin" / "python", Path(sys.executable)]


@pytest.fixture
def site(monkeypatch):
    """A module of docs/site by its name."""
    monkeypatch.syspath_prepend(str(DOCS / "site"))
    yield importlib.import_module
    for name in ("figures", "tables", "header", "command_line"):
        sys.modules.pop(name, None)


@pytest.mark.parametrize(
    ("package", "page"), [(specens_kernels, "kernels"), (specens, "driver")], ids=["kernels", "driver"]
)
def test_every_public_name_has_its_entry(package, page):
    text = (DOCS / "api" / f"{page}.md").read_text()
    shown = {name.rsplit(".", 1)[1] for name in re.findall(rf"^::: ({package.__name__}\.[\w.]+)", text, re.M)}
    assert set(package.__all__) - {"__version__"} <= shown


def test_figures_are_what_the_script_draws_and_each_is_shown(site):
    figures = site("figures")
    committed = {path.stem: path.read_text() for path in figures.FOLDER.glob("*.svg")}
    drawn = {name: made().svg() for name, made in figures.FIGURES.items()}
    assert {name: text for name, text in committed.items() if name in drawn} == drawn
    pages = "".join(path.read_text() for path in DOCS.rglob("*.md"))
    assert [name for name in committed if f"figures/{name}.svg" not in pages] == []


def test_tables_come_from_the_results_and_each_is_shown_with_its_command(site):
    tables = site("tables")
    page = (DOCS / "performance.md").read_text()
    made = {name: make() for name, make in tables.TABLES.items()}
    measured = {name: text for name, text in made.items() if text != tables.UNMEASURED}
    assert len(measured) >= 5
    for name, text in measured.items():
        lines = text.splitlines()
        widths = {line.count("|") for line in lines if line.startswith("|")}
        assert len(widths) == 1
        assert len(lines) > 5
        before = page.split(f"<!-- made: {name} -->")[0]
        assert re.search(r"python -m bench|bench/gpu/run.sh", before.split("<!-- made")[-1])


def test_a_table_without_the_runs_that_others_are_compared_with_leaves_the_comparison_out(site, monkeypatch):
    tables = site("tables")
    whole, measured = tables.everyday(), tables.rows("everyday-cpu.jsonl")
    plain = next(run["engine"] for run in measured if run["kind"] == "text" and run["drafts"] == "none")
    left = [run for run in measured if (run["engine"], run.get("drafts")) != (plain, "none")]
    monkeypatch.setattr(tables, "rows", lambda _: left)
    column = _cells(whole)[0].index("texts of the seed without drafts")
    compared = [row[column] for row in _cells(tables.everyday()) if row[0].startswith(plain)]
    assert compared
    assert set(compared) == {"-"}


def test_readme_tells_what_was_measured_of_verify_chain(site):
    """Its rows are rows of the page, of drafts that are not all accepted; it tells the extremes of all."""
    readme = (ROOT / "README.md").read_text()
    head, _, *body = _cells(site("tables").verify_chain())
    page = [dict(zip(head, row, strict=True)) for row in body]
    names, _, *shown = _cells(readme[readme.index("| batch, vocabulary |") :].partition("\n\n")[0])
    measured = [[row[name].split(" / ")[0].replace("-", "takes one request") for name in names] for row in page]
    assert len(shown) >= 4
    assert [row for row in shown if row not in measured] == []
    for name, digits in (("transformers", 0), ("verify_chain", 1)):
        ratios = [float(cell) for row in page for cell in row[name].split(" / ") if cell != "-"]
        told = [f"{ratio:.{digits}f}".removeprefix("0") for ratio in (min(ratios), max(ratios))]
        assert f"{' to '.join(told)} times as long as one read" in readme


def _cells(table: str) -> list[list[str]]:
    return [[cell.strip() for cell in line.split("|")[1:-1]] for line in table.splitlines() if "|" in line]


def test_the_command_line_page_tells_every_option(site):
    text = site("command_line").markdown()
    assert {"## specens generate", "## specens doctor"} <= set(text.splitlines())
    assert "`--max-new-tokens`" in text


def test_the_c_page_tells_every_function(site):
    header = site("header")
    text = header.markdown()
    names = header.functions(header.header().read_text())
    assert len(names) > 20
    assert [name for name in names if f"## {name}\n" not in text] == []


def has_mkdocs(python: Path) -> bool:
    return not subprocess.run(
        [python, "-c", "import mkdocs, mkdocstrings"], capture_output=True, check=False
    ).returncode


def test_the_site_builds_without_a_warning(tmp_path):
    """With the tools of `make docs`, which .ci/run calls; where they are missing it says so."""
    found = [path for path in TOOLS if path.exists() and has_mkdocs(path)]
    if not found:
        pytest.skip("mkdocs is not installed: make docs installs it, and builds the site")
    command = [found[0], "-m", "mkdocs", "build", "--strict", "--site-dir", tmp_path]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "api" / "kernels" / "index.html").is_file()
