"""Draft trees scored by models of transformers: each node gets the logits of a plain forward over its path."""

import copy

import pytest
import torch
from driver.cache_models import tiny_model
from driver.tiny_models import tiny_llama
from ops.test_tree_mask import path_to
from specens.adapters.tree_attention import NAME, draft_tree
from specens.engines.transformers.causal_lm import CausalLM
from transformers import (
    DynamicCache,
    Gemma2Config,
    Gemma2ForCausalLM,
    MambaConfig,
    MambaForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    StaticCache,
)

from specens_kernels import TokenTree

TOLERANCE = {"rtol": 1e-4, "atol": 1e-4}
PREFIX = torch.tensor([[5, 3, 8, 1, 44, 12, 9, 30, 2, 17, 6], [7, 7, 1, 20, 33, 4, 58, 60, 11, 3, 2]])
TREES = [TokenTree.branching([3, 2, 1]), TokenTree.chains(2, 4)]
BATCH = {name: torch.from_numpy(array) for name, array in TokenTree.batch(TREES).items()}
PARENTS = BATCH["parents"]
TOKENS = torch.randint(61, PARENTS.shape, generator=torch.Generator().manual_seed(0))


def tiny_gemma(seed):
    """A model of which every second layer forgets all but the last tokens."""
    return tiny_model("sliding_hybrid", seed)


def tiny_qwen(seed):
    sizes = {"vocab_size": 61, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "head_dim": 8}
    config = Qwen3Config(**sizes, num_attention_heads=4, num_key_value_heads=1, initializer_range=0.3)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return Qwen3ForCausalLM(config).eval()


def caches(model):
    """A cache of each kind that holds no token yet; one that lasts only has layers that see everything."""
    static = "sliding_attention" not in (getattr(model.config, "layer_types", None) or ())
    yield DynamicCache(config=model.config)
    yield DynamicCache()
    if static:
        yield StaticCache(config=model.config, max_cache_len=64)


def score(model, cache, parents=PARENTS, tokens=TOKENS, **options):
    with draft_tree(parents, cache, **options) as position_ids:
        return CausalLM(model).forward(tokens, cache, tokens.shape[1], position_ids=position_ids)


@torch.no_grad()
@pytest.mark.parametrize("make", [tiny_llama, tiny_qwen, tiny_gemma])
@pytest.mark.parametrize("prefix_len", [3, 11])
def test_each_node_has_the_logits_of_a_forward_over_its_path(make, prefix_len):
    model = make(0)
    plain = copy.deepcopy(model)
    model.set_attn_implementation(NAME)
    expected = {}
    for request, tree in enumerate(TREES):
        for node in range(len(tree)):
            path = path_to(tree.parents.tolist(), node, len(tree))
            line = torch.cat([PREFIX[request, :prefix_len], TOKENS[request, path]])
            expected[request, node] = plain(line[None]).logits[0, -1]
    for cache in caches(model):
        CausalLM(model).forward(PREFIX[:, :prefix_len], cache, 1)
        logits = score(model, cache)
        assert logits.isfinite().all()
        for (request, node), wanted in expected.items():
            torch.testing.assert_close(logits[request, node], wanted, **TOLERANCE)


@torch.no_grad()
@pytest.mark.parametrize("make", [tiny_llama, tiny_gemma])
@pytest.mark.parametrize("num_padding", [2, 6])
def test_a_request_padded_on_the_left_is_scored_as_if_alone(make, num_padding):
    model = make(3)
    model.set_attn_implementation(NAME)
    alone = DynamicCache(config=model.config)
    CausalLM(model).forward(PREFIX[1:, num_padding:], alone, 1)
    expected = score(model, alone, PARENTS[1:], TOKENS[1:])[0]
    together = DynamicCache(config=model.config)
    indices = torch.arange(PREFIX.shape[1]) - torch.tensor([[0], [num_padding]])
    padding = {"attention_mask": (indices >= 0).long(), "position_ids": indices.clamp(min=0)}
    CausalLM(model).forward(PREFIX, together, 1, **padding)
    logits = score(model, together, num_padding=torch.tensor([0, num_padding]))
    used = len(TREES[1])
    torch.testing.assert_close(logits[1, :used], expected[:used], **TOLERANCE)


@torch.no_grad()
def test_a_tree_with_its_root_needs_no_committed_token():
    model = tiny_llama(1)
    line = torch.cat([PREFIX[0, :1], TOKENS[0, [0, 3]]])  # node 3 is the first child of node 0
    assert TREES[0].parents[3] == 0
    expected = model(line[None]).logits[0, -1]
    model.set_attn_implementation(NAME)
    parents = torch.from_numpy(TREES[0].with_root().parents)[None]
    tokens = torch.cat([PREFIX[:1, :1], TOKENS[:1, : len(TREES[0])]], 1)
    logits = score(model, DynamicCache(), parents, tokens)
    torch.testing.assert_close(logits[0, 4], expected, **TOLERANCE)
    counted = score(model, DynamicCache(), parents, tokens, num_nodes=torch.tensor([5]))
    torch.testing.assert_close(counted[0, :5], logits[0, :5], **TOLERANCE)
    assert not torch.allclose(counted[0, 5:], logits[0, 5:])


@torch.no_grad()
def test_outside_of_a_tree_it_is_sdpa():
    model = tiny_llama(2)
    padding = torch.ones_like(PREFIX)
    padding[1, :4] = 0
    expected = model(PREFIX, attention_mask=padding).logits
    model.set_attn_implementation(NAME)
    assert torch.equal(model(PREFIX, attention_mask=padding).logits, expected)
    with pytest.raises(KeyError), draft_tree(PARENTS, DynamicCache()):
        raise KeyError
    assert torch.equal(model(PREFIX, attention_mask=padding).logits, expected)


def tiny_gemma2(softcap):
    sizes = {"vocab_size": 61, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "head_dim": 8}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    return Gemma2ForCausalLM(Gemma2Config(**sizes, **heads, attn_logit_softcapping=softcap)).eval()


@torch.no_grad()
@pytest.mark.parametrize(
    ("message", "arguments"),
    [
        ("^attention_mask: expected None .*got a tensor", {"attention_mask": torch.ones(2, PARENTS.shape[1])}),
        ("^attention_mask: expected None .*got a tensor", {"attention_mask": torch.ones(2, 1, *PARENTS.shape)}),
        ("^parents: expected a node for each of the 3 tokens fed", {"input_ids": TOKENS[:, :3]}),
    ],
)
def test_what_a_forward_must_not_get_is_named(message, arguments):
    model = tiny_llama(0)
    model.set_attn_implementation(NAME)
    cache = DynamicCache()
    with pytest.raises(ValueError, match=message), draft_tree(PARENTS, cache):
        CausalLM(model).forward(**{"input_ids": TOKENS, "cache": cache, "rows": 1} | arguments)


@torch.no_grad()
def test_models_and_caches_that_cannot_score_a_tree_are_refused():
    cache = DynamicCache()
    with pytest.raises(RuntimeError, match=f"no layer scored the tree; is .*{NAME}"):
        score(tiny_llama(0), cache)
    model = tiny_gemma2(softcap=50.0)
    model.set_attn_implementation(NAME)
    with pytest.raises(ValueError, match=r"^model: expected attention without softcap .*Gemma2Attention"):
        score(model, DynamicCache())
    model = tiny_llama(0, attention_dropout=0.5).train()
    model.set_attn_implementation(NAME)
    with pytest.raises(ValueError, match=r"^dropout: expected 0 .*got 0.5"), draft_tree(PARENTS, DynamicCache()):
        model(TOKENS)
    with pytest.raises(ValueError, match=r"^cache: expected a Cache of transformers, got NoneType"):
        score(model, None)
    with pytest.raises(ValueError, match=r"^parents: expected a tensor of integers of 2 dimensions, got list"):
        score(model, DynamicCache(), [[-1]])
    with pytest.raises(ValueError, match=r"^num_padding: expected a tensor of integers of 1 dimensions, got .*float32"):
        score(model, DynamicCache(), num_padding=torch.ones(2))
    mamba = MambaForCausalLM(MambaConfig(vocab_size=61, hidden_size=16, num_hidden_layers=2))
    for model, kind in ((mamba, DynamicCache), (tiny_gemma(0), StaticCache)):
        cache = kind(config=model.config, **({"max_cache_len": 64} if kind is StaticCache else {}))
        with pytest.raises(ValueError, match=r"^cache: expected layers of full or sliding attention, got .*Layer"):
            score(model, cache)
