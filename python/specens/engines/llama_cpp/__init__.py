"""Members that llama.cpp runs, from GGUF files."""

from specens.engines.llama_cpp.engine import LlamaCpp

__all__ = ["LlamaCpp"]
