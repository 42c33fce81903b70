"""int32 is taken wherever int64 is: tokens, lengths, places, seeds and positions."""

from __future__ import annotations

import pytest
import torch

from specens_kernels import (
    Processing,
    Sampling,
    compact_kv,
    sample,
    target_logprobs,
    tree_attention,
    tree_mask,
    uniforms,
    verify_chain,
    verify_tree,
)

SEEDS, POSITIONS = torch.tensor([3, -7, 2**31 - 1]), torch.tensor([5, 2**31 - 1, 0])
PARENTS, PREFIX_LENS, NUM_NODES = torch.tensor([[-1, 0, -1, 2]] * 3), torch.tensor([0, 4, 2]), torch.tensor([4, 3, 1])
TREE = {"parents": PARENTS, "prefix_lens": PREFIX_LENS, "num_nodes": NUM_NODES}
LOGITS = torch.randn(3, 5, 19, generator=torch.Generator().manual_seed(1))
TOKENS = LOGITS[:, :4].argmax(-1)
NUMBERS = {"seeds": SEEDS, "positions": POSITIONS}
QUERY = LOGITS[:, None, :4, :8].contiguous()
CACHE = LOGITS.repeat(1, 2, 1)[:, None, :, :8].contiguous()


def sampling(**tensors):
    return {"sampling": Sampling(top_k=tensors.pop("top_k")), "processing": Processing(**tensors)}


def verify(call, draft_tokens, top_k, end_tokens, output_tokens, min_tokens, **arguments):
    chosen = sampling(top_k=top_k, end_tokens=end_tokens, output_tokens=output_tokens, min_tokens=min_tokens)
    return call(LOGITS, draft_tokens, **chosen, **arguments)


SETTINGS = {"top_k": torch.tensor([3, 0, 1]), "end_tokens": TOKENS[:, :1], "output_tokens": TOKENS}
SETTINGS |= {"min_tokens": torch.tensor([0, 4, 2]), "draft_tokens": TOKENS}
CALLS = {
    "uniforms": (lambda **given: [uniforms(**given)], {**NUMBERS, "step": torch.tensor([0, 7, 2**31 - 1])}),
    "tree_mask": (lambda **given: tree_mask(**given, max_prefix=6, window=3), TREE),
    "tree_mask, packed": (lambda **given: tree_mask(**given, layout="packed"), TREE),
    "compact_kv": (
        lambda **given: compact_kv(CACHE.clone(), **given),
        {
            "kept": torch.tensor([[0, 2], [1, 3], [2, -1]]),
            "prefix_lens": PREFIX_LENS,
            "num_kept": torch.tensor([2, 2, 1]),
        },
    ),
    "sample": (lambda **given: sample(LOGITS[:, 0], **given), NUMBERS),
    "sample, gumbel": (lambda **given: sample(LOGITS[:, 0], method="gumbel", **given), NUMBERS),
    "target_logprobs": (lambda **given: [target_logprobs(LOGITS, **given)], {"draft_tokens": TOKENS}),
    "verify_chain": (
        lambda **given: verify(verify_chain, **given),
        {**NUMBERS, **SETTINGS, "draft_lens": torch.tensor([4, 2, 0]), "drafter": TOKENS * 0},
    ),
    "verify_tree": (
        lambda **given: verify(verify_tree, **given, siblings="with_replacement"),
        {**NUMBERS, **SETTINGS, "parents": PARENTS, "num_nodes": NUM_NODES, "drafter": TOKENS * 0},
    ),
}


def assert_alike(call, arguments, backend):
    """All integers as int64, as int32, and each alone as int32, for which Triton's interpreter is too slow."""
    expected = call(**arguments, backend=backend)
    narrow = {name: value.int() for name, value in arguments.items()}
    alone = [{**arguments, name: value} for name, value in narrow.items()]
    for given in (narrow, *(alone if backend != "triton" else ())):
        for own, other in zip(call(**given, backend=backend), expected, strict=True):
            assert own is None or (own.dtype == other.dtype and torch.equal(own, other))


@pytest.mark.parametrize("backend", ["reference", "cpp", "triton"])
@pytest.mark.parametrize("name", CALLS)
def test_int32_gives_the_results_of_int64(backend, name):
    call, arguments = CALLS[name]
    assert_alike(call, arguments, backend)


@pytest.mark.parametrize("backend", ["reference", "sdpa"])
def test_int32_gives_the_attention_of_int64(backend):
    arguments = {**TREE, "prefix_starts": torch.tensor([0, 1, 2])}
    assert_alike(lambda **given: [tree_attention(QUERY, CACHE, CACHE, **given, window=3)], arguments, backend)
