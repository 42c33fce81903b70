"""A GGUF file that llama.cpp has loaded: its weights, its vocabulary and what its metadata says."""

from __future__ import annotations

import ctypes
import os
import weakref
from functools import cached_property
from pathlib import Path
from typing import Any

from specens.engines.llama_cpp.library import last_errors, library

ALL_LAYERS = -1


class Weights:
    """Frees a loaded model with the last object that holds this one; a context must not outlive it."""

    def __init__(self, functions: Any, pointer: Any) -> None:
        weakref.finalize(self, functions.llama_model_free, pointer)


class GGUFModel:
    """The weights of one file, read by any number of contexts.

    path: a .gguf file. gpu_layers: how many layers lie on the GPU, -1 all of them; None is all where llama.cpp was
        built for one. gpu: the number of the GPU that has them all; None spreads them over all GPUs.
    Raises ValueError where llama-cpp-python is missing, where the file cannot be loaded, or where it is no model that
    continues a text.
    """

    def __init__(self, path: str | os.PathLike[str], *, gpu_layers: int | None = None, gpu: int | None = None) -> None:
        self.functions = functions = library()
        self.path = Path(path)
        parameters = functions.llama_model_default_params()
        has_gpu = functions.llama_supports_gpu_offload()
        if gpu_layers and not has_gpu:
            raise ValueError("device: expected cpu, as this llama.cpp was built without a GPU")
        parameters.n_gpu_layers = (ALL_LAYERS if has_gpu else 0) if gpu_layers is None else gpu_layers
        if gpu is not None:
            parameters.split_mode, parameters.main_gpu = functions.LLAMA_SPLIT_MODE_NONE, gpu
        last_errors()
        self.pointer = functions.llama_model_load_from_file(os.fsencode(self.path), parameters)
        if not self.pointer:
            raise ValueError(f"model: expected a GGUF file that llama.cpp can load, got {str(path)!r}: {last_errors()}")
        self.weights = Weights(functions, self.pointer)
        self.vocab = functions.llama_model_get_vocab(self.pointer)
        self._check_continues_texts()

    @cached_property
    def metadata(self) -> dict[str, str]:
        """What the file says of the model, arrays left out."""
        functions = self.functions
        buffer = ctypes.create_string_buffer(1 << 16)

        def read(function: Any, index: int) -> str:
            length = function(self.pointer, index, buffer, len(buffer))
            return buffer.raw[: min(length, len(buffer) - 1)].decode(errors="replace")

        indices = range(functions.llama_model_meta_count(self.pointer))
        by_index = functions.llama_model_meta_key_by_index, functions.llama_model_meta_val_str_by_index
        return {read(by_index[0], index): read(by_index[1], index) for index in indices}

    @cached_property
    def description(self) -> str:
        """Its architecture, size and quantisation."""
        buffer = ctypes.create_string_buffer(256)
        self.functions.llama_model_desc(self.pointer, buffer, len(buffer))
        return buffer.value.decode(errors="replace")

    @cached_property
    def num_tokens(self) -> int:
        """The size of the vocabulary, and the width of a row of logits."""
        return self.functions.llama_vocab_n_tokens(self.vocab)

    @cached_property
    def max_positions(self) -> int:
        """The longest text that it was trained on."""
        return self.functions.llama_model_n_ctx_train(self.pointer)

    @cached_property
    def end_of_sequence(self) -> frozenset[int]:
        """The ids that end a text: of a sequence, of a turn, and what its metadata counts among them."""
        ends = self.functions.llama_vocab_is_eog
        return frozenset(token for token in range(self.num_tokens) if ends(self.vocab, token))

    @property
    def cuts(self) -> bool:
        """Whether its cache can forget the last tokens of a text; a recurrent state cannot."""
        model = self.pointer
        return not (self.functions.llama_model_is_recurrent(model) or self.functions.llama_model_is_hybrid(model))

    def _check_continues_texts(self) -> None:
        functions, model = self.functions, self.pointer
        if functions.llama_model_has_encoder(model) or functions.llama_model_is_diffusion(model):
            raise ValueError(
                f"members: expected a model that continues a text, got {self.path.name} of the architecture "
                f"{self.metadata.get('general.architecture')}"
            )

    def load_adapter(self, path: Path) -> Any:
        """A LoRA from a .gguf file, which stays as long as the weights. Raises ValueError where it is not for them."""
        last_errors()
        adapter = self.functions.llama_adapter_lora_init(self.pointer, os.fsencode(path))
        if not adapter:
            raise ValueError(
                f"model: expected a LoRA of {self.path.name} in a GGUF file after '+', got {str(path)!r}: "
                f"{last_errors()}"
            )
        return adapter
