"""What architectures need beyond the sizes that all of them get (`zoo.tiny.SIZES`)."""

from typing import Any

HYBRID = ["linear_attention", "full_attention"]
ATTENTION = ["sliding_attention", "full_attention"]
OVERRIDES: dict[str, dict[str, Any]] = {
    "bamba": {"attn_layer_indices": [1], "mamba_n_heads": 8},
    "cwm": {"bos_token_id": 60},
    "deepseek_v2": {"num_experts_per_tok": 2},
    "dory": {"layer_types": ATTENTION * 2, "num_hidden_layers": 4, "n_input_layers": 1, "n_output_layers": 1},
    "dots1": {"n_routed_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1},
    "emu3": {"text_config": {"pad_token_id": 60, "bos_token_id": 60, "eos_token_id": 60}},
    "gemma4": {"text_config": {"pad_token_id": 60}},
    "gemma4_unified": {"text_config": {"pad_token_id": 60}},
    "falcon_h1": {"mamba_n_heads": 4},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]], "attention_layers": ["global", "local"]},
    "granitemoehybrid": {"layers_block_type": HYBRID, "mamba_n_heads": 8},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "mamba2": {"num_heads": 8, "n_groups": 2},
    "modernbert-decoder": {"pad_token_id": 60, "bos_token_id": 60, "eos_token_id": 60},
    "reformer": {"axial_pos_embds": False},
    "xmod": {"default_language": "en_XX"},
    "xlm": {"use_lang_emb": False, "causal": True},
    "xlstm": {"num_heads": 2, "qk_dim_factor": 1.0},
    "zamba": {"attention_hidden_size": 64, "attention_head_dim": 16},
    "zamba2": {"attention_hidden_size": 64, "attention_head_dim": 16},
    "zaya": {"num_experts_per_tok": 1},
}

# What the general sizes do not build: these want sizes of their own, parts for images or sound, or further packages.
NOT_BUILT = (
    "cohere_compass_text",
    "dbrx",
    "dots3_note",
    "gemma3n",
    "gemma3n_text",
    "gemma4_assistant",
    "gemma4_unified_assistant",
    "mllama",
    "musicgen",
    "musicgen_melody",
    "qwen4_exp",
    "qwen4_exp_text",
)
