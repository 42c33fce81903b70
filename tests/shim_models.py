"""Plain Python that says what FlashInfer's and SGLang's functions do, and arguments as their callers pass them."""

from __future__ import annotations

import random

import torch
from torch import Tensor

from specens_kernels import TokenTree

MARGIN = 3e-6  # nearer to a tie than this, the last bits of a logarithm decide
UNTOUCHED = -7


def distributions(*shape: int, seed: int, zeros: float = 0.3) -> Tensor:
    """Random probabilities [*shape], some of them 0."""
    generator = torch.Generator().manual_seed(seed)
    weights = torch.rand(shape, generator=generator) ** 3
    weights = weights * (torch.rand(shape, generator=generator) >= zeros)
    weights[..., -1] += 1e-3
    return weights / weights.sum(-1, keepdim=True)


def drawn(masses: list[float], uniform: float, margins: list[float]) -> int:
    """The token at which the running sum of masses exceeds uniform * their sum, the last possible one at the end."""
    at, total, last = uniform * sum(masses), 0.0, 0
    for token, mass in enumerate(masses):
        if mass > 0:
            total, last = total + mass, token
            margins.append(abs(total - at) if token < len(masses) - 1 else 1.0)
            if total > at:
                return token
    return last


def chain_model(
    draft: Tensor, tokens: list[int], target: Tensor, random_numbers: list[float]
) -> tuple[list, int, int, float]:
    """What FlashInfer documents for one request: tokens, accepted, emitted; and how near the nearest tie is."""
    margins: list[float] = []
    passes = []
    for step, token in enumerate(tokens):
        draft_there, target_there = float(draft[step, token]), float(target[step, token])
        margins.append(abs(random_numbers[step] * draft_there - target_there) if target_there > 0 else 1.0)
        passes.append(random_numbers[step] * draft_there < target_there)
    emitted = passes.index(False) if False in passes else len(tokens)
    subtracted = draft[emitted] if emitted < len(tokens) else torch.zeros_like(target[0])
    left = (target[emitted].double() - subtracted.double()).clamp(min=0).tolist()
    last = drawn(left, random_numbers[-1], margins)
    padding = [-1] * (len(tokens) - emitted)
    return [*tokens[:emitted], last, *padding], sum(passes), emitted, min(margins)


def tree_model(case: dict, request: int) -> tuple[dict[int, int], list[int], int, float]:
    """What SGLang's kernel writes for one request: predicts by place, accept_index, accept_token_num; the tie margin.

    With the boundaries of its later releases: half-open, never a token of probability 0, the last possible token.
    """
    target = case["target_probs"][request].double()
    first, following = case["retrive_next_token"][request], case["retrive_next_sibling"][request]
    indices, random_numbers = case["retrive_index"][request].tolist(), case["uniform_samples"][request].tolist()
    margins: list[float] = []
    divisor = max(case["threshold_acc"], 1e-9)
    here, row_left, predicts, path = 0, target[0].clone(), {}, [indices[0]]
    for _ in range(case["accept_index"].shape[1] - 1):
        child, so_far, found = int(first[here]), 0.0, -1
        while child != -1:
            token = int(case["candidates"][request, child])
            mass = float(target[here, token])
            so_far += mass
            margins.append(abs(random_numbers[here] - so_far / divisor) if mass > 0 else 1.0)
            if (mass > 0 and random_numbers[here] < so_far / divisor) or mass >= case["threshold_single"]:
                found = child
                break
            row_left[token] = 0
            child = int(following[child])
        if found < 0:
            break
        predicts[indices[here]] = int(case["candidates"][request, found])
        here, row_left = found, target[found].clone()
        path.append(indices[here])
    final = float(case["uniform_samples_for_final_sampling"][request])
    predicts[indices[here]] = drawn(row_left.tolist(), final, margins)
    return predicts, path, len(path) - 1, min(margins)


def tree_case(batch: int, nodes: int, num_steps: int, vocab: int, seed: int, thresholds: tuple[float, float]) -> dict:
    """Arguments as SGLang passes them: random trees with different tokens among siblings, places in any order."""
    rng, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    first, following, candidates = [], [], []
    for _ in range(batch):
        parents = [-1, *(rng.randrange(node) for node in range(1, nodes))]
        rooted = TokenTree(parents)
        first.append(rooted.first_child.tolist())
        following.append(rooted.next_sibling.tolist())
        tokens = [0] * nodes
        for parent in range(nodes):
            children = rooted.children(parent).tolist()
            for child, token in zip(children, rng.sample(range(vocab), len(children)), strict=True):
                tokens[child] = token
        candidates.append(tokens)
    return {
        "predicts": torch.full((batch * nodes + 3,), UNTOUCHED, dtype=torch.int32),
        "accept_index": torch.full((batch, num_steps), UNTOUCHED, dtype=torch.int32),
        "accept_token_num": torch.full((batch,), UNTOUCHED, dtype=torch.int32),
        "candidates": torch.tensor(candidates),
        "retrive_index": torch.randperm(batch * nodes, generator=generator).view(batch, nodes),
        "retrive_next_token": torch.tensor(first),
        "retrive_next_sibling": torch.tensor(following),
        "uniform_samples": torch.rand(batch, nodes, generator=generator),
        "uniform_samples_for_final_sampling": torch.rand(batch, generator=generator),
        "target_probs": distributions(batch, nodes, vocab, seed=seed + 1),
        "draft_probs": torch.zeros(batch, nodes, vocab),
        "threshold_single": thresholds[0],
        "threshold_acc": thresholds[1],
    }
