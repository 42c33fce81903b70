"""examples/c: the C program writes the text of the Python one."""

from __future__ import annotations

import runpy
import subprocess
from pathlib import Path

import torch

import specens_kernels
from specens_kernels import Sampling

EXAMPLES = Path(__file__).parents[2] / "examples"


def test_the_c_decoder_writes_the_text_of_the_python_decoder(tmp_path):
    decoder = runpy.run_path(str(EXAMPLES / "batched_decoder.py"))
    program, weights = tmp_path / "batched_decoder", tmp_path / "weights"
    flags = ["-std=c11", "-O2", "-Wall", "-Wextra", "-pedantic", "-Werror", f"-I{specens_kernels.get_include()}"]
    library = specens_kernels.get_library()
    link = [f"-L{library}", f"-Wl,-rpath,{library}", "-lspecens", "-lm"]
    source = str(EXAMPLES / "c" / "batched_decoder.c")
    subprocess.run(["cc", *flags, source, *link, "-o", str(program)], check=True)
    lengths, ends = torch.tensor([3, 9, 5, 2]), torch.tensor([60, 40, 80, 100])
    text = torch.randint(decoder["VOCAB"], (4, decoder["SLOTS"]), generator=torch.Generator().manual_seed(1))
    models = [decoder["ToyModel"](width=width, batch=4) for width in (16, 14)]
    names = ("embedding", "places", "output", "query", "key", "value")
    tensors = [getattr(model, name) for model in models for name in names]
    weights.write_bytes(b"".join(value.contiguous().numpy().tobytes() for value in (*tensors, text, lengths, ends)))
    found = subprocess.run([program, weights], capture_output=True, text=True, check=True).stdout
    decoder["generate"](*models, text, lengths, ends, Sampling(temperature=0.8), seeds=torch.arange(4))
    rows = [" ".join(map(str, row[:end].tolist())) for row, end in zip(text, ends, strict=True)]
    assert found.splitlines() == rows
