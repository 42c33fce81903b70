"""What the compiled Triton kernels need, without a GPU: `python -m bench static`.

What `bench/gpu/variants` lists of an operation is compiled for each architecture; its binary tells registers, stack,
shared memory, local loads and stores (spills), the widest loads from device memory, and whether a loop that loads has
a barrier. A process that interprets kernels (TRITON_INTERPRET=1) cannot compile them, so this one is its own.
"""

from __future__ import annotations

import importlib
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.table import Table

from bench.counts import print_counts

ARCHITECTURES = (80, 90, 100)
WARP_SIZE = 32
OPERATIONS = ("compact_kv", "sample", "target_logprobs", "tree_mask", "uniforms", "verify_chain", "verify_tree")
# kernels that read whole rows of logits, and those of them whose loops, if they have any, go over the vocabulary
LOGIT_READERS = (
    "_statistics_kernel",
    "_filter_kernel",
    "_target_logprobs_kernel",
    "_residual_kernel",
    "_maxima_kernel",
)
VOCABULARY_LOOPS = ("_statistics_kernel", "_filter_kernel", "_target_logprobs_kernel")
WIDEST, TABLE_WIDTH = 16, 200
REGISTERS, REGISTER_UNIT, LARGEST_WARPS = 65536, 256, 64  # of a multiprocessor, per warp, warps at once
SHARED_KIB = {80: 164, 90: 228, 100: 228}  # CUDA C++ Programming Guide, compute capabilities
WIDTHS = {"128": 16, "64": 8, "": 4, "U16": 2, "S16": 2, "U8": 1, "S8": 1}  # bytes by the suffix of a load


@dataclass(frozen=True)
class Binary:
    """A kernel's variant compiled for one architecture; sizes in bytes."""

    operation: str
    kernel: str
    variant: int
    architecture: int
    num_warps: int
    registers: int
    stack: int
    shared: int
    spills: int  # instructions that load or store local memory
    widest_load: int | None  # from device memory; this and the next only of kernels that read logits
    barriers_in_loops: int | None  # of loops that load from device memory
    waits: bool | None  # for the launch before it, before it reads or writes; only where it may start early
    occupancy: float  # warps at once, of those that a multiprocessor can hold


def compile_operations(
    operations: Sequence[str], architectures: Sequence[int] = ARCHITECTURES, most: int | None = None
) -> list[Binary]:
    """Compile in a fresh process, one for all operations.

    most: variants of a kernel, over all these operations; one is the last, which does the most, several begin with it.
    """
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "bench.gpu.static", ",".join(map(str, architectures)), str(most or 0), *operations]
    root = Path(__file__).parents[2]
    result = subprocess.run(command, env=environment, cwd=root, capture_output=True, text=True, check=False)
    if result.returncode != 0:
        raise RuntimeError(f"compiling the kernels of {', '.join(operations)} failed:\n{result.stderr}")
    return [Binary(**fields) for fields in json.loads(result.stdout)]


def chosen(kernels: Sequence[str], most: int) -> set[int]:
    """The places of at most so many variants of each kernel, the last and then the first among them; all for 0."""
    indices: dict[str, list[int]] = {}
    for position, kernel in enumerate(kernels):
        indices.setdefault(kernel, []).insert(0, position)
    return {
        own[index * (len(own) - 1) // max(most - 1, 1)] if 0 < most < len(own) else own[index]
        for own in indices.values()
        for index in range(min(most or len(own), len(own)))
    }


def compile_here(operations: Sequence[str], architectures: Sequence[int], most: int) -> list[Binary]:
    """Compile in this process."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from specens_kernels.parts.launches import DEPENDENT_CAPABILITY, aot_variant, as_dependent, compile_options

    tools = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
    binaries = []
    variants = [
        (operation, index, aot_variant(launch))
        for operation in operations
        for index, launch in enumerate(importlib.import_module(f"bench.gpu.variants.{operation}").variants())
    ]
    for place in sorted(chosen([variant.kernel.fn.__name__ for _, _, variant in variants], most)):
        operation, index, plain = variants[place]
        for architecture in architectures:
            dependent = architecture >= 10 * DEPENDENT_CAPABILITY
            variant = as_dependent(plain) if dependent else plain
            source = ASTSource(variant.kernel, variant.signature, variant.constexprs, variant.attributes)
            target = GPUTarget("cuda", architecture, WARP_SIZE)
            compiled = triton.compile(source, target=target, options=compile_options(variant))
            facts = resources(tools, compiled.asm["cubin"], reads_logits=variant.kernel.fn.__name__ in LOGIT_READERS)
            facts["waits"] = waits_first(compiled.asm["ptx"]) if dependent else None
            facts["shared"] = max(facts["shared"], compiled.metadata.shared)
            binaries.append(
                Binary(
                    operation=operation,
                    kernel=variant.kernel.fn.__name__,
                    variant=index,
                    architecture=architecture,
                    num_warps=variant.num_warps,
                    occupancy=occupancy(architecture, variant.num_warps, facts["registers"], facts["shared"]),
                    **facts,
                )
            )
    return binaries


def resources(tools: Path, cubin: bytes, reads_logits: bool) -> dict[str, Any]:
    """What the binary says. Its code, which takes half a second to print, tells spills and how logits are read."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        usage = _output(tools / "cuobjdump", "--dump-resource-usage", file.name)
        numbers = {name: int(value) for name, value in re.findall(r"(REG|STACK|SHARED|LOCAL):(\d+)", usage)}
        can_spill = numbers["STACK"] > 0 or numbers["LOCAL"] > 0
        assembly = _output(tools / "nvdisasm", "-c", file.name) if can_spill or reads_logits else ""
    loads = re.findall(r"\bLDG\.E(?:\.\w+)*", assembly)
    return {
        "registers": numbers["REG"],
        "stack": numbers["STACK"],
        "shared": numbers["SHARED"],
        "spills": len(re.findall(r"\b(?:LDL|STL)\b", assembly)),
        "widest_load": max((_width(load) for load in loads), default=0) if reads_logits else None,
        "barriers_in_loops": barriers_in_loops(assembly) if reads_logits else None,
    }


def waits_first(assembly: str) -> bool:
    """Whether a kernel in PTX waits for the launch before it ahead of all that it reads and writes."""
    first = re.search(r"griddepcontrol\.wait|\b(?:ld|st|red|atom)\.(?:\w+\.)*global", assembly)
    return first is not None and first[0] == "griddepcontrol.wait"


def _output(*command: Any) -> str:
    return subprocess.run([str(part) for part in command], capture_output=True, text=True, check=True).stdout


def _width(load: str) -> int:
    suffixes = load.split(".")[2:]
    return next((WIDTHS[suffix] for suffix in suffixes if suffix in WIDTHS and suffix), WIDTHS[""])


def barriers_in_loops(assembly: str) -> int:
    """Barriers in innermost loops that load from device memory: from a label to a later jump back to it."""
    lines = assembly.splitlines()
    labels = {match[1]: index for index, line in enumerate(lines) if (match := re.match(r"\s*(\.L_x_\d+):", line))}
    jumps = [
        (index, match[1]) for index, line in enumerate(lines) if (match := re.search(r"\bBRA\b.*(\.L_x_\d+)", line))
    ]
    loops = [(labels[label], index) for index, label in jumps if labels.get(label, index) < index]
    inner = [loop for loop in loops if not any(loop != other and _inside(other, loop) for other in loops)]
    barriers = 0
    for start, end in inner:
        body = lines[start:end]
        if any("LDG" in line for line in body):
            barriers += sum(bool(re.search(r"\bBAR\.(?:SYNC|RED)", line)) for line in body)
    return barriers


def _inside(loop: tuple[int, int], other: tuple[int, int]) -> bool:
    return other[0] <= loop[0] and loop[1] <= other[1]


def occupancy(architecture: int, num_warps: int, registers: int, shared: int) -> float:
    """Warps that a multiprocessor holds at once, as a share of the most, by registers and shared memory."""
    per_warp = -(-registers * WARP_SIZE // REGISTER_UNIT) * REGISTER_UNIT
    programs = REGISTERS // (per_warp * num_warps)
    if shared:
        programs = min(programs, SHARED_KIB[architecture] * 1024 // (shared + 1024))
    return min(1.0, programs * num_warps / LARGEST_WARPS)


def report(binaries: list[Binary]) -> tuple[Table, list[str]]:
    """A line for each kernel and architecture, with the worst of its variants, and the bars that are missed."""
    table = Table(title="compiled kernels: the worst variant of each", title_justify="left")
    columns = (
        "operation",
        "kernel",
        "sm",
        "variants",
        "warps",
        "registers",
        "stack",
        "shared",
        "spills",
        "widest load",
    )
    for column in (*columns, "barriers in loops", "occupancy"):
        table.add_column(column, justify="left" if column in ("operation", "kernel") else "right")
    groups: dict[tuple[str, str, int], list[Binary]] = {}
    for binary in binaries:
        groups.setdefault((binary.operation, binary.kernel, binary.architecture), []).append(binary)
    missed = []
    for (operation, kernel, architecture), group in groups.items():
        spills = max(b.spills for b in group)
        widest = min((b.widest_load for b in group if b.widest_load is not None), default=None)
        barriers = max((b.barriers_in_loops for b in group if b.barriers_in_loops is not None), default=None)
        numbers = [len(group), max(b.num_warps for b in group), max(b.registers for b in group)]
        numbers += [max(b.stack for b in group), max(b.shared for b in group), spills]
        reads = ["" if number is None else str(number) for number in (widest, barriers)]
        occupied = min(b.occupancy for b in group)
        table.add_row(operation, kernel, str(architecture), *map(str, numbers), *reads, f"{occupied:.2f}")
        name = f"{operation} {kernel} sm_{architecture}"
        if spills > 0:
            missed.append(f"{name}: {spills} instructions for spills, expected none")
        if widest is not None and widest < WIDEST:
            missed.append(f"{name}: loads of {widest} bytes, expected {WIDEST}")
        if any(b.waits is False for b in group):
            missed.append(f"{name}: reads or writes before it waits for the launch before it")
        if kernel in VOCABULARY_LOOPS and barriers:
            missed.append(f"{name}: {barriers} barriers in loops over the vocabulary, expected none")
    return table, missed


def main() -> int:
    """Print the table and the missed bars; the number of missed bars."""
    binaries = compile_operations(OPERATIONS)
    table, missed = report(binaries)
    return print_counts(table, missed, TABLE_WIDTH)


if __name__ == "__main__":
    if len(sys.argv) == 1:
        sys.exit(min(main(), 1))
    compiled_for = [int(architecture) for architecture in sys.argv[1].split(",")]
    print(json.dumps([asdict(binary) for binary in compile_here(sys.argv[3:], compiled_for, int(sys.argv[2]))]))
