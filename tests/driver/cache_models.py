"""Small random models of each kind of cache that transformers has, and caches other than the model's own."""

import torch
import transformers
from driver.tiny_models import tiny_llama
from transformers import cache_utils

SIZES = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 512,
    "initializer_range": 0.3,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
KINDS = {
    "sliding_hybrid": (
        "Gemma3Text",
        "Gemma3",
        {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 8},
    ),
    "sliding": ("Mistral", "Mistral", {"sliding_window": 8}),
    "mamba": ("Mamba", "Mamba", {"state_size": 4}),
    "mamba2": ("Mamba2", "Mamba2", {"state_size": 4, "num_heads": 8, "head_dim": 8, "n_groups": 2, "chunk_size": 4}),
    "falcon_mamba": ("FalconMamba", "FalconMamba", {"state_size": 4}),
    "gated_delta": (
        "Qwen3Next",
        "Qwen3Next",
        {
            "layer_types": ["linear_attention", "full_attention"],
            "linear_key_head_dim": 8,
            "linear_value_head_dim": 8,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 16,
            "shared_expert_intermediate_size": 16,
        },
    ),
    "attention_and_mamba": (
        "FalconH1",
        "FalconH1",
        {"mamba_d_ssm": 32, "mamba_n_heads": 4, "mamba_d_head": 8, "mamba_d_state": 4, "mamba_chunk_size": 4},
    ),
    "convolution": ("Lfm2", "Lfm2", {"layer_types": ["conv", "full_attention"]}),
}


def tiny_model(kind, seed=0, **settings):
    """A model of two layers, of one of the KINDS or "full", whose tokens are not all alike."""
    if kind == "full":
        return tiny_llama(seed, **settings)
    config_name, model_name, own = KINDS[kind]
    config = getattr(transformers, f"{config_name}Config")(**(SIZES | own | settings))
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = getattr(transformers, f"{model_name}ForCausalLM")(config).eval()
        model.get_output_embeddings().weight = torch.nn.Parameter(torch.randn(61, 32))
    return model


class RoundedLayer(cache_utils.QuantizedLayer):
    """Keeps its tensors rounded to 8 bits, and requantises all of them whenever six more have come."""

    def __init__(self):
        super().__init__(residual_length=6)

    def _quantize(self, tensor, axis):  # noqa: ARG002
        scale = tensor.abs().amax() / 127
        return (tensor / scale).round().to(torch.int8), scale

    def _dequantize(self, quantized):
        return quantized[0].float() * quantized[1]


CACHES = {
    "dynamic": None,
    "static": lambda config: transformers.StaticCache(config, max_cache_len=256),
    "fp8": lambda config: transformers.QuantizedCache("fp8", config),
    "rounded": lambda config: cache_utils.Cache(layers=[RoundedLayer() for _ in range(config.num_hidden_layers)]),
}
