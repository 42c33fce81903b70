"""A member without some of its layers drafts.

Sources: Zhang et al., Draft & Verify, ACL 2024 (any layers left out); Elhoushi et al., LayerSkip, ACL 2024 (an early
exit, for models that were trained for it).
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

from specens.decoding.request import OUTSIDE
from specens.drafters.drafter import Drafter, check_count, check_index
from specens.drafters.member import MemberDrafter
from specens.engines.protocol import Engine
from specens.engines.transformers.causal_lm import CausalLM
from specens.engines.transformers.fewer_layers import num_layers, with_layers


class LayerSkip(MemberDrafter):
    """A member's own weights draft, without some of its layers and with a cache of their own: no further memory.

    skip_layers: the layers that are left out; or exit_layer: how many of the first ones are used, with the model's last
        norm and output layer after them. index: the member.
    Raises ValueError unless one of the two is given; when an ensemble is made with it, also where the member has no
        such layers, or is not built of decoder layers in a row.
    """

    def __init__(
        self, skip_layers: Sequence[int] | None = None, *, exit_layer: int | None = None, index: int = 0
    ) -> None:
        super().__init__(OUTSIDE)
        if (skip_layers is None) == (exit_layer is None):
            raise ValueError(
                f"skip_layers: expected either it or exit_layer; got skip_layers={skip_layers}, exit_layer={exit_layer}"
            )
        self.skip_layers = None if skip_layers is None else tuple(skip_layers)
        self.exit_layer = exit_layer
        self.prompt_of = index

    def bind(self, models: Sequence[Engine], tokenizer: Any | None) -> Drafter:  # noqa: ARG002
        """A copy that knows its model."""
        check_index(self.prompt_of, len(models))
        member = models[self.prompt_of]
        if not isinstance(member, CausalLM):
            raise ValueError(f"drafter: expected a member of transformers, got {type(member).__name__}")
        bound = copy.copy(self)
        bound.model = CausalLM(with_layers(member.base, self._kept(num_layers(member.base))), member.make_cache)
        return bound

    def _kept(self, count: int) -> list[int]:
        """The layers that are used, of so many."""
        if self.exit_layer is not None:
            check_count("exit_layer", self.exit_layer)
            if self.exit_layer > count:
                raise ValueError(f"exit_layer: expected at most the member's {count} layers, got {self.exit_layer}")
            return list(range(self.exit_layer))
        skipped = set(self.skip_layers or ())
        if not skipped or len(skipped) >= count or not skipped <= set(range(count)):
            raise ValueError(
                f"skip_layers: expected some of the member's layers, 0 to {count - 1}, and not all; "
                f"got {list(self.skip_layers or ())}"
            )
        return [layer for layer in range(count) if layer not in skipped]
