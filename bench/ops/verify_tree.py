"""verify_tree: a batch of rounds from raw logits at the nodes of draft trees to emitted tokens."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

import specens_kernels
from bench import bounds, peers
from bench.case import DTYPES, Case, Options, chosen_shapes
from bench.check import check_tokens, shifted
from bench.inputs import ACCEPTANCES, LOGIT_SPREAD, noise_for
from specens_kernels import Mixture, TokenTree

TREE = TokenTree.best_for_acceptance((0.6, 0.2, 0.1, 0.05), 31)
CHAIN_OF_PATH = TokenTree.chains(1, TREE.num_levels)  # what a wider tree costs more than its longest path
SHAPES = ((1, 32000), (1, 128256), (8, 128256))  # batch, vocab
SETTINGS = (("token", 1), ("traversal", 1), ("token", 2))  # rule, members


@dataclass(frozen=True)
class TreeInputs:
    """A batch of rounds: children drawn without replacement by an outside drafter.

    member_logits: one [batch, nodes + 1, vocab] a member. draft_logits: like one of them. draft_tokens: int64 [batch,
    nodes]. uniforms: float64 [batch, nodes + 1].
    """

    tree: TokenTree
    member_logits: list[Tensor]
    draft_logits: Tensor
    draft_tokens: Tensor
    uniforms: Tensor
    rule: str

    def request(self, index: int, shift: float) -> TreeInputs:
        """One request alone, its uniforms moved by shift."""
        one = slice(index, index + 1)
        members = [logits[one] for logits in self.member_logits]
        random_numbers = shifted(self.uniforms[one], shift)
        return TreeInputs(self.tree, members, self.draft_logits[one], self.draft_tokens[one], random_numbers, self.rule)

    @property
    def arguments(self) -> dict[str, Any]:
        members = len(self.member_logits)
        return {
            "member_logits": self.member_logits,
            "draft_tokens": self.draft_tokens,
            "parents": self.tree,
            "ensemble": None if members == 1 else Mixture((1 / members,) * members),
            "draft_logits": self.draft_logits,
            "siblings": "without_replacement",
            "rule": self.rule,
            "uniforms": self.uniforms,
        }


def tree_inputs(tree: TokenTree, batch: int, vocab: int, dtype: torch.dtype, rule: str, members: int) -> TreeInputs:
    """Logits whose chains would have the natural acceptance."""
    generator = torch.Generator().manual_seed(batch * vocab)
    draft = torch.randn(batch, len(tree) + 1, vocab, generator=generator) * LOGIT_SPREAD
    noise = noise_for(ACCEPTANCES["natural"].rate, 1.0)
    logits = [(draft + noise * torch.randn(draft.shape, generator=generator)).to(dtype) for _ in range(members)]
    draft = draft.to(dtype)
    most = max(len(tree.children(node)) for node in range(-1, len(tree)))
    noisy = draft.float() - torch.empty(draft.shape).exponential_(generator=generator).log()
    drawn = noisy.topk(most, -1).indices  # the order of Gumbel maxima is that of draws without replacement
    index = [(tree.children(int(parent)) == node).nonzero()[0][0] for node, parent in enumerate(tree.parents)]
    tokens = drawn[:, torch.from_numpy(tree.parents) + 1, torch.tensor(index)].contiguous()
    uniforms = torch.rand(batch, len(tree) + 1, dtype=torch.float64, generator=generator)
    return TreeInputs(tree, logits, draft, tokens, uniforms, rule)


def cases(options: Options) -> Iterator[Case]:
    """A tree and its longest path alone, under both lossless rules, and a mixture of two."""
    for rule, members in SETTINGS:
        for dtype in options.dtypes:
            for batch, vocab in chosen_shapes(options, SHAPES):
                for tree in (TREE, CHAIN_OF_PATH):
                    yield _case(options, tree_inputs(tree, batch, vocab, DTYPES[dtype], rule, members), dtype)


def _case(options: Options, inputs: TreeInputs, dtype: str) -> Case:
    batch, rows, vocab = inputs.member_logits[0].shape
    verdict = specens_kernels.verify_tree(**inputs.arguments, backend=options.backend)

    @cache
    def reference(request: int, shift: float) -> Tensor:
        one = inputs.request(request, shift)
        return specens_kernels.verify_tree(**one.arguments, backend="reference").tokens[0]

    needed = int((verdict.num_accepted + 1).sum()) * (len(inputs.member_logits) + 1)
    return Case(
        shape={"batch": batch, "vocab": vocab, "nodes": rows - 1},
        setting={
            "target": "single" if len(inputs.member_logits) == 1 else "mixture of 2",
            "rule": inputs.rule,
            "mean_accepted": round(float(verdict.num_accepted.double().mean()), 2),
        },
        dtype=dtype,
        run=lambda: specens_kernels.verify_tree(**inputs.arguments, backend=options.backend),
        result=lambda result: result.tokens,
        check=lambda tokens: check_tokens(tokens, reference),
        bounds=bounds.reading([*inputs.member_logits, inputs.draft_logits]),
        bytes_needed=needed * vocab * inputs.draft_logits.element_size(),
        rivals=peers.rivals("verify_tree", options, inputs),
    )
