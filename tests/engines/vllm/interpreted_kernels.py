"""Imported before vLLM: its V2 model runner then runs on a CPU, its Triton kernels in Triton's interpreter.

vLLM asks for a Triton with a backend for CPUs, which the interpreter stands in for (TRITON_INTERPRET=1).
"""

from types import SimpleNamespace

from triton.backends import backends

backends["cpu"] = SimpleNamespace(driver=SimpleNamespace(is_active=lambda: True))  # type: ignore[assignment]
