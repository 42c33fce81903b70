"""What the generation configs of members say, and what a call says in their place."""

from __future__ import annotations

import copy
import numbers
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import Tensor

from specens.decoding.request import counted_indices
from specens.engines.transformers.generation_config import (
    SAMPLING,
    TOP_K,
    Wishes,
    check_config,
    completed,
    config_of,
    differing,
    wishes,
)
from specens.targets import DenseTarget
from specens_kernels import Processing

if TYPE_CHECKING:
    from specens.generate import SpeculativeEnsemble
    from specens.settings.jobs import Settings

NONE = "none"
USUAL_LENGTH = 256


@dataclass(frozen=True)
class Lengths:
    """Between how many tokens a text is long, and the strings that end it."""

    max_new_tokens: Any
    min_new_tokens: Any
    stop_strings: Any


class ModelSettings:
    """The settings of one call that nobody gave, from the config of the first member that counts.

    Raises ValueError where a config asks for what there is not, and warns where members ask for different texts.
    """

    def __init__(self, owner: SpeculativeEnsemble, settings: Settings) -> None:
        self._owner = owner
        counted = counted_indices(owner.ensemble, owner.plan.num_members)
        self.index = counted[0] if counted else 0
        self._engine = owner.models[self.index]
        self._given = settings.get("generation_config")
        others = [config_of(owner.models[index]) for index in counted]
        self.config = self._chosen()
        check_config(self.config)
        if self._given is None and settings.get("sampling") is None:
            self._warn_of(others, counted)

    def _chosen(self) -> Any:
        if self._given is None:
            return config_of(self._engine)
        if isinstance(self._given, str) and self._given == NONE:
            return config_of(None)
        if not hasattr(self._given, "to_diff_dict"):
            raise ValueError(
                f"generation_config: expected a transformers GenerationConfig, or {NONE!r} to leave out those of the "
                f"models; got {self._given!r}"
            )
        return completed(self._given, self._engine)

    def _warn_of(self, others: Sequence[Any], counted: Sequence[int]) -> None:
        for index, other in zip(counted, others, strict=True):
            names = differing(self.config, other)
            if names:
                warnings.warn(
                    f"generation_config: members {self.index} and {index} differ in {', '.join(names)}; that of member "
                    f"{self.index} holds. Give generation_config= to choose",
                    stacklevel=5,
                )

    @property
    def end_of_sequence(self) -> frozenset[int] | None:
        """The ids that end a text by a config that was given; None leaves it to the models."""
        given = None if self._given in (None, NONE) else self._given.eos_token_id
        if given is None:
            return None
        return frozenset([given] if isinstance(given, int) else given)

    def lengths(self, own: Settings, prompts: Sequence[list[int]]) -> Lengths:
        """How long a text is: as the call says, else as the config does."""
        config, prompt_len = self.config, len(prompts[self.index])
        most, least = own.get("max_new_tokens"), own.get("min_new_tokens")
        if most is None:
            most = config.max_new_tokens
        if most is None and config.max_length is not None:
            most = config.max_length - prompt_len
            if most <= 0:
                raise ValueError(
                    f"max_length: expected more than the {prompt_len} tokens of the prompt in the generation config of "
                    f"member {self.index}, got {config.max_length}; give max_new_tokens="
                )
        most = USUAL_LENGTH if most is None else most
        if least is None:
            least = config.min_new_tokens
            if least is None:
                least = max((config.min_length or 0) - prompt_len, 0)
            if isinstance(most, int):  # what is said here ends a text that the config would have longer
                least = min(least, most)
        if own.get("stop") is not None and own.get("stop_strings"):
            raise ValueError(f"stop: expected none beside stop_strings=, its other name; got {own['stop']!r}")
        stops = own.get("stop") if own.get("stop") is not None else own.get("stop_strings")
        if stops is None:
            stops = config.stop_strings or ()
        return Lengths(most, least, stops)

    def wishes(
        self, own: Settings, ensemble: Any, prompts: Sequence[list[int]], stop_tokens: frozenset[int], most: int
    ) -> Wishes:
        """How tokens are drawn and logits edited: as the call says, else as the config does."""
        config = _with_keywords(self.config, own)
        if own.get("processing") is not None:
            config.repetition_penalty = None
        found = wishes(
            config,
            self._engine,
            sampling=own.get("sampling"),
            user_processors=own.get("logits_processors", ()),
            stop_tokens=stop_tokens,
            max_new_tokens=most,
            can_fuse=not isinstance(ensemble, DenseTarget)
            and own.get("processing") is None
            and all(prompt == prompts[0] for prompt in prompts),
        )
        return found


def as_processing(found: Wishes, processing: Processing | None) -> Processing | None:
    """The edits of logits that the test of drafts does."""
    if found.repetition_penalty is None:
        return processing
    return Processing(repetition_penalty=found.repetition_penalty)


def _with_keywords(config: Any, own: Settings) -> Any:
    """The config with the sampling parameters that a call names one by one.

    Any of them asks for a sampled text, temperature 0 and do_sample=False for a greedy one.
    """
    given: dict[str, Any] = {name: own[name] for name in SAMPLING if own.get(name) is not None}  # type: ignore[literal-required]
    if own.get("sampling") is not None and given:
        name, value = next(iter(given.items()))
        raise ValueError(f"{name}: expected none beside sampling=, which says how tokens are drawn; got {value!r}")
    chosen = given.pop("do_sample", None)
    temperature = given.get("temperature")
    if chosen is not None and not isinstance(chosen, bool):
        raise ValueError(f"do_sample: expected True or False, got {chosen!r}")
    if chosen is False and any(given.values()):
        name, value = next((name, value) for name, value in given.items() if value)
        raise ValueError(f"{name}: expected none beside do_sample=False, got {value!r}")
    if chosen and temperature == 0:
        raise ValueError("temperature: expected a number > 0 beside do_sample=True, got 0")
    for name, value in given.items():
        if not isinstance(value, (numbers.Real, Tensor)) or isinstance(value, bool):
            raise ValueError(f"{name}: expected a number, got {value!r}")
        if isinstance(value, Tensor) and value.numel() != 1:
            raise ValueError(f"{name}: expected one number, got {list(value.shape)}")
    config = copy.copy(config)
    for name, value in given.items():
        setattr(config, name, float(value) if name == "temperature" else value)
    if chosen is None and given:
        chosen = False if temperature == 0 else config.do_sample or None
    elif chosen is None:
        chosen = config.do_sample
    config.do_sample = chosen
    if chosen and config.top_k is None:
        config.top_k = TOP_K
    return config
