"""An operation has its files under one name everywhere."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import specens_kernels

ROOT = Path(__file__).parents[1]
OPERATIONS = sorted(folder.parent.name for folder in (ROOT / "specens_kernels" / "ops").glob("*/__init__.py"))
HOST_OBJECTS = sorted(path.parent.name for path in (ROOT / "csrc").glob("*/bindings.cpp"))


def test_there_are_operations():
    assert "uniforms" in OPERATIONS


@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize(
    "path", ["specens_kernels/ops/{}/reference.py", "tests/ops/test_{}.py", "bench/ops/{}.py"], ids=lambda path: path
)
def test_an_operation_has_its_reference_test_and_bench(operation: str, path: str):
    assert (ROOT / path.format(operation)).is_file(), f"{operation} lacks {path.format(operation)}"


@pytest.mark.parametrize("operation", OPERATIONS)
def test_an_operation_is_a_public_function_with_a_docstring(operation: str):
    assert operation in specens_kernels.__all__
    assert getattr(specens_kernels, operation).__doc__


def test_there_are_host_operations():
    assert "token_tree" in HOST_OBJECTS


@pytest.mark.parametrize("operation", HOST_OBJECTS)
def test_a_host_object_is_public_and_has_its_test_and_bench(operation: str):
    name = operation.title().replace("_", "")
    assert name in specens_kernels.__all__
    assert getattr(specens_kernels, name).__doc__
    for path in (f"tests/ops/test_{operation}.py", f"bench/ops/{operation}.py"):
        assert (ROOT / path).is_file(), f"{operation} lacks {path}"


def test_every_folder_of_operators_is_an_operation():
    folders = {path.name for path in (ROOT / "specens_kernels" / "ops").iterdir() if any(path.glob("*.py"))}
    assert folders == set(OPERATIONS)
    sources = {path.parent.name for path in (ROOT / "csrc").glob("*/*") if path.suffix in (".cpp", ".cu")}
    assert sources - {"api", "bindings", "operators", "parts"} <= {*OPERATIONS, *HOST_OBJECTS}


def test_the_way_of_a_call_names_files_that_are_there_and_no_more_than_it_says():
    page = (ROOT / "docs" / "architecture.md").read_text()
    figure = page.split("```")[1]
    for folder, ends, most in (("specens_kernels", r"py", 4), ("csrc", r"cpp|h|inc", 12)):
        part = figure[figure.index(f"{folder}/ ") :].split("csrc/ ")[0 if folder == "specens_kernels" else 1]
        named = re.findall(rf"^ +(\S+\.(?:{ends}))\b", part, flags=re.MULTILINE)
        assert len(named) == most
        assert [name for name in named if not (ROOT / folder / name).is_file()] == []
