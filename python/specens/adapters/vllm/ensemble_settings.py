"""What a config.json says of an ensemble, and a request of its weights. Nothing here imports vLLM."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from specens_kernels import Contrastive, LogitMixture, Mixture
from specens_kernels.ensembles import WEIGHT_SUM_TOLERANCE, Ensemble

ARCHITECTURE = "SpecensEnsemble"
KEY = "specens"  # of config.json
WEIGHTS, AMATEUR_WEIGHT = "specens_weights", "specens_amateur_weight"  # of a request's extra_args
KINDS = ("mixture", "logit_mixture", "contrastive")
LARGEST = 3e38  # a float32 holds it
FIELDS = ("members", "kind", "weights", "amateur_weight", "plausibility", "filter")


@dataclass(frozen=True)
class EnsembleSettings:
    """Members (folders, or names with an optional @REVISION) and what their ensemble is unless a request says more.

    weights: one a member; of the kind "contrastive" 1 and minus the amateur's.
    """

    members: tuple[str, ...]
    kind: str
    weights: tuple[float, ...]
    plausibility: float | None = None
    filter: str = "mixture"

    def __post_init__(self) -> None:
        if self.kind == "mixture" and self.plausibility is not None:
            raise ValueError(f"{KEY}.plausibility: expected none of a mixture, got {self.plausibility}")
        if self.kind != "mixture" and self.filter != "mixture":
            raise ValueError(f"{KEY}.filter: expected none of a {self.kind}, got {self.filter!r}")
        _check_weights(f"{KEY}.weights", self.kind, self.weights, len(self.members))
        self.ensemble()

    @classmethod
    def of_config(cls, said: Any) -> EnsembleSettings:
        """From the entry of a config.json. Raises ValueError naming what is wrong in it."""
        if not isinstance(said, Mapping):
            raise ValueError(f"{KEY}: expected an object with {', '.join(FIELDS[:3])} ... in config.json, got {said!r}")
        if unknown := sorted(set(said) - set(FIELDS)):
            raise ValueError(f"{KEY}: expected {', '.join(FIELDS)}, got {', '.join(unknown)}")
        members, kind = said.get("members"), said.get("kind", KINDS[0])
        if isinstance(members, str) or not isinstance(members, Sequence) or len(members) < 2:
            raise ValueError(f"{KEY}.members: expected two folders or names of models, or more, got {members!r}")
        if kind not in KINDS:
            raise ValueError(f"{KEY}.kind: expected {', '.join(KINDS)}, got {kind!r}")
        weights = _weights_of(kind, said, len(members))
        return cls(tuple(map(str, members)), kind, weights, said.get("plausibility"), said.get("filter", "mixture"))

    @classmethod
    def of_ensemble(cls, members: Sequence[str], ensemble: Ensemble | None) -> EnsembleSettings:
        """From an ensemble with weights of its own; None is the even mixture."""
        if ensemble is None:
            ensemble = Mixture([1 / len(members)] * len(members))
        kind = {Mixture: "mixture", LogitMixture: "logit_mixture", Contrastive: "contrastive"}[type(ensemble)]
        weights = tuple(map(float, ensemble.weights))
        return cls(tuple(members), kind, weights, ensemble.plausibility, getattr(ensemble, "filter", "mixture"))

    def to_config(self) -> dict[str, Any]:
        """The entry that `of_config` reads."""
        entry: dict[str, Any] = {"members": list(self.members), "kind": self.kind}
        if self.kind == "contrastive":
            entry["amateur_weight"] = -self.weights[1]
        else:
            entry["weights"] = list(self.weights)
        if self.plausibility is not None:
            entry["plausibility"] = self.plausibility
        return entry | ({"filter": self.filter} if self.filter != "mixture" else {})

    def weights_of(self, extra_args: Mapping[str, Any] | None) -> tuple[float, ...]:
        """The weights that a request asks for, or the default. Raises ValueError naming the argument."""
        asked = extra_args or {}
        own = AMATEUR_WEIGHT if self.kind == "contrastive" else WEIGHTS
        for name in asked:  # vLLM passes on what it does not know: a misspelt name would leave the default weights
            if name.startswith(f"{KEY}_") and name != own:
                raise ValueError(f"{name}: expected {own} of an ensemble of the kind {self.kind}, got {asked[name]!r}")
        if own not in asked:
            return self.weights
        if own == AMATEUR_WEIGHT:
            return (1.0, -_number(own, asked[own]))
        if isinstance(asked[own], str) or not isinstance(asked[own], Sequence):
            raise ValueError(f"{own}: expected {len(self.members)} numbers, got {asked[own]!r}")
        weights = tuple(_number(own, weight) for weight in asked[own])
        _check_weights(own, self.kind, weights, len(self.members))
        # Rounded to float32 a sum at the edge of the tolerance could leave it, where an error would end the engine.
        return tuple(weight / sum(weights) for weight in weights) if self.kind == "mixture" else weights

    def ensemble(self, weights: Tensor | None = None) -> Ensemble:
        """weights: float [batch, members], or None for the default of all requests."""
        if self.kind == "mixture":
            return Mixture(self.weights if weights is None else weights, self.filter)
        if self.kind == "contrastive" and weights is None:
            return Contrastive(-self.weights[1], self.plausibility)
        return LogitMixture(self.weights if weights is None else weights, self.plausibility)


def _weights_of(kind: str, said: Mapping[str, Any], members: int) -> tuple[float, ...]:
    if kind == "contrastive":
        if "weights" in said or members != 2:
            raise ValueError(
                f"{KEY}: expected two members and amateur_weight of the kind contrastive, got {dict(said)!r}"
            )
        return (1.0, -_number(f"{KEY}.amateur_weight", said.get("amateur_weight")))
    if "amateur_weight" in said:
        raise ValueError(f"{KEY}.amateur_weight: expected weights of the kind {kind}, got {said['amateur_weight']!r}")
    weights = said.get("weights", [1 / members] * members)
    if isinstance(weights, str) or not isinstance(weights, Sequence):
        raise ValueError(f"{KEY}.weights: expected {members} numbers, got {weights!r}")
    return tuple(_number(f"{KEY}.weights", weight) for weight in weights)


def _number(name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not abs(value) <= LARGEST:
        raise ValueError(f"{name}: expected a finite number, got {value!r}")
    return float(value)


def _check_weights(name: str, kind: str, weights: Sequence[float], members: int) -> None:
    if len(weights) != members:
        raise ValueError(f"{name}: expected one number for each of {members} members, got {list(weights)}")
    if kind == "mixture" and (min(weights) < 0 or not abs(sum(weights) - 1) <= WEIGHT_SUM_TOLERANCE):
        raise ValueError(f"{name}: expected numbers from 0 on with the sum 1 in a mixture, got {list(weights)}")
