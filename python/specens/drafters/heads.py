"""Further output layers on a member draft [Cai et al., Medusa, ICML 2024, section 2.1.1]."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from specens.decoding.draws import Drafting
from specens.decoding.request import Request
from specens.drafters.drafter import Drafter, check_index
from specens.drafters.tree_plan import TreePlan
from specens.drafters.trees import draft_trees
from specens.engines.protocol import Engine

if TYPE_CHECKING:
    from specens.decoding.batch import Batch


@dataclass
class _States:
    """Hidden states [rows, width] of a member from an index on, and logits [heads, vocab] of the one that was last."""

    first: int
    states: Tensor
    logits: Tensor | None = None


class Heads(Drafter):
    """Heads of the user's draft from a member's last hidden state, each one token of a chain or one level of a tree.

    heads: called with hidden states [batch, width], the input of the member's output layer; logits [batch, heads,
        vocab]. The output layer itself gives the token after a state, head 0 the one after that, and so on.
    index: the member. A path has a draft of each head at most. The state that the last token was drawn from is used, so
    the drafts cost no forward, and the first round, before the prompt is read, drafts nothing.
    Raises ValueError where heads return another shape, or the member has no output layer.
    """

    has_probabilities = True

    def __init__(self, heads: Callable[[Tensor], Tensor], index: int = 0) -> None:
        if not callable(heads):
            raise ValueError(f"heads: expected a function of hidden states, got {heads!r}")
        self.heads = heads
        self.index = index

    def bind(self, models: Sequence[Engine], tokenizer: Any | None) -> Drafter:  # noqa: ARG002
        """Itself; the member keeps its hidden states from now on."""
        check_index(self.index, len(models))
        model = models[self.index]
        for other in models:  # members that share weights read in one forward, of the first of them
            if other is model or other.is_same_as(model):
                other.keep_hidden()
        return self

    def observe(self, requests: Sequence[Request]) -> None:
        """Keep the hidden states of all positions that were scored."""
        for request in requests:
            if self.index not in request.hidden:
                raise ValueError("heads: expected a member that calls its output layer, which was not called")
            request.drafter_state = _States(*request.hidden[self.index])

    def propose(
        self,
        batch: Batch,
        requests: Sequence[Request],
        draft_lens: Sequence[int],
        min_probability: float = 0.0,
        hands_over: bool = False,
    ) -> None:
        """Draw from each head in turn."""
        drafting, left = Drafting(self.proposer, min_probability, hands_over), self._begin(requests)
        most = dict(zip(requests, draft_lens, strict=True))
        for head in range(self._num_heads(left)):
            left = [request for request in left if most[request] > head and request.can_draft]
            if not left:
                return
            self.read(batch, left)
            left = drafting.add(left)

    def propose_trees(self, batch: Batch, requests: Sequence[Request], plan: TreePlan) -> None:
        """Trees in which all nodes of one depth have the distribution of one head."""
        drafting = self._begin(requests)
        levels = self._num_heads(drafting)
        if levels:
            draft_trees(self.proposer, partial(self.read, batch), drafting, plan, levels)

    def read(self, batch: Batch, requests: Sequence[Request]) -> None:  # noqa: ARG002
        """Put the rows of the heads after the drafts; after those of the last head there is none."""
        for request in requests:
            rows, heads = request.rows[self.proposer], request.drafter_state.logits
            first, drafts = request.num_settled, request.drafts
            depths = [0, *drafts.depths][max(rows.end - first, 0) :]
            rows.add(max(rows.end, first), heads[[min(depth, len(heads) - 1) for depth in depths]])

    def _begin(self, requests: Sequence[Request]) -> list[Request]:
        """The requests that have a state to draft from; their logits are computed, of all in one call."""
        states = {request: state for request in requests if (state := self._state(request)) is not None}
        if states:
            for request, logits in zip(states, self._logits(torch.stack(list(states.values()))), strict=True):
                request.drafter_state.logits = logits
        return list(states)

    def _num_heads(self, requests: Sequence[Request]) -> int:
        return len(requests[0].drafter_state.logits) if requests else 0

    def _state(self, request: Request) -> Tensor | None:
        """The hidden state [width] that the last settled token was drawn from."""
        if request.drafter_state is None:
            return None
        first, states = request.drafter_state.first, request.drafter_state.states
        row = request.drawn_at - first
        return states[row] if 0 <= row < len(states) else None

    def _logits(self, states: Tensor) -> Tensor:
        logits = self.heads(states)
        if logits.dim() != 3 or len(logits) != len(states):
            raise ValueError(f"heads: expected logits [{len(states)}, heads, vocab], got {list(logits.shape)}")
        return logits
