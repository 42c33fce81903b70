"""The operators outside Python: in exported graphs, compiled ahead of time, and called from C++."""

from __future__ import annotations

import subprocess
from pathlib import Path

import torch
from cases import FULL
from torch import Tensor

import specens_kernels
from specens_kernels import Sampling, verify_chain

ROOT = Path(__file__).parents[2]
TORCH = Path(torch.__file__).parent


class Round(torch.nn.Module):
    """What docs/embedding.md exports."""

    def forward(self, logits: Tensor, drafts: Tensor, draft_logits: Tensor, seeds: Tensor, positions: Tensor) -> Tensor:
        sampling = Sampling(temperature=0.8, top_p=0.9)
        random = {"seeds": seeds, "positions": positions}
        return verify_chain(logits, drafts, draft_logits=draft_logits, sampling=sampling, rule="block", **random).tokens


def inputs(batch: int = 2) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(batch)
    logits, drafts = torch.randn(batch, 4, 50, generator=generator), torch.arange(3 * batch).view(batch, 3)
    return logits, drafts, torch.randn(batch, 3, 50, generator=generator), torch.arange(batch), torch.full((batch,), 7)


def test_an_exported_graph_reads_as_the_documentation_shows():
    code = torch.export.export(Round(), inputs()).graph_module.code
    call = next(line.strip().split(";")[0] for line in code.splitlines() if "specens" in line)
    assert call in (ROOT / "docs" / "embedding.md").read_text()
    assert "seeds" in call
    assert "positions" in call


def test_no_operator_takes_more_than_twenty_arguments():
    names = ("verify_chain", "verify_tree", "sample", "target_logprobs", "uniforms", "tree_mask", "compact_kv")
    for name in names:
        own, writing = (getattr(torch.ops.specens, name + end).default._schema.arguments for end in ("", "_out"))
        assert len(writing) <= 20, name
        assert [argument.name for argument in writing] == ["out", *(argument.name for argument in own)], name


def test_a_graph_of_any_batch_gives_the_same_tokens_exported_and_compiled_ahead_of_time(tmp_path):
    """Compiled by torch for a quarter of a minute: in make test-full."""
    shapes = tuple({0: torch.export.Dim("batch", min=1, max=64)} for _ in inputs())
    program = torch.export.export(Round(), inputs(3), dynamic_shapes=shapes)
    graphs = [program.module()]
    if FULL:
        path = torch._inductor.aoti_compile_and_package(program, package_path=str(tmp_path / "round.pt2"))
        graphs.append(torch._inductor.aoti_load_package(path))
    for graph in graphs:
        for size in (1, 2, 5):
            assert torch.equal(graph(*inputs(size)), Round()(*inputs(size)))


def test_cpp_loads_the_library_alone_and_calls_an_operator(tmp_path):
    program = tmp_path / "load_operator"
    flags = ["-std=c++20", "-O0", "-DTORCH_TARGET_VERSION=0x020b000000000000ULL", "-DTORCH_STABLE_ONLY"]
    source = ROOT / "tests" / "ops" / "load_operator.cpp"
    link = [f"-L{TORCH / 'lib'}", f"-Wl,-rpath,{TORCH / 'lib'}", "-l:libtorch_cpu.so", "-l:libc10.so", "-ldl"]
    command = ["c++", *flags, "-isystem", str(TORCH / "include"), str(source), *link, "-o", str(program)]
    subprocess.run(command, check=True)
    library = next(path for folder in specens_kernels.__path__ if (path := Path(folder, "_C.so")).is_file())
    found = subprocess.run([program, library], capture_output=True, text=True, check=True).stdout
    logits = (torch.arange(48.0) ** 2 % 11 / 3).view(2, 3, 8)
    drafts, numbers = torch.arange(4).view(2, 2), torch.arange(2)
    sampling = Sampling(0.7, top_k=5, top_p=0.9)
    expected = verify_chain(logits, drafts, drafter=0, sampling=sampling, seeds=numbers, positions=numbers)
    assert found.split() == [str(token) for token in expected.tokens.flatten().tolist()]
