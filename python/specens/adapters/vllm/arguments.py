"""How vLLM holds a batch, in the words of `verify_chain`. Tensors and lists only: nothing here imports vLLM."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from specens_kernels import Processing, Sampling, Verdict
from specens_kernels.ensembles import Ensemble

logger = logging.getLogger(__name__)

GREEDY_BELOW = 1e-5  # a lower temperature is greedy to vLLM
WHERE_NO_TOKEN = 0  # what vLLM emits of a row without a possible token
PADDING = -1
LARGEST_SEED = 2**63 - 1
DRAW = 4  # by how much vLLM moves the generator of a request on a GPU in each step


class Target(NamedTuple):
    """Logits [rows, vocab] of one model and None, or those of an ensemble's members."""

    members: tuple[Tensor, ...]
    ensemble: Ensemble | None = None

    def of_requests(self, requests: Tensor) -> Ensemble | None:
        """The ensemble of these requests, int64 [n], where weights are theirs."""
        ensemble: Any = self.ensemble
        if ensemble is None or not isinstance(ensemble.weights, Tensor):
            return ensemble
        return replace(ensemble, weights=ensemble.weights[requests])


def chain_rule(asked: str, rejection_sample_method: str) -> str:
    """The rule of `verify_chain` for SPECENS_VLLM_RULE and vLLM's own setting; rates of "synthetic" come before it."""
    if asked == "gumbel":
        if rejection_sample_method != "standard":
            raise ValueError(
                "rejection_sample_method: expected 'standard' with SPECENS_VLLM_RULE=gumbel, which accepts drafts "
                f"in its own way, got {rejection_sample_method!r}"
            )
        return asked
    return "block" if rejection_sample_method == "block" else "token"


def sampling(
    temperature: Tensor | None, top_k: Tensor | None, top_p: Tensor | None, min_p: Tensor | None, vocab: int
) -> Sampling:
    """Sampling parameters of a batch.

    temperature: float [batch], or None where every request is greedy. top_k: integers [batch], vocab where it is off.
    top_p, min_p: float [batch]. None: off for every request.
    """
    if temperature is None:
        return Sampling(temperature=0.0)
    temperature = torch.where(temperature < GREEDY_BELOW, 0.0, temperature)
    if top_k is not None:
        top_k = torch.where(top_k >= vocab, 0, top_k)
    return Sampling(temperature, top_k, top_p, min_p, filter_order="vllm")


def row_offsets(ends: Tensor) -> Tensor:
    """Integers [batch + 1] of packed rows from their inclusive sums [batch]."""
    return torch.cat((ends.new_zeros(1), ends))


def token_table(tokens: Sequence[Iterable[int]], device: torch.device) -> Tensor:
    """int64 [batch, longest], padded with -1."""
    rows = [torch.tensor(list(row), dtype=torch.int64) for row in tokens]
    if not rows:
        return torch.empty(0, 0, dtype=torch.int64, device=device)
    return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=PADDING).to(device, non_blocking=True)


def logit_bias(biases: Mapping[int, Mapping[int, float]], batch: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Tokens int64 and values float32, each [batch, most], from what some requests ask for."""
    asked = [biases.get(request, {}) for request in range(batch)]
    values = [torch.tensor(list(bias.values()), dtype=torch.float32) for bias in asked]
    padded = torch.nn.utils.rnn.pad_sequence(values, batch_first=True)
    return token_table(asked, device), padded.to(device, non_blocking=True)


def minimum_lengths(
    asked: Mapping[int, tuple[int, Sequence[int], Iterable[int], bool]], batch: int, device: torch.device
) -> tuple[Tensor, Tensor]:
    """min_tokens int64 [batch] and end_tokens int64 [batch, most].

    asked: of some requests, the least number of tokens, the tokens so far, those that would end the text, and whether
    there is a grammar (which does not matter here).
    """
    missing, ends = [0] * batch, [list[int]() for _ in range(batch)]
    for request, (least, so_far, end_tokens, _) in asked.items():
        missing[request], ends[request] = least - len(so_far), list(end_tokens)
    return torch.tensor(missing, dtype=torch.int64).to(device, non_blocking=True), token_table(ends, device)


def processing(
    penalties: tuple[Tensor, Tensor, Tensor, Tensor, Sequence[Sequence[int]]] | None,
    biases: Mapping[int, Mapping[int, float]],
    lengths: Mapping[int, tuple[int, Sequence[int], Iterable[int], bool]],
    batch: int,
    device: torch.device,
) -> Processing | None:
    """penalties: repetition, frequency and presence float [batch], the prompts [batch, n] and the outputs; or None."""
    if penalties is None and not biases and not lengths:
        return None
    parts: dict = {}
    if biases:
        parts["logit_bias"] = logit_bias(biases, batch, device)
    if lengths:
        parts["min_tokens"], parts["end_tokens"] = minimum_lengths(lengths, batch, device)
    if penalties is not None:
        repetition, frequency, presence, prompts, outputs = penalties
        parts |= {"repetition_penalty": repetition, "frequency_penalty": frequency, "presence_penalty": presence}
        parts |= {"prompt_tokens": prompts.long(), "output_tokens": token_table(outputs, device)}
    return Processing(**parts)


def allowed_bits(forbidden: Tensor) -> Tensor:
    """Packed bits int32 [batch, words] of the tokens that are not forbidden, bool [batch, vocab]."""
    batch, vocab = forbidden.shape
    allowed = torch.nn.functional.pad(~forbidden, (0, -vocab % 32)).view(batch, -1, 32)
    bits = torch.ones(32, dtype=torch.int32, device=forbidden.device) << torch.arange(32, device=forbidden.device)
    return (allowed * bits.int()).sum(2, dtype=torch.int32)


def requests_of_rows(num_rows: Sequence[int], device: torch.device) -> Tensor:
    """int64 [rows]: whose each packed row is."""
    lengths = torch.tensor(num_rows, dtype=torch.int64)
    return torch.arange(len(num_rows)).repeat_interleave(lengths).to(device, non_blocking=True)


def draft_logits(draft_probs: Tensor | None) -> Tensor | None:
    """Logits, at temperature 1, of the probabilities [drafts, vocab] that drafts were drawn with; None for one-hot."""
    return None if draft_probs is None else draft_probs.log()


def random_numbers(
    generators: Mapping[int, torch.Generator], first_positions: Tensor | None, batch: int, device: torch.device
) -> tuple[Tensor, Tensor]:
    """seeds and positions, int64 [batch].

    generators: of the requests that have a seed. Their uniforms follow from that seed and first_positions, the absolute
    position [batch] of each round's first draft: not from the batch, nor from how often a generator was used. Where
    the positions are not known, they are drawn from the generators. Any other request gets a new seed each round.
    Generators on a GPU move as in vLLM's sampler, as vLLM moves them back where it throws a token away.
    """
    seeds = seeds_of(generators, batch, device)
    positions = torch.zeros_like(seeds) if first_positions is None else first_positions.long()
    if not generators:
        return seeds, positions
    if first_positions is None:
        drawn = [
            torch.randint(LARGEST_SEED, (1,), generator=generator, device=generator.device)
            for generator in generators.values()
        ]
        requests = torch.tensor(list(generators)).to(device, non_blocking=True)
        positions[requests] = torch.cat(drawn).to(device)
        return seeds, positions
    for generator in generators.values():
        if generator.device.type != "cpu":  # one of a CPU has no offset
            generator.set_offset(generator.get_offset() + DRAW)
    return seeds, positions


def seeds_of(generators: Mapping[int, torch.Generator], batch: int, device: torch.device) -> Tensor:
    """int64 [batch]: the seeds of the requests that have one, and new ones of the others."""
    seeds = torch.randint(-LARGEST_SEED, LARGEST_SEED, (batch,), dtype=torch.int64, device=device)
    if generators:
        requests = torch.tensor(list(generators)).to(device, non_blocking=True)
        given = [_as_int64(generator.initial_seed()) for generator in generators.values()]
        seeds[requests] = torch.tensor(given, dtype=torch.int64).to(device, non_blocking=True)
    return seeds


def _as_int64(seed: int) -> int:
    return (seed + 2**63) % 2**64 - 2**63


def emitted(verdict: Verdict) -> tuple[Tensor, Tensor]:
    """tokens int64 [batch, draft_len + 1], padded with -1, and how many, int64 [batch]: at least one a request."""
    first = some_token(verdict.tokens[:, 0])
    return torch.cat((first[:, None], verdict.tokens[:, 1:]), 1), verdict.num_tokens.clamp(min=1)


def some_token(tokens: Tensor) -> Tensor:
    """Tokens [batch], but 0 instead of -1: of a request for which no token is possible.

    It would be scheduled for ever, and gets token 0 from vLLM's own sampler too. On a CPU, where looking costs nothing,
    a warning says so.
    """
    nothing = tokens < 0
    if nothing.device.type == "cpu" and bool(nothing.any()):
        logger.warning("no token is possible for %d request(s): token %d instead", int(nothing.sum()), WHERE_NO_TOKEN)
    return torch.where(nothing, WHERE_NO_TOKEN, tokens)
