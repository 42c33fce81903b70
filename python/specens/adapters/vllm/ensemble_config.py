"""The configurations of an ensemble and of its members in vLLM, checked where the engine starts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from vllm.config import ModelConfig, VllmConfig
from vllm.model_executor.models.config import VerifyAndUpdateConfig

from specens.adapters.vllm.ensemble_settings import ARCHITECTURE, KEY, EnsembleSettings

DRAFTERS = ("draft_model", "ngram", "ngram_gpu", "suffix")  # which need nothing of the target's hidden states
LOADED_BY_MEMBER = ("auto", "hf", "safetensors", "fastsafetensors", "pt", "npcache", "mistral", "dummy")


class EnsembleConfig(VerifyAndUpdateConfig):
    """What vLLM asks before it starts an engine with the architecture SpecensEnsemble."""

    @staticmethod
    def verify_and_update_config(vllm_config: VllmConfig) -> None:
        """Raise ValueError for what an ensemble is not served with."""
        check_engine(vllm_config)
        settings, base = settings_of(vllm_config.model_config), vllm_config.model_config
        for member in settings.members:
            check_member(member, member_config(member, base), base)


def settings_of(model_config: ModelConfig) -> EnsembleSettings:
    """Of a model's config.json and --hf-overrides."""
    return EnsembleSettings.of_config(getattr(model_config.hf_config, KEY, None))


def is_ensemble(model_config: ModelConfig) -> bool:
    """Whether this model is an ensemble."""
    return ARCHITECTURE in (getattr(model_config.hf_config, "architectures", None) or ())


def member_config(member: str, base: ModelConfig) -> ModelConfig:
    """A member as vLLM would serve it alone, with what the engine says of dtype and length.

    member: a folder, beside the ensemble's config.json where it begins with ./, or a name with an optional @REVISION.
    """
    member = str(Path(base.model) / member) if member.startswith("./") else member
    name, _, revision = (member, "", "") if Path(member).exists() else member.partition("@")
    return ModelConfig(
        model=name,
        revision=revision or None,
        tokenizer=base.tokenizer,
        tokenizer_mode=base.tokenizer_mode,
        trust_remote_code=base.trust_remote_code,
        dtype=base.dtype,
        max_model_len=base.max_model_len,
        skip_tokenizer_init=base.skip_tokenizer_init,
        enforce_eager=base.enforce_eager,
        seed=base.seed,
    )


def check_engine(vllm_config: VllmConfig) -> None:
    """Raise ValueError naming the setting that an ensemble does not go together with."""
    model, parallel, speculative = vllm_config.model_config, vllm_config.parallel_config, vllm_config.speculative_config
    refused: list[tuple[str, Any, Any]] = [
        ("pipeline_parallel_size", "1", parallel.pipeline_parallel_size if parallel.pipeline_parallel_size > 1 else 0),
        ("enable_lora", "no LoRA", vllm_config.lora_config is not None),
        ("enable_prompt_embeds", "tokens as prompts", model.enable_prompt_embeds),
        ("logits_processors", "none, as they would see one member's logits", model.logits_processors),
        ("quantization", "none, as each member brings its own", model.quantization),
        ("runner", "'generate'", "" if model.runner_type == "generate" else model.runner_type),
        ("enable_batch_sharded_sampling", "False", getattr(parallel, "enable_batch_sharded_sampling", False)),
    ]
    if vllm_config.load_config.load_format not in LOADED_BY_MEMBER:
        refused.append(("load_format", " or ".join(LOADED_BY_MEMBER), vllm_config.load_config.load_format))
    if speculative is not None and speculative.method not in DRAFTERS:
        refused.append(("speculative_config.method", " or ".join(DRAFTERS), speculative.method))
    if speculative is not None and getattr(speculative, "enable_adaptive_verification", False):
        refused.append(("enable_adaptive_verification", "False", True))
    for name, expected, got in refused:
        if got:
            raise ValueError(f"{name}: expected {expected} with an ensemble ({ARCHITECTURE}), got {got!r}")


def check_member(member: str, config: ModelConfig, base: ModelConfig) -> None:
    """Raise ValueError unless the model can be a member: a causal language model of text, with attention throughout."""
    if config.is_multimodal_model or config.is_encoder_decoder:
        raise ValueError(f"{KEY}.members: expected models of text alone, got {member} ({config.architecture})")
    if config.is_hybrid or config.is_attention_free:
        raise ValueError(f"{KEY}.members: expected models with attention alone, got {member} ({config.architecture})")
    if is_ensemble(config):
        raise ValueError(f"{KEY}.members: expected models, got {member}, which is an ensemble")
    if config.get_vocab_size() > base.get_vocab_size():
        raise ValueError(
            f"vocab_size: expected the largest of the members, {config.get_vocab_size()} of {member}, in the "
            f"ensemble's config.json, got {base.get_vocab_size()} (`specens vllm-config` writes it)"
        )
