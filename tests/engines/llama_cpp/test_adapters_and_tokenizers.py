"""What llama.cpp makes of adapters and texts is what PEFT and transformers make of them."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from peft import LoraConfig, get_peft_model
from specens import SpeculativeEnsemble
from specens.engines.llama_cpp import LlamaCpp
from specens.engines.llama_cpp.tokenizer import GGUFTokenizer
from specens.engines.protocol import Needs, Read
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from .conftest import write

HEADS, WIDTH = 2, 32
TEXTS = ("Hello world", " leading  spaces\n\n\ttabs", "naïve café 你好 🎉", "<|im_start|>user\nHi<|im_end|>\n", "")
IDS = list(range(100, 130))
NAMES = {"self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v"}
NAMES |= {"self_attn.o_proj": "attn_output", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up"}
NAMES |= {"mlp.down_proj": "ffn_down"}


@pytest.fixture(scope="module")
def llama() -> LlamaForCausalLM:
    """A random Llama of one layer and two heads with SmolLM2's tokens."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=49152, hidden_size=WIDTH, intermediate_size=WIDTH, num_hidden_layers=1, num_attention_heads=HEADS
    )
    config.rope_parameters = {"rope_type": "default", "rope_theta": 100000.0}
    model = LlamaForCausalLM(config).eval()
    for weight in model.parameters():
        if weight.dim() == 2:
            torch.nn.init.normal_(weight, std=0.3)
    return model


@pytest.fixture(scope="module")
def converted(llama: LlamaForCausalLM, smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same model as a GGUF file."""
    layer, tensors = llama.model.layers[0], {}
    for name, own in NAMES.items():
        weight = layer.get_submodule(name).weight.detach().numpy()
        if own in ("attn_q", "attn_k"):
            weight = weight.reshape(HEADS, 2, WIDTH // HEADS // 2, WIDTH).swapaxes(1, 2).reshape(WIDTH, WIDTH)
        tensors[f"blk.0.{own}.weight"] = (np.ascontiguousarray(weight), None)
    ones = np.ones(WIDTH, np.float32)
    tensors |= dict.fromkeys(("blk.0.attn_norm.weight", "blk.0.ffn_norm.weight", "output_norm.weight"), (ones, None))
    tensors["token_embd.weight"] = (llama.model.embed_tokens.weight.detach().numpy(), None)
    tensors["output.weight"] = (llama.lm_head.weight.detach().numpy(), None)
    sizes = {"embedding_length": WIDTH, "feed_forward_length": WIDTH, "rope.dimension_count": WIDTH // HEADS}
    changes = {f"llama.{name}": size for name, size in sizes.items()} | {"llama.block_count": 1}
    changes |= {"llama.attention.head_count": HEADS, "llama.attention.head_count_kv": HEADS}
    return write(tmp_path_factory.mktemp("llama") / "llama.gguf", gguf.GGUFReader(smollm2), changes, tensors)


def logits_of(engine: LlamaCpp) -> torch.Tensor:
    context = engine.open(Needs())
    return context.read([Read(context.add(IDS[:1]), IDS[1:], len(IDS))])[0]


@torch.no_grad()
def test_an_adapter_of_peft_is_applied_as_peft_applies_it(llama, converted: Path, tmp_path: Path):
    expected = llama(torch.tensor([IDS])).logits[0]
    base = LlamaCpp(converted)
    assert (logits_of(base) - expected).abs().max() < 0.03
    config = LoraConfig(r=4, lora_alpha=6, target_modules=[name.split(".")[1] for name in NAMES])
    adapted = get_peft_model(llama, config)
    for name, weight in adapted.named_parameters():
        if "lora_" in name:
            torch.nn.init.normal_(weight, std=0.3)
    expected_adapted = adapted(torch.tensor([IDS])).logits[0]
    adapted.save_pretrained(tmp_path)
    adapted.unload()
    found = logits_of(LlamaCpp(base.model, tmp_path))
    assert (expected_adapted - expected).abs().max() > 1
    assert (found - expected_adapted).abs().max() < 0.03
    assert torch.equal(logits_of(base), logits_of(base))


def test_members_with_adapters_share_the_weights_of_their_file(smollm2: Path):
    expert = Path(__file__).parents[3] / "demo" / "expert"
    ensemble = SpeculativeEnsemble([smollm2, f"llama_cpp:{smollm2}+{expert}"], schedule="standard")
    first, second = ensemble.models
    assert first.model is second.model
    assert not first.is_same_as(second)


def test_a_tokenizer_is_that_of_transformers(smollm2: Path):
    own = LlamaCpp(smollm2).tokenizer
    assert isinstance(own, GGUFTokenizer)
    theirs = AutoTokenizer.from_pretrained(str(smollm2.parent), gguf_file=smollm2.name)
    assert own.get_vocab() == theirs.get_vocab()
    assert own.eos_token_id == theirs.eos_token_id
    for text in (
        "Hello world",
        " leading  spaces\n\n\ttabs",
        "naïve café 你好 🎉",
        "<|im_start|>user\nHi<|im_end|>\n",
        "",
    ):
        ids = own(text)["input_ids"]
        assert ids == theirs(text)["input_ids"]
        assert own.decode(ids) == text
        assert own.decode(ids, skip_special_tokens=True) == theirs.decode(ids, skip_special_tokens=True)
    messages = [{"role": "user", "content": "Hi"}]
    assert own.apply_chat_template(messages, add_generation_prompt=True, tokenize=False) == theirs.apply_chat_template(
        messages, add_generation_prompt=True, tokenize=False
    )
    with pytest.raises(ValueError, match="token_ids: expected ids from 0 to 49151, got 49152"):
        own.decode([49152])
