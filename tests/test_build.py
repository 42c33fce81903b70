"""What was built, what is usable, and that what is not says why."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import specens_kernels
from specens_kernels import _host, backends, uniforms
from specens_kernels.backend import _load_library

BATCH = torch.arange(4)

REPORT = """
import json
import torch
from specens_kernels import backends, uniforms
batch = torch.arange(4)
error = None
try:
    uniforms(batch, batch, backend="{backend}")
except RuntimeError as raised:
    error = str(raised)
print(json.dumps([{{name: info.reason for name, info in backends().items()}}, error, uniforms(batch, batch).tolist()]))
"""


def library_path(name: str) -> Path | None:
    return next((path for folder in specens_kernels.__path__ if (path := Path(folder, name)).is_file()), None)


def report(before: str, backend: str, **environment: str) -> tuple[dict[str, str | None], str, list[float]]:
    """Reasons, the error of a call that names `backend`, and the coins of one that names none, in a fresh process."""
    code = before + REPORT.format(backend=backend)
    inherited = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    result = subprocess.run(
        [sys.executable, "-c", code], env=inherited | environment, capture_output=True, text=True, check=True
    )
    return tuple(json.loads(result.stdout))


def test_backends_are_reported_with_devices_or_a_reason():
    infos = backends()
    assert list(infos) == ["reference", "cpp", "triton", "cuda"]
    for name, info in infos.items():
        assert info.name == name
        assert bool(info.devices) == (info.reason is None), info
    assert "cpu" in infos["reference"].devices
    assert "cpu" in infos["cpp"].devices


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is here")
def test_without_a_gpu_that_is_the_reason():
    reasons, error, _ = report("", "triton")
    assert "no GPU" in reasons["triton"]
    assert "CUDA" in reasons["cuda"]
    assert "TRITON_INTERPRET=1" in error


def test_the_interpreter_makes_triton_usable_on_the_cpu():
    reasons, error, _ = report("", "triton", TRITON_INTERPRET="1")
    assert reasons["triton"] is None
    assert error is None


def test_an_unbuilt_extension_says_so_and_the_reference_serves():
    hide = """
import pathlib
exists = pathlib.Path.is_file
pathlib.Path.is_file = lambda path: path.name != "_C.so" and exists(path)
"""
    reasons, error, coins = report(hide, "cpp")
    assert reasons["cpp"] == "not built: the package has no _C.so"
    assert error == "uniforms: backend 'cpp' cannot run on cpu: not built: the package has no _C.so"
    assert coins == uniforms(BATCH, BATCH).tolist()


def test_an_extension_that_does_not_load_gives_the_text_of_the_loader():
    refuse = """
import torch
def refuse(path):
    raise OSError("undefined symbol: from_another_version")
torch.ops.load_library = refuse
"""
    reasons, error, coins = report(refuse, "cpp")
    assert reasons["cpp"] == "_C.so could not be loaded: undefined symbol: from_another_version"
    assert reasons["cpp"] in error
    assert coins == uniforms(BATCH, BATCH).tolist()


def test_a_triton_that_is_too_old_says_so():
    old = (
        "import sys, types\nsys.modules['triton'] = triton = types.ModuleType('triton')\ntriton.__version__ = '3.6.0'\n"
    )
    reasons, error, _ = report(old, "triton")
    assert reasons["triton"] == "Triton 3.6.0 cannot compile the kernels: 3.7 or newer can"
    assert reasons["triton"] in error


def test_missing_triton_says_so():
    hide = "import sys\nsys.modules['triton'] = None\n"
    reasons, error, _ = report(hide, "triton")
    assert "Triton is not installed" in reasons["triton"]
    assert "Triton is not installed" in error


def test_a_file_that_is_no_library_gives_the_text_of_the_loader(tmp_path):
    (tmp_path / "_C.so").write_bytes(b"not a library")
    assert "_C.so could not be loaded" in _load_library("_C.so", [str(tmp_path)])
    assert _load_library("_C.so", [str(tmp_path / "nowhere")]) == "not built: the package has no _C.so"


def test_the_environment_variable_chooses_the_backend(monkeypatch):
    monkeypatch.setattr(specens_kernels.backend, "CHOSEN_BACKEND", "no_such_backend")
    with pytest.raises(ValueError, match=r"^SPECENS_BACKEND: expected .*got 'no_such_backend'"):
        uniforms(BATCH, BATCH)
    assert torch.equal(uniforms(BATCH, BATCH, backend="cpp"), uniforms(BATCH, BATCH, backend="reference"))

    calls = []
    table = specens_kernels.ops.uniforms.IMPLEMENTATIONS
    reference = table["reference"]
    monkeypatch.setitem(table, "reference", lambda *arguments: calls.append(1) or reference(*arguments))
    monkeypatch.setattr(specens_kernels.backend, "CHOSEN_BACKEND", "reference")
    uniforms(BATCH, BATCH)
    assert calls == [1]
    monkeypatch.setattr(specens_kernels.backend, "CHOSEN_BACKEND", None)
    uniforms(BATCH, BATCH)
    assert calls == [1]


def test_the_build_describes_itself():
    info = _host.build_info()
    assert info["version"] == specens_kernels.__version__
    assert info["instruction_set"] in info["instruction_sets"]
    assert "plain" in info["instruction_sets"]
    assert info["compiler"]
    major, minor = (int(part) for part in info["torch_headers"].split(".")[:2])
    assert (major, minor) >= (2, 11)
    assert bool(info["cuda_architectures"]) == (library_path("_C_cuda.so") is not None)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads ELF files")
@pytest.mark.parametrize("name", ["_C.so", "_C_cuda.so"])
def test_an_extension_needs_one_library_of_torch_and_no_path_to_it(name):
    path = library_path(name)
    if path is None:
        assert not _host.build_info()["cuda_architectures"], "the build says that it made CUDA kernels"
        assert name == "_C_cuda.so", "_C.so is not built"
        return
    dynamic = subprocess.run(["readelf", "-d", path], capture_output=True, text=True, check=True).stdout
    needed = [line.split("[")[1].rstrip("]") for line in dynamic.splitlines() if "(NEEDED)" in line]
    assert [library for library in needed if "torch" in library or "c10" in library or "cuda" in library] == [
        "libtorch_cpu.so"
    ]
    assert "RPATH" not in dynamic
    assert "RUNPATH" not in dynamic
