"""The core knows no engine, and of the driver only its adapters import one."""

import ast
import subprocess
import sys
from pathlib import Path

import specens

import specens_kernels

ENGINES = {"transformers", "peft", "vllm", "sglang"}


def imports(path):
    """The packages that a file imports anywhere."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name.split(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            yield node.module.split(".")[0]


def test_engines_are_imported_by_engines_and_adapters_only():
    core, driver = Path(specens_kernels.__file__).parent, Path(specens.__file__).parent
    importing = {path for folder in (core, driver) for path in folder.rglob("*.py") if ENGINES & set(imports(path))}
    assert importing
    assert {path.relative_to(driver).parts[0] for path in importing} == {"adapters", "engines"}


def test_the_core_runs_where_no_engine_is_installed():
    script = f"""
import sys
for engine in {ENGINES!r}:
    sys.modules[engine] = None  # importing it fails
import torch
from specens_kernels import verify_chain
logits = torch.zeros(1, 2, 5)
uniforms = torch.full((1, 2), 0.5)
print(int(verify_chain(logits, torch.tensor([[3]]), uniforms=uniforms).num_tokens))
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout in ("1\n", "2\n")
