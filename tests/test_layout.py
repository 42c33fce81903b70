"""A room opens the same doors everywhere."""

from __future__ import annotations

from pathlib import Path

import pytest

import specens_kernels

ROOT = Path(__file__).parents[1]
ROOMS = sorted(folder.parent.name for folder in (ROOT / "specens_kernels" / "ops").glob("*/__init__.py"))
HOST_ROOMS = sorted(path.parent.name for path in (ROOT / "csrc").glob("*/bindings.cpp"))


def test_there_are_rooms():
    assert "uniforms" in ROOMS


@pytest.mark.parametrize("room", ROOMS)
@pytest.mark.parametrize(
    "path", ["specens_kernels/ops/{}/reference.py", "tests/ops/test_{}.py", "bench/ops/{}.py"], ids=lambda path: path
)
def test_a_room_has_its_reference_test_and_bench(room: str, path: str):
    assert (ROOT / path.format(room)).is_file(), f"{room} lacks {path.format(room)}"


@pytest.mark.parametrize("room", ROOMS)
def test_a_room_is_a_public_function_with_a_docstring(room: str):
    assert room in specens_kernels.__all__
    assert getattr(specens_kernels, room).__doc__


def test_there_are_host_rooms():
    assert "token_tree" in HOST_ROOMS


@pytest.mark.parametrize("room", HOST_ROOMS)
def test_a_host_object_is_public_and_has_its_test_and_bench(room: str):
    name = room.title().replace("_", "")
    assert name in specens_kernels.__all__
    assert getattr(specens_kernels, name).__doc__
    for path in (f"tests/ops/test_{room}.py", f"bench/ops/{room}.py"):
        assert (ROOT / path).is_file(), f"{room} lacks {path}"


def test_every_folder_of_operators_is_a_room():
    folders = {path.name for path in (ROOT / "specens_kernels" / "ops").iterdir() if any(path.glob("*.py"))}
    assert folders == set(ROOMS)
    sources = {path.parent.name for path in (ROOT / "csrc").glob("*/*") if path.suffix in (".cpp", ".cu")}
    assert sources - {"api", "bindings", "operators", "parts"} <= {*ROOMS, *HOST_ROOMS}
