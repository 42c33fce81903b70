"""The trees of several drafters, merged [Miao et al., SpecInfer, ASPLOS 2024, section 3.2]."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from specens.decoding.request import OUTSIDE, Request
from specens.drafters.draft_model import DraftModel
from specens.drafters.drafter import Drafter, check_index
from specens.drafters.heads import Heads
from specens.drafters.layer_skip import LayerSkip
from specens.drafters.member import MemberDrafter
from specens.drafters.other_tokenizer import OtherTokenizer
from specens.drafters.tree_plan import TreePlan

if TYPE_CHECKING:
    from specens.decoding.batch import Batch
    from specens.engines.protocol import Engine


class Several(Drafter):
    """Each drafts a tree of the plan's shape, or grows one; all are tested as one tree.

    Nodes that were chosen are one where paths have the same tokens; drawn ones stay apart, each with the distribution
    that it was drawn from, so that the text keeps its law: without replacement also without the children of those
    drafters before it. Models that only draft are DraftModels, or members of weight 0, who may have prompts of their
    own: `Mixture((1, 0, 0))` with `Several([1, 2])`. Each reads the nodes of those before it, beside its own.

    drafters: indices of members and drafters of any kind, as far as their drafts have no estimated probability; of
        your own, those without a model and a distribution.
    Raises ValueError for another drafter; when an ensemble is made with it, also without trees.
    """

    def __init__(self, drafters: Sequence[int | Drafter]) -> None:
        if not isinstance(drafters, Sequence) or isinstance(drafters, str) or not drafters:
            raise ValueError(f"drafters: expected a list of drafters, got {drafters!r}")
        for drafter in drafters:
            if isinstance(drafter, type) or not isinstance(drafter, int | Drafter):
                raise ValueError(f"drafters: expected indices of members and drafters, got {drafter!r}")
            if not isinstance(drafter, int) and not _may_be_one(drafter):
                raise ValueError(
                    "drafters: expected indices of members, a DraftModel, LayerSkip, Heads, OtherTokenizer without "
                    "probabilities, and drafters without a model or a distribution; "
                    f"got a {type(drafter).__name__}"
                )
        self.drafters = tuple(drafters)
        self.num_trees = len(self.drafters)

    @property
    def parts(self) -> list[Drafter]:
        """The others."""
        return [drafter for drafter in self.drafters if not isinstance(drafter, int)]

    @property
    def models(self) -> list[Engine]:
        """Those of all."""
        return [model for own in self.parts for model in own.models]

    @property
    def extra_nodes(self) -> int:
        """Of all together."""
        return sum(own.extra_nodes for own in self.parts)

    @property
    def indices(self) -> tuple[int, ...]:
        """The members that draft."""
        return tuple(drafter for drafter in self.drafters if isinstance(drafter, int))

    def bind(self, models: Sequence[Engine], tokenizer: Any | None) -> Drafter:
        """A copy of bound drafters, each with a number of its own; first those that put members into two parts."""
        for index in self.indices:
            check_index(index, len(models))
        bound: dict[Drafter, Drafter] = {}
        for own in sorted(self.parts, key=lambda own: not isinstance(own, LayerSkip)):
            if own not in bound:
                bound[own] = copy.copy(own.bind(models, tokenizer))
                models = bound[own].members(models)
        for number, own in enumerate(own for own in bound.values() if own.has_probabilities):
            own.proposer = OUTSIDE - 1 - number
        return Several([own if isinstance(own, int) else bound[own] for own in self.drafters])

    def members(self, models: Sequence[Engine]) -> list[Engine]:
        """As all need them."""
        for own in self.parts:
            models = own.members(models)
        return list(models)

    def check_topology(self, plan: TreePlan | None) -> None:
        """Raise ValueError without trees."""
        if plan is None:
            raise ValueError("tree: expected draft trees, tree=, with a Several, whose trees are merged; got none")
        for own in self.parts:
            own.check_topology(plan)

    def propose_trees(self, batch: Batch, requests: Sequence[Request], plan: TreePlan) -> None:
        """Let one after the other add its tree."""
        siblings: dict[Request, str | None] = dict.fromkeys(requests)
        for drafter in self.drafters:
            own = MemberDrafter(drafter) if isinstance(drafter, int) else drafter
            for request in requests:
                request.drafts.siblings = None
            with _state_of(drafter, requests):
                own.propose_trees(batch, requests, plan)
            for request in requests:
                siblings[request] = siblings[request] or request.drafts.siblings
        for request, how in siblings.items():
            request.drafts.siblings = how

    def observe(self, requests: Sequence[Request]) -> None:
        """As each."""
        for own in self.parts:
            with _state_of(own, requests):
                own.observe(requests)


def _may_be_one(drafter: Drafter) -> bool:
    """Whether its drafts can be told apart from those of others."""
    if isinstance(drafter, DraftModel | LayerSkip | Heads | OtherTokenizer):
        return not drafter.estimates
    return not (drafter.models or drafter.has_probabilities or drafter.indices)


@contextmanager
def _state_of(drafter: int | Drafter, requests: Sequence[Request]) -> Iterator[None]:
    """What one of several drafters remembers in the place of what all do."""
    states = {request: request.drafter_state or {} for request in requests}
    for request in requests:
        request.drafter_state = states[request].get(drafter)
    yield
    for request in requests:
        request.drafter_state = states[request] | {drafter: request.drafter_state}
