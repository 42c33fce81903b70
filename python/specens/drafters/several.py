"""The trees of several drafters, merged [Miao et al., SpecInfer, ASPLOS 2024, section 3.2]."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from specens.decoding.request import Request
from specens.drafters.drafter import Drafter, check_index
from specens.drafters.member import MemberDrafter
from specens.drafters.tree_plan import TreePlan

if TYPE_CHECKING:
    from specens.decoding.batch import Batch
    from specens.engines.protocol import Engine


class Several(Drafter):
    """Each drafts a tree of the plan's shape, or grows one; all are tested as one tree.

    Nodes that were chosen are one where paths have the same tokens; drawn ones stay apart, each with the distribution
    that it was drawn from, so that the text keeps its law: without replacement also without the children of those
    drafters before it. Models that only draft are members of weight 0:
    `Mixture((1, 0, 0))` with `Several([1, 2])`.

    drafters: indices of members, and drafters without a model and a distribution of their own, such as a PromptLookup.
    Raises ValueError for another drafter; when an ensemble is made with it, also without trees.
    """

    def __init__(self, drafters: Sequence[int | Drafter]) -> None:
        if not isinstance(drafters, Sequence) or isinstance(drafters, str) or not drafters:
            raise ValueError(f"drafters: expected a list of drafters, got {drafters!r}")
        for drafter in drafters:
            if isinstance(drafter, type) or not isinstance(drafter, int | Drafter):
                raise ValueError(f"drafters: expected indices of members and drafters, got {drafter!r}")
            if not isinstance(drafter, int) and (drafter.models or drafter.has_probabilities or drafter.indices):
                raise ValueError(
                    "drafters: expected indices of members, of weight 0 where they only draft, and drafters without a "
                    f"distribution; got a {type(drafter).__name__}"
                )
        self.drafters = tuple(drafters)

    @property
    def indices(self) -> tuple[int, ...]:
        """The members that draft."""
        return tuple(drafter for drafter in self.drafters if isinstance(drafter, int))

    def bind(self, models: Sequence[Engine], tokenizer: Any | None) -> Drafter:
        """A copy of bound drafters."""
        for index in self.indices:
            check_index(index, len(models))
        bound = [own if isinstance(own, int) else own.bind(models, tokenizer) for own in self.drafters]
        return Several(bound)

    def check_topology(self, plan: TreePlan | None) -> None:
        """Raise ValueError without trees."""
        if plan is None:
            raise ValueError("tree: expected draft trees, tree=, with a Several, whose trees are merged; got none")
        for drafter in self.drafters:
            if not isinstance(drafter, int):
                drafter.check_topology(plan)

    def propose_trees(self, batch: Batch, requests: Sequence[Request], plan: TreePlan) -> None:
        """Let one after the other add its tree."""
        siblings: dict[Request, str | None] = dict.fromkeys(requests)
        for drafter in self.drafters:
            own = MemberDrafter(drafter) if isinstance(drafter, int) else drafter
            with _state_of(drafter, requests):
                own.propose_trees(batch, requests, plan)
            for request in requests:
                siblings[request] = siblings[request] or request.drafts.siblings
        for request, how in siblings.items():
            request.drafts.siblings = how

    def observe(self, requests: Sequence[Request]) -> None:
        """As each."""
        for drafter in self.drafters:
            if not isinstance(drafter, int):
                with _state_of(drafter, requests):
                    drafter.observe(requests)


@contextmanager
def _state_of(drafter: int | Drafter, requests: Sequence[Request]) -> Iterator[None]:
    """What one of several drafters remembers in the place of what all do."""
    states = {request: request.drafter_state or {} for request in requests}
    for request in requests:
        request.drafter_state = states[request].get(drafter)
    yield
    for request in requests:
        request.drafter_state = states[request] | {drafter: request.drafter_state}
