"""Further output layers on a member draft [Cai et al., Medusa, ICML 2024, section 2.1.1]."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from specens.decoding.request import OUTSIDE, Request
from specens.decoding.verification import draft
from specens.drafters.drafter import Drafter, check_place
from specens.engines.transformers.causal_lm import CausalLM

if TYPE_CHECKING:
    from specens.decoding.batch import Batch


class Heads(Drafter):
    """Heads of the user's draft a chain from a member's last hidden state, each one token, all without a forward.

    heads: called with hidden states [batch, width], the input of the member's output layer; logits [batch, heads,
        vocab]. The output layer itself gives the token behind a state, head 0 the one after that, and so on.
    place: the member. A chain has a draft of each head at most. The state that the last token was drawn from is used,
    so the heads' chain costs no forward, and the first round, before the prompt is read, drafts nothing.
    Raises ValueError where heads return another shape, or the member has no output layer.
    """

    has_probabilities = True

    def __init__(self, heads: Callable[[Tensor], Tensor], place: int = 0) -> None:
        if not callable(heads):
            raise ValueError(f"heads: expected a function of hidden states, got {heads!r}")
        self.heads = heads
        self.place = place

    def bind(self, models: Sequence[CausalLM], tokenizer: Any | None) -> Drafter:  # noqa: ARG002
        """Itself; the member keeps its hidden states from now on."""
        check_place(self.place, len(models))
        model = models[self.place]
        if model.base.get_output_embeddings() is None:
            raise ValueError(f"heads: expected a member with an output layer, got {type(model.base).__name__}")
        for other in models:  # members that share weights read in one forward, of the first of them
            other.keeps_hidden |= other.is_same_as(model)
        return self

    def observe(self, requests: Sequence[Request]) -> None:
        """Keep the hidden states of all positions that were scored."""
        for request in requests:
            if self.place not in request.hidden:
                raise ValueError("heads: expected a member that calls its output layer, which was not called")
            request.drafter_state = request.hidden[self.place]

    def propose(
        self,
        batch: Batch,  # noqa: ARG002
        requests: Sequence[Request],
        draft_lens: Sequence[int],
        min_probability: float = 0.0,
    ) -> None:
        """Draw from each head in turn."""
        chosen = dict(zip(requests, draft_lens, strict=True))
        states = {request: state for request in requests if (state := self._state(request)) is not None}
        if not states:
            return
        logits = self._logits(torch.stack(list(states.values())))
        for request, rows in zip(states, logits, strict=True):
            request.rows[OUTSIDE].add(request.num_settled, rows)
        drafting = list(states)
        for head in range(logits.shape[1]):
            drafting = [request for request in drafting if chosen[request] > head and request.can_draft]
            if not drafting:
                return
            drawn = draft(drafting, OUTSIDE, with_probabilities=min_probability > 0)
            drafting = [request for request, chance in drawn.items() if chance >= min_probability]

    def _state(self, request: Request) -> Tensor | None:
        """The hidden state [width] from which the last settled token was drawn."""
        if request.drafter_state is None:
            return None
        first, states = request.drafter_state
        row = request.num_settled - 1 - first
        return states[row] if 0 <= row < len(states) else None

    def _logits(self, states: Tensor) -> Tensor:
        logits = self.heads(states)
        if logits.dim() != 3 or len(logits) != len(states):
            raise ValueError(f"heads: expected logits [{len(states)}, heads, vocab], got {list(logits.shape)}")
        return logits
