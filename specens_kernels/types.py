"""The words of the public API: ensembles, sampling parameters, results and their status."""

from __future__ import annotations

import enum
import math
import numbers
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

INTEGER_DTYPES = (torch.int64, torch.int32)
WEIGHT_SUM_TOLERANCE = 1e-3  # of a Mixture's weights; they are normalised afterwards
EMPTY_RESIDUAL_MASS = 2.0**-20  # what float32 rounding can leave of a residual that is nothing
LARGEST_TOP_P = 1 - 2.0**-20  # above it top-p is off: sums of float32 powers could not tell


class Status(enum.IntFlag):
    """What was unusual about a request; bits of `Verdict.status` and `Draw.status`. 0 is a plain request."""

    OK = 0
    NAN_LOGITS = 1  # a used row holds NaN, which counts as -inf
    INFINITE_LOGITS = 2  # a used row holds +inf, which counts as the largest finite number
    NO_TOKEN = 4  # no token of the row has positive probability: nothing more was emitted
    MEMBER_WITHOUT_TOKEN = 8  # a weighted member of a Mixture has no token: the other weights were renormalised
    INVALID_DRAFT_TOKEN = 16  # a draft id is -1 or outside the vocabulary: the chain ended there
    INVALID_DRAFT_DISTRIBUTION = 32  # no usable draft distribution: it was treated as one-hot
    EMPTY_RESIDUAL = 64  # the residual is nothing but rounding: the next token was drawn from the target
    INVALID_PARAMETER = 128  # a per-request temperature, weight, length or coin is out of range: nothing was emitted


class EnsembleKind(enum.IntEnum):
    """How member logits become one distribution; the code that operators carry."""

    SINGLE = 0
    MIXTURE = 1
    LOGIT_MIXTURE = 2


class RuleKind(enum.IntEnum):
    """The acceptance rules of a chain; the code that operators carry."""

    TOKEN = 0
    BLOCK = 1
    TYPICAL = 2
    SYNTHETIC = 3
    THRESHOLD = 4
    REPLACEMENT = 5
    DECISION_TREE = 6
    GUMBEL = 7

    @property
    def subtracts(self) -> bool:
        """Whether a rejected draft is followed by a token from the residual, else by one from the target."""
        return self in (RuleKind.TOKEN, RuleKind.BLOCK)

    @property
    def compares(self) -> bool:
        """Whether the draft is weighed against the target's most likely token, which takes its place; without coins."""
        return self in (RuleKind.REPLACEMENT, RuleKind.DECISION_TREE)

    @property
    def picks(self) -> bool:
        """Whether a row has one next token, without uniforms: the most likely one, or the one of the best score."""
        return self.compares or self == RuleKind.GUMBEL


def _readable(value: object) -> bool:
    """Whether looking at the numbers of a tensor costs no device synchronisation and no graph break."""
    return isinstance(value, Tensor) and value.device.type == "cpu" and not torch.compiler.is_compiling()


def is_integer(value: object) -> bool:
    """Whether this is an integer that operators take: Python's or NumPy's, of 64 bits, no truth value."""
    if isinstance(value, bool) or not isinstance(value, int | torch.SymInt | numbers.Integral):
        return False
    return bool(-(2**63) <= value < 2**63)  # type: ignore[operator]


def is_number(value: object) -> bool:
    """Whether this is a real number, Python's or NumPy's."""
    return isinstance(value, int | float | numbers.Real)


def _check_weights(weights: Sequence[float] | Tensor, *, mixture: bool) -> None:
    """Raise ValueError unless weights are finite and, for a mixture, non-negative with sum 1 in each row."""
    if isinstance(weights, Tensor):
        if weights.dim() != 2 or not weights.is_floating_point():
            raise ValueError(
                f"weights: expected a floating-point tensor [batch, members], got {weights.dtype} {list(weights.shape)}"
            )
        if not _readable(weights):
            return
        finite = bool(torch.isfinite(weights).all())
        negative = bool((weights < 0).any())
        sums = weights.double().sum(1)
        off = bool(((sums - 1).abs() > WEIGHT_SUM_TOLERANCE).any())
    else:
        finite = all(math.isfinite(w) for w in weights)
        negative = any(w < 0 for w in weights)
        off = abs(sum(weights) - 1) > WEIGHT_SUM_TOLERANCE
    if not finite:
        raise ValueError(f"weights: expected finite numbers, got {weights}")
    if mixture and negative:
        raise ValueError(f"weights: expected numbers >= 0 for a Mixture, got {weights}")
    if mixture and off:
        raise ValueError(f"weights: expected a sum of 1 for a Mixture, got {weights}")


def _as_weights(weights: Sequence[float] | Tensor) -> tuple[float, ...] | Tensor:
    if isinstance(weights, Tensor):
        return weights
    try:
        return tuple(float(w) for w in weights)
    except (TypeError, ValueError):
        raise ValueError(f"weights: expected numbers or a tensor [batch, members], got {weights!r}") from None


def _check_plausibility(value: float | None) -> None:
    if value is not None and not (is_number(value) and 0 < value <= 1):
        raise ValueError(f"plausibility: expected None or a number in (0, 1], got {value}")


@dataclass(frozen=True)
class Mixture:
    """The target is the weighted mean of the members' probabilities: sum_i weight_i * softmax(logits_i / temperature).

    weights: one float a member, or a tensor [batch, members]; each >= 0, sum 1.
    filter: "mixture": top-k, top-p and min-p act on the mixture; "members": on each member's distribution before.
    Source: Fu et al., Collaborative Decoding via Speculation, ICML 2025 (weighted ensemble).
    """

    weights: tuple[float, ...] | Tensor
    filter: str = "mixture"

    def __init__(self, weights: Sequence[float] | Tensor, filter: str = "mixture") -> None:
        object.__setattr__(self, "weights", _as_weights(weights))
        object.__setattr__(self, "filter", filter)
        _check_weights(self.weights, mixture=True)
        if filter not in ("mixture", "members"):
            raise ValueError(f"filter: expected 'mixture' or 'members', got {filter!r}")

    kind = EnsembleKind.MIXTURE
    plausibility = None


@dataclass(frozen=True)
class LogitMixture:
    """The target is softmax(sum_i weight_i * logits_i / temperature): a product of experts, guidance, proxy tuning.

    weights: one float a member, or a tensor [batch, members]; any sign, any sum, finite.
    plausibility: in (0, 1]; tokens whose probability under member 0 (temperature 1) is below plausibility times its
        largest are excluded. None: no such constraint.
    A token that is -inf under a member of non-zero weight is excluded.
    """

    weights: tuple[float, ...] | Tensor
    plausibility: float | None = None

    def __init__(self, weights: Sequence[float] | Tensor, plausibility: float | None = None) -> None:
        object.__setattr__(self, "weights", _as_weights(weights))
        object.__setattr__(self, "plausibility", plausibility)
        _check_weights(self.weights, mixture=False)
        _check_plausibility(plausibility)

    kind = EnsembleKind.LOGIT_MIXTURE


@dataclass(frozen=True)
class Contrastive:
    """Contrastive decoding: softmax((logits_0 - amateur_weight * logits_1) / temperature), member 1 the amateur.

    plausibility: in (0, 1]; tokens whose probability under member 0 (temperature 1) is below plausibility times its
    largest are excluded. None: no such constraint.
    Source: Li et al., Contrastive Decoding, ACL 2023; the weighting of Fu et al., ICML 2025.
    """

    amateur_weight: float
    plausibility: float | None = None

    def __post_init__(self) -> None:
        if not is_number(self.amateur_weight) or not math.isfinite(self.amateur_weight):
            raise ValueError(f"amateur_weight: expected a finite number, got {self.amateur_weight}")
        _check_plausibility(self.plausibility)

    kind = EnsembleKind.LOGIT_MIXTURE

    @property
    def weights(self) -> tuple[float, float]:
        return (1.0, -float(self.amateur_weight))


Ensemble = Mixture | LogitMixture | Contrastive


@dataclass(frozen=True)
class Sampling:
    """Sampling parameters of a batch: each a number (Python's or NumPy's) for all requests, or a tensor [batch].

    Tensors may be float64, float32, bfloat16 or float16, and count as the numbers that they hold: a positive
    temperature is never 0, a finite one never infinite.

    temperature: >= 0; 0 takes the most likely token of the unfiltered ensemble (lowest id on a tie).
    Filters, each on the distribution that the one before left, renormalised. All are thresholds, so ties are kept:
    top_k: keeps every token not below the k-th largest probability. None, 0 and -1 are off.
    top_p: in (0, 1]; keeps the smallest set of the most probable tokens whose mass reaches top_p, and all that tie with
        its last. None and 1.0 are off, and so is what lies above 1 - 2**-20, which float32 cannot resolve in a sum.
    min_p: in [0, 1]; keeps every token with at least min_p times the largest probability. None and 0.0 are off.
    filter_order: "transformers" (top-k, top-p, min-p) or "vllm" (min-p, top-k, top-p).

    Raises ValueError for a number, or a tensor on the CPU with a number, out of range; elsewhere such a request gets
    `Status.INVALID_PARAMETER`.
    """

    temperature: float | Tensor = 1.0
    top_k: int | Tensor | None = None
    top_p: float | Tensor | None = None
    min_p: float | Tensor | None = None
    filter_order: str = "transformers"

    def __post_init__(self) -> None:
        if self.filter_order not in ("transformers", "vllm"):
            raise ValueError(f"filter_order: expected 'transformers' or 'vllm', got {self.filter_order!r}")
        _check_numbers("temperature", self.temperature, "a finite number >= 0", lambda t: (t >= 0) & (t < math.inf))
        if self.top_k is not None:
            _check_integers("top_k", self.top_k, -1)
        if self.top_p is not None:
            _check_numbers("top_p", self.top_p, "a number in (0, 1]", lambda p: (p > 0) & (p <= 1))
        if self.min_p is not None:
            _check_numbers("min_p", self.min_p, "a number in [0, 1]", lambda p: (p >= 0) & (p <= 1))

    @property
    def greedy(self) -> bool:
        """Whether every request is known to be greedy."""
        return not isinstance(self.temperature, Tensor) and self.temperature == 0

    @property
    def filters(self) -> bool:
        """Whether any filter may be on."""
        return self.top_k is not None or self.top_p is not None or self.min_p is not None


def _check_numbers(name: str, value: Any, expected: str, in_range: Callable[[Any], Any]) -> None:
    """Raise ValueError unless a number, or each number of a tensor [batch], is in range."""
    if isinstance(value, Tensor):
        if value.dim() != 1 or not value.is_floating_point():
            got = f"{value.dtype} {list(value.shape)}"
            raise ValueError(f"{name}: expected {expected} or a floating-point tensor [batch], got {got}")
        if _readable(value) and not bool(in_range(value).all()):
            raise ValueError(f"{name}: expected {expected} for each request, got {value}")
    else:
        _check_number(name, value, expected, in_range)


def _check_number(name: str, value: object, expected: str, in_range: Callable[[Any], Any]) -> None:
    """Raise ValueError unless this is a number in range."""
    if not is_number(value) or not in_range(value):
        raise ValueError(f"{name}: expected {expected}, got {value!r}")


def _check_integers(name: str, value: object, least: float) -> None:
    """Raise ValueError unless an integer, or each of a tensor [batch], is at least this."""
    expected = "an integer of 64 bits" if least == -math.inf else f"an integer from {least} to 2**63 - 1"
    if isinstance(value, Tensor):
        if value.dim() != 1 or value.dtype not in INTEGER_DTYPES:
            got = f"{value.dtype} {list(value.shape)}"
            raise ValueError(f"{name}: expected {expected} or an int64 or int32 tensor [batch], got {got}")
        if _readable(value) and not bool((value >= least).all()):
            raise ValueError(f"{name}: expected {expected} for each request, got {value}")
    elif not is_integer(value) or value < least:  # type: ignore[operator]
        raise ValueError(f"{name}: expected {expected}, got {value!r}")


def _check_token_table(name: str, value: object, dims: tuple[int, ...] = (2,)) -> None:
    """Raise ValueError unless this is None or an integer tensor of so many dimensions."""
    if value is None:
        return
    if not isinstance(value, Tensor) or value.dim() not in dims or value.dtype not in INTEGER_DTYPES:
        got = f"{value.dtype} {list(value.shape)}" if isinstance(value, Tensor) else repr(value)
        raise ValueError(f"{name}: expected an int64 or int32 tensor [batch, tokens], got {got}")


@dataclass(frozen=True)
class Processing:
    """What is done to the logits of a batch before anything else: of every member, at every row.

    Row i of a request comes after its drafts 0..i-1, or in a tree after those on the way to it, which count as output
    like `output_tokens`. Of a token's logit, in this order:
    logit_bias: (tokens, values): int64 or int32 [batch, n] and floating-point [batch, n]; the value is added to the
        logit, the values of a token that is listed twice are. -inf forbids a token.
    repetition_penalty: > 0; of tokens in the prompt or the output, a positive logit is divided by it, another one
        multiplied. 1 is off. Source: Keskar et al., CTRL, 2019.
    frequency_penalty, presence_penalty: subtracted for each time that a token is in the output, and once if it is. 0 is
        off.
    min_tokens: end_tokens get -inf in rows after fewer than min_tokens drafts: how many tokens must still come before
        the text may end, counted from the first row. An integer or an int64 or int32 tensor [batch].
    end_tokens: int64 or int32 [ends] or [batch, ends].
    prompt_tokens, output_tokens: int64 or int32 [batch, n]: what stands before the first row.
    Penalties are numbers or floating-point tensors [batch]. Ids outside the vocabulary are padding, in all tables.

    Raises ValueError for a number, or a tensor on the CPU with a number, out of range; elsewhere a request with such a
    penalty gets `Status.INVALID_PARAMETER`.
    """

    logit_bias: tuple[Tensor, Tensor] | None = None
    repetition_penalty: float | Tensor = 1.0
    frequency_penalty: float | Tensor = 0.0
    presence_penalty: float | Tensor = 0.0
    min_tokens: int | Tensor = 0
    end_tokens: Tensor | None = None
    prompt_tokens: Tensor | None = None
    output_tokens: Tensor | None = None

    def __post_init__(self) -> None:
        _check_logit_bias(self.logit_bias)
        positive = "a finite number > 0"
        _check_numbers("repetition_penalty", self.repetition_penalty, positive, lambda x: (x > 0) & (x < math.inf))
        for name in ("frequency_penalty", "presence_penalty"):
            _check_numbers(name, getattr(self, name), "a finite number", lambda x: (x > -math.inf) & (x < math.inf))
        _check_integers("min_tokens", self.min_tokens, -math.inf)
        _check_token_table("end_tokens", self.end_tokens, (1, 2))
        _check_token_table("prompt_tokens", self.prompt_tokens)
        _check_token_table("output_tokens", self.output_tokens)
        if self.end_tokens is None and not (is_integer(self.min_tokens) and self.min_tokens <= 0):
            raise ValueError("end_tokens: expected the tokens that min_tokens holds back, got None")


def _check_logit_bias(value: object) -> None:
    if value is None:
        return
    if not isinstance(value, tuple) or len(value) != 2 or not isinstance(value[1], Tensor):
        raise ValueError(f"logit_bias: expected a pair of tensors (tokens, values), got {value!r}")
    tokens, values = value
    _check_token_table("logit_bias[0]", tokens)
    if tokens is None or not values.is_floating_point() or values.shape != tokens.shape:
        raise ValueError(
            f"logit_bias[1]: expected floating-point values for each of logit_bias[0], got {values.dtype} "
            f"{list(values.shape)}"
        )
    if _readable(values) and not bool((values < math.inf).all()):
        raise ValueError(f"logit_bias[1]: expected numbers below +inf, got {values}")


@dataclass(frozen=True)
class Typical:
    """Typical acceptance: a draft is accepted if its target probability exceeds min(threshold, alpha * exp(-entropy)).

    threshold: in [0, 1]. alpha: >= 0. The entropy is the target distribution's, in nats.
    Source: Cai et al., Medusa, ICML 2024: threshold is its epsilon, alpha its delta, by default the root of epsilon.
    """

    threshold: float = 0.09
    alpha: float = 0.3

    def __post_init__(self) -> None:
        _check_number("threshold", self.threshold, "a number in [0, 1]", lambda x: (x >= 0) & (x <= 1))
        _check_number("alpha", self.alpha, "a finite number >= 0", lambda x: (x >= 0) & (x < math.inf))


@dataclass(frozen=True)
class Threshold:
    """Threshold acceptance: a draft is accepted while its target probability is at least `probability`.

    Not lossless. The next token is drawn from the target; greedy requests accept the most likely token only.
    probability: in (0, 1].
    """

    probability: float

    def __post_init__(self) -> None:
        _check_number("probability", self.probability, "a number in (0, 1]", lambda x: (x > 0) & (x <= 1))


@dataclass(frozen=True)
class Synthetic:
    """Synthetic acceptance: draft j is accepted with a given probability if all before it are, whatever it is.

    Not lossless: it shows what a drafter of that quality would be worth, with the real cost of everything else. The
    next token is drawn from the target. Greedy requests are treated alike, and need coins.
    acceptance_rates: in [0, 1]: one number for all positions, or one a position.
    """

    acceptance_rates: float | tuple[float, ...] = 0.8

    def __post_init__(self) -> None:
        if isinstance(self.acceptance_rates, list):
            object.__setattr__(self, "acceptance_rates", tuple(self.acceptance_rates))
        rates = self.acceptance_rates if isinstance(self.acceptance_rates, tuple) else (self.acceptance_rates,)
        for rate in rates:
            _check_number("acceptance_rates", rate, "numbers in [0, 1]", lambda x: (x >= 0) & (x <= 1))


class Verdict(NamedTuple):
    """What a batch of speculative steps emits.

    tokens: int64 [batch, draft_len + 1]: the accepted draft tokens, then the next token, then -1.
    num_accepted: int64 [batch], accepted draft tokens. num_tokens: int64 [batch], emitted tokens.
    next_token: int64 [batch], the recovered or the bonus token, -1 where there is none.
    logprobs: float32 [batch, draft_len + 1], of the emitted tokens, 0 in the padding; None unless asked for.
    status: int32 [batch], bits of `Status`.
    top_tokens: int64 [batch, draft_len + 1, top_logprobs], the most likely tokens where one was emitted, most likely
        first, -1 where there is none (left); None unless asked for.
    top_logprobs: float32, their log-probabilities, -inf where there is no token; None unless asked for.
    path: int64 [batch, max_levels], of a tree: the accepted nodes from the root down, then -1. None for a chain.
    Of a tree, draft_len is max_levels, the most nodes of a path.
    """

    tokens: Tensor
    num_accepted: Tensor
    num_tokens: Tensor
    next_token: Tensor
    logprobs: Tensor | None
    status: Tensor
    top_tokens: Tensor | None = None
    top_logprobs: Tensor | None = None
    path: Tensor | None = None


class Draw(NamedTuple):
    """One drawn token a request, or with `count` several.

    tokens: int64 [batch], -1 where no token has positive probability; with `count` [batch, count], best score first,
    then -1. logprobs: float32 like tokens (0 where there is no token) or None unless asked for. status: int32 [batch],
    bits of `Status`. top_tokens: int64 [batch, top_logprobs] and top_logprobs, float32: the most likely tokens, as in
    `Verdict`, or None unless asked for.
    """

    tokens: Tensor
    logprobs: Tensor | None
    status: Tensor
    top_tokens: Tensor | None = None
    top_logprobs: Tensor | None = None


class TreeMask(NamedTuple):
    """Which keys each node of a draft tree attends to, and where the node is.

    mask: in the layout that was asked for (see `tree_mask`). positions: int64 [batch, nodes], absolute positions; the
    first free one, prefix_len, for padding.
    """

    mask: Tensor
    positions: Tensor


class Compaction(NamedTuple):
    """What a cache holds after `compact_kv`.

    lengths: int64 [batch], slots in use: prefix_lens + the nodes that were kept. num_blocks: int64 [batch], the blocks
    of block_table that these slots take; None without block_table. status: int32 [batch]: `Status.INVALID_PARAMETER`
    for a request that was refused, of which no slot was moved and lengths is prefix_lens; else 0.
    """

    lengths: Tensor
    num_blocks: Tensor | None
    status: Tensor
