"""What a release and its hosting read: one version, workflows that call what is there, a template for reports."""

from __future__ import annotations

import re
from importlib import metadata
from pathlib import Path

import pytest
import yaml

from specens_kernels import _host

try:
    import tomllib
except ModuleNotFoundError:  # Python 3.10, where pytest brings it
    import tomli as tomllib

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))


def test_the_version_is_one():
    version = PROJECT["project"]["version"]
    assert yaml.safe_load((ROOT / "CITATION.cff").read_text())["version"] == version
    assert metadata.version("specens-kernels") == version == _host.build_info()["version"]
    assert re.search(rf"^## {re.escape(version)}", (ROOT / "CHANGELOG.md").read_text(), re.M)


def test_the_page_on_a_package_index_holds_no_relative_link():
    page = metadata.metadata("specens-kernels").get_payload()
    readme = (ROOT / "README.md").read_text()
    assert page.startswith("# specens-kernels")
    assert re.findall(r"\]\((?!https?://)|\]\[", page) == []
    assert re.findall(r"^#+ .*", page, re.M) == re.findall(r"^#+ .*", readme, re.M)
    assert 0.8 * len(readme) < len(page) < len(readme)


def test_there_are_workflows_for_lint_tests_wheels_and_docs():
    assert {path.stem for path in WORKFLOWS} == {"lint", "tests", "wheels", "docs"}


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_a_workflow_calls_targets_and_actions_that_are_there(path):
    workflow = yaml.safe_load(path.read_text())
    steps = [step for job in workflow["jobs"].values() for step in job["steps"]]
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.M))
    assert {name for step in steps for name in re.findall(r"make ([\w-]+)", step.get("run", ""))} <= targets
    local = [step["uses"] for step in steps if step.get("uses", "").startswith("./")]
    assert all((ROOT / name / "action.yml").is_file() for name in local)
    assert workflow["permissions"]  # no more than it needs


def test_wheels_are_built_for_each_python_and_against_the_oldest_torch():
    settings = PROJECT["tool"]["cibuildwheel"]
    oldest = re.search(r"3\.(\d+)", PROJECT["project"]["requires-python"])[1]
    assert settings["build"].split()[0] == f"cp3{oldest}-*"
    required = next(line for line in PROJECT["project"]["dependencies"] if line.startswith("torch"))
    assert required.replace(">=", "==") in settings["before-build"]


def test_the_issue_template_asks_for_the_report_of_the_doctor():
    template = yaml.safe_load((ROOT / ".github" / "ISSUE_TEMPLATE" / "fault.yml").read_text())
    report = next(field for field in template["body"] if field["id"] == "report")
    assert report["attributes"]["label"] == "specens doctor --report"
    assert report["validations"]["required"]
