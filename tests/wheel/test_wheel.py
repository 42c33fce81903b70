"""A wheel in an environment of its own: what it brings, and that it computes (`make test-wheel`, cibuildwheel)."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest
import torch

import specens_kernels
from specens_kernels import Mixture, NgramIndex, Sampling, TokenTree, _host, sample, verify_chain, verify_tree

ROOT = Path(__file__).parents[2]
PACKAGE = Path(specens_kernels.__file__).parent
BATCH, DRAFT_LEN, VOCAB = 64, 4, 1009
RANDOM = {"seeds": torch.arange(BATCH), "positions": torch.full((BATCH,), 7)}


def problem(dtype: torch.dtype) -> tuple[list[torch.Tensor], torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    members = [torch.randn(BATCH, DRAFT_LEN + 1, VOCAB, generator=generator).mul(2).to(dtype) for _ in range(2)]
    return members, members[0][:, :DRAFT_LEN].float().softmax(-1).flatten(0, 1).multinomial(1).view(BATCH, DRAFT_LEN)


def test_the_wheel_is_tested_and_not_the_source_tree():
    assert ROOT not in PACKAGE.parents or "site-packages" in PACKAGE.parts


def test_no_library_of_torch_is_inside():
    files = [str(file) for file in metadata.files("specens-kernels") or []]
    assert any(file.endswith("_C.so") for file in files)
    assert not [file for file in files if "libtorch" in file or "libc10" in file]


def test_the_version_is_one():
    version = metadata.version("specens-kernels")
    assert _host.build_info()["version"] == specens_kernels.__version__ == version
    command = [sys.executable, "-m", "specens", "--version"]
    assert version in subprocess.run(command, capture_output=True, text=True, check=True).stdout


def test_licences_and_a_bill_of_materials_are_inside():
    distribution = metadata.distribution("specens-kernels")
    texts = {Path(str(file)).name: file for file in distribution.files or [] if ".dist-info" in str(file)}
    assert "Apache License" in texts["LICENSE"].read_text()
    assert "Wenzel Jakob" in texts["pybind11.txt"].read_text()
    bill = json.loads(texts["specens-kernels.cdx.json"].read_text())
    assert bill["metadata"]["component"]["version"] == distribution.version
    assert "pybind11" in {component["name"] for component in bill["components"]}


@pytest.mark.parametrize("rule", ["token", "block", "typical", "gumbel"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_chains_are_verified_as_the_reference_does(rule, dtype):
    members, drafts = problem(dtype)
    settings = {"ensemble": Mixture((0.5, 0.5)), "sampling": Sampling(top_p=0.9), "rule": rule}
    settings |= {"drafter": 0} if rule != "gumbel" else {}  # which does not ask what a draft was drawn from
    cpp, reference = (verify_chain(members, drafts, backend=b, **settings, **RANDOM) for b in ("cpp", "reference"))
    assert torch.equal(cpp.tokens, reference.tokens)


def test_trees_and_draws_are_those_of_the_reference():
    tree = TokenTree.branching([2, 2])
    generator = torch.Generator().manual_seed(2)
    logits = torch.randn(BATCH, len(tree) + 1, VOCAB, generator=generator)
    drafts = torch.randint(VOCAB, (BATCH, len(tree)), generator=generator)
    verdicts = [verify_tree(logits, drafts, tree, backend=name, **RANDOM) for name in ("cpp", "reference")]
    assert torch.equal(verdicts[0].tokens, verdicts[1].tokens)
    draws = [sample(logits[:, 0], backend=name, **RANDOM) for name in ("cpp", "reference")]
    assert torch.equal(draws[0].tokens, draws[1].tokens)


def test_host_objects_work():
    index = NgramIndex()
    index.extend([1, 2, 3, 4, 1, 2])
    drafts, matched = index.propose(2)
    assert (drafts.tolist(), matched) == ([3, 4], 2)


def test_a_traced_call_gives_the_same_tokens():
    members, drafts = problem(torch.float32)
    call = torch.compile(lambda rows, ids: verify_chain(rows, ids, **RANDOM).tokens, backend="eager", fullgraph=True)
    assert torch.equal(call(members[0], drafts), verify_chain(members[0], drafts, **RANDOM).tokens)


def test_the_c_library_is_there_with_its_header():
    assert (Path(specens_kernels.get_include()) / "specens.h").is_file()
    assert list(Path(specens_kernels.get_library()).glob("libspecens.*"))


def test_the_doctor_finds_the_backend():
    command = [sys.executable, "-m", "specens", "doctor", "--json"]
    report = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    facts = {fact["name"]: fact for fact in report["facts"]}
    assert facts["backend cpp"]["ok"]
    assert facts["torch"]["value"] == metadata.version("torch")
