"""What every drafter has in common."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from specens.decoding.request import OUTSIDE, Request
from specens.drafters.tree_plan import TreePlan
from specens.drafters.trees import add_candidates
from specens.engines.protocol import Engine

if TYPE_CHECKING:
    from specens.decoding.batch import Batch


@runtime_checkable
class Drafter(Protocol):
    """Proposes draft tokens for the requests of a batch. Derive from it, and write `candidates`, or more than that.

    One object serves many batches: what it has to remember of a request goes into `request.drafter_state`, which is
    None at first. Drafts may depend on the request's own prompt, text and rows, and on uniforms of the draft stream, as
    those of `specens.decoding.draws.Drafting`; never on the batch around it, so that a seed gives one text.

    model: what it reads requests with, if that is no member: each batch makes a scorer for it, `scorer_of(proposer)`.
    prompt_of: the member whose prompts that model reads. has_probabilities: whether its drafts have one. estimates:
    whether their rows only say how probable they were, and are not what they were drawn from, which a lossless rule
    takes them for. proposer: whose its drafts and rows are in a request: a member, OUTSIDE, or, of one of several that
    are none, a number below that. num_trees: how many trees of its plan it makes one of.
    """

    model: Engine | None = None
    prompt_of: int = 0
    proposer: int = OUTSIDE
    num_trees: int = 1
    has_probabilities: bool = False
    estimates: bool = False

    @property
    def extra_nodes(self) -> int:
        """Of its trees, beside those of their plan."""
        return 0

    @property
    def indices(self) -> tuple[int, ...]:
        """The members whose distributions it drafts from."""
        return ()

    @property
    def parts(self) -> Sequence[Drafter]:
        """The drafters that it is made of, beside members."""
        return [self]

    @property
    def models(self) -> list[Engine]:
        """The models that it reads with, beside the members."""
        return [] if self.model is None else [self.model]

    def bind(self, models: Sequence[Engine], tokenizer: Any | None) -> Drafter:  # noqa: ARG002
        """The drafter as it serves an ensemble of these members. Raises ValueError where it does not suit them."""
        return self

    def members(self, models: Sequence[Engine]) -> list[Engine]:
        """The members as it needs them, once it is bound."""
        return list(models)

    def candidates(self, request: Request, count: int, length: int) -> Sequence[Sequence[int]]:  # noqa: ARG002
        """Up to `count` chains of up to `length` tokens that may follow a request's text, the likeliest first."""
        return []

    def propose(
        self,
        batch: Batch,  # noqa: ARG002
        requests: Sequence[Request],
        draft_lens: Sequence[int],
        min_probability: float = 0.0,  # noqa: ARG002
        hands_over: bool = False,  # noqa: ARG002
    ) -> None:
        """Append draft tokens to each request, while it can have any, and at most as many as `draft_lens` says.

        Here the likeliest candidate. min_probability: nothing is drafted after a token that was less probable.
        hands_over: nor where the most likely token is less probable, which then is not drafted itself.
        """
        for request, most in zip(requests, draft_lens, strict=True):
            for chain in self.candidates(request, 1, most)[:1]:
                add_chosen(request, chain)

    def propose_trees(self, batch: Batch, requests: Sequence[Request], plan: TreePlan) -> None:  # noqa: ARG002
        """Append a draft tree to each request, of what may follow it; to one of which nothing is known, none."""
        for request in requests:
            add_candidates(request, self.candidates(request, plan.most_paths, plan.most_levels), plan)

    def check_topology(self, plan: TreePlan | None) -> None:
        """Raise ValueError where it cannot propose such trees, or without them chains."""
        kind = type(self)
        knows_trees = kind.candidates is not Drafter.candidates or kind.propose_trees is not Drafter.propose_trees
        if plan is not None and not knows_trees:
            expected = "one that proposes trees, so has `candidates`, beside tree="
            raise ValueError(f"drafter: expected {expected}; got a {kind.__name__}")

    def observe(self, requests: Sequence[Request]) -> None:  # noqa: ARG002
        """Look at the logits of the members at the drafts, which have been scored and not yet been tested."""
        return


def add_chosen(request: Request, tokens: Iterable[int]) -> None:
    """Append draft tokens that were chosen, not drawn, up to the first after which none can be used."""
    for token in tokens:
        if not request.can_draft:
            return
        request.add_draft(token, OUTSIDE)


MOST_TOKENS = 2**29  # of an index


def check_count(name: str, value: object, least: int = 1, most: int = MOST_TOKENS) -> None:
    """Raise ValueError where a setting of a drafter is no integer from `least` to `most`."""
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
        raise ValueError(f"{name}: expected an integer from {least} to {most}, got {value!r}")


def check_index(index: int, num_members: int) -> None:
    """Raise ValueError where a drafter asks for a member that there is not."""
    if not isinstance(index, int) or isinstance(index, bool) or not 0 <= index < num_members:
        raise ValueError(f"index: expected the index of a member, 0 to {num_members - 1}; got {index!r}")
