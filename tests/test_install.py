"""What is pinned and required fits what torch's public builds require; which torch a build takes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from specens_kernels.triton_release import OLDEST_TRITON

try:
    import tomllib
except ModuleNotFoundError:  # Python 3.10, where pytest brings it
    import tomli as tomllib

ROOT = Path(__file__).parents[1]
# What the public builds of torch for Linux require: Requires-Dist of their wheels.
TRITON_OF_TORCH = {
    "2.11.0": "3.6.0",
    "2.12.0": "3.7.0",
    "2.12.1": "3.7.1",
    "2.13.0": "3.7.1",
    "2.14.1": "3.8.0",
    "2.15.0": "3.9.0",
}


def requirement(name: str, extra: str | None = None) -> Requirement:
    """What the package asks for, itself or in an extra."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    lines = project["dependencies"] if extra is None else project["optional-dependencies"][extra]
    return next(line for line in map(Requirement, lines) if line.name == name)


def test_the_constraints_pin_a_torch_and_the_triton_that_it_requires():
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pins = dict(line.split("==") for line in lines if not line.startswith("#"))
    assert pins == {"torch": pins["torch"], "triton": TRITON_OF_TORCH[pins["torch"]]}


@pytest.mark.parametrize(("torch", "triton"), TRITON_OF_TORCH.items())
def test_what_the_package_requires_admits_each_torch_with_its_triton(torch, triton):
    assert requirement("torch").specifier.contains(torch)
    assert requirement("triton", "triton").specifier.contains(triton)


def test_the_oldest_triton_is_that_of_the_oldest_torch():
    oldest = ".".join(map(str, OLDEST_TRITON))
    assert str(requirement("triton", "triton").specifier) == f">={oldest}"
    assert TRITON_OF_TORCH["2.11.0"].startswith(oldest)
    assert not requirement("torch").specifier.contains("2.10.9")


@pytest.mark.parametrize(
    ("version", "taken"),
    [("2.9.1", False), ("2.10.0+cu128", False), ("2.11.0", True), ("2.13.0+cpu", True), ("3.0.0a0+git1234", True)],
)
def test_a_build_takes_a_torch_from_2_11_on(tmp_path, version, taken):
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").touch()
    (tmp_path / "torch" / "version.py").write_text(f"__all__ = []\n__version__ = '{version}'\ncuda = None\n")
    code = f"""
import sys, sysconfig
sys.path[:0] = [{str(tmp_path)!r}, {str(ROOT / "_build_backend")!r}]
sysconfig.get_path = lambda name: {str(tmp_path)!r}
import backend, torch_location
print(torch_location.torch_folder(), backend._with_torch([]))
print(torch_location.missing())
"""
    found, message = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    ).stdout.splitlines()
    folder = str(tmp_path / "torch")
    assert found == (f"{folder} []" if taken else "None ['torch>=2.11']")
    assert message == f"torch: expected 2.11 or newer to be installed for this Python, found {version} in {folder}"


def test_a_build_without_any_torch_says_so(tmp_path):
    script = str(ROOT / "_build_backend" / "torch_location.py")
    code = f"""
import runpy, sysconfig
sysconfig.get_path = lambda name: {str(tmp_path)!r}
runpy.run_path({script!r}, run_name="__main__")
"""
    result = subprocess.run([sys.executable, "-S", "-c", code], capture_output=True, text=True, check=False)
    assert result.returncode == 1
    assert result.stderr == "torch: expected 2.11 or newer to be installed for this Python, found none\n"
