"""The definition of logit processing, in float64. Row i of a request comes after its drafts 0..i-1, or as told."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from specens_kernels.arguments import ProcessingArguments

FLOAT_MAX = torch.finfo(torch.float32).max


class Paths(NamedTuple):
    """The draft tokens before each row, where they are not those of the rows before it."""

    tokens: Tensor  # int64 [batch, nodes]
    above: Tensor  # bool [batch, rows, nodes], whether a node is on the way to a row


def request_values(number: float, rows: Tensor | None, like: Tensor) -> Tensor:
    """A parameter as float64 [batch]; like: any tensor [batch, ...]."""
    if rows is not None:
        return rows.double()
    return torch.full((like.shape[0],), number, dtype=torch.float64, device=like.device)


def token_sums(table: Tensor | None, values: Tensor | float, batch: int, vocab: int, device: torch.device) -> Tensor:
    """float64 [batch, vocab]: the sum of the values [batch, n] of each token of a table [batch, n]; others are 0."""
    sums = torch.zeros(batch, vocab, dtype=torch.float64, device=device)
    if table is None:
        return sums
    known = (table >= 0) & (table < vocab)
    return sums.scatter_add(1, torch.where(known, table, 0).long(), torch.where(known, values, 0.0).double())


def output_counts(processing: ProcessingArguments, drafts: Tensor | Paths | None, logits: Tensor) -> Tensor:
    """float64 [batch, rows, vocab]: how often a token is in the output before each row; drafts [batch, n]."""
    batch, rows, vocab = logits.shape
    before = token_sums(processing.output_tokens, 1.0, batch, vocab, logits.device)[:, None].expand(-1, rows, -1)
    if isinstance(drafts, Paths):
        own = (drafts.tokens[..., None] == torch.arange(vocab, device=logits.device)).double()
        return before + drafts.above.double() @ own
    if drafts is None or drafts.shape[1] == 0:
        return before
    own = (drafts[:, : rows - 1, None] == torch.arange(vocab, device=logits.device)).double().cumsum(1)
    return before + torch.nn.functional.pad(own, (0, 0, 1, 0))


def processed(
    logits: Tensor, processing: ProcessingArguments, allowed: Tensor | None, drafts: Tensor | Paths | None
) -> Tensor:
    """float64 logits [batch, rows, vocab] as `Processing` and a bit mask int32 [batch, rows, words] say."""
    batch, rows, vocab = logits.shape
    logits = logits.double()
    if processing.active:
        bias = token_sums(processing.bias_tokens, _values(processing), batch, vocab, logits.device)
        prompt = token_sums(processing.prompt_tokens, 1.0, batch, vocab, logits.device) > 0
        output = output_counts(processing, drafts, logits)
        repetition, frequency, presence = (values[:, None, None] for values in penalties(processing, logits))
        repetition = torch.where(prompt[:, None] | (output > 0), repetition, 1.0)
        logits = logits + bias[:, None]
        logits = torch.where(logits > 0, logits / repetition, logits * repetition)
        logits = logits - frequency * output - presence * (output > 0)
        held_back = request_values(processing.min_tokens, processing.min_tokens_rows, logits)
        ends = token_sums(processing.end_tokens, 1.0, batch, vocab, logits.device) > 0
        steps = drafts.above.sum(2) if isinstance(drafts, Paths) else torch.arange(rows, device=logits.device)
        too_early = steps < held_back[:, None]
        logits = torch.where(ends[:, None] & too_early[..., None], -math.inf, logits)
        logits = torch.where(logits.abs() > FLOAT_MAX, logits.sign() * math.inf, logits)  # beyond float32
    return logits if allowed is None else torch.where(unpacked_bits(allowed, vocab), logits, -math.inf)


def _values(processing: ProcessingArguments) -> Tensor | float:
    return 0.0 if processing.bias_values is None else processing.bias_values


def penalties(processing: ProcessingArguments, like: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Repetition, frequency and presence penalty, float64 [batch]."""
    return (
        request_values(processing.repetition_penalty, processing.repetition_penalties, like),
        request_values(processing.frequency_penalty, processing.frequency_penalties, like),
        request_values(processing.presence_penalty, processing.presence_penalties, like),
    )


def invalid_penalties(processing: ProcessingArguments, like: Tensor) -> Tensor:
    """bool [batch]: a penalty is out of range; like: any tensor [batch, ...]."""
    repetition, frequency, presence = penalties(processing, like)
    finite = torch.isfinite(repetition) & torch.isfinite(frequency) & torch.isfinite(presence)
    return ~(finite & (repetition > 0))


def unpacked_bits(words: Tensor, vocab: int) -> Tensor:
    """bool [..., vocab]: bit token % 32 of word token // 32; tokens beyond the words are not allowed."""
    bits = (words[..., None] >> torch.arange(32, device=words.device)) & 1
    bits = bits.flatten(-2)[..., :vocab] != 0
    return torch.nn.functional.pad(bits, (0, vocab - bits.shape[-1]))
