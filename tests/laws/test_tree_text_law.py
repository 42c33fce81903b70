"""The text law of trees over several rounds with seeds: chi-square of many texts against the target distribution."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from cases import FULL
from laws.enumeration import target_law
from laws.test_text_law import LENGTH, PROMPT, assert_law
from laws.tiny_targets import VOCAB, Model, build
from torch import Tensor

from specens_kernels import Sampling, TokenTree, Verdict, sample, verify_chain, verify_tree

TEXTS = 30_000 if FULL else 15_000
TREE = TokenTree([-1, -1, 0, 0, 1])
LEVELS = TREE.num_levels


def propose(model: Model, first: Tensor, seeds: Tensor, positions: Tensor, siblings: str) -> Tensor:
    """Draft tokens [batch, nodes], each drawn after its parent, with its number as the step of the random number."""
    sampling: Sampling = model.arguments.get("draft_sampling", model.arguments["sampling"])
    table = model.draft_logits if model.draft_logits is not None else model.member_logits[model.arguments["drafter"]]
    nodes: list[Tensor] = []
    for node, parent in enumerate(TREE.parents.tolist()):
        before = first if parent < 0 else nodes[parent]
        words = torch.full((len(first), 1), 2**VOCAB - 1, dtype=torch.int32)
        if siblings == "without_replacement":
            for other in range(node):
                if TREE.parents[other] == parent:
                    words &= ~(1 << nodes[other][:, None].clamp(min=0)).int()
        drawn = sample(
            table[0, before.clamp(min=0)],
            sampling=sampling,
            allowed=words,
            seeds=seeds,
            positions=positions,
            step=node,
            backend="reference",
        )
        nodes.append(torch.where(before >= 0, drawn.tokens, -1))
    return torch.stack(nodes, 1)


def verify(model: Model, before: Tensor, drafts: Tensor, seeds: Tensor, positions: Tensor, **arguments: Any) -> Verdict:
    rows = torch.cat([before[:, None], drafts.clamp(min=0)], 1)
    if model.draft_logits is not None:
        arguments["draft_logits"] = model.draft_logits[0, rows]
    logits = [member[0, rows] for member in model.member_logits]
    arguments |= model.arguments
    return verify_tree(logits, drafts, TREE, seeds=seeds, positions=positions, backend="reference", **arguments)


def generate(model: Model, rule: str, siblings: str) -> tuple[Tensor, int]:
    """LENGTH tokens of each text after token 0, and the rounds that it took until all had them."""
    seeds, lengths = torch.arange(TEXTS), torch.zeros(TEXTS, dtype=torch.int64)
    texts = torch.zeros(TEXTS, LENGTH + LEVELS + 1, dtype=torch.int64)
    before, rounds = texts[:, 0].clone(), 0
    while (lengths < LENGTH).any():
        open_texts = (lengths < LENGTH).nonzero()[:, 0]
        own, positions = seeds[open_texts], PROMPT + lengths[open_texts]
        drafts = propose(model, before[open_texts], own, positions, siblings)
        verdict = verify(model, before[open_texts], drafts, own, positions, rule=rule, siblings=siblings)
        for column in range(LEVELS + 1):
            emitted = verdict.tokens[:, column] >= 0
            indices = open_texts[emitted]
            before[indices] = verdict.tokens[emitted, column]
            texts[indices, lengths[indices]] = before[indices]
            lengths[indices] += 1
        rounds += 1
    return texts[:, :LENGTH], rounds


@pytest.mark.parametrize("siblings", ["with_replacement", "without_replacement"])
@pytest.mark.parametrize("rule", ["token", "traversal"])
@pytest.mark.parametrize(
    ("target", "drafter"), [("single", "outside"), ("mixture", "member"), ("logit mixture", "outside")]
)
def test_texts_of_several_rounds_follow_the_target_law(target, drafter, rule, siblings):
    model = build(target, drafter, rows=1, draft_len=LEVELS, seed=11)
    texts, rounds = generate(model, rule, siblings)
    assert rounds >= 2
    assert_law(texts, target_law(model.target, LENGTH))


@pytest.mark.parametrize(("rule", "chain_rule"), [("token", "token"), ("traversal", "block"), ("typical", "typical")])
@pytest.mark.parametrize("drafted", [True, False])
def test_a_chain_gives_the_verdict_of_verify_chain_from_the_same_seeds(rule, chain_rule, drafted):
    batch, nodes, vocab = 2000, 4, 7
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(batch, nodes + 1, vocab, generator=generator)
    draft_logits = logits + torch.randn(batch, nodes + 1, vocab, generator=generator) * 0.5
    drafts = torch.randint(vocab, (batch, nodes), generator=generator)
    drafts = torch.where(torch.rand(batch, nodes, generator=generator) < 0.5, logits[:, :nodes].argmax(-1), drafts)
    drafts[torch.rand(batch, nodes, generator=generator) < 0.03] = -1
    lens = torch.randint(nodes + 1, (batch,), generator=generator)
    temperature = torch.rand(batch, generator=generator) * (torch.arange(batch) % 4 > 0)
    common = {"sampling": Sampling(temperature), "logprobs": True, "top_logprobs": 2, "backend": "reference"}
    common |= {"seeds": torch.arange(batch), "positions": torch.full((batch,), 50)}
    of_chain = {"draft_logits": draft_logits[:, :nodes]} if drafted else {}
    of_tree = {"draft_logits": draft_logits, "siblings": "without_replacement"} if drafted else {}
    chain = verify_chain(logits, drafts, rule=chain_rule, draft_lens=lens, **of_chain, **common)
    tree = verify_tree(logits, drafts, TokenTree.chains(1, nodes), rule=rule, num_nodes=lens, **of_tree, **common)
    for name, own, expected in zip(chain._fields[:-1], tree, chain, strict=False):
        assert torch.equal(own, expected), name
    assert chain.num_accepted.double().mean() > 0.3
    level = torch.arange(nodes)
    assert torch.equal(tree.path, torch.where(level < chain.num_accepted[:, None], level, -1))
