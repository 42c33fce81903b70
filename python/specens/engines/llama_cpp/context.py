"""A `llama_context`: the cells of a cache in which sequences of tokens share what they have in common, and forwards."""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from specens.engines.llama_cpp.library import last_errors
from specens.engines.llama_cpp.model import GGUFModel, Weights

CELLS = 256  # of a new cache; llama.cpp pads to it too
SEQUENCES = 8
BATCH = 512  # tokens in one forward
NO_SPACE = 1  # what llama_decode returns, having changed nothing


class LlamaContext:
    """Sequences of tokens, each with the cells of its own in one cache, which grows as it needs to.

    A cell may belong to several sequences, which then share their beginning: that is how the paths of a draft tree
    share their text. Rejected tokens are cut, and nothing is moved.

    adapter: a LoRA of the model's, which forwards apply.
    """

    def __init__(self, model: GGUFModel, adapter: Any = None) -> None:
        self.model = model
        self._adapter = adapter
        self._functions = model.functions
        self._batch = Batch(model.functions)
        self._open(CELLS, min(SEQUENCES, self.most_sequences))
        self._free = list(reversed(range(self._num_sequences)))

    @property
    def most_sequences(self) -> int:
        """How many there can be at a time."""
        return self._functions.llama_max_parallel_sequences() if self.model.cuts else 1

    def take(self, count: int = 1) -> list[int]:
        """The numbers of new, empty sequences. Raises ValueError where there are too many, see `can_take`."""
        if not self.can_take(count):
            raise ValueError(f"batch_size: expected at most {self.most_sequences} texts and paths at a time")
        while len(self._free) < count:
            before = self._num_sequences
            self._reopen(self._cells, min(2 * before, self.most_sequences))
            self._free = [*reversed(range(before, self._num_sequences)), *self._free]
        return [self._free.pop() for _ in range(count)]

    def can_take(self, count: int) -> bool:
        """Whether so many more sequences are left."""
        return len(self._free) + self.most_sequences - self._num_sequences >= count

    def give_back(self, sequences: Sequence[int]) -> None:
        """Empty sequences, whose numbers may be taken again."""
        self.empty(sequences)
        self._free += reversed(sequences)

    def empty(self, sequences: Sequence[int]) -> None:
        """Have sequences without tokens."""
        for sequence in sequences:
            self._functions.llama_memory_seq_rm(self._memory, sequence, -1, -1)

    def cut(self, sequence: int, length: int) -> None:
        """Forget the tokens of a sequence after the first `length`."""
        if not self._functions.llama_memory_seq_rm(self._memory, sequence, length, -1):
            raise RuntimeError(f"llama.cpp cannot take back tokens of {self.model.path.name}")

    def share(self, source: int, target: int, start: int, end: int) -> None:
        """Let a sequence have the tokens of another one from position `start` up to `end`, too; they are not copied."""
        self._functions.llama_memory_seq_cp(self._memory, source, target, start, end)

    def read(
        self,
        tokens: Sequence[int],
        positions: Sequence[int],
        sequences: Sequence[Sequence[int]],
        wanted: Sequence[bool],
    ) -> Tensor:
        """Read tokens at their positions, each in one sequence or several; logits [wanted, vocab] after some of them.

        The positions of a sequence go on from those it has. The logits of one forward lie where llama.cpp wrote them,
        without a copy: they are valid until the context reads again, and are gone with it.
        """
        if torch.get_num_threads() != self._threads:
            self._set_threads()
        while self._cells < min(len(tokens), BATCH):  # llama.cpp takes no more tokens at once than there are cells
            self._reopen(2 * self._cells, self._num_sequences)
        parts = []
        for start in range(0, len(tokens), BATCH):
            part = slice(start, start + BATCH)
            self._batch.fill(tokens[part], positions[part], sequences[part], wanted[part])
            self._decode()
            if count := sum(wanted[part]):
                rows = self._rows(count)
                parts.append(rows.clone() if len(tokens) > start + BATCH else rows)
        return parts[0] if len(parts) == 1 else torch.cat(parts) if parts else torch.empty(0, self.model.num_tokens)

    def _decode(self) -> None:
        last_errors()
        while (result := self._functions.llama_decode(self._pointer, self._batch.struct)) == NO_SPACE:
            self._reopen(2 * self._cells, self._num_sequences)
        if result != 0:
            raise RuntimeError(f"llama.cpp cannot read with {self.model.path.name} ({result}): {last_errors()}")

    def _rows(self, count: int) -> Tensor:
        logits = self._functions.llama_get_logits(self._pointer)
        address = ctypes.addressof(logits.contents)
        numbers = (ctypes.c_float * (count * self.model.num_tokens)).from_address(address)
        return torch.frombuffer(numbers, dtype=torch.float32).view(count, self.model.num_tokens)

    def _set_threads(self) -> None:
        """As many as torch has: members read in turn, and each has all of them then."""
        self._threads = torch.get_num_threads()
        self._functions.llama_set_n_threads(self._pointer, self._threads, self._threads)

    def _reopen(self, cells: int, num_sequences: int) -> None:
        """A larger cache, with what the one before holds."""
        size = self._functions.llama_state_get_size(self._pointer)
        state = (ctypes.c_uint8 * size)()
        self._functions.llama_state_get_data(self._pointer, state, size)
        close = self._close
        self._open(cells, num_sequences, state)
        close()

    def _open(self, cells: int, num_sequences: int, state: ctypes.Array[ctypes.c_uint8] | None = None) -> None:
        """Take a new cache, which holds a state; where there is no space for it, all stays as it is."""
        functions, model = self._functions, self.model
        parameters = functions.llama_context_default_params()
        parameters.n_ctx, parameters.n_seq_max = cells, num_sequences
        parameters.n_batch = parameters.n_ubatch = BATCH
        parameters.kv_unified = True  # tokens of several texts, of any number each, in one forward
        parameters.swa_full = True  # windows that forget nothing which a rejection may need again
        parameters.no_perf = True
        last_errors()
        pointer = functions.llama_init_from_model(model.pointer, parameters)
        if not pointer:
            raise MemoryError(f"llama.cpp has no space for {cells} tokens of {model.path.name}: {last_errors()}")
        close = weakref.finalize(self, _free, functions, pointer, model.weights)
        if state is not None and not functions.llama_state_set_data(pointer, state, len(state)):
            close()
            raise RuntimeError(f"llama.cpp cannot move the cache of {model.path.name}: {last_errors()}")
        self._pointer, self._close, self._cells, self._num_sequences = pointer, close, cells, num_sequences
        self._memory = functions.llama_get_memory(pointer)
        if self._adapter is not None:
            adapters = (functions.llama_adapter_lora_p_ctypes * 1)(self._adapter)
            functions.llama_set_adapters_lora(pointer, adapters, 1, (ctypes.c_float * 1)(1.0))
        self._set_threads()


def _free(functions: Any, pointer: Any, _: Weights) -> None:
    """Free a context, and only then its weights."""
    functions.llama_free(pointer)


class Batch:
    """The tokens of one forward, as llama.cpp takes them."""

    def __init__(self, functions: Any) -> None:
        self._token, self._pos, self._counts = (np.zeros(BATCH, np.int32) for _ in range(3))
        self._addresses = np.zeros(BATCH, np.uint64)  # of the sequences of each token, which lie in `_ids`
        self._ids = np.zeros(BATCH, np.int32)
        self._wanted = np.zeros(BATCH, np.int8)
        self.struct = functions.llama_batch()
        arrays: dict[str, np.ndarray] = {"token": self._token, "pos": self._pos, "n_seq_id": self._counts}
        arrays |= {"seq_id": self._addresses, "logits": self._wanted}
        kinds = dict(functions.llama_batch._fields_)
        for name, array in arrays.items():
            setattr(self.struct, name, ctypes.cast(array.ctypes.data, kinds[name]))

    def fill(
        self,
        tokens: Sequence[int],
        positions: Sequence[int],
        sequences: Sequence[Sequence[int]],
        wanted: Sequence[bool],
    ) -> None:
        """Hold these tokens in place of those before."""
        count = self.struct.n_tokens = len(tokens)
        self._token[:count], self._pos[:count], self._wanted[:count] = tokens, positions, wanted
        ids = [sequence for own in sequences for sequence in own]
        if len(ids) > len(self._ids):
            self._ids = np.zeros(2 * len(ids), np.int32)
        self._ids[: len(ids)] = ids
        self._counts[:count] = [len(own) for own in sequences]
        ends = self._counts[:count].cumsum(dtype=np.uint64)
        self._addresses[:count] = ends - self._counts[:count].astype(np.uint64)
        self._addresses[:count] *= np.uint64(self._ids.itemsize)
        self._addresses[:count] += np.uint64(self._ids.ctypes.data)
