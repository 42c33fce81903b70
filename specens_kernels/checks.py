"""Argument checks shared by the doors, and the flat form in which operators take their arguments."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor

from specens_kernels.types import Contrastive, Ensemble, LogitMixture, Mixture, Sampling

LOGIT_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
PARAMETER_DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
COIN_DTYPES = (torch.float64, torch.float32)
INTEGER_DTYPES = (torch.int64, torch.int32)
INT64 = (torch.int64,)
NO_DRAFTER = -1  # no member drafted: one-hot


def fail(argument: str, expected: str, got: object) -> NoReturn:
    raise ValueError(f"{argument}: expected {expected}, got {got}")


def check_tensor(
    argument: str, value: Any, shape: tuple[int | None, ...], dtypes: tuple[torch.dtype, ...], device: torch.device
) -> None:
    """Raise ValueError unless value is a tensor of this shape (None: any size), of one of dtypes, on device."""
    if not isinstance(value, Tensor):
        fail(argument, "a tensor", type(value).__name__)
    if value.shape != shape and not _matches(value.shape, shape):
        wanted = ", ".join("*" if size is None else str(size) for size in shape)
        fail(argument, f"shape [{wanted}]", list(value.shape))
    if value.dtype not in dtypes:
        fail(argument, " or ".join(str(dtype) for dtype in dtypes), value.dtype)
    if value.device != device:
        fail(argument, f"device {device}", value.device)


def _matches(have: torch.Size, shape: tuple[int | None, ...]) -> bool:
    if len(have) != len(shape):
        return False
    for size, wanted in zip(have, shape, strict=True):  # noqa: SIM110  a generator would take three times as long
        if wanted is not None and size != wanted:
            return False
    return True


def check_logits(argument: str, logits: Any, leading: tuple[int, ...], device: torch.device) -> None:
    """Raise ValueError unless logits [..., vocab] have these leading dimensions and a contiguous vocabulary."""
    check_tensor(argument, logits, (*leading, None), LOGIT_DTYPES, device)
    if logits.shape[-1] < 1:
        fail(argument, "a vocabulary of at least one token", list(logits.shape))
    if logits.stride(-1) != 1 and logits.shape[-1] > 1:
        fail(argument, "a contiguous vocabulary (stride 1 in the last dimension)", f"stride {logits.stride(-1)}")


def member_list(member_logits: Tensor | Sequence[Tensor], dims: int) -> list[Tensor]:
    """The members' logits as a list, each with `dims` dimensions, equal but for the vocabulary."""
    members = [member_logits] if isinstance(member_logits, Tensor) else list(member_logits)
    if not members:
        fail("member_logits", "at least one member", "none")
    first = members[0]
    if not isinstance(first, Tensor):
        fail("member_logits", "a tensor or a sequence of tensors", f"a sequence of {type(first).__name__}")
    if first.dim() != dims:
        fail("member_logits", f"{dims} dimensions", list(first.shape))
    leading = first.shape[:-1]
    for index, logits in enumerate(members):
        check_logits(f"member_logits[{index}]", logits, leading, first.device)
    return members


def per_request(argument: str, value: float | Tensor, like: Tensor) -> tuple[float, Tensor | None]:
    """A number for all requests, or one a request: (number, None) or (0.0, float32 tensor [batch])."""
    if not isinstance(value, Tensor):
        return float(value), None
    check_tensor(argument, value, (like.shape[0],), PARAMETER_DTYPES, like.device)
    return 0.0, value.to(torch.float32).contiguous()


class SamplingArguments(NamedTuple):
    """Sampling parameters as operators take them; the tensors [batch] win where they are given."""

    temperature: float
    temperatures: Tensor | None  # float32
    top_k: int  # 0 is off
    top_ks: Tensor | None  # int64, 0 and less is off
    top_p: float  # 1 is off
    top_ps: Tensor | None  # float32
    min_p: float  # 0 is off
    min_ps: Tensor | None  # float32
    min_p_first: bool

    @property
    def greedy(self) -> bool:
        """Whether every request is known to be greedy."""
        return self.temperatures is None and self.temperature == 0

    @property
    def filters(self) -> bool:
        """Whether any request may be filtered."""
        tensors = self.top_ks is not None or self.top_ps is not None or self.min_ps is not None
        return tensors or self.top_k > 0 or self.top_p < 1 or self.min_p > 0


SAMPLING_SCHEMA = (
    "float {0}temperature, Tensor? {0}temperatures, int {0}top_k, Tensor? {0}top_ks, float {0}top_p, "
    "Tensor? {0}top_ps, float {0}min_p, Tensor? {0}min_ps, bool {0}min_p_first"
)


def sampling_arguments(argument: str, sampling: Sampling, like: Tensor) -> SamplingArguments:
    """Check sampling parameters against the batch and flatten them."""
    if not isinstance(sampling, Sampling):
        fail(argument, "a Sampling", type(sampling).__name__)
    prefix = "" if argument == "sampling" else f"{argument}."
    temperature = per_request(f"{prefix}temperature", sampling.temperature, like)
    if not sampling.filters:
        return SamplingArguments(*temperature, 0, None, 1.0, None, 0.0, None, False)
    top_k, top_ks = 0, None
    if isinstance(sampling.top_k, Tensor):
        check_tensor(f"{prefix}top_k", sampling.top_k, (like.shape[0],), INTEGER_DTYPES, like.device)
        top_ks = sampling.top_k.to(torch.int64).contiguous()
    elif sampling.top_k is not None:
        top_k = max(sampling.top_k, 0)
    top_p = per_request(f"{prefix}top_p", 1.0 if sampling.top_p is None else sampling.top_p, like)
    min_p = per_request(f"{prefix}min_p", 0.0 if sampling.min_p is None else sampling.min_p, like)
    min_p_first = sampling.filter_order == "vllm"
    return SamplingArguments(*temperature, top_k, top_ks, *top_p, *min_p, min_p_first)


class Target(NamedTuple):
    """The target distribution; operators take the fields in order, those of `sampling` last."""

    member_logits: list[Tensor]
    ensemble: int
    weights: list[float]
    weight_rows: Tensor | None  # float32 [batch, members]; wins over weights where it is given
    plausibility: float  # 0 is off
    filter_members: bool
    sampling: SamplingArguments

    @classmethod
    def split(cls, flat: Sequence[Any]) -> tuple[Target, Sequence[Any]]:
        """The target and the arguments that follow it, from what an operator was given."""
        own = len(cls._fields) - 1
        end = own + len(SamplingArguments._fields)
        return cls._make([*flat[:own], SamplingArguments._make(flat[own:end])]), flat[end:]


def flat(group: Target | Draft) -> tuple:
    """The fields of a group as operators take them, those of its sampling last."""
    return *group[:-1], *group.sampling


TARGET_SCHEMA = (
    "Tensor[] member_logits, int ensemble, float[] weights, Tensor? weight_rows, float plausibility, "
    "bool filter_members, " + SAMPLING_SCHEMA.format("")
)


def target_arguments(members: list[Tensor], ensemble: Ensemble | None, sampling: Sampling) -> Target:
    """Check an ensemble and sampling parameters against the members and flatten them."""
    flat = sampling_arguments("sampling", sampling, members[0])
    if ensemble is None:
        if len(members) > 1:
            fail("ensemble", f"an ensemble for {len(members)} members", None)
        return Target(members, 0, [1.0], None, 0.0, False, flat)
    if not isinstance(ensemble, Mixture | LogitMixture | Contrastive):
        fail("ensemble", "None, a Mixture, a LogitMixture or a Contrastive", type(ensemble).__name__)
    weights = ensemble.weights
    if isinstance(weights, Tensor):
        check_tensor("weights", weights, (members[0].shape[0], len(members)), PARAMETER_DTYPES, members[0].device)
        numbers, rows = [1.0] * len(members), weights.to(torch.float32).contiguous()
    else:
        if len(weights) != len(members):
            fail("weights", f"one weight for each of {len(members)} members", f"{len(weights)} weights")
        numbers, rows = list(weights), None
    members_first = isinstance(ensemble, Mixture) and ensemble.filter == "members"
    return Target(members, int(ensemble.kind), numbers, rows, ensemble.plausibility or 0.0, members_first, flat)


class Draft(NamedTuple):
    """The draft tokens and what they were drawn from, as operators take it."""

    tokens: Tensor  # int64 or int32 [batch, draft_len]
    drafter: int  # a member, or NO_DRAFTER
    drafters: Tensor | None  # int64 [batch, draft_len]
    logits: Tensor | None  # [batch, draft_len, vocab]
    lens: Tensor | None  # int64 [batch]
    sampling: SamplingArguments


class Coins(NamedTuple):
    """Where random numbers come from, as operators take it: given, or seeds and positions, or none (all greedy)."""

    uniforms: Tensor | None
    seeds: Tensor | None
    positions: Tensor | None


COINS_SCHEMA = "Tensor? uniforms, Tensor? seeds, Tensor? positions"


def coin_arguments(
    uniforms: Tensor | None, seeds: Tensor | None, positions: Tensor | None, shape: tuple[int, ...], target: Target
) -> Coins:
    """Check that exactly one source of random numbers is given; none is needed where every request is greedy."""
    device = target.member_logits[0].device
    if uniforms is not None:
        if seeds is not None or positions is not None:
            fail("uniforms", "either uniforms or seeds and positions", "both")
        check_tensor("uniforms", uniforms, shape, COIN_DTYPES, device)
        return Coins(uniforms.to(torch.float64).contiguous(), None, None)
    if seeds is None and positions is None and target.sampling.greedy:
        return Coins(None, None, None)
    if seeds is None or positions is None:
        raise ValueError(
            f"{'seeds' if seeds is None else 'positions'}: expected a tensor [batch] (or uniforms), got None"
        )
    check_tensor("seeds", seeds, shape[:1], INT64, device)
    check_tensor("positions", positions, shape[:1], INT64, device)
    return Coins(None, seeds.contiguous(), positions.contiguous())


class ChainArguments(NamedTuple):
    """The arguments of `verify_chain`'s operators, grouped."""

    target: Target
    draft: Draft
    uniforms: Tensor | None
    seeds: Tensor | None
    positions: Tensor | None
    rule: int
    typical_threshold: float
    typical_alpha: float
    logprobs: bool

    @classmethod
    def split(cls, flat: Sequence[Any]) -> ChainArguments:
        """From what the operator was given."""
        target, rest = Target.split(flat)
        own = len(Draft._fields) - 1
        end = own + len(SamplingArguments._fields)
        draft = Draft._make([*rest[:own], SamplingArguments._make(rest[own:end])])
        return cls._make([target, draft, *rest[end:]])
