"""Tiny models whose target and draft distributions are known fractions, in each ensemble and with each drafter.

A table holds a row for each position and token before it. Target probabilities are quarters, so that a small grid of
uniforms integrates every decision of verification without error.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from fractions import Fraction
from typing import Any

import torch
from torch import Tensor

from specens_kernels import Contrastive, LogitMixture, Mixture, Sampling
from specens_kernels.ensembles import Ensemble

VOCAB = 3
PARTS = 4  # probabilities are multiples of 1 / PARTS
Row = tuple[list[list[float]], list[float]]  # logits of each member, target probabilities


@dataclass(frozen=True)
class Target:
    """An ensemble, its temperature, how to draw a row, and the members whose own distributions are fractions."""

    ensemble: Ensemble | None
    temperature: float
    draw_row: Callable[[random.Random], Row]
    drafters: tuple[int, ...]


@dataclass(frozen=True)
class Model:
    """Tables of a target and of drafts; `draft` are the arguments of verify_chain for them, of one request."""

    member_logits: list[Tensor]  # float32 [rows, vocab, vocab of the member]
    target: Tensor  # float64 [rows, vocab, vocab]
    draft: Tensor  # float64 [draft_len, vocab, vocab of the drafter]
    draft_logits: Tensor | None  # float32 like draft, of an outside drafter
    arguments: dict[str, Any] = field(default_factory=dict)


def fractions(rng: random.Random, vocab: int = VOCAB) -> list[float]:
    counts = [0] * vocab
    for _ in range(PARTS):
        counts[rng.randrange(vocab)] += 1
    return [count / PARTS for count in counts]


def log(probability: float) -> float:
    return math.log(probability) if probability > 0 else -math.inf


def single(temperature: float) -> Target:
    def draw_row(rng: random.Random) -> Row:
        target = fractions(rng)
        return [[temperature * log(value) for value in target]], target

    return Target(None, temperature, draw_row, (0,))


def mixture(weights: tuple[float, ...], vocabs: tuple[int, ...], temperature: float) -> Target:
    """Members are drawn until their mixture is in quarters too."""

    def draw_row(rng: random.Random) -> Row:
        while True:
            members = [fractions(rng, vocab) for vocab in vocabs]
            padded = [member + [0.0] * (max(vocabs) - len(member)) for member in members]
            target = [sum(w * p for w, p in zip(weights, column)) for column in zip(*padded)]
            if all(value * PARTS == int(value * PARTS) for value in target):
                return [[temperature * log(value) for value in member] for member in members], target

    return Target(Mixture(weights), temperature, draw_row, tuple(range(len(vocabs))))


def logit_mixture(ensemble: LogitMixture | Contrastive, solved: int, temperature: float) -> Target:
    """The logits of member `solved` are whatever turns the others, which are fractions, into the target."""
    weights = [float(weight) for weight in ensemble.weights]

    def draw_row(rng: random.Random) -> Row:
        members = [fractions(rng) for _ in weights]
        target = fractions(rng)
        while any(target[token] > 0 and min(member[token] for member in members) == 0 for token in range(VOCAB)):
            members, target = [fractions(rng) for _ in weights], fractions(rng)
        logits = [[temperature * log(value) for value in member] for member in members]
        for token in range(VOCAB):
            others = sum(w * row[token] for i, (w, row) in enumerate(zip(weights, logits)) if i != solved)
            score = temperature * log(target[token])
            logits[solved][token] = (score - others) / weights[solved] if target[token] > 0 else -math.inf
        return logits, target

    return Target(ensemble, temperature, draw_row, tuple(i for i in range(len(weights)) if i != solved))


def plausible(solved: int) -> Target:
    """Contrastive decoding in which a token of the target 0 is excluded by plausibility, and nothing else."""
    ensemble = Contrastive(0.5, plausibility=0.1)
    below = math.log(0.01)  # of a probability of one quarter and more

    def draw_row(rng: random.Random) -> Row:
        target, other = fractions(rng), [0.25, 0.25, 0.5]
        rng.shuffle(other)
        if solved == 0:
            amateur = [log(value) for value in other]
            expert = [log(r) + 0.5 * a if r > 0 else below for r, a in zip(target, amateur)]
            return [expert, amateur], target
        expert = [0.75, 0.25, 0.0] if target.count(0.0) == 1 else [0.5, 0.25, 0.25]
        expert = [1.0, 0.0, 0.0] if target.count(0.0) == 2 else expert
        expert.sort(key=lambda value: value == 0)
        order = sorted(range(VOCAB), key=lambda token: target[token] == 0)
        logits = [0.0] * VOCAB
        for token, value in zip(order, expert):
            logits[token] = log(value) if value > 0 else -20.0  # so unlikely that the fractions stay
        return [logits, [2 * (x - log(r)) if r > 0 else 0.0 for x, r in zip(logits, target)]], target

    return Target(ensemble, 1.0, draw_row, (1 - solved,))


TARGETS = {
    "single": single(1.0),
    "single at temperature 0.5": single(0.5),
    "mixture": mixture((0.5, 0.5), (3, 3), 2.0),
    "mixture of three vocabularies": mixture((0.25, 0.25, 0.5), (2, 3, 1), 1.0),
    "logit mixture": logit_mixture(LogitMixture((1.5, 0.5)), 0, 1.0),
    "logit mixture of three": logit_mixture(LogitMixture((0.5, 1.0, -0.25)), 1, 0.5),
    "contrastive, amateur drafts": logit_mixture(Contrastive(0.5), 0, 1.0),
    "contrastive, expert drafts": logit_mixture(Contrastive(0.5), 1, 2.0),
    "plausible, amateur drafts": plausible(0),
    "plausible, expert drafts": plausible(1),
}
DRAFTERS = ("one-hot", "member", "member a token", "outside", "outside of two tokens")


def build(name: str, drafter: str, rows: int, draft_len: int, seed: int) -> Model:
    """Tables of `rows` positions. The first row of the tables stands for all where there is only one."""
    target, rng = TARGETS[name], random.Random(seed)
    table = [[target.draw_row(rng) for _ in range(VOCAB)] for _ in range(rows)]
    members = [
        torch.tensor([[row[0][member] for row in position] for position in table], dtype=torch.float32)
        for member in range(len(table[0][0][0]))
    ]
    probabilities = torch.tensor([[row[1] for row in position] for position in table], dtype=torch.float64)
    arguments = {"ensemble": target.ensemble, "sampling": Sampling(temperature=target.temperature)}
    shape = (min(draft_len, rows), VOCAB)
    model = Model(members, probabilities, torch.zeros(*shape, VOCAB), None, arguments)
    return _with_drafter(model, target, drafter, shape, rng)


def _with_drafter(model: Model, target: Target, drafter: str, shape: tuple[int, int], rng: random.Random) -> Model:
    rows = shape[0]
    successors = torch.tensor([[rng.randrange(VOCAB) for _ in range(VOCAB)] for _ in range(rows)], dtype=torch.int64)
    one_hot = torch.eye(VOCAB, dtype=torch.float64)[successors.reshape(shape)]
    if drafter == "one-hot":
        return replace(model, draft=one_hot)
    if drafter.startswith("outside"):
        vocab = {"outside": VOCAB, "outside of two tokens": 2, "outside of four tokens": 4}[drafter]
        draft = torch.tensor([[fractions(rng, vocab) for _ in range(VOCAB)] for _ in range(rows)], dtype=torch.float64)
        arguments = model.arguments | {"draft_sampling": Sampling(temperature=0.5)}
        return replace(model, draft=draft, draft_logits=0.5 * draft.log().float(), arguments=arguments)
    if drafter == "member at another temperature":
        member, arguments = target.drafters[0], {"draft_sampling": Sampling(temperature=target.temperature / 2)}
        draft = own_distribution(model.member_logits[member][:rows], target.temperature / 2)
        return replace(model, draft=draft, arguments=model.arguments | arguments | {"drafter": member})
    own = {i: own_distribution(model.member_logits[i][:rows], target.temperature) for i in target.drafters}
    if drafter == "member":
        member = target.drafters[-1]
        return replace(model, draft=own[member], arguments=model.arguments | {"drafter": member})
    chosen = [(*target.drafters, -1)[(row + 1) % (len(target.drafters) + 1)] for row in range(rows)]
    drafts = [own[member][row] if member >= 0 else one_hot[row] for row, member in enumerate(chosen)]
    return replace(model, draft=torch.stack(drafts), arguments=model.arguments | {"drafter": torch.tensor(chosen)})


def own_distribution(logits: Tensor, temperature: float) -> Tensor:
    """A member's draft distributions [rows, vocab, VOCAB], as the fractions that its rounded logits stand for."""
    exact = (logits.double() / temperature).softmax(-1)
    nearest = exact.clone().apply_(lambda value: float(Fraction(value).limit_denominator(20)))
    torch.testing.assert_close(nearest, exact, rtol=0, atol=1e-6)
    return torch.nn.functional.pad(nearest, (0, VOCAB - logits.shape[-1]))
