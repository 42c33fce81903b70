"""A key-value cache for requests that each have a length of their own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

from specens.engines.transformers.kv_cache import move_slots
from specens.engines.transformers.model import Model
from specens.engines.transformers.tree_arguments import line_indices, tree_indices

LAYERS = ("DynamicLayer", "DynamicSlidingWindowLayer")
OTHER_WINDOWS = ("attention_chunk_size", "window_size", "attention_window_size", "local_attention", "keep_window_size")
GROWTH = 64  # slots are added in multiples of it


@dataclass
class Window:
    """What one forward reads and writes. rows: of the cache, all below num_rows; extent: slots in use afterwards.

    slots: [rows, new], where the new tokens go; -1, the last slot of all, for padding.
    """

    rows: Tensor
    num_rows: int
    is_prefix: bool
    slots: Tensor
    extent: int


class RaggedLayer(CacheLayerMixin):
    """Keys and values [rows, heads, slots, head_dim] in which the token at position i of a row is in its slot i.

    So nothing has to be moved when drafts are rejected: the next tokens are written over them. A row that gets fewer
    new tokens than others writes the padding into one more slot at the end, which no token sees.
    """

    def __init__(self) -> None:
        super().__init__()
        self.window: Window | None = None

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Empty buffers; they grow with what is written."""
        self.device = key_states.device
        self.keys, self.values = (
            states.new_zeros(0, states.shape[1], 1, states.shape[3]) for states in (key_states, value_states)
        )
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Write new keys and values [rows, heads, new, head_dim]; return those that the rows have then."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        window = self.window
        assert window is not None
        rows = window.rows.to(self.device)
        slots = window.slots.to(self.device)
        seen = []
        for name, states in (("keys", key_states), ("values", value_states)):
            buffer = self._grown(name, window.num_rows, window.extent)
            buffer[rows[:, None], :, slots] = states.transpose(1, 2)
            seen.append((buffer[: len(rows)] if window.is_prefix else buffer[rows])[:, :, : window.extent])
        return seen[0], seen[1]

    def _grown(self, name: str, rows: int, slots: int) -> Tensor:
        """The buffer, with at least so many rows and slots, and the one for padding."""
        buffer = getattr(self, name)
        more_rows = 0 if rows <= buffer.shape[0] else max(rows, 2 * buffer.shape[0]) - buffer.shape[0]
        held = buffer.shape[2] - 1
        more_slots = 0 if slots <= held else -(-max(slots, held + held // 2) // GROWTH) * GROWTH - held
        if more_rows or more_slots:
            buffer = torch.nn.functional.pad(buffer, (0, 0, 0, more_slots, 0, 0, 0, more_rows))
            setattr(self, name, buffer)
        return buffer

    def copy_row(self, source: int, target: int) -> None:
        """Put one row in another's place."""
        if self.is_initialized and source < self.keys.shape[0]:
            self.keys[target] = self.keys[source]
            self.values[target] = self.values[source]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:  # noqa: ARG002
        """Slots that are seen, and the first of them."""
        assert self.window is not None
        return self.window.extent, 0

    def get_seq_length(self) -> int:
        """Slots in use before the forward under way by the longest of its rows."""
        return 0 if self.window is None else self.window.extent - self.window.slots.shape[1]

    def get_max_length(self) -> int:
        """-1: there is none."""
        return -1


class RaggedCache:
    """The cache of one model for a batch whose rows have lengths of their own.

    Rows are numbered from 0 without gaps, so that a forward of all of them reads its buffers without a copy.
    """

    def __init__(self, model: Model) -> None:
        layers = model.new_cache().layers
        self._model = model
        self._layers = [RaggedLayer() for _ in layers]
        self._cache = Cache(layers=list(self._layers))
        self._windows = [getattr(layer, "sliding_window", None) for layer in layers]
        self.num_rows = 0

    @staticmethod
    def suits(model: Model) -> bool:
        """Whether the model attends by keys of every token, with the masks that are made here.

        Chunks, and windows that its cache knows nothing of, are for masks of its own.
        """
        if model.make_cache is not None:
            return False
        layers = model.new_cache().layers
        sizes = {layer.sliding_window for layer in layers if hasattr(layer, "sliding_window")}
        others = [getattr(model.text_config, name, None) for name in OTHER_WINDOWS]
        plain = not any(others) or set(others) - {None, False} == sizes
        return plain and len(sizes) <= 1 and all(type(layer).__name__ in LAYERS for layer in layers)

    def add_row(self) -> int:
        """The number of a new row."""
        self.num_rows += 1
        return self.num_rows - 1

    def remove_row(self, row: int) -> int:
        """Remove a row; the last one takes its place, and its former number is returned."""
        self.num_rows -= 1
        if row != self.num_rows:
            for layer in self._layers:
                layer.copy_row(self.num_rows, row)
        return self.num_rows

    def keep(self, row: int, start: int, nodes: Sequence[int]) -> None:
        """Move what a row holds of these nodes, which ascend from the slot `start` on, there one after the other."""
        layers = [layer for layer in self._layers if layer.is_initialized]
        move_slots([buffer[row : row + 1] for layer in layers for buffer in (layer.keys, layer.values)], start, nodes)

    def forward(
        self,
        rows: Sequence[int],
        lengths: Sequence[int],
        tokens: Sequence[list[int] | Tensor],
        keep: int,
        trees: Sequence[Sequence[int]] = (),
    ) -> Tensor:
        """Feed each row its tokens after the first `lengths` it holds; logits [rows, keep, vocab] of the last places.

        tokens: ids, or of each row hidden states [new, width] in the place of their embeddings.
        trees: of each row the parents of the nodes that its last tokens are, held ones among them; none where they are
        a line. Rows with fewer tokens than others are padded in front.
        """
        device = self._model.device
        most = max(map(len, tokens))
        pads = torch.tensor([most - len(new) for new in tokens])[:, None]
        slots = torch.tensor(lengths)[:, None] + torch.arange(most) - pads  # of each new token
        is_pad = torch.arange(most) < pads
        extent = int(slots[:, -1].max()) + 1
        index, is_prefix = torch.tensor(rows, device=device), list(rows) == list(range(len(rows)))
        written = slots.masked_fill(is_pad, -1).to(device)
        window = Window(index, max(rows) + 1, is_prefix, written, extent)
        for layer in self._layers:
            layer.window = window
        ids = torch.stack([_padded(new, most) for new in tokens]).to(device)
        slots = slots.masked_fill(is_pad, 0)  # padding sees the first token, so that its numbers stay finite
        if any(map(len, trees)):
            ends = [held + len(new) for held, new in zip(lengths, tokens, strict=True)]
            prefixes = [end - len(parents) for end, parents in zip(ends, trees, strict=True)]
            seen, indices = tree_indices(slots, extent, prefixes, trees)
        else:
            seen, indices = line_indices(slots, extent)
        masks = {size: self._mask(seen, indices, slots, size).to(device) for size in set(self._windows)}
        attention: Any = masks.popitem()[1] if len(masks) == 1 else _by_kind(masks)
        positions = indices.expand(len(rows), -1).gather(1, slots)
        return self._model.forward(ids, self._cache, keep, attention_mask=attention, position_ids=positions.to(device))

    def _mask(self, seen: Tensor, indices: Tensor, slots: Tensor, size: int | None) -> Tensor:
        """[rows, 1, new, extent]: 0 for the tokens that one sees, in a sliding window of `size`, else -inf."""
        if size is not None:
            own = indices.expand(len(slots), -1).gather(1, slots)
            seen = seen & (own[:, :, None] - indices[:, None] < size)
        return torch.zeros(seen.shape, dtype=self._model.dtype).masked_fill(~seen, float("-inf"))[:, None]


def _padded(tokens: list[int] | Tensor, length: int) -> Tensor:
    """Ids [length], or states [length, width], with zeros in front."""
    own = torch.as_tensor(tokens)
    return torch.cat([own.new_zeros(length - len(own), *own.shape[1:]), own])


def _by_kind(masks: dict[int | None, Tensor]) -> dict[str, Tensor]:
    """What models with layers of two kinds take."""
    return {"full_attention" if size is None else "sliding_attention": mask for size, mask in masks.items()}
