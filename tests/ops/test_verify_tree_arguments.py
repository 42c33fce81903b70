"""Bad input of verify_tree: every argument that cannot be served is named, with what was expected and what came."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from cases import operator_arguments

import specens_kernels.ops.verify_tree as operation
from specens_kernels import Sampling, TokenTree, Verdict, verify_tree

LOGITS, TOKENS, PARENTS = torch.zeros(2, 4, 5), torch.zeros(2, 3, dtype=torch.int64), torch.tensor([[-1, 0, 1]] * 2)
SEEDS, DRAWN = torch.zeros(2, dtype=torch.int64), {"siblings": "with_replacement"}
WRONG: list[tuple[str, dict[str, Any]]] = [
    ("member_logits", {"member_logits": LOGITS[:, :3]}),
    ("member_logits", {"member_logits": LOGITS[0]}),
    ("draft_tokens", {"draft_tokens": TOKENS.float()}),
    ("draft_tokens", {"draft_tokens": TOKENS[:1]}),
    ("parents", {"parents": PARENTS[:, :2]}),
    ("parents", {"parents": PARENTS.float()}),
    ("parents", {"parents": PARENTS[0].tolist()}),
    ("parents", {"parents": None}),
    ("parents", {"parents": TokenTree([-1, 0])}),
    ("parents", {"parents": [TokenTree([-1, 0, 1])]}),
    (r"parents\[1\]", {"parents": [TokenTree([]), TokenTree([-1, 0, 1, 2])]}),
    ("siblings", {"drafter": 0}),
    ("siblings", {"drafter": 0, "siblings": "independent"}),
    ("siblings", DRAWN),
    ("drafter", {"drafter": 1, **DRAWN}),
    ("drafter", {"drafter": torch.zeros(2, 4, dtype=torch.int64), **DRAWN}),
    ("drafter", {"drafter": 0, "draft_logits": LOGITS, **DRAWN}),
    ("draft_logits", {"draft_logits": LOGITS[:, :3], **DRAWN}),
    ("draft_sampling", {"draft_sampling": 1.0}),
    ("rule", {"rule": "block"}),
    ("rule", {"rule": None}),
    ("num_nodes", {"num_nodes": SEEDS[:1]}),
    ("num_nodes", {"num_nodes": SEEDS.float()}),
    ("max_levels", {"max_levels": -1}),
    ("max_levels", {"max_levels": True}),
    ("max_levels", {"max_levels": 2.0}),
    ("max_levels", {"max_levels": torch.tensor(2)}),
    ("allowed", {"allowed": torch.zeros(2, 3, 1, dtype=torch.int32)}),
    ("uniforms", {"uniforms": torch.zeros(2, 3), "seeds": None, "positions": None}),
    ("seeds", {"seeds": None}),
    ("logprobs", {"logprobs": "all"}),
    ("top_logprobs", {"top_logprobs": -1}),
    ("backend", {"backend": "fortran"}),
]


def verify(**changes: Any) -> Verdict:
    arguments: dict[str, Any] = {"member_logits": LOGITS, "draft_tokens": TOKENS, "parents": PARENTS}
    return verify_tree(**(arguments | {"seeds": SEEDS, "positions": SEEDS} | changes))


@pytest.mark.parametrize(("argument", "changes"), WRONG)
def test_a_bad_argument_is_named(argument, changes):
    with pytest.raises(ValueError, match=rf"^{argument}: expected"):
        verify(**changes)


def test_too_many_nodes_are_refused():
    logits, tokens = torch.zeros(1, 1, 1).expand(1, 16386, 1), torch.zeros(1, 16385, dtype=torch.int64)
    with pytest.raises(ValueError, match=r"^draft_tokens: expected at most 16384 nodes"):
        verify_tree(logits, tokens, tokens, sampling=Sampling(0.0))


def test_the_operator_itself_refuses_logits_that_it_cannot_read():
    (members, *rest), options = operator_arguments(operation, lambda backend: verify(backend=backend))
    with pytest.raises(ValueError, match=r"^member_logits: expected float32, bfloat16 or float16, got"):
        operation.IMPLEMENTATIONS["cpp"]([logits.double() for logits in members], *rest, **options)
