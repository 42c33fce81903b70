"""What was built, what is usable, and that what is not says why."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import specens_kernels
from specens_kernels import _host, backends, triton_release, uniforms
from specens_kernels.backend import _load_library, backend_for, select

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

HIDE_TRITON = "import sys\nsys.modules['triton'] = None\n"

GPU_CALLS = """
import json
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
import specens_kernels as kernels

with FakeTensorMode():
    logits, drafts = torch.empty(2, 3, 11, device="cuda"), torch.empty(2, 2, dtype=torch.int64, device="cuda")
    request = torch.empty(2, dtype=torch.int64, device="cuda")
    uniforms = {"seeds": request, "positions": request}
    calls = {
        "verify_chain": lambda: kernels.verify_chain(logits, drafts, **uniforms),
        "verify_tree": lambda: kernels.verify_tree(logits, drafts, drafts, **uniforms),
        "sample": lambda: kernels.sample(torch.empty(2, 11, device="cuda"), **uniforms),
        "target_logprobs": lambda: kernels.target_logprobs(logits),
        "uniforms": lambda: kernels.uniforms(request, request),
        "tree_mask": lambda: kernels.tree_mask(drafts, request, max_prefix=4),
    }
    errors = {}
    for name, call in calls.items():
        try:
            call()
        except RuntimeError as error:
            errors[name] = str(error)
print(json.dumps(errors))
"""


def library_path(name: str) -> Path | None:
    return next((path for folder in specens_kernels.__path__ if (path := Path(folder, name)).is_file()), None)


def report(before: str, backend: str, **environment: str) -> tuple[dict[str, str | None], str, list[float]]:
    """Reasons, the error of a call that names `backend`, and the numbers of one that names none, in a fresh process."""
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
    reasons, error, random_numbers = report(hide, "cpp")
    assert reasons["cpp"] == "not built: the package has no _C.so"
    assert error == "uniforms: backend 'cpp' cannot run on cpu: not built: the package has no _C.so"
    assert random_numbers == uniforms(BATCH, BATCH).tolist()


def test_an_extension_that_does_not_load_gives_the_text_of_the_loader():
    refuse = """
import torch
def refuse(path):
    raise OSError("undefined symbol: from_another_version")
torch.ops.load_library = refuse
"""
    reasons, error, random_numbers = report(refuse, "cpp")
    assert reasons["cpp"] == "_C.so could not be loaded: undefined symbol: from_another_version"
    assert reasons["cpp"] in error
    assert random_numbers == uniforms(BATCH, BATCH).tolist()


def test_a_triton_that_is_too_old_says_so():
    old = (
        "import sys, types\nsys.modules['triton'] = triton = types.ModuleType('triton')\ntriton.__version__ = '3.5.1'\n"
    )
    reasons, error, _ = report(old, "triton")
    assert reasons["triton"] == "Triton 3.5.1 cannot compile the kernels: pip install 'specens-kernels[triton]'"
    assert reasons["triton"] in error


def test_missing_triton_says_so():
    reasons, error, _ = report(HIDE_TRITON, "triton")
    assert reasons["triton"] == "Triton is not installed: pip install 'specens-kernels[triton]'"
    assert reasons["triton"] in error


def test_a_triton_that_lacks_a_part_is_not_called_missing():
    broken = """
import sys
class Broken:
    def find_spec(self, name, path=None, target=None):
        if name == "triton":
            raise ModuleNotFoundError("No module named 'triton._C'", name="triton._C")
sys.meta_path.insert(0, Broken())
"""
    reasons, _, _ = report(broken, "triton")
    assert reasons["triton"] == "Triton could not be imported: No module named 'triton._C'"


IMPORT = """
import json, sys, time
import torch
start = time.process_time()
import specens_kernels
seconds = time.process_time() - start
batch = torch.arange(4)
seen, values = ["triton" in sys.modules], []
for backend in ("cpp", "triton"):
    values.append(specens_kernels.uniforms(batch, batch, backend=backend).tolist())
    seen.append("triton" in sys.modules)
print(json.dumps([seconds, seen, values]))
"""


def test_the_package_is_imported_at_once_and_triton_when_it_is_first_needed():
    command, own = [sys.executable, "-c", IMPORT], os.environ | {"TRITON_INTERPRET": "1"}
    for _ in range(3):  # another process may slow one down
        found = subprocess.run(command, env=own, capture_output=True, text=True, check=True)
        seconds, seen, values = json.loads(found.stdout)
        assert seen == [False, False, True]
        assert values[0] == values[1]
        if seconds < 0.25:
            break
    assert seconds < 0.25


@pytest.mark.parametrize("value", ["1", "true", "On", "yes", "y", "0", "t", ""])
def test_whether_triton_interprets_is_read_as_triton_reads_it(value, monkeypatch):
    import triton

    monkeypatch.setenv("TRITON_INTERPRET", value)
    wanted = bool(triton.knobs.runtime.interpret)
    monkeypatch.delitem(sys.modules, "triton")
    assert triton_release.find_triton() == (None, wanted)


def test_a_triton_that_does_not_load_says_why_where_it_is_asked_for(tmp_path):
    package = tmp_path / "triton"
    package.mkdir()
    (package / "__init__.py").write_text("raise ImportError('libtriton.so: cannot open shared object file')\n")
    path = f"import sys\nsys.path.insert(0, {str(tmp_path)!r})\n"
    reasons, error, _ = report(path, "triton", TRITON_INTERPRET="1")
    assert reasons["triton"] == "Triton could not be imported: libtriton.so: cannot open shared object file"
    assert error == f"uniforms: {reasons['triton']}"


def calls_on_a_gpu(before: str) -> dict[str, str]:
    """What operations say of tensors on a GPU, which fake tensors stand in for, in a fresh process."""
    result = subprocess.run([sys.executable, "-c", before + GPU_CALLS], capture_output=True, text=True, check=True)
    return json.loads(result.stdout)


def test_on_a_gpu_the_reference_serves_only_those_who_ask_for_it():
    errors = calls_on_a_gpu(HIDE_TRITON)
    assert set(errors) == {"verify_chain", "verify_tree", "sample", "target_logprobs", "uniforms", "tree_mask"}
    for name, error in errors.items():
        assert error.startswith(f"{name}: no kernel can run on cuda: "), error
        assert 'backend="reference"' in error
        assert "pip install 'specens-kernels[triton]'" in error
    assert "cpp: " in errors["tree_mask"]


def test_the_driver_says_when_it_takes_the_reference_on_a_gpu(monkeypatch):
    with FakeTensorMode():
        on_gpu = torch.empty(1, device="cuda")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert backend_for("verify_tree", BATCH) is None
        assert backend_for("verify_tree", on_gpu) is None  # Triton has it
    ready = {key: value for key, value in specens_kernels.backend.READY.items() if key[2] != "cuda"}
    monkeypatch.setattr(specens_kernels.backend, "READY", ready)
    with pytest.warns(UserWarning, match=r"^verify_tree: no kernel can run on cuda: "):
        assert backend_for("verify_tree", on_gpu) == "reference"
    assert select(specens_kernels.ops.verify_tree.IMPLEMENTATIONS, "reference", on_gpu, "verify_tree")[0] == "reference"


def test_a_file_that_is_no_library_gives_the_text_of_the_loader(tmp_path, monkeypatch):
    monkeypatch.setattr(specens_kernels.backend.OPERATORS, "loaded", set())
    (tmp_path / "_C_cuda.so").write_bytes(b"not a library")
    assert "_C_cuda.so could not be loaded" in _load_library("_C_cuda.so", [str(tmp_path)])
    assert _load_library("_C_cuda.so", [str(tmp_path / "nowhere")]) == "not built: the package has no _C_cuda.so"


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
