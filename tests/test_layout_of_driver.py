"""The folders of the driver lie on a few floors: a folder imports those below it, and none imports one above."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

ROOT = Path(__file__).parents[1] / "python" / "specens"
MODEL_LIBRARIES = {"transformers", "peft", "llama_cpp", "vllm", "sglang", "huggingface_hub", "safetensors", "gguf"}
MOST_FLOORS = 8
MOST_ENTRIES = 14


def name_of(path: Path) -> str:
    parts = ["specens", *path.relative_to(ROOT).with_suffix("").parts]
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {name_of(path): path for path in ROOT.rglob("*.py")}


def imports(node: ast.AST) -> Iterator[str]:
    """What is imported anywhere in a module when it runs: not for types only."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.dump(child.test):
            continue
        if isinstance(child, ast.Import):
            yield from (alias.name for alias in child.names)
        elif isinstance(child, ast.ImportFrom):
            whole = [f"{child.module}.{alias.name}" for alias in child.names]
            yield from (name if name in MODULES else child.module for name in whole)
        yield from imports(child)


IMPORTS = {name: set(imports(ast.parse(path.read_text()))) for name, path in MODULES.items()}


PROGRAMS = ("specens.__main__", "specens.adapters.lm_eval")  # begin commands, and stand where the command line does


def folder_of(name: str) -> str:
    """A module's folder."""
    return "cli" if name in PROGRAMS else MODULES[name].parent.relative_to(ROOT).as_posix()


def folders() -> dict[str, set[str]]:
    """The folders that each one imports. The package itself, of which names are loaded on first use, is none."""
    found: dict[str, set[str]] = {}
    for name, imported in IMPORTS.items():
        own = found.setdefault(folder_of(name), set())
        own |= {folder_of(other) for other in imported if other in MODULES and other != "specens"} - {folder_of(name)}
    return found


def test_no_module_is_above_itself():
    graph = {name: (imported & MODULES.keys()) - {"specens"} for name, imported in IMPORTS.items()}
    graph["specens.adapters.vllm.ensemble_model"] -= {"specens.adapters.vllm.v2_ensemble"}  # vLLM asks it for it
    list(TopologicalSorter(graph).static_order())  # raises CycleError


def test_folders_lie_on_at_most_eight_floors_without_a_circle():
    graph = folders()
    floors: dict[str, int] = {}
    for folder in TopologicalSorter(graph).static_order():  # raises CycleError
        floors[folder] = 1 + max((floors[below] for below in graph[folder]), default=0)
    assert max(floors.values()) <= MOST_FLOORS, floors
    assert floors["decoding"] < floors["drafters"] < floors["schedules"] < floors["analysis"] < floors["cli"]


def test_the_loop_and_the_protocol_of_engines_know_no_model_library():
    for name, imported in IMPORTS.items():
        if folder_of(name) in ("decoding", "engines", "targets", "schedules"):
            libraries = {other.split(".")[0] for other in imported} & MODEL_LIBRARIES
            engines = {other for other in imported if other.startswith("specens.engines.") and other.count(".") > 2}
            assert not libraries | engines, name


def test_the_top_of_the_driver_is_read_at_a_glance():
    entries = [path for path in ROOT.iterdir() if path.suffix == ".py" or any(path.glob("*.py"))]
    assert len(entries) <= MOST_ENTRIES, sorted(path.name for path in entries)


def test_the_way_of_a_token_names_files_that_are_there():
    page = (ROOT.parents[1] / "docs" / "architecture.md").read_text()
    figure = page.split("## From a prompt to a token of its text")[1].split("```")[1].split("python/specens/")[1]
    named = re.findall(r"[\w/]+(?:\.py|/)(?=\s|$)", figure)
    assert len(named) >= 15
    assert [name for name in named if not (ROOT / name).exists()] == []
