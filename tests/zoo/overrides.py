"""What architectures need beyond the sizes that all of them get (`zoo.tiny.SIZES`)."""

from typing import Any

HYBRID = ["linear_attention", "full_attention"]
ATTENTION = ["sliding_attention", "full_attention"]
ASSISTANT = {
    "hidden_size_per_layer_input": 0,
    "vocab_size_per_layer_input": 0,
    "num_hidden_layers": 2,
    "num_kv_shared_layers": 2,
    "layer_types": ATTENTION,
}
INDEXER = {
    "indexer_n_heads": 2,
    "indexer_kv_heads": 1,
    "indexer_head_dim": 8,
    "indexer_budget": 8,
    "indexer_compress_ratio": 4,
}
OVERRIDES: dict[str, dict[str, Any]] = {
    "bamba": {"attn_layer_indices": [1], "mamba_n_heads": 8},
    "cohere_compass_text": {
        "rope_parameters": {
            "full_attention": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 1, 1]}
        },
    },
    "cwm": {"bos_token_id": 60},
    "dbrx": {"attn_config": {"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 10000.0}},
    "deepseek_v2": {"num_experts_per_tok": 2},
    "dory": {"layer_types": ATTENTION * 2, "num_hidden_layers": 4, "n_input_layers": 1, "n_output_layers": 1},
    "dots1": {"n_routed_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1},
    "dots3_note": {
        "text_config": {
            "swa_num_attention_heads": 4,
            "swa_num_key_value_heads": 4,
            "swa_q_lora_rank": 16,
            "swa_kv_lora_rank": 16,
            "swa_head_dim": 16,
            "swa_qk_nope_head_dim": 8,
            "swa_v_head_dim": 8,
        },
        "vision_config": {"adapter_out_dim": 32},
    },
    "emu3": {"text_config": {"pad_token_id": 60, "bos_token_id": 60, "eos_token_id": 60}},
    "gemma4": {"text_config": {"pad_token_id": 60}},
    "gemma4_unified": {"text_config": {"pad_token_id": 60}},
    "gemma3n_text": {"layer_types": ATTENTION * 2, "num_hidden_layers": 4, "num_kv_shared_layers": 2},
    "gemma4_assistant": {"base": {"text_config": ASSISTANT}, "backbone_hidden_size": 32, "text_config": ASSISTANT},
    "gemma4_unified_assistant": {
        "base": {"text_config": ASSISTANT},
        "backbone_hidden_size": 32,
        "text_config": ASSISTANT,
    },
    "falcon_h1": {"mamba_n_heads": 4},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]], "attention_layers": ["global", "local"]},
    "granitemoehybrid": {"layers_block_type": HYBRID, "mamba_n_heads": 8},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "mamba2": {"num_heads": 8, "n_groups": 2},
    "mllama": {"text_config": {"bos_token_id": 60, "cross_attention_layers": [1], "num_hidden_layers": 3}},
    "modernbert-decoder": {"pad_token_id": 60, "bos_token_id": 60, "eos_token_id": 60},
    "qwen4_exp": {"text_config": INDEXER},
    "qwen4_exp_text": INDEXER,
    "reformer": {"axial_pos_embds": False},
    "xmod": {"default_language": "en_XX"},
    "xlm": {"use_lang_emb": False, "causal": True, "pad_index": 60},
    "xlstm": {"hidden_size": 64, "embedding_dim": 64, "num_heads": 2, "qk_dim_factor": 1.0},
    "zamba": {"attention_hidden_size": 64, "attention_head_dim": 16},
    "zamba2": {"attention_hidden_size": 64, "attention_head_dim": 16},
    "zaya": {"num_experts_per_tok": 1},
}

# What a configuration alone does not build here, and why.
SOUND = "its class takes the part of the configuration that is its decoder's, and writes several codebooks of sound"
NOT_BUILT = {
    "gemma3n": "its part for images wants a package that is not installed",
    "musicgen": SOUND,
    "musicgen_melody": SOUND,
}
