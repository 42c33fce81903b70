"""A GPU that is not there: Triton's own JIT, compiler and launcher run for CPU tensors, but for the kernels themselves.

`install()` comes before the first import of the package, in a process of its own: one that interprets kernels cannot
compile them. What kernels would write stays as it was, so nothing can be read from the results.
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
CAPABILITY = 90


def load_libcuda() -> None:
    """Build the library and load it by the name under which Triton looks for it."""
    folder = Path(tempfile.gettempdir(), f"specens-gpu-stub-{os.getuid()}")
    folder.mkdir(mode=0o700, exist_ok=True)
    library = folder / "libcuda.so.1"
    if not library.exists() or library.stat().st_mtime < (HERE / "libcuda.c").stat().st_mtime:
        built = folder / f"{os.getpid()}.so"
        command = ["gcc", "-O1", "-w", "-shared", "-fPIC", "-Wl,-soname,libcuda.so.1", "-o", built, HERE / "libcuda.c"]
        subprocess.run(command, check=True)
        built.replace(library)
        (folder / "libcuda.so").unlink(missing_ok=True)
        (folder / "libcuda.so").symlink_to(library)
    os.environ["TRITON_LIBCUDA_PATH"] = str(folder)
    ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)


def make_driver() -> Any:
    """Triton's driver for CUDA, but for what it asks torch."""
    import torch
    from triton.backends.compiler import GPUTarget
    from triton.backends.nvidia import driver as nvidia

    class Driver:
        launcher_cls = nvidia.CudaLauncher

        def __init__(self) -> None:
            self.utils = nvidia.CudaUtils()

        def get_current_device(self) -> int:
            return 0

        def get_current_stream(self, _: int) -> int:
            return 0

        def set_current_device(self, _: int) -> None:
            pass

        def get_device_capability(self, _: int = 0) -> tuple[int, int]:
            return divmod(CAPABILITY, 10)

        def get_current_target(self) -> GPUTarget:
            return GPUTarget("cuda", CAPABILITY, 32)

        def get_active_torch_device(self) -> torch.device:
            return torch.device("cpu")

        def get_device_interface(self) -> Any:
            return torch.cuda

        def is_active(self) -> bool:
            return True

        def map_python_to_cpp_type(self, name: str) -> str:
            return nvidia.ty_to_cpp(name)

        def allocate_default_profile_scratch(self, *_: int) -> None:
            return None

    return Driver()


def serve_cpu_tensors() -> None:
    """Let the package register Triton's kernels for CPU tensors, which it does where they are interpreted."""
    name = "specens_kernels.triton_release"
    spec = importlib.util.spec_from_file_location(name, ROOT / "specens_kernels" / "triton_release.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.import_triton = module.find_triton = lambda: (None, True)
    sys.modules[name] = module


def install() -> None:
    """Put the stub in place of a GPU."""
    assert "specens_kernels" not in sys.modules, "the package has been imported already"
    os.environ["TRITON_INTERPRET"] = "0"
    load_libcuda()
    import triton

    triton.runtime.driver.set_active(make_driver())
    serve_cpu_tensors()


def prefer_triton() -> None:
    """Let calls that name no backend take Triton on CPU tensors, as on a GPU."""
    import torch

    from specens_kernels.backend import KERNEL_DEVICES, READY

    for operator, devices in KERNEL_DEVICES.items():
        name, backend = operator.rsplit("_", 1)
        if backend == "triton" and "cpu" in devices:
            READY[name, None, "cpu"] = "triton", getattr(torch.ops.specens, operator).default


class NotCompiled:
    """In place of a compiled kernel: keeps what it is launched with. `launched` is told (kernel, grid, arguments)."""

    function = packed_metadata = None
    launched: Callable[[Any, tuple, tuple], None] | None = None

    def __init__(self, kernel: Any) -> None:
        self.kernel = kernel

    def launch_metadata(self, *_: Any) -> None:
        return None

    def run(self, *launch: Any) -> None:
        if NotCompiled.launched is not None:
            NotCompiled.launched(self.kernel, launch[:3], launch[9:])

    def __getitem__(self, grid: tuple) -> Callable:
        return lambda *arguments, stream: self.run(*grid, stream, *(None,) * 5, *arguments)


CACHES: list[dict] = []  # of the JIT


def forget_compiled() -> None:
    """Let everything be compiled anew."""
    from specens_kernels.parts import launches

    launches.COMPILED.clear()
    for cache in CACHES:
        cache.clear()


def replace_compiler(replacement: Callable[..., None]) -> None:
    """Call `replacement` with what the JIT would compile, (kernel, signature, constexprs, options, attributes)."""
    from triton.runtime.jit import JITFunction

    def compile_nothing(kernel, key, signature, device, constexprs, options, attributes, _):
        replacement(kernel, signature, constexprs, options, attributes)
        compiled = NotCompiled(kernel)
        cache = kernel.device_caches[device][0]
        cache[key] = compiled
        CACHES.append(cache)
        return compiled

    JITFunction._do_compile = compile_nothing
