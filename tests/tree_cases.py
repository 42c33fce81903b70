"""Random problems for tree verification: ragged trees of any shape, every ensemble, drafter, filter and processing."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from typing import Any

import torch
from in_turn import use_next
from torch import Tensor

from specens_kernels import (
    Contrastive,
    LogitMixture,
    Mixture,
    Processing,
    Sampling,
    Typical,
    Verdict,
    verify_tree,
)

VOCABS = (1, 2, 7, 33, 33, 1100)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
NUDGE = 4e-6  # by which uniforms and thresholds are moved to see whether a request hangs on the last bits


@dataclass(frozen=True)
class TreeCase:
    """The arguments of a call."""

    member_logits: list[Tensor]
    draft_tokens: Tensor
    parents: Tensor
    arguments: dict[str, Any]

    def verify(self, backend: str, **changes: Any) -> Verdict:
        arguments = self.arguments | changes
        return verify_tree(self.member_logits, self.draft_tokens, self.parents, backend=backend, **arguments)

    def requests(self, indices: list[int]) -> TreeCase:
        """The case of these requests only."""
        index = torch.tensor(indices, dtype=torch.int64)
        return TreeCase(
            [logits[index] for logits in self.member_logits],
            self.draft_tokens[index],
            self.parents[index],
            {name: _requests(value, index) for name, value in self.arguments.items()},
        )


def _requests(value: Any, index: Tensor) -> Any:
    if isinstance(value, Tensor):
        return value[index]
    if isinstance(value, Sampling | Processing | Mixture | LogitMixture):
        fields = {name: _requests(field, index) for name, field in vars(value).items()}
        return type(value)(**fields)
    if isinstance(value, tuple) and any(isinstance(part, Tensor) for part in value):
        return tuple(part[index] for part in value)
    return value


def random_parents(batch: int, nodes: int, generator: torch.Generator) -> Tensor:
    """Trees of every shape, from bushes to chains; a few of their nodes are padding."""
    node = torch.arange(nodes)
    deep = torch.rand(batch, 1, generator=generator)
    drawn = (torch.rand(batch, nodes, generator=generator) * (node + 1)).long() - 1
    parents = torch.where(torch.rand(batch, nodes, generator=generator) < deep, node - 1, drawn)
    return torch.where(torch.rand(batch, nodes, generator=generator) < 0.05, -2, parents)


def random_filters(choice: random.Random, batch: int, generator: torch.Generator) -> dict[str, Any]:
    filters: dict[str, Any] = {}
    if choice.random() < 0.3:
        filters["top_k"] = choice.choice([1, 2, 5, 50, torch.randint(-1, 40, (batch,), generator=generator)])
    if choice.random() < 0.3:
        filters["top_p"] = choice.choice([0.9, 0.5, torch.rand(batch, generator=generator) * 0.98 + 0.01])
    if choice.random() < 0.2:
        filters["min_p"] = choice.choice([0.1, torch.rand(batch, generator=generator)])
    return filters


def random_processing(choice: random.Random, batch: int, vocab: int, generator: torch.Generator) -> Processing:
    def tokens(count: int) -> Tensor:
        return torch.randint(-1, vocab, (batch, count), generator=generator)

    return Processing(
        logit_bias=(tokens(3), torch.randn(batch, 3, generator=generator)) if choice.random() < 0.5 else None,
        repetition_penalty=choice.choice([1.0, 1.3]),
        frequency_penalty=choice.choice([0.0, 0.4]),
        presence_penalty=choice.choice([0.0, torch.rand(batch, generator=generator)]),
        min_tokens=choice.choice([0, 1, 2]),
        end_tokens=tokens(1),
        prompt_tokens=tokens(2),
        output_tokens=tokens(2),
    )


def _ensemble(choice: random.Random, members: int, batch: int, generator: torch.Generator) -> Any:
    weights = torch.rand(members, generator=generator) + 0.1
    rows = torch.rand(batch, members, generator=generator) + 0.1
    mixture = Mixture((weights / weights.sum()).tolist(), filter=choice.choice(["mixture", "members"]))
    ensembles = [mixture, Mixture(rows / rows.sum(1, keepdim=True)), LogitMixture(weights.tolist())]
    if members == 1:
        ensembles.append(None)
    if members == 2:
        ensembles.append(Contrastive(0.2, 0.1))
    return choice.choice(ensembles)


def _draft(choice: random.Random, shape: tuple[int, ...], members: int, vocab: int, logits: Tensor) -> dict[str, Any]:
    """Drafters close to member 0, so that deep nodes are reached."""
    generator = torch.Generator().manual_seed(choice.randrange(2**30))
    arguments: dict[str, Any] = {}
    kind = choice.choice(["one-hot", "member", "member a node", "outside"])
    if kind == "member":
        arguments["drafter"] = choice.randrange(members)
    if kind == "member a node":
        arguments["drafter"] = torch.randint(-1, members, shape, generator=generator)
    if kind == "outside":
        wide = vocab + choice.choice([0, 2])
        own = torch.randn(shape[0], shape[1] + 1, wide, generator=generator)
        own[..., : logits.shape[-1]] += torch.nan_to_num(logits.float(), neginf=-9.0)
        arguments["draft_logits"] = own
    if kind != "one-hot":
        arguments["siblings"] = choice.choice(["with_replacement", "without_replacement"])
        if choice.random() < 0.4:
            arguments["draft_sampling"] = Sampling(0.8, **random_filters(choice, shape[0], generator))
    return arguments


def random_case(
    seed: int,
    batches: tuple[int, ...] = (1, 4, 9),
    vocabs: tuple[int, ...] = VOCABS,
    sizes: tuple[int, ...] = (0, 1, 3, 6, 12),
) -> TreeCase:
    """sizes: of the trees."""
    use_next(seed)
    choice, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    batch, nodes, vocab = choice.choice(batches), choice.choice(sizes), choice.choice(vocabs)
    members, dtype = choice.choice([1, 1, 2, 3]), choice.choice(DTYPES)
    first = torch.randn(batch, nodes + 1, vocab, generator=generator) * choice.choice([1, 2])
    widths = [max(1, vocab - choice.choice([0, 0, 1])) for _ in range(members)]
    logits = [(first + torch.randn(first.shape, generator=generator))[..., :width].to(dtype) for width in widths]
    if choice.random() < 0.3:
        logits[0][torch.rand(logits[0].shape, generator=generator) < 0.1] = -torch.inf
    if choice.random() < 0.1:
        logits[0][0, 0] = -torch.inf
    temperature = choice.choice([1.0, 0.7, torch.rand(batch, generator=generator) * (torch.arange(batch) % 3 > 0)])
    arguments: dict[str, Any] = {
        "ensemble": _ensemble(choice, members, batch, generator),
        "sampling": Sampling(temperature, **random_filters(choice, batch, generator)),
        "rule": choice.choice(["token", "token", "traversal", "traversal", "typical", Typical(0.5, 0.4)]),
        "uniforms": torch.rand(batch, nodes + 1, dtype=torch.float64, generator=generator),
        "logprobs": choice.choice(["target", "raw"]),
        "top_logprobs": choice.choice([0, 2]),
    }
    arguments |= _draft(choice, (batch, nodes), members, vocab, logits[0])
    arguments |= _limits(choice, (batch, nodes), vocab, generator)
    parents = random_parents(batch, nodes, generator)
    return TreeCase(logits, _likely_children(logits[0], parents, vocab, generator), parents, arguments)


def _limits(choice: random.Random, shape: tuple[int, int], vocab: int, generator: torch.Generator) -> dict[str, Any]:
    """Processing, bit masks, and parts of the trees that are padding."""
    (batch, nodes), arguments = shape, dict[str, Any]()
    if choice.random() < 0.3:
        arguments["processing"] = random_processing(choice, batch, vocab, generator)
        arguments["process_drafts"] = choice.random() < 0.7
    if choice.random() < 0.2:
        words = torch.randint(-(2**31), 2**31, (batch, nodes + 1, (vocab + 31) // 32), generator=generator)
        words |= torch.randint(-(2**31), 2**31, words.shape, generator=generator)
        arguments["allowed"] = words.int()
    if choice.random() < 0.3:
        arguments["num_nodes"] = torch.randint(nodes + 1, (batch,), generator=generator)
    if choice.random() < 0.3:
        arguments["max_levels"] = choice.choice([0, 1, 3, nodes])
    return arguments


def _likely_children(logits: Tensor, parents: Tensor, vocab: int, generator: torch.Generator) -> Tensor:
    """Draft tokens int64 [batch, nodes]: the most likely ones after the parents, and a few that are none."""
    batch, nodes = parents.shape
    best = torch.nn.functional.pad(logits.float(), (0, vocab - logits.shape[-1]), value=-99.0)
    rows = best[torch.arange(batch)[:, None], (parents + 1).clamp(min=0)]  # [batch, nodes, vocab]
    ranked = rows.argsort(-1, descending=True)
    rank = torch.randint(0, min(4, vocab), (batch, nodes, 1), generator=generator)
    tokens = ranked.gather(2, rank)[..., 0]
    tokens = torch.where(torch.rand(batch, nodes, generator=generator) < 0.03, vocab, tokens)
    tokens = torch.where(torch.rand(batch, nodes, generator=generator) < 0.03, -1, tokens)
    return tokens


def _nudged(sampling: Sampling, amount: float) -> Sampling:
    def move(value: Any) -> Any:
        if value is None or (not isinstance(value, Tensor) and value in (0.0, 1.0)):
            return value
        moved = (torch.as_tensor(value) * (1 + amount)).clamp(1e-30, 1.0)
        return moved if isinstance(value, Tensor) else float(moved)

    return replace(sampling, top_p=move(sampling.top_p), min_p=move(sampling.min_p))


def hangs_on_the_last_bits(case: TreeCase, request: int, result: list[int]) -> bool:
    """Whether moving uniforms and thresholds a little makes the reference decide as the backend did."""
    for amount in (-NUDGE, NUDGE):
        moved = {
            name: _nudged(case.arguments[name], amount)
            for name in ("sampling", "draft_sampling")
            if name in case.arguments
        }
        random_numbers = {"uniforms": (case.arguments["uniforms"] + amount).clamp(0, 1 - 1e-12)}
        for change in (moved, random_numbers, moved | random_numbers):
            if case.verify("reference", **change).tokens[request].tolist() == result:
                return True
    return False
