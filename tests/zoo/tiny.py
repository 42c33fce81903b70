"""A tiny random model of each causal LM architecture that the installed transformers builds from a configuration."""

import copy
import math
from typing import Any

import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PretrainedConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from zoo.overrides import OVERRIDES

MODEL_TYPES = sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
NUM_LAYERS = 2
MAX_LAYERS = 4
VOCAB = 61

# Whatever a configuration calls them. Groups of equal size, so that one architecture's names fit together.
SIZES: list[tuple[int, str]] = [
    (VOCAB, "vocab_size vocab_size_per_layer_input decoder_vocab_size unpadded_vocab_size"),
    (
        256,
        "max_position_embeddings n_positions n_ctx max_seq_len max_target_positions model_max_length context_length "
        "max_sequence_length rel_extent log_scaling_n_floor floor_scale",
    ),
    (
        48,
        "intermediate_size ffn_dim decoder_ffn_dim encoder_ffn_dim n_inner dim_ff dff d_inner d_ff ffn_hidden_size "
        "intermediate_size_mlp dense_intermediate_size feed_forward_size",
    ),
    (
        32,
        "hidden_size d_model n_embd dim emb_dim embedding_size word_embed_proj_dim embedding_dim mamba_d_ssm "
        "attention_hidden_size lru_width hidden_size_global input_embedding_size output_embedding_size "
        "adapter_input_size adapter_out_dim",
    ),
    (
        16,
        "moe_intermediate_size shared_expert_intermediate_size shared_intermediate_size "
        "shared_experts_intermediate_size moe_shared_expert_intermediate_size expert_ffn_hidden_size q_lora_rank "
        "kv_lora_rank o_lora_rank router_hidden_size mamba_dt_rank qk_head_dim block_size index_topk",
    ),
    (
        8,
        "head_dim swa_head_dim global_head_dim qk_rope_head_dim qk_nope_head_dim v_head_dim linear_key_head_dim "
        "linear_value_head_dim linear_head_dim mamba_d_head mamba_head_dim attention_head_dim kv_channels d_kv d_head "
        "dim_head attention_head_size index_head_dim sliding_window sliding_window_size attention_chunk_size "
        "attention_window_size window_size local_attention keep_window_size hidden_size_per_layer_input laurel_rank "
        "mamba_n_heads mamba_num_heads d_rel adapter_rank compress_rates ssm_state_size index_block_size "
        "prompt_length rotary_dim gated_norm_rank hc_lowrank",
    ),
    (
        4,
        "num_attention_heads n_head n_heads num_heads decoder_attention_heads encoder_attention_heads attention_heads "
        "num_decoder_attention_heads num_encoder_attention_heads swa_num_attention_heads linear_num_value_heads "
        "linear_num_heads num_experts num_local_experts n_routed_experts moe_num_experts state_size mamba_d_state "
        "mamba_chunk_size chunk_size time_step_rank index_n_heads",
    ),
    (
        2,
        "num_key_value_heads num_kv_heads kv_n_heads swa_num_key_value_heads linear_num_key_heads num_experts_per_tok "
        "num_experts_per_token moe_topk moe_top_k moe_k n_groups mamba_n_groups altup_num_inputs encoder_layers "
        "index_topk_blocks num_encoder_layers",
    ),
    (
        1,
        "n_group topk_group num_expert_group n_shared_experts num_shared_experts moe_num_shared_experts "
        "num_kv_shared_layers num_nextn_predict_layers first_k_dense_replace num_dense_layers",
    ),
    (NUM_LAYERS, "num_hidden_layers n_layer n_layers num_layers decoder_layers num_decoder_layers num_blocks"),
]
SIZE_OF = {name: size for size, names in SIZES for name in names.split()}
LAYER_LISTS = ("layer_types", "mlp_layer_types", "layers_block_type", "block_types", "indexer_types")
DERIVED = ("head_dim", "num_key_value_heads")  # from others, where None
ENDS = ("bos_token_id", "eos_token_id", "pad_token_id", "decoder_start_token_id", "sep_token_id", "cls_token_id")
NO_ENDS = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id", "forced_eos_token_id"))


def tiny_config(model_type: str) -> PretrainedConfig:
    """The configuration of an architecture with few layers, at least one of each kind, and small widths."""
    config_class = CONFIG_MAPPING[model_type]
    own = dict(OVERRIDES.get(model_type, {}))
    base = own.pop("base", {})
    text = own.pop("text_config", {})
    return config_class(**(_shrunk(config_class(**base), text) | own))


def _shrunk(config: PretrainedConfig, text: dict[str, Any]) -> dict[str, Any]:
    """Settings of a configuration; text: own ones of the part that reads text, if it is one of several."""
    settings: dict[str, Any] = {}
    for name, value in vars(config).items():
        if isinstance(value, PretrainedConfig):
            own = text if name == "text_config" else {}
            settings[name] = value if name == "vision_config" else type(value)(**(_shrunk(value, {}) | own))
        elif name in SIZE_OF and (_is_size(value) or (value is None and name in DERIVED)):
            settings[name] = SIZE_OF[name]
        elif name in NO_ENDS:
            settings[name] = None
    if "kv_lora_rank" in settings:  # each head has keys of its own
        settings["num_key_value_heads"] = SIZE_OF["num_attention_heads"]
    settings |= _layers(config, settings)
    settings |= {"tie_word_embeddings": False} | ({"is_decoder": True} if hasattr(config, "is_decoder") else {})
    return settings


def _is_derived(config: PretrainedConfig, name: str) -> bool:
    return isinstance(getattr(type(config), name, None), property)


def _is_size(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def _layers(config: PretrainedConfig, settings: dict[str, Any]) -> dict[str, Any]:
    """As many layers as there are kinds, one of each."""
    aliases = config.attribute_map
    names = [name for name in LAYER_LISTS if name not in aliases and not _is_derived(config, name)]
    lists = {name: getattr(config, name, None) for name in names}
    lists = {name: list(kinds) for name, kinds in lists.items() if isinstance(kinds, (list, tuple)) and kinds}
    if not lists:
        return {}
    seen: list[tuple] = []
    for kinds in zip(*lists.values(), strict=False):
        if kinds not in seen and len(seen) < MAX_LAYERS:
            seen.append(kinds)
    while len(seen) < NUM_LAYERS:
        seen.append(seen[-1])
    own = {name: [kinds[index] for kinds in seen] for index, name in enumerate(lists)}
    return own | {name: len(seen) for name in ("num_hidden_layers", "num_layers") if name in settings}


def tiny_model(model_type: str, seed: int = 0) -> torch.nn.Module:
    """A model in eval mode and float32, with weights so large that its greedy texts vary."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(tiny_config(model_type), dtype=torch.float32).eval()
        for name, weight in model.named_parameters():
            if weight.dim() >= 2 and weight.is_floating_point() and not _is_decay(name):
                torch.nn.init.normal_(weight, std=0.9 / math.sqrt(weight.shape[-1]))
        for table, size in ((model.get_input_embeddings(), 1.0), (model.get_output_embeddings(), 0.6)):
            if isinstance(getattr(table, "weight", None), torch.nn.Parameter):
                torch.nn.init.normal_(table.weight, std=size)
    for setting in ENDS:
        setattr(model.generation_config, setting, None)
    return model


def _is_decay(name: str) -> bool:
    """Whether a parameter is one of those of a recurrence, which must stay in their range."""
    return any(part in name for part in ("A_log", "dt_", ".D", "time_decay", "rg_lru", "slope"))


def changed_copy(model: torch.nn.Module, seed: int = 1, noise: float = 0.1) -> torch.nn.Module:
    """A drafter that agrees with a model here and there."""
    twin = copy.deepcopy(model)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in twin.named_parameters():
            if weight.dim() >= 2 and weight.is_floating_point() and not _is_decay(name):
                weight += noise * weight.std() * torch.randn(weight.shape, generator=generator)
    return twin
