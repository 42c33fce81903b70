"""A model that is no member drafts [Leviathan et al., ICML 2023; Chen et al., 2023]."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from specens.decoding.request import OUTSIDE
from specens.drafters.drafter import Drafter, check_index
from specens.drafters.member import MemberDrafter
from specens.engines.checks import check_engine
from specens.engines.loading import load_engine
from specens.engines.protocol import Engine, Needs
from specens.engines.transformers.causal_lm import CausalLM
from specens.engines.transformers.load import check_unused, is_spec


def as_engine(
    model: Any,
    dtype: str | torch.dtype | None,
    device: str | torch.device | None,
    ray_options: Mapping[str, Any] | None = None,
    model_kwargs: Mapping[str, Any] | None = None,
) -> Engine:
    """The engine of a drafter's model: a causal LM, an Engine, or a spec, to which alone the other arguments belong."""
    if is_spec(model):
        return load_engine(model, dtype, device, ray_options, model_kwargs)
    check_unused(dtype=dtype, device=device, ray_options=ray_options, model_kwargs=model_kwargs)
    if isinstance(model, Engine):
        check_engine(model, "model")
        return model
    if not isinstance(model, torch.nn.Module):
        raise ValueError(f"model: expected a causal LM, an Engine, or what names a model, got {type(model).__name__}")
    return CausalLM(model)


class DraftModel(MemberDrafter):
    """A smaller model drafts chains from its own distribution, with a cache of its own; it has no part in the target.

    model: a Hugging Face causal LM, an Engine, or a spec (`engines.transformers.load.resolve_model`), with the
        ensemble's tokenizer; it may have fewer token ids than the members. index: the member whose prompt it reads.
    dtype, device, ray_options, model_kwargs: for a spec, as of `SpeculativeEnsemble`.
    Raises ValueError where a spec cannot be loaded; when an ensemble is made with it, also where its tokenizer is
        another one, or its cache cannot forget what was rejected.
    """

    def __init__(
        self,
        model: Any,
        index: int = 0,
        *,
        dtype: str | torch.dtype | None = None,
        device: str | torch.device | None = None,
        ray_options: Mapping[str, Any] | None = None,
        model_kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(OUTSIDE)
        self.model = as_engine(model, dtype, device, ray_options, model_kwargs)
        self.prompt_of = index

    def bind(self, models: Sequence[Engine], tokenizer: Any | None) -> Drafter:
        """Itself, checked."""
        check_index(self.prompt_of, len(models))
        assert self.model is not None
        self.model.check(Needs())
        own = self.model.tokenizer
        if own and tokenizer and own.get_vocab() != tokenizer.get_vocab():
            raise ValueError(
                "drafter: the tokenizer of the DraftModel differs from that of the ensemble; in Python an "
                "OtherTokenizer drafts with its own"
            )
        return self
