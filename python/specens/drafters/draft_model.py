"""A model that is no member drafts [Leviathan et al., ICML 2023; Chen et al., 2023]."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from specens.decoding.request import OUTSIDE
from specens.drafters.drafter import Drafter, check_place
from specens.drafters.member import MemberDrafter
from specens.engines.transformers.causal_lm import CausalLM
from specens.engines.transformers.load import check_unused, is_spec, load_both
from specens.engines.transformers.probing import reading_of


class OutsideModel(CausalLM):
    """A model beside the ensemble's: ids that it has no embedding for are read as its last one.

    It is only asked for drafts, which are tested whatever they come from.
    """

    def check_generated(self, tokens: list[int], index: int) -> None:
        """Nothing: every id can be read."""

    def _call(self, inputs: dict[str, Any], rows: int) -> Tensor:
        return super()._call(inputs | {"input_ids": inputs["input_ids"].clamp(max=self.num_embeddings - 1)}, rows)


class DraftModel(MemberDrafter):
    """A smaller model drafts chains from its own distribution, with a cache of its own; it has no part in the target.

    model: a Hugging Face causal LM, one in a CausalLM, or a spec (`engines.transformers.load.resolve_model`), with the
        ensemble's tokenizer; it may have fewer token ids than the members. place: the member whose prompt it reads.
    dtype, device: for a spec, as of `SpeculativeEnsemble`.
    Raises ValueError where a spec cannot be loaded; when an ensemble is made with it, also where its tokenizer is
        another one, or its cache cannot forget what was rejected.
    """

    def __init__(
        self,
        model: Any,
        place: int = 0,
        *,
        dtype: str | torch.dtype | None = None,
        device: str | torch.device | None = None,
    ) -> None:
        super().__init__(OUTSIDE)
        self._tokenizer = None
        if is_spec(model):
            model, self._tokenizer = load_both(model, dtype, device)
        else:
            check_unused(dtype=dtype, device=device)
        self.model = as_outside_model(model)
        self.prompt_of = place

    def bind(self, models: Sequence[CausalLM], tokenizer: Any | None) -> Drafter:
        """Itself, checked."""
        check_place(self.prompt_of, len(models))
        assert self.model is not None
        reading_of(self.model, speculates=True)  # raises where it cannot
        if self._tokenizer and tokenizer and self._tokenizer.get_vocab() != tokenizer.get_vocab():
            raise ValueError("drafter: the tokenizer of the DraftModel differs from that of the ensemble")
        return self


def as_outside_model(model: Any) -> OutsideModel:
    """A model as it stands beside an ensemble, with the cache that it was given."""
    return OutsideModel(model.model, model.make_cache) if isinstance(model, CausalLM) else OutsideModel(model)
