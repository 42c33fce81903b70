"""What users of other packages have met when a draft was rolled back; each must not happen here."""

from __future__ import annotations

import pytest
import torch
from kv_problems import REFUSED

from specens_kernels import TokenTree, compact_kv, tree_mask

BACKENDS = ["reference", "cpp"]
HEADS, SIZE = 2, 8


def states(tokens):
    """Keys or values [1, heads, tokens, size] that tell which token made them."""
    generator = torch.Generator().manual_seed(0)
    table = torch.randn(100, HEADS, SIZE, generator=generator)
    return table[torch.tensor(tokens, dtype=torch.int64)].movedim(0, 1)[None]


def cache_of(tokens, slots):
    cache = torch.full((1, HEADS, slots, SIZE), 1e4)
    cache[:, :, : len(tokens)] = states(tokens)
    return cache


def attend(query, keys, values, mask=None):
    return torch.nn.functional.scaled_dot_product_attention(query, keys, values, attn_mask=mask)


@pytest.mark.parametrize("backend", BACKENDS)
def test_after_a_full_acceptance_the_drafters_cache_is_one_token_behind_and_intact(backend):
    """vllm#9730: the drafter has not forwarded its last token, and its cache was taken to be as long as the target."""
    prompt, drafts = [1, 2, 3], [4, 5, 6, 7]
    target = cache_of(prompt + drafts, slots=7)
    drafter = cache_of(prompt + drafts[:-1], slots=6)
    path, prefix_lens = torch.arange(4)[None], torch.tensor([3])
    assert compact_kv(target, path, prefix_lens, backend=backend).lengths.tolist() == [7]
    refused = compact_kv(drafter, path, prefix_lens, backend=backend)  # a node that it has no slot for
    assert (refused.status.tolist(), refused.lengths.tolist()) == ([REFUSED], [3])
    assert compact_kv(drafter, path[:, :3], prefix_lens, backend=backend).lengths.tolist() == [6]
    assert torch.equal(target, states(prompt + drafts))
    assert torch.equal(drafter, states(prompt + drafts[:-1]))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("accepted", [0, 1, 3])
def test_a_rejection_keeps_the_prefix_and_what_was_accepted(backend, accepted):
    """paiml/aprender#2014: the cache was reset, and the logits after a rejection were those of no prefix."""
    prompt, drafts = [1, 2, 3, 4], [5, 6, 7]
    cache = cache_of(prompt + drafts, slots=10)
    path = torch.where(torch.arange(3) < accepted, torch.arange(3), -1)[None]
    result = compact_kv(cache, path, torch.tensor([4]), backend=backend)
    assert result.lengths.tolist() == [4 + accepted]
    assert torch.equal(cache[:, :, : 4 + accepted], states(prompt + drafts[:accepted]))


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_static_cache_rolls_back_in_its_own_buffer_and_decodes_on_as_if_fresh(backend):
    """transformers#30312: a static cache was not rolled back, and its buffers must not move under a CUDA graph."""
    tree = TokenTree([-1, -1, 0, 1, 3])
    prompt, drafts, path = [1, 2], [10, 11, 12, 13, 14], [1, 3, 4]
    keys, values = cache_of(prompt + drafts, slots=16), cache_of(prompt + drafts, slots=16)
    addresses = keys.data_ptr(), values.data_ptr()
    assert all(tree.parents[node] in (-1, *path) for node in path)
    length = int(compact_kv([keys, values], torch.tensor([path]), torch.tensor([2]), backend=backend).lengths)
    keys[:, :, length], values[:, :, length] = states([50])[:, :, 0], states([50])[:, :, 0]
    assert (keys.data_ptr(), values.data_ptr()) == addresses
    text = states([1, 2, 11, 13, 14, 50])
    query = torch.randn(1, HEADS, 1, SIZE)
    decoded = attend(query, keys[:, :, : length + 1], values[:, :, : length + 1])
    torch.testing.assert_close(decoded, attend(query, text, text))


@pytest.mark.parametrize("backend", BACKENDS)
def test_no_attention_reaches_a_rejected_node(backend):
    """SafeAILab/EAGLE#336: rejected nodes stayed in the drafter's cache, and the next round attended to them."""
    prompt, drafts, path = [1, 2, 3], [20, 21, 22, 23, 24, 25], [0, 3, 5]
    keys, values = cache_of(prompt + drafts, slots=12), cache_of(prompt + drafts, slots=12)
    result = compact_kv([keys, values], torch.tensor([path]), torch.tensor([3]), backend=backend)
    round_two = states([30, 31])
    mask = tree_mask(torch.tensor([[-1, 0]]), result.lengths, max_prefix=12).mask[:, None]
    query = torch.randn(1, HEADS, 2, SIZE)
    seen = [torch.cat([cache, round_two], 2) for cache in (keys, values)]
    text = states([1, 2, 3, 20, 23, 25, 30, 31])
    own = torch.ones(2, 8, dtype=torch.bool).tril(6)
    torch.testing.assert_close(attend(query, *seen, mask), attend(query, text, text, own))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
def test_a_path_shorter_than_its_tree_is_not_read_beyond_its_end(backend, dtype):
    """SGLang: with 64 nodes, depth 5 and several children a node, accept_index was read past its end."""
    nodes, depth = 64, 5
    around = torch.tensor([[9, 0, 7, 20, 41, 63, 12, 13], [9, 1, 8, -1, 40, 62, 12, 13]], dtype=dtype)
    path = around[:, 1 : 1 + depth]
    cache = torch.randn(2, HEADS, 10 + nodes, SIZE)
    before = cache.clone()
    result = compact_kv(cache, path, torch.tensor([10, 4]), backend=backend)
    assert result.lengths.tolist() == [15, 6]
    assert torch.equal(cache[0, :, 10:15], before[0][:, [10, 17, 30, 51, 73]])
    assert torch.equal(cache[1, :, 4:6], before[1][:, [5, 12]])
    assert torch.equal(cache[0, :, 15:], before[0, :, 15:])
    assert torch.equal(cache[1, :, 6:], before[1, :, 6:])
