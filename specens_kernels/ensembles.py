"""Ensembles: how the logits of several models become one distribution."""

from __future__ import annotations

import enum
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from specens_kernels.values import Range, check_number, check_requests, fail, readable

WEIGHT_SUM_TOLERANCE = 1e-3  # of a Mixture's weights; they are normalised afterwards
PLAUSIBILITY = Range(0, 1, above=True)


class EnsembleKind(enum.IntEnum):
    """How member logits become one distribution; the code that operators carry."""

    SINGLE = 0
    MIXTURE = 1
    LOGIT_MIXTURE = 2


def _check_weights(weights: Sequence[float] | Tensor, *, mixture: bool) -> None:
    """Raise ValueError unless weights are finite and, for a mixture, non-negative with sum 1 in each row."""
    if isinstance(weights, Tensor):
        if weights.dim() != 2 or not weights.is_floating_point():
            fail("weights", "a floating-point tensor [batch, members]", f"{weights.dtype} {list(weights.shape)}")
        if not readable(weights):
            return
        check_requests("weights", "finite numbers", weights, torch.isfinite(weights))
        if mixture:
            check_requests("weights", "numbers >= 0 for a Mixture", weights, weights >= 0)
            off = (weights.double().sum(1) - 1).abs() > WEIGHT_SUM_TOLERANCE
            check_requests("weights", "a sum of 1 for a Mixture", weights, ~off)
        return
    if not all(math.isfinite(w) for w in weights):
        fail("weights", "finite numbers", weights)
    if mixture and any(w < 0 for w in weights):
        fail("weights", "numbers >= 0 for a Mixture", weights)
    if mixture and abs(sum(weights) - 1) > WEIGHT_SUM_TOLERANCE:
        fail("weights", "a sum of 1 for a Mixture", weights)


def _as_weights(weights: Sequence[float] | Tensor) -> tuple[float, ...] | Tensor:
    if isinstance(weights, Tensor):
        return weights
    try:
        return tuple(float(w) for w in weights)
    except (TypeError, ValueError):
        raise ValueError(f"weights: expected numbers or a tensor [batch, members], got {weights!r}") from None


def _check_plausibility(value: float | None) -> None:
    if value is not None:
        check_number("plausibility", value, PLAUSIBILITY, f"None or {PLAUSIBILITY.expected}")


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
            fail("filter", "'mixture' or 'members'", repr(filter))

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
        check_number("amateur_weight", self.amateur_weight, Range())
        _check_plausibility(self.plausibility)

    kind = EnsembleKind.LOGIT_MIXTURE

    @property
    def weights(self) -> tuple[float, float]:
        return (1.0, -float(self.amateur_weight))


Ensemble = Mixture | LogitMixture | Contrastive
