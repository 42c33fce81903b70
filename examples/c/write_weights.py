"""Write the Python decoder's models and texts for batched_decoder.c: `python examples/c/write_weights.py FILE`."""

import runpy
import sys
from pathlib import Path

import torch

decoder = runpy.run_path(str(Path(__file__).parents[1] / "batched_decoder.py"))
models = [decoder["ToyModel"](width=width, batch=4) for width in (16, 14)]
names = ("embedding", "positions", "output", "query", "key", "value")
text = torch.randint(decoder["VOCAB"], (4, decoder["SLOTS"]), generator=torch.Generator().manual_seed(1))
lengths, ends = torch.tensor([3, 9, 5, 2]), torch.tensor([60, 40, 80, 100])
tensors = [getattr(model, name) for model in models for name in names]
Path(sys.argv[1]).write_bytes(
    b"".join(value.contiguous().numpy().tobytes() for value in (*tensors, text, lengths, ends))
)
