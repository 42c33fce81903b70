"""The CUDA C++ files, unchanged, on a CPU: operators against the reference; `make sanitize` looks for races in them."""

from __future__ import annotations

import os
import random
import subprocess
import sysconfig
from pathlib import Path

import pytest
import torch
from kv_problems import random_problem

from specens_kernels import backend, tree_mask, uniforms

ROOT = Path(__file__).parents[2]
OPERATIONS = ("uniforms", "tree_mask", "compact_kv")
SANITIZER = os.environ.get("SPECENS_TEST_SANITIZER")  # "thread": the library is compiled to be watched
TORCH = Path(torch.__file__).parent


@pytest.fixture(scope="module")
def operators(tmp_path_factory):
    """Each operator of csrc/NAME/cuda.cu as one on CPU tensors."""
    folder = tmp_path_factory.mktemp("cuda_on_cpu")
    flags = [
        "-std=c++20",
        "-O1",
        "-g",
        "-pthread",
        "-fPIC",
        "-fvisibility=hidden",
        "-Wall",
        "-Wextra",
        "-Werror",
        "-Wno-unknown-pragmas",
    ]
    flags += [f"-fsanitize={SANITIZER}"] if SANITIZER else []
    flags += [f"-I{ROOT / 'tests' / 'cuda_on_cpu'}", f"-I{ROOT / 'csrc'}", "-isystem", str(TORCH / "include")]
    flags += ["-DTORCH_TARGET_VERSION=0x020b000000000000ULL", "-DTORCH_STABLE_ONLY"]
    compiler = os.environ.get("CXX", sysconfig.get_config_var("CXX") or "c++").split()[0]
    objects = [folder / f"{name}.o" for name in OPERATIONS]
    jobs = [
        subprocess.Popen(
            [compiler, *flags, "-x", "c++", "-c", str(ROOT / "csrc" / name / "cuda.cu"), "-o", str(target)]
        )
        for name, target in zip(OPERATIONS, objects, strict=True)
    ]
    assert [job.wait() for job in jobs] == [0] * len(jobs)
    link = [f"-fsanitize={SANITIZER}"] if SANITIZER else []
    library = folder / "cuda_on_cpu.so"
    link += ["-shared", "-pthread", f"-L{TORCH / 'lib'}", "-l:libtorch_cpu.so", "-o", str(library)]
    subprocess.run([compiler, *map(str, objects), *link], check=True)
    definitions = torch.library.Library("specens_cuda_on_cpu", "DEF")
    for name in OPERATIONS:
        schema = str(getattr(torch.ops.specens, name).default._schema)
        definitions.define(schema.split("::")[1])
    torch.ops.load_library(library)
    yield {name: getattr(torch.ops.specens_cuda_on_cpu, name).default for name in OPERATIONS}
    definitions._destroy()


@pytest.fixture
def on_cpu(operators, monkeypatch):
    """backend="cpp" takes the CUDA operators for CPU tensors."""
    for name, operator in operators.items():
        monkeypatch.setitem(backend.READY, (name, "cpp", "cpu"), ("cpp", operator))


@pytest.mark.usefixtures("on_cpu")
@pytest.mark.parametrize("batch", [0, 1, 256, 700])
def test_uniforms_are_those_of_the_reference(batch):
    generator = torch.Generator().manual_seed(batch)
    seeds = torch.randint(-(2**62), 2**62, (batch,), generator=generator)
    positions, step = (torch.randint(0, limit, (batch,), generator=generator) for limit in (2**40, 9))
    numbers = [uniforms(seeds, positions, step=step, stream=1, backend=name) for name in ("cpp", "reference")]
    assert torch.equal(*numbers)


@pytest.mark.usefixtures("on_cpu")
@pytest.mark.parametrize("layout", ["full", "tree", "packed", "additive"])
def test_tree_masks_are_those_of_the_reference(layout):
    for seed in range(3):
        rng = random.Random(seed)
        batch, nodes = rng.randint(1, 2), rng.randint(1, 9)
        parents = [[rng.randint(-2, max(-1, node - 1)) for node in range(nodes)] for _ in range(batch)]
        prefix_lens = torch.tensor([rng.randint(0, 300) for _ in range(batch)])
        options = {"num_nodes": torch.tensor([rng.randint(0, nodes) for _ in range(batch)])} if seed % 2 else {}
        options |= {"window": rng.choice([None, 4]), "layout": layout, "dtype": rng.choice([torch.float32, torch.half])}
        options |= {"max_prefix": 300} if layout in ("full", "additive") else {}
        one, other = (tree_mask(torch.tensor(parents), prefix_lens, **options, backend=b) for b in ("cpp", "reference"))
        assert torch.equal(one.mask, other.mask)
        assert torch.equal(one.positions, other.positions)


@pytest.mark.usefixtures("on_cpu")
@pytest.mark.parametrize("paging", ["dense", "block_table", "slot_mapping"])
def test_caches_are_moved_as_slot_by_slot(paging):
    refused = moved = 0
    for seed in range(4 if SANITIZER else 12):
        problem = random_problem(seed, faults=0.02 if seed % 3 == 0 else 0.0, paging=paging, big=not SANITIZER)
        memory, lengths, status = problem.expected()
        copy = problem.copy()
        result = copy.run("cpp")
        assert result.lengths.tolist() == lengths
        assert result.status.tolist() == status
        assert all(torch.equal(after, wanted) for after, wanted in zip(copy.memory, memory, strict=True))
        refused += sum(code != 0 for code in status)
        moved += sum(length > int(prefix) for length, prefix in zip(lengths, problem.prefix_lens))
    assert moved > 3
    assert refused > 0 or SANITIZER
