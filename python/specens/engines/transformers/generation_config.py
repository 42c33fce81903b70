"""What a generation config of transformers asks for, as settings of the driver; of each field, whether it can.

Every field of `transformers.GenerationConfig` is in one of three tables: honoured as `generate` honours it, refused by
name where it is set, or without meaning here. A field of none is warned of.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import GenerationConfig, GenerationMixin, LogitsProcessorList, PreTrainedConfig

from specens.engines.transformers.logits_processors import split_processors
from specens_kernels import Sampling

TOP_K = 50  # of transformers, where do_sample=True and nobody says another
SAMPLING = ("do_sample", "temperature", "top_k", "top_p", "min_p")
WARPERS = {"top_h": None, "typical_p": 1.0, "epsilon_cutoff": 0.0, "eta_cutoff": 0.0}  # and what switches each off
PROCESSORS: dict[str, Any] = {
    "sequence_bias": None,
    "repetition_penalty": 1.0,
    "no_repeat_ngram_size": 0,
    "bad_words_ids": None,
    "forced_bos_token_id": None,
    "forced_eos_token_id": None,
    "remove_invalid_values": False,
    "exponential_decay_length_penalty": None,
    "suppress_tokens": None,
    "begin_suppress_tokens": None,
    "watermarking_config": None,
}
LENGTHS = ("max_new_tokens", "max_length", "min_new_tokens", "min_length")
ENDS = ("eos_token_id", "stop_strings")
HONOURED = (*SAMPLING, *WARPERS, *PROCESSORS, *LENGTHS, *ENDS)
REFUSED: dict[str, tuple[tuple[Any, ...], str]] = {  # the values that ask for nothing, and what to do instead
    "num_beams": ((None, 1), "texts are sampled or greedy"),
    "num_beam_groups": ((None, 1), "texts are sampled or greedy"),
    "constraints": ((None,), "give constraint="),
    "force_words_ids": ((None,), "give constraint="),
    "penalty_alpha": ((None, 0.0), "contrastive search is not there"),
    "dola_layers": ((None,), "DoLa is not there"),
    "guidance_scale": ((None, 1.0), "give the model twice, with LogitMixture((scale, 1 - scale)) and MemberPrompts"),
    "encoder_repetition_penalty": ((None, 1.0), "there is no encoder"),
    "encoder_no_repeat_ngram_size": ((None, 0), "there is no encoder"),
    "token_healing": ((None, False), "heal the prompt's tokens before"),
    "num_return_sequences": ((None, 1), "give samples= to generate_many"),
    "max_time": ((None,), "raise KeyboardInterrupt in on_tokens="),
    "output_scores": ((None, False), "give logprobs=True"),
    "output_logits": ((None, False), "give logprobs=True"),
    "output_attentions": ((None, False), "call the model itself"),
    "output_hidden_states": ((None, False), "call the model itself"),
    "cache_implementation": ((None, "dynamic", "dynamic_full", "hybrid"), "give a CausalLM with make_cache="),
    "cache_config": ((None,), "give a CausalLM with make_cache="),
    "prompt_lookup_num_tokens": ((None,), "give drafter=PromptLookup()"),
    "assistant_early_exit": ((None,), "give drafter=LayerSkip(exit_layer=...)"),
    "assistant_ensemble_weight": ((None,), "give ensemble=Mixture(...)"),
    "speculation_type": ((None,), "give drafter="),
    "use_mtp": ((None, False), "give drafter="),
}
MEANINGLESS = {
    **dict.fromkeys(("bos_token_id", "pad_token_id", "decoder_start_token_id"), "a prompt has its own first token"),
    **dict.fromkeys(("early_stopping", "length_penalty", "diversity_penalty", "low_memory"), "of beam search only"),
    **dict.fromkeys(
        ("num_assistant_tokens", "num_assistant_tokens_schedule", "assistant_confidence_threshold"),
        "how transformers drafts; here draft_lens= says it",
    ),
    **dict.fromkeys(
        ("assistant_lookbehind", "target_lookbehind", "max_matching_ngram_size", "is_assistant"),
        "how transformers drafts; here a drafter says it",
    ),
    **dict.fromkeys(
        (
            "max_cache_len",
            "prefill_chunk_size",
            "compile_config",
            "disable_compile",
            "continuous_batching_config",
            "use_cache",
        ),
        "how transformers computes; the text does not depend on it",
    ),
    "renormalize_logits": "distributions are normalised in any case",
    "return_dict_in_generate": "a Generation is returned",
    "transformers_version": "who wrote the file",
}


@dataclass
class Wishes:
    """What a config asks of one generation.

    sampling: how tokens are drawn. repetition_penalty: where it is the only edit of logits, to be done in the test.
    processors: of a member's prompt by its length, all other edits. names: the fields that these do.
    """

    sampling: Sampling
    repetition_penalty: float | None = None
    processors: Callable[[int], Sequence[Any]] | None = None
    names: list[str] = field(default_factory=list)


def config_of(model: Any) -> GenerationConfig:
    """A copy of a model's config; an empty one of a model that has none of transformers'."""
    own = getattr(model, "generation_config", None)
    return copy.deepcopy(own) if isinstance(own, GenerationConfig) else GenerationConfig()


def completed(config: GenerationConfig, model: Any) -> GenerationConfig:
    """A config that the user gave, with the fields that it leaves open as the model's has them."""
    whole = config_of(model)
    for name, value in vars(config).items():
        if value is not None and not name.startswith("_"):
            setattr(whole, name, value)
    return whole


def differing(first: GenerationConfig, second: GenerationConfig) -> list[str]:
    """The fields in which two members ask for other texts."""
    off = WARPERS | PROCESSORS
    names = [*SAMPLING, *off, "max_new_tokens", "max_length", "min_new_tokens", "min_length", "stop_strings"]
    pairs = [(name, *((getattr(config, name, None) or off.get(name)) for config in (first, second))) for name in names]
    return [name for name, one, other in pairs if (one or None) != (other or None)]


def check_config(config: GenerationConfig) -> None:
    """Raise ValueError naming a field that is set and cannot be honoured; warn of fields that nobody knows here."""
    for name, (values, instead) in REFUSED.items():
        value = getattr(config, name, None)
        if value not in values:
            expected = " or ".join(map(repr, values))
            raise ValueError(f"{name}: expected {expected} in a generation config, got {value!r}; {instead}")
    if type(config.watermarking_config).__name__ == "SynthIDTextWatermarkingConfig":
        raise ValueError("watermarking_config: expected one without a state, got a SynthIDTextWatermarkingConfig")
    known = {*HONOURED, *REFUSED, *MEANINGLESS}
    for name, value in vars(config).items():
        if value is not None and not name.startswith("_") and name not in known:
            warnings.warn(
                f"{name}: {value!r} of the generation config is not known here and has no effect", stacklevel=2
            )


def wishes(
    config: GenerationConfig,
    model: Any,
    *,
    sampling: Sampling | None,
    user_processors: Sequence[Any],
    stop_tokens: frozenset[int],
    max_new_tokens: int,
    can_fuse: bool,
) -> Wishes:
    """How the tokens of a generation are to be drawn, and its logits edited.

    sampling: of the user, in place of the config's. user_processors: run where transformers runs them, between the
    processors and the filters of the config. can_fuse: whether all members read one prompt, and the test may penalise.
    """
    config = copy.copy(config)
    config.do_sample = sampling is None and config.do_sample is not False and config.temperature != 0
    config.min_length = config.min_new_tokens = config.renormalize_logits = None  # the driver has its own
    greedy = Sampling(temperature=0.0)
    own = _sampling(config) if config.do_sample else greedy
    plain = own if sampling is None else sampling
    off = PROCESSORS | (WARPERS if config.do_sample else {})
    names = [name for name, value in off.items() if getattr(config, name, None) not in (None, value)]
    if not names:
        return Wishes(plain)
    if names == ["repetition_penalty"] and can_fuse and not user_processors:
        return Wishes(plain, repetition_penalty=config.repetition_penalty)

    def build(prompt_len: int) -> tuple[list[Any], Sampling]:
        own = copy.copy(config)
        own.max_length = prompt_len + max_new_tokens
        own._eos_token_tensor = torch.tensor(sorted(stop_tokens)) if stop_tokens else None
        made = _Maker(model)._get_logits_processor(
            own, input_ids_seq_length=prompt_len, logits_processor=LogitsProcessorList(user_processors)
        )
        return split_processors(made) if config.do_sample else (list(made), plain)

    return Wishes(build(1)[1], processors=lambda prompt_len: build(prompt_len)[0], names=names)


class _Maker(GenerationMixin):
    """Makes the processors of a model as its own `generate` does, also of one without that."""

    def __init__(self, model: Any) -> None:
        self.config = getattr(getattr(model, "base", model), "config", None) or PreTrainedConfig()


def _sampling(config: GenerationConfig) -> Sampling:
    """The sampling parameters of a config that samples."""
    return Sampling(
        temperature=1.0 if config.temperature is None else config.temperature,
        top_k=config.top_k or None,
        top_p=config.top_p,
        min_p=config.min_p,
    )
