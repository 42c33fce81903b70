"""Acceptance rules: what each is called, what it needs and promises, and its settings.

`RuleKind` is the one description of a rule. Checks, the codes that operators, specens.h and kernels carry, and the
table in docs/concepts/rules.md come from it or are held equal to it; CONTRIBUTING.md says how to add one. What rules
compute is said by `ops.verify_chain.rules` and `ops.verify_tree.rules`.
"""

from __future__ import annotations

import enum
from dataclasses import MISSING, dataclass, fields
from typing import Any, ClassVar, NamedTuple

from specens_kernels.decision_tree import DecisionTree
from specens_kernels.values import Range, check_number, fail

__all__ = ["DecisionTree", "Replacement", "Synthetic", "Threshold", "Typical"]

EMPTY_RESIDUAL_MASS = 2.0**-20  # what float32 rounding can leave of a residual that is nothing
MOST_DRAFTS = 2**20  # of a request: results have columns for as many
CHAIN, TREE = "verify_chain", "verify_tree"


class Settings:
    """The settings of a rule: numbers with ranges, in the order in which operators take them."""

    RANGES: ClassVar[dict[str, Range]]

    def __post_init__(self) -> None:
        for name, allowed in self.RANGES.items():
            check_number(name, getattr(self, name), allowed)

    def numbers(self, _draft_len: int) -> tuple[float, ...]:
        """What operators take after the rule's code."""
        return tuple(float(getattr(self, name)) for name in self.RANGES)


@dataclass(frozen=True)
class Typical(Settings):
    """Typical acceptance: a draft is accepted if its target probability exceeds min(threshold, alpha * exp(-entropy)).

    threshold: in [0, 1]. alpha: >= 0. The entropy is the target distribution's, in nats.
    Source: Cai et al., Medusa, ICML 2024: threshold is its epsilon, alpha its delta, by default the root of epsilon.
    """

    threshold: float = 0.09
    alpha: float = 0.3

    RANGES: ClassVar = {"threshold": Range(0, 1), "alpha": Range(0)}


@dataclass(frozen=True)
class Threshold(Settings):
    """Threshold acceptance: a draft is accepted while its target probability is at least `probability`.

    Not lossless. The next token is drawn from the target; greedy requests accept the most likely token only.
    probability: in (0, 1].
    """

    probability: float

    RANGES: ClassVar = {"probability": Range(0, 1, above=True)}


@dataclass(frozen=True)
class Replacement(Settings):
    """The assistant's token replaces a draft token that the drafter is unsure of and the assistant is not.

    The assistant is the target, its token the most likely one. It replaces the draft token where the two differ, the
    draft token has a draft probability below alpha, and the assistant's token has a target probability above beta times
    that draft probability.
    alpha: in [0, 1]. beta: >= 0.
    Source: Wang et al., Speculate, then Collaborate, ICML 2025 (CoSD-Rule, with these defaults).
    """

    alpha: float = 0.5
    beta: float = 0.5

    RANGES: ClassVar = {"alpha": Range(0, 1), "beta": Range(0)}


@dataclass(frozen=True)
class Synthetic:
    """Synthetic acceptance: draft j is accepted with a given probability if all before it are, whatever it is.

    Not lossless: it shows what a drafter of that quality would be worth, with the real cost of everything else. The
    next token is drawn from the target. Greedy requests are treated alike, and need random numbers.
    acceptance_rates: in [0, 1]: one number for all positions, or one a position.
    """

    acceptance_rates: float | tuple[float, ...] = 0.8

    RANGES: ClassVar = {"acceptance_rates": Range(0, 1)}

    def __post_init__(self) -> None:
        if isinstance(self.acceptance_rates, list):
            object.__setattr__(self, "acceptance_rates", tuple(self.acceptance_rates))
        rates = self.acceptance_rates if isinstance(self.acceptance_rates, tuple) else (self.acceptance_rates,)
        allowed = self.RANGES["acceptance_rates"]
        for rate in rates:
            check_number("acceptance_rates", rate, allowed, f"numbers in {allowed}")

    def numbers(self, draft_len: int) -> tuple[float, ...]:
        """A rate for each position."""
        rates = self.acceptance_rates
        if isinstance(rates, tuple):
            if len(rates) != draft_len:
                fail("acceptance_rates", f"a rate for each of {draft_len} positions", f"{len(rates)} rates")
            return tuple(map(float, rates))
        if draft_len > MOST_DRAFTS:
            fail("max_draft_len", f"at most {MOST_DRAFTS}", draft_len)
        return (float(rates),) * draft_len


class Next(enum.Enum):
    """Where the token after a rejected draft comes from, and so what a rule reads."""

    RESIDUAL = "the residual"  # of target and draft distribution
    TARGET = "the target"  # what drafts were drawn from is not looked at
    MOST_LIKELY = "the target's most likely token"  # weighed against the draft distribution; nothing is drawn
    BEST_SCORE = "the best Gumbel score"  # of each row, from seed and position alone


class RuleKind(enum.IntEnum):
    """An acceptance rule. Its value is the code that operators carry, SPECENS_RULE_* of specens.h.

    lossless: whether what is emitted has exactly the target distribution.
    operations: those that take it, by its name in small letters unless it needs settings that have no default.
    next: where the token after a rejection comes from.
    source: who described it, or what it is for.
    settings: the class of its settings, which `rule=` takes too; None: it has none.
    """

    lossless: bool
    operations: tuple[str, ...]
    next: Next
    source: str
    settings: type[Any] | None

    TOKEN = 0, True, (CHAIN, TREE), Next.RESIDUAL, "Leviathan et al. 2023, Chen et al. 2023"
    BLOCK = 1, True, (CHAIN,), Next.RESIDUAL, "Sun et al. 2025"
    TYPICAL = 2, False, (CHAIN, TREE), Next.TARGET, "Cai et al. 2024 (Medusa)", Typical
    SYNTHETIC = 3, False, (CHAIN,), Next.TARGET, "acceptance at given rates, to plan capacity", Synthetic
    THRESHOLD = 4, False, (CHAIN,), Next.TARGET, "a simpler typical", Threshold
    REPLACEMENT = 5, False, (CHAIN,), Next.MOST_LIKELY, "Wang et al. 2025 (CoSD)", Replacement
    DECISION_TREE = 6, False, (CHAIN,), Next.MOST_LIKELY, "Wang et al. 2025 (CoSD)", DecisionTree
    GUMBEL = 7, True, (CHAIN, TREE), Next.BEST_SCORE, "Daliri et al. 2024"
    TRAVERSAL = 8, True, (TREE,), Next.RESIDUAL, "Weng et al. 2025"
    K_SEQ = 9, True, (TREE,), Next.RESIDUAL, "Sun et al. 2023 (SpecTr)"

    def __new__(
        cls,
        code: int,
        lossless: bool = False,
        operations: tuple[str, ...] = (),
        next: Next = Next.TARGET,
        source: str = "",
        settings: type[Any] | None = None,
    ) -> RuleKind:
        kind = int.__new__(cls, code)
        kind._value_ = code
        kind.lossless, kind.operations, kind.next = lossless, operations, next
        kind.source, kind.settings = source, settings
        kind.subtracts = next is Next.RESIDUAL
        kind.compares = next is Next.MOST_LIKELY
        kind.picks = next in (Next.MOST_LIKELY, Next.BEST_SCORE)
        kind.reads_draft = next in (Next.RESIDUAL, Next.MOST_LIKELY)
        kind.has_table = settings in (Synthetic, DecisionTree)
        kind.tests_greedy = settings is Synthetic
        return kind

    subtracts: bool  # a rejected draft is followed by a token from the residual
    compares: bool  # the draft is weighed against the target's most likely token; without random numbers
    picks: bool  # a row has one next token, without uniforms: the most likely one, or the one of the best score
    reads_draft: bool  # what drafts were drawn from is looked at
    has_table: bool  # its settings are as many numbers as there are drafts, or nodes
    tests_greedy: bool  # greedy requests are tested as others are, by random numbers

    @property
    def needs_draft(self) -> bool:
        """Whether a draft distribution must be given."""
        return self.compares

    @property
    def without(self) -> tuple[str, ...]:
        """The arguments that play no part, and must be None."""
        return DRAFT_SOURCES if self.next is Next.BEST_SCORE else ()

    def needs_random(self, greedy: bool) -> bool:
        """Whether random numbers must be given; greedy: all requests are."""
        return not self.compares and (self.tests_greedy or not greedy)


DRAFT_SOURCES = ("drafter", "draft_logits", "draft_sampling", "siblings", "uniforms")


class ChosenRule(NamedTuple):
    """A rule with its settings, as a call has it."""

    kind: RuleKind
    settings: Any  # of the class that the kind says, or None

    def numbers(self, draft_len: int) -> list[float]:
        """What operators take: the code, then the settings."""
        own = () if self.settings is None else self.settings.numbers(draft_len)
        return [int(self.kind), *own]


def _by_name() -> dict[str, ChosenRule]:
    """The rules that a name is enough for."""
    found = {}
    for kind in RuleKind:
        required = [] if kind.settings is None else [own for own in fields(kind.settings) if own.init]
        if all(own.default is not MISSING for own in required):
            found[kind.name.lower()] = ChosenRule(kind, None if kind.settings is None else kind.settings())
    return found


BY_NAME = _by_name()


def chosen(rule: object, operation: str) -> ChosenRule:
    """The rule that a call of an operation names, or gives the settings of. Raises ValueError for another."""
    if isinstance(rule, str):
        found = BY_NAME.get(rule)
    else:
        kinds = (kind for kind in RuleKind if kind.settings is not None and isinstance(rule, kind.settings))
        found = next((ChosenRule(kind, rule) for kind in kinds), None)
    if found is None or operation not in found.kind.operations:
        fail("rule", _expected(operation), repr(rule))
    return found


def _expected(operation: str) -> str:
    taken = [kind for kind in RuleKind if operation in kind.operations]
    names = [repr(name) for name, rule in BY_NAME.items() if rule.kind in taken]
    classes = [kind.settings.__name__ for kind in taken if kind.settings is not None]
    return f"one of {', '.join(names)}, or a {' or '.join(classes)}"
