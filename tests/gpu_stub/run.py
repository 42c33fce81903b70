"""Run a module where a stub stands for the GPU, and CPU tensors go to Triton: `python -m gpu_stub.run MODULE ...`."""

from __future__ import annotations

import runpy
import sys

import gpu_stub


def main() -> None:
    gpu_stub.install()
    gpu_stub.replace_compiler(lambda *_: None)
    gpu_stub.prefer_triton()
    sys.argv = sys.argv[1:]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
