"""The law of the tokens that verification emits, summed over all draft chains and integrated over all uniforms."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from fractions import Fraction

import torch
from laws.tiny_targets import Model
from torch import Tensor

from specens_kernels import Verdict, verify_chain

MOST_UNIFORMS = 300_000


@dataclass(frozen=True)
class Enumeration:
    """Every draft chain with every combination of uniforms, verified; `weights` sum to 1."""

    verdict: Verdict
    weights: Tensor  # float64 [batch]


def enumerate_rounds(model: Model, bonus: bool, draft_len_used: int, backend: str = "reference") -> Enumeration:
    """The first token of each text follows token 0."""
    draft_len, _, draft_vocab = model.draft.shape
    chains = torch.tensor(list(itertools.product(range(draft_vocab), repeat=draft_len))).reshape(-1, draft_len)
    before = torch.nn.functional.pad(chains, (1, 0)) % model.target.shape[-1]  # [chains, draft_len + 1]
    steps = torch.arange(draft_len)
    probabilities = model.draft[steps, before[:, :-1], chains].prod(1)
    chains, before, probabilities = (tensor[probabilities > 0] for tensor in (chains, before, probabilities))
    random_numbers = grid(random_needed(model), draft_len + 1)

    batch = len(chains) * len(random_numbers)
    rows = torch.arange(draft_len + bonus)
    every = torch.arange(len(chains)).repeat_interleave(len(random_numbers))
    arguments = dict(model.arguments)
    if isinstance(arguments.get("drafter"), Tensor):
        arguments["drafter"] = arguments["drafter"].expand(batch, -1)
    if model.draft_logits is not None:
        arguments["draft_logits"] = model.draft_logits[steps, before[:, :-1]][every]
    if draft_len_used < draft_len:
        arguments["draft_lens"] = torch.full((batch,), draft_len_used)
    verdict = verify_chain(
        [logits[rows, before[:, : len(rows)]][every] for logits in model.member_logits],
        chains[every],
        uniforms=random_numbers.repeat(len(chains), 1),
        backend=backend,
        **arguments,
    )
    return Enumeration(verdict, probabilities[every] / len(random_numbers))


def text_law(model: Model, rounds: Enumeration, length: int) -> Tensor:
    """float64 [vocab] * length: the law of the emitted tokens, followed by draws from the target."""
    vocab = model.target.shape[-1]
    tokens = rounds.verdict.tokens[:, :length]
    law = torch.zeros([vocab] * length, dtype=torch.float64)
    for text in itertools.product(range(vocab), repeat=length):
        weight = rounds.weights * ((tokens == torch.tensor(text)) | (tokens == -1)).all(1)
        for step, (token, before) in enumerate(zip(text, (0, *text))):
            weight = weight * torch.where(tokens[:, step] == -1, model.target[step, before, token], 1.0)
        law[text] = weight.sum()
    return law


def target_law(target: Tensor, length: int) -> Tensor:
    """float64 [vocab] * length: the product of conditional target distributions [rows or 1, vocab, vocab]."""
    law = target[0, 0]
    for step in range(1, length):
        law = law[..., None] * target[min(step, len(target) - 1)]
    return law


def expected_accepted(model: Model, draft_len_used: int) -> float:
    """The sum over positions of the probability that the chain gets there: products of min(target, draft)."""
    vocab = model.target.shape[-1]
    reached = torch.zeros(vocab, dtype=torch.float64)
    reached[0] = 1
    total = 0.0
    for step in range(draft_len_used):
        draft = torch.nn.functional.pad(model.draft[step], (0, vocab - model.draft.shape[-1]))
        reached = reached @ torch.minimum(model.target[step], draft)
        total += float(reached.sum())
    return total


def grid(size: int, random_numbers: int) -> Tensor:
    """float64 [size ** uniforms, uniforms]: all combinations of the midpoints of a grid."""
    midpoints = (torch.arange(size, dtype=torch.float64) + 0.5) / size
    return torch.cartesian_prod(*[midpoints] * random_numbers).reshape(-1, random_numbers)


def random_needed(model: Model) -> int:
    """The grid on which every threshold of a decision lies: acceptances, draws from residuals and from the target."""
    thresholds = [model.target.cumsum(-1).flatten()]
    for target, draft in zip(model.target, model.draft):
        draft = torch.nn.functional.pad(draft, (0, target.shape[-1] - draft.shape[-1]))
        thresholds.append((target / draft)[draft > target])
        residual = (target - draft).clamp(min=0)
        residual = residual[residual.sum(-1) > 0.01]  # what is smaller comes from rounding
        thresholds.append((residual.cumsum(-1) / residual.sum(-1, keepdim=True)).flatten())
    size = 1
    for threshold in torch.cat(thresholds).tolist():
        fraction = Fraction(threshold).limit_denominator(300)
        assert abs(float(fraction) - threshold) < 1e-6, threshold
        size = math.lcm(size, fraction.denominator)
    assert size ** (model.draft.shape[0] + 1) <= MOST_UNIFORMS, size
    return size
