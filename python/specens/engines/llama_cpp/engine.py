"""A GGUF file as a member: llama.cpp reads what is new of several texts, and of their draft trees, together."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from specens.engines.llama_cpp.context import LlamaContext
from specens.engines.llama_cpp.lora import write_lora
from specens.engines.llama_cpp.model import GGUFModel
from specens.engines.llama_cpp.tokenizer import GGUFTokenizer
from specens.engines.protocol import Context, Engine, Needs, Read, Text, check_tokens


class LlamaCpp(Engine):
    """A model that llama.cpp runs, as its file quantises it.

    path: a .gguf file, or a GGUFModel, whose weights several members may share. adapter: a LoRA in a .gguf file, or of
        PEFT's, a folder. gpu_layers: how many layers lie on the GPU, -1 all; None: all where llama-cpp-python was built
        for one. Threads are those of torch, for one member after the other.
    Raises ValueError as `GGUFModel` and `write_lora`.
    """

    name = "llama_cpp"

    def __init__(
        self,
        path: str | os.PathLike[str] | GGUFModel,
        adapter: str | os.PathLike[str] | None = None,
        *,
        gpu_layers: int | None = None,
    ) -> None:
        self.model = path if isinstance(path, GGUFModel) else GGUFModel(path, gpu_layers=gpu_layers)
        self._adapter_path = None if adapter is None else Path(adapter).resolve()
        self._adapter = None if self._adapter_path is None else self._load(self._adapter_path)
        self.tokenizer = GGUFTokenizer(self.model)
        self.vocab_size, self.max_length = self.model.num_tokens, self.model.max_positions
        self.end_tokens = self.model.end_of_sequence

    def open(self, needs: Needs) -> GGUFContext:
        """A context of its own for each batch, which grows with its texts."""
        self.check(needs)
        return GGUFContext(LlamaContext(self.model, self._adapter), needs)

    def is_same_as(self, other: Engine) -> bool:
        """Whether it has the same weights in memory, and the same LoRA."""
        return isinstance(other, LlamaCpp) and self.model is other.model and self._adapter_path == other._adapter_path

    def _load(self, adapter: Path) -> Any:
        if not adapter.is_dir():
            return self.model.load_adapter(adapter)
        with tempfile.TemporaryDirectory() as folder:
            written = Path(folder) / "adapter.gguf"
            write_lora(adapter, self.model, written)
            return self.model.load_adapter(written)

    def check(self, needs: Needs) -> None:
        """Raise ValueError where tokens may have to be taken back, and the model has a recurrent state."""
        if needs.rollback and not self.model.cuts:
            raise ValueError(
                f"members: expected a model that can take back tokens, got {self.model.path.name} of the architecture "
                f"{self.model.metadata.get('general.architecture')}; use schedule='standard'"
            )


class GGUFText(Text):
    """A text and the nodes of a draft tree after it, as cells of a context.

    sequence: its number there. num_cells: tokens of the prompt and after it. paths: of each node a sequence that holds
    its path; depths: its levels below the text. Nodes share a sequence where one is below the other.
    """

    def __init__(self, cells: LlamaContext, prompt: list[int]) -> None:
        self.prompt = prompt
        self.sequence = cells.take()[0]
        self.num_cells = 0
        self.paths: list[int] = []
        self.depths: list[int] = []
        self._cells = cells

    def roll_back(self, length: int) -> None:
        """Cut the cells after the first `length` generated tokens."""
        self.keep_path([])
        if len(self.prompt) + length < self.num_cells:
            self.num_cells = len(self.prompt) + length
            self._cells.cut(self.sequence, self.num_cells)

    def keep_path(self, path: Sequence[int]) -> None:
        """Have the cells of the path, and empty those of other nodes; none is moved."""
        held = [node for node in path if node < len(self.paths)]
        end = self.num_cells + len(held)
        if held:
            self._cells.share(self.paths[held[-1]], self.sequence, self.num_cells, end)
        self._cells.give_back(sorted(set(self.paths)))
        self.num_cells, self.paths, self.depths = end, [], []

    def forget(self) -> None:
        """Hold nothing, as before the first read."""
        self._cells.empty([self.sequence])
        self._cells.give_back(sorted(set(self.paths)))
        self.num_cells, self.paths, self.depths = 0, [], []

    def new_tokens(self, sequence: Sequence[int]) -> list[int]:
        """Those of the prompt and of all generated tokens that have no cells yet."""
        if not self.num_cells:
            return [*self.prompt, *sequence]
        return list(sequence[self.num_cells - len(self.prompt) :])

    def grow(self, parents: Sequence[int]) -> list[set[int]]:
        """Begin new paths for new nodes; for each of these the sequences of the new paths through it.

        parents: of each new node, as an index among all nodes, -1 for the text. A new node that has no new child ends a
        path, which begins as the text does, or as the path to a node that was read before.
        """
        first, inner = len(self.paths), set(parents)
        leaves = [index for index in range(len(parents)) if first + index not in inner]
        through: list[set[int]] = [set() for _ in parents]
        for leaf, path in zip(leaves, self._cells.take(len(leaves)), strict=True):
            through[leaf].add(path)
        for index in reversed(range(len(parents))):
            if parents[index] >= first:
                through[parents[index] - first] |= through[index]
            else:
                self._follow(parents[index], through[index])
        self.paths += [min(paths) for paths in through]
        for parent in parents:
            self.depths.append(1 if parent < 0 else self.depths[parent] + 1)
        return through

    def _follow(self, node: int, paths: set[int]) -> None:
        source, end = self.sequence, self.num_cells
        if node >= 0:
            source, end = self.paths[node], self.num_cells + self.depths[node]
        for path in paths:
            self._cells.share(source, path, 0, end)


class GGUFContext(Context):
    """Texts in the cells of one cache, which holds 256 sequences: one for each text, and for each path of its tree."""

    def __init__(self, cells: LlamaContext, needs: Needs) -> None:
        self._num_paths = cells.most_sequences // needs.num_texts - 1 if needs.trees else 0  # of each text
        self._cells = cells
        self._vocab_size = cells.model.num_tokens

    def add(self, prompt: list[int]) -> GGUFText:
        """A sequence without cells."""
        return GGUFText(self._cells, prompt)

    def holds_tree(self, text: Text, num_tokens: int) -> bool:
        """Whether this text's share of the sequences has one for each path, were each new node a path of its own."""
        assert isinstance(text, GGUFText)
        return num_tokens - text.num_cells <= self._num_paths

    def remove(self, text: Text) -> None:
        """Empty its cells."""
        assert isinstance(text, GGUFText)
        text.keep_path([])
        self._cells.give_back([text.sequence])

    def read(self, reads: Sequence[Read]) -> list[Tensor]:
        """One forward of all, up to 512 tokens; logits of a row are copied, as the next forward overwrites them.

        Where it raises, nobody knows which cells were filled: these texts hold nothing after it, and are read anew.
        """
        try:
            rows = self._read(reads).clone()
        except BaseException:
            for each in reads:
                assert isinstance(each.text, GGUFText)
                each.text.forget()
            raise
        return list(torch.split(rows, [each.num_rows for each in reads]))

    def _read(self, reads: Sequence[Read]) -> Tensor:
        tokens: list[int] = []
        positions: list[int] = []
        owners: list[Sequence[int]] = []
        wanted: list[bool] = []
        for each in reads:
            text = each.text
            assert isinstance(text, GGUFText)
            new, nodes = text.new_tokens(each.sequence), each.nodes[len(text.paths) :]
            check_tokens([*new, *nodes], self._vocab_size, "a member")
            through = text.grow(each.parents[len(text.paths) :])
            depths = text.depths[len(text.depths) - len(nodes) :]
            end = text.num_cells + len(new)
            tokens += [*new, *nodes]
            positions += [*range(text.num_cells, end), *(end + depth - 1 for depth in depths)]
            owners += [[text.sequence, *sorted(set().union(*through))]] * len(new) + [sorted(own) for own in through]
            count = len(new) + len(nodes)
            wanted += [index >= count - each.num_rows for index in range(count)]
            text.num_cells = end
        return self._cells.read(tokens, positions, owners, wanted)
