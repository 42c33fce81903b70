"""A rank's slice of the vocabulary: arguments that name tokens, as the slice sees them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from specens_kernels.arguments import ProcessingArguments, Target
from specens_kernels.ops.target_logprobs.processing import Paths, processed
from specens_kernels.ops.target_logprobs.reference import clean, pad_vocab
from specens_kernels.values import fail, is_integer

LARGEST_VOCAB = 2**31 - 1  # a token and a row's status are told as one float64


class Shard(NamedTuple):
    """Tokens start to start + width - 1 of the vocabulary lie on this rank. Tokens of a shard count from its start."""

    start: int
    sizes: tuple[int, ...]  # the whole vocabulary of each member
    draft_size: int  # of the drafter
    width: int  # of the widest tensor of logits
    max_top_k: int | None

    @property
    def vocab(self) -> int:
        return max(self.sizes)

    def own(self, tokens: Tensor) -> Tensor:
        """Tokens as the shard counts them; negative, or its width and more, where they lie elsewhere."""
        return torch.where(tokens >= 0, tokens.long() - self.start, -1)


def check_size(name: str, value: Any, least: int, most: int = LARGEST_VOCAB) -> int:
    if not is_integer(value) or not least <= value <= most:
        fail(name, f"an integer from {least} to {most}", repr(value))
    return int(value)


def sizes_of(vocab_size: int | Sequence[int], members: int) -> tuple[int, ...]:
    """The vocabulary of each member."""
    sizes = list(vocab_size) if isinstance(vocab_size, list | tuple) else [vocab_size] * members
    if len(sizes) != members:
        fail("vocab_size", f"an integer, or one for each of {members} members", f"{len(sizes)} integers")
    return tuple(check_size("vocab_size", size, 1) for size in sizes)


def without_padding(logits: Any, start: int, size: int) -> Any:
    """The tokens of a slice that are in the vocabulary; one that cannot be drawn where there are none."""
    if not isinstance(logits, Tensor) or logits.dim() == 0 or not logits.is_floating_point():
        return logits  # the operation's own checks say what is wrong
    width = min(logits.shape[-1], max(0, size - start))
    return logits[..., :width] if width > 0 else logits.new_full((*logits.shape[:-1], 1), -math.inf)


def shifted(shard: Shard, processing: ProcessingArguments) -> ProcessingArguments:
    tables = ("bias_tokens", "end_tokens", "prompt_tokens", "output_tokens")
    own: dict[str, Any] = {
        name: shard.own(table) for name in tables if (table := getattr(processing, name)) is not None
    }
    return processing._replace(**own)


def allowed_tokens(shard: Shard, words: Tensor) -> Tensor:
    """bool [..., width], of a bit mask over the whole vocabulary."""
    tokens = torch.arange(shard.start, shard.start + shard.width, device=words.device)
    known = tokens // 32 < words.shape[-1]
    own = words[..., torch.where(known, tokens // 32, 0)]
    return ((own >> (tokens % 32)) & 1 != 0) & known


def shifted_mask(shard: Shard, words: Tensor) -> Tensor:
    """A bit mask over the whole vocabulary as one that begins with the shard."""
    first, shift = divmod(shard.start, 32)
    own = words[..., first : first + shard.width // 32 + 2]
    if own.shape[-1] == 0:
        return words.new_zeros(*words.shape[:-1], 1)
    if shift == 0:
        return own
    bits = own.long() & 0xFFFFFFFF
    after = torch.nn.functional.pad(bits[..., 1:], (0, 1))
    bits = (bits >> shift | after << (32 - shift)) & 0xFFFFFFFF
    return (bits - (bits >> 31 << 32)).int()


def usable(shard: Shard, logits: Tensor, target: Target, before: Tensor | Paths | None) -> tuple[Tensor, Tensor]:
    """Processed logits float64 [batch, rows, width], -inf where there is no token; status of the rows' slices.

    target: its `processing` is the shard's, its `allowed` covers the rows. before: draft tokens as the shard sees them.
    """
    values = processed(logits, target.processing, None, before)
    if target.allowed is not None:
        values = torch.where(allowed_tokens(shard, target.allowed)[..., : logits.shape[-1]], values, -math.inf)
    values, status = clean(values)
    return pad_vocab(values, shard.width, -math.inf), status
