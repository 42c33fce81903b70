"""Kinds of members that an architecture alone does not make: lengths, hooks, wrappers, memory."""

import copy

import pytest
import torch
from accelerate import cpu_offload
from driver.cache_models import tiny_model
from driver.tiny_models import PROMPT, relative_of, tiny_llama
from specens import SpeculativeEnsemble
from specens.engines.transformers.causal_lm import CausalLM
from specens.settings.arguments import group_by_weights
from transformers import FalconConfig, FalconForCausalLM, Phi3Config, Phi3ForCausalLM

from specens_kernels import LogitMixture, Mixture, Sampling
from zoo.outcomes import EQUAL, outcomes
from zoo.tiny import tiny_model as tiny_of_zoo

GREEDY = Sampling(temperature=0.0)
LONG = [1, 7] * 20


def text_of(members, prompt=PROMPT, **settings):
    return SpeculativeEnsemble(members, **settings).generate(prompt, max_new_tokens=40, sampling=GREEDY).tokens


def text_of_generate(model, prompt=PROMPT):
    ids = torch.tensor([prompt])
    how = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 40, "do_sample": False}
    return copy.deepcopy(model).generate(ids, **how)[0, len(prompt) :].tolist()


def rope(kind, **settings):
    return {"rope_type": kind, "rope_theta": 100.0, **settings}


def long_rope_phi3():
    torch.manual_seed(0)
    factors = {"short_factor": [1.0] * 4, "long_factor": [1.0, 3.0, 6.0, 9.0], "original_max_position_embeddings": 24}
    sizes = tiny_llama(0).config.to_dict()
    names = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    config = {name: sizes[name] for name in names} | {"num_key_value_heads": 2, "max_position_embeddings": 256}
    ends = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"))
    own = {"initializer_range": 0.3, "original_max_position_embeddings": 24, **ends}
    return Phi3ForCausalLM(Phi3Config(**config, **own, rope_parameters=rope("longrope", **factors))).eval()


LENGTHS = {
    "longrope": long_rope_phi3,
    "dynamic": lambda: tiny_llama(0, max_position_embeddings=24, rope_parameters=rope("dynamic", factor=4.0)),
    "longrope that keeps its cache": lambda: tiny_llama(
        0,
        rope_parameters=rope(
            "longrope", short_factor=[1.0] * 4, long_factor=[1.0, 3, 6, 9], original_max_position_embeddings=24
        ),
    ),
}


@pytest.mark.parametrize("kind", LENGTHS)
def test_texts_that_outgrow_a_rotary_embedding_are_those_of_generate(kind):
    model = LENGTHS[kind]()
    expected, long = text_of_generate(model), text_of_generate(model, LONG)
    pair, only = [model, relative_of(model, 1, 0.1)], {"ensemble": Mixture((1, 0)), "drafter": 1}
    assert text_of(pair[:1], schedule="standard") == expected
    assert text_of(pair, schedule="fixed", draft_lens=4, **only) == expected
    assert text_of(pair, schedule="tree", tree=(2, 2), **only) == expected
    together = SpeculativeEnsemble(pair, schedule="fixed", draft_lens=2, **only)
    texts = together.generate_many([PROMPT, LONG], batch_size=2, max_new_tokens=40, sampling=GREEDY)
    assert {text.index: text.tokens for text in texts} == {0: expected, 1: long}


@pytest.mark.parametrize(
    ("settings", "most"),
    [
        ({"rope_parameters": rope("linear", factor=4.0)}, 128),
        ({"rope_parameters": rope("dynamic", factor=2.0)}, 64),
        ({"rope_parameters": rope("yarn", factor=4.0, original_max_position_embeddings=32)}, 128),
        ({}, 32),
    ],
    ids=["linear", "dynamic", "yarn", "default"],
)
def test_positions_reach_as_far_as_the_scaling_of_rotary_embeddings(settings, most):
    ensemble = SpeculativeEnsemble([tiny_llama(0, max_position_embeddings=32, **settings)], schedule="standard")
    assert len(ensemble.generate(PROMPT, max_new_tokens=most - len(PROMPT)).tokens) == most - len(PROMPT)
    with pytest.raises(ValueError, match=f"max_new_tokens: expected at most {most - len(PROMPT)}"):
        ensemble.generate(PROMPT, max_new_tokens=most - len(PROMPT) + 1)


def test_positions_of_a_model_that_reads_more_than_text_are_those_of_its_text_part():
    model = tiny_of_zoo("gemma3")
    assert model.config.text_config is not model.config
    assert CausalLM(model).max_length == model.config.text_config.max_position_embeddings > 0


@pytest.mark.parametrize("kind", ["mamba", "falcon_mamba", "gated_delta"])
@pytest.mark.parametrize("schedule", ["standard", "fixed", "alternate"])
def test_guidance_by_a_shorter_prompt_never_pads_a_recurrent_state(kind, schedule):
    model, prompts, expected = tiny_model(kind), ([3, 5, 7, 9, 11, 2, 4, 6], [20, 20, 7]), []
    with torch.inference_mode():
        for _ in range(12):
            rows = [model(torch.tensor([prompt + expected]), use_cache=False).logits[0, -1] for prompt in prompts]
            expected.append(int((1.5 * rows[0] - 0.5 * rows[1]).argmax()))
    ensemble = SpeculativeEnsemble([model, model], ensemble=LogitMixture((1.5, -0.5)), schedule=schedule)
    assert ensemble.generate(list(prompts), max_new_tokens=12, sampling=GREEDY).tokens == expected


def test_falcon_with_alibi_instead_of_rotary_embeddings_writes_the_texts_of_generate():
    """Its biases come from the mask, so that a batch or a tree that is masked wrongly moves them."""
    torch.manual_seed(0)
    sizes = {"vocab_size": 61, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    ends = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"))
    config = FalconConfig(alibi=True, multi_query=False, parallel_attn=False, initializer_range=0.3, **sizes, **ends)
    assert set(outcomes(FalconForCausalLM(config).eval()).values()) == {EQUAL}


def test_offloaded_models_are_two_and_write_their_texts():
    pair = [tiny_llama(0), tiny_llama(1)]
    expected = text_of(pair)
    for model in pair:
        cpu_offload(model, execution_device=torch.device("cpu"))
    assert group_by_weights([CausalLM(model) for model in pair]) == [[0], [1]]
    assert text_of(pair) == expected


def test_a_compiled_model_is_a_member():
    model = tiny_llama(0)
    assert text_of([torch.compile(model, backend="eager")], schedule="standard") == text_of_generate(model)


def sharing_copy(model):
    """Another module over the same memory."""
    return copy.deepcopy(model, {id(tensor): tensor for tensor in [*model.parameters(), *model.buffers()]})


def test_models_of_one_memory_are_one_unless_hooks_or_settings_make_them_two():
    model = tiny_llama(0)
    same, hooked, changed = (sharing_copy(model) for _ in range(3))
    hooked.model.layers[0].register_forward_hook(lambda _, __, output: 0.5 * output)
    changed.model.layers[1].self_attn.scaling *= 2
    members = [model, same, hooked, changed, model.train()]
    assert group_by_weights([CausalLM(member) for member in members]) == [[0, 1, 4], [2], [3]]
    weights = Mixture((0.5, 0.5))
    separate = text_of([copy.deepcopy(model), copy.deepcopy(hooked)], ensemble=weights, schedule="standard")
    assert text_of([model, hooked], ensemble=weights, schedule="standard") == separate
