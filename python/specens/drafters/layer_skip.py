"""A member without some of its layers drafts.

Sources: Zhang et al., Draft & Verify, ACL 2024 (any layers left out); Elhoushi et al., LayerSkip, ACL 2024 (an early
exit, for models that were trained for it).
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence
from typing import Any

from specens.decoding.request import OUTSIDE
from specens.drafters.drafter import Drafter, check_count, check_index
from specens.drafters.member import MemberDrafter
from specens.engines.protocol import Engine
from specens.engines.transformers.causal_lm import CausalLM
from specens.engines.transformers.early_exit import TwoParts, in_two_parts
from specens.engines.transformers.fewer_layers import num_layers, with_layers


class LayerSkip(MemberDrafter):
    """A member's own weights draft, without some of its layers and with a cache of their own: no further memory.

    skip_layers: the layers that are left out; or exit_layer: how many of the first ones are used, with the model's last
        norm and output layer after them. index: the member.
    reuse: with the first layers alone, whether the member goes on from what they have computed, so that each of its
        layers reads a token once, and keys and values are kept once. None: where its model can be read so, which is
        found out by trying; False: the drafter computes for itself, with a cache of its own. `reuses` says what it is,
        of the drafter that an ensemble has in its plan.
    Raises ValueError unless one of the two is given; when an ensemble is made with it, also where the member has no
        such layers, or is not built of decoder layers in a row, or cannot be read as `reuse=True` asks.
    """

    def __init__(
        self,
        skip_layers: Sequence[int] | None = None,
        *,
        exit_layer: int | None = None,
        index: int = 0,
        reuse: bool | None = None,
    ) -> None:
        super().__init__(OUTSIDE)
        if (skip_layers is None) == (exit_layer is None):
            raise ValueError(
                f"skip_layers: expected either it or exit_layer; got skip_layers={skip_layers}, exit_layer={exit_layer}"
            )
        if skip_layers is not None and not isinstance(skip_layers, Iterable):
            raise ValueError(f"skip_layers: expected the numbers of layers, got {skip_layers!r}")
        self.skip_layers = None if skip_layers is None else tuple(skip_layers)
        self.exit_layer = exit_layer
        self.prompt_of = index
        if reuse is not None and not isinstance(reuse, bool):
            raise ValueError(f"reuse: expected True, False or None, got {reuse!r}")
        self.reuse = reuse
        self._parts: TwoParts | None = None

    @property
    def reuses(self) -> bool:
        """Whether the member goes on from what the drafter has computed."""
        return self._parts is not None

    def bind(self, models: Sequence[Engine], tokenizer: Any | None) -> Drafter:  # noqa: ARG002
        """A copy that knows its model."""
        check_index(self.prompt_of, len(models))
        member = models[self.prompt_of]
        if not isinstance(member, CausalLM):
            raise ValueError(f"drafter: expected a member of transformers, got {type(member).__name__}")
        bound, kept = copy.copy(self), self._kept(num_layers(member.base))
        is_exit = kept == list(range(len(kept)))
        shares = is_exit and self.reuse is not False and not isinstance(member, TwoParts)  # which has another exit
        bound._parts = in_two_parts(member, len(kept)) if shares else None
        if self.reuse and bound._parts is None:
            raise ValueError(
                "reuse: expected an exit before the last layer of a member whose other layers can go on from hidden "
                f"states, in a cache that a batch shares; got layers {kept} of {type(member.base).__name__}"
            )
        if bound._parts is None:
            bound.model = CausalLM(with_layers(member.base, kept), member.make_cache)
        else:
            bound.model = bound._parts.exit
        return bound

    def members(self, models: Sequence[Engine]) -> list[Engine]:
        """With its member in two parts, and all that share the member's weights."""
        if self._parts is None:
            return list(models)
        own = models[self.prompt_of]
        return [self._parts if model.is_same_as(own) else model for model in models]

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
