"""Compile the Triton kernels of rooms for GPUs that need not be here: python tests/compile_triton.py ROOM...

Prints a JSON list with one entry for each kernel, variant and architecture. A process of its own, since one that
interprets kernels (TRITON_INTERPRET=1) cannot compile them.
"""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

ARCHITECTURES = (80, 90, 100)
WARP_SIZE = 32


def compile_rooms(rooms: list[str]) -> list[dict[str, Any]]:
    """Compile in a fresh process; return room, kernel, constexprs, architecture, ptx and cubin bytes of each binary."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, str(Path(__file__).resolve()), *rooms]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if result.returncode != 0:
        raise RuntimeError(f"compiling the kernels of {', '.join(rooms)} failed:\n{result.stderr}")
    return json.loads(result.stdout)


def _compile_room(room: str) -> list[dict[str, Any]]:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    module = importlib.import_module(f"specens_kernels.ops.{room}.triton_kernel")
    binaries = []
    for variant in module.aot_variants():
        for architecture in ARCHITECTURES:
            source = ASTSource(variant.kernel, variant.signature, variant.constexprs, variant.attributes)
            options = {"num_warps": variant.num_warps, "enable_fp_fusion": False}
            compiled = triton.compile(source, target=GPUTarget("cuda", architecture, WARP_SIZE), options=options)
            entry = {"room": room, "kernel": variant.kernel.fn.__name__, "constexprs": str(variant.constexprs)}
            sizes = {f"{kind}_bytes": len(compiled.asm[kind]) for kind in ("ptx", "cubin")}
            binaries.append(entry | {"architecture": architecture} | sizes)
    return binaries


if __name__ == "__main__":
    print(json.dumps([binary for room in sys.argv[1:] for binary in _compile_room(room)]))
