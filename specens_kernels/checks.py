"""Argument checks that operations share."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from specens_kernels.ensembles import Contrastive, LogitMixture, Mixture
from specens_kernels.rules import RuleKind, chosen
from specens_kernels.sampling import Processing, Sampling
from specens_kernels.values import INTEGER_DTYPES, fail, is_integer

LOGIT_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
PARAMETER_DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
UNIFORM_DTYPES = (torch.float64, torch.float32)
MOST_TOP_LOGPROBS = 2**20
MOST_KEYS = 2**31 - 1  # of a row of a mask
LARGEST_INTEGER = 2**63 - 1


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


def check_logits(argument: str, logits: Any, leading: tuple[int | None, ...], device: torch.device) -> None:
    """Raise ValueError unless logits [..., vocab] have these leading dimensions and a contiguous vocabulary."""
    check_tensor(argument, logits, (*leading, None), LOGIT_DTYPES, device)
    if logits.shape[-1] < 1:
        fail(argument, "a vocabulary of at least one token", list(logits.shape))
    if logits.stride(-1) != 1 and logits.shape[-1] > 1 and logits.numel() > 0:
        fail(argument, "a contiguous vocabulary (stride 1 in the last dimension)", f"stride {logits.stride(-1)}")


def check_integers(argument: str, value: Any, shape: tuple[int | None, ...], device: torch.device) -> None:
    check_tensor(argument, value, shape, INTEGER_DTYPES, device)


def check_members(member_logits: Any, dims: int, why: str = "") -> list[Tensor]:
    """Raise ValueError unless every member has `dims` dimensions, equal but for the vocabulary; return their list.

    why: what the number of dimensions follows from, where another argument decides it.
    """
    if not isinstance(member_logits, Tensor | list | tuple):
        fail("member_logits", "a tensor or a sequence of tensors", type(member_logits).__name__)
    members = [member_logits] if isinstance(member_logits, Tensor) else list(member_logits)
    if not members:
        fail("member_logits", "at least one member", "none")
    first = members[0]
    if not isinstance(first, Tensor):
        fail("member_logits", "a tensor or a sequence of tensors", f"a sequence of {type(first).__name__}")
    if first.dim() != dims:
        fail("member_logits", f"{dims} dimensions{why}", list(first.shape))
    for index, logits in enumerate(members):
        check_logits(f"member_logits[{index}]", logits, first.shape[:-1], first.device)
    return members


def check_target(
    members: list[Tensor],
    batch: int,
    ensemble: Any,
    sampling: Any,
    processing: Any = None,
    allowed: Any = None,
) -> None:
    """Raise ValueError unless this makes a target distribution of the members, which have been checked."""
    device = members[0].device
    if allowed is not None:
        check_tensor("allowed", allowed, (*members[0].shape[:-1], None), (torch.int32,), device)
        if allowed.shape[-1] < 1 or (allowed.stride(-1) != 1 and allowed.shape[-1] > 1 and allowed.numel() > 0):
            fail("allowed", "contiguous words, at least one", f"{list(allowed.shape)}, stride {allowed.stride(-1)}")
    check_sampling("sampling", sampling, batch, device)
    if processing is not None:
        check_processing(processing, batch, device)
    if ensemble is None:
        if len(members) > 1:
            fail("ensemble", f"an ensemble for {len(members)} members", None)
        return
    if not isinstance(ensemble, Mixture | LogitMixture | Contrastive):
        fail("ensemble", "None, a Mixture, a LogitMixture or a Contrastive", type(ensemble).__name__)
    if isinstance(ensemble.weights, Tensor):
        check_tensor("weights", ensemble.weights, (batch, len(members)), PARAMETER_DTYPES, device)
    elif len(ensemble.weights) != len(members):
        fail("weights", f"one weight for each of {len(members)} members", f"{len(ensemble.weights)} weights")


def check_sampling(argument: str, sampling: Any, batch: int, device: torch.device) -> None:
    if not isinstance(sampling, Sampling):
        fail(argument, "a Sampling", type(sampling).__name__)
    prefix = "" if argument == "sampling" else f"{argument}."
    for name in ("temperature", "top_k", "top_p", "min_p"):
        value = getattr(sampling, name)
        if isinstance(value, Tensor):
            dtypes = INTEGER_DTYPES if name == "top_k" else PARAMETER_DTYPES
            check_tensor(f"{prefix}{name}", value, (batch,), dtypes, device)


def check_processing(processing: Any, batch: int, device: torch.device) -> None:
    if not isinstance(processing, Processing):
        fail("processing", "None or a Processing", type(processing).__name__)
    bias_tokens, bias_values = processing.logit_bias or (None, None)
    end_tokens = processing.end_tokens
    if end_tokens is not None and end_tokens.dim() == 1:
        check_integers("end_tokens", end_tokens, (None,), device)
        end_tokens = None
    tables = {"logit_bias[0]": bias_tokens, "end_tokens": end_tokens}
    tables |= {"prompt_tokens": processing.prompt_tokens, "output_tokens": processing.output_tokens}
    for name, table in tables.items():
        if table is not None:
            check_integers(name, table, (batch, None), device)
    if bias_values is not None:
        check_tensor("logit_bias[1]", bias_values, (batch, None), PARAMETER_DTYPES, device)
    for name in ("repetition_penalty", "frequency_penalty", "presence_penalty"):
        if isinstance(value := getattr(processing, name), Tensor):
            check_tensor(name, value, (batch,), PARAMETER_DTYPES, device)
    if isinstance(processing.min_tokens, Tensor):
        check_integers("min_tokens", processing.min_tokens, (batch,), device)


def check_random(
    uniforms: Any, seeds: Any, positions: Any, shape: tuple[int, ...], device: torch.device, needed: bool
) -> None:
    """Raise ValueError unless exactly one source of random numbers is given, or none where none is needed."""
    if uniforms is not None:
        if seeds is not None or positions is not None:
            fail("uniforms", "either uniforms or seeds and positions", "both")
        check_tensor("uniforms", uniforms, shape, UNIFORM_DTYPES, device)
    elif seeds is not None and positions is not None:
        check_integers("seeds", seeds, shape[:1], device)
        check_integers("positions", positions, shape[:1], device)
    elif needed or seeds is not None or positions is not None:
        fail("seeds" if seeds is None else "positions", "a tensor [batch] (or uniforms)", None)


def check_report(logprobs: Any, top_logprobs: Any) -> None:
    if not isinstance(logprobs, bool | str) or logprobs not in (False, True, "target", "raw"):
        fail("logprobs", "False, True, 'target' or 'raw'", repr(logprobs))
    check_count("top_logprobs", top_logprobs, MOST_TOP_LOGPROBS)


def check_count(argument: str, value: Any, most: int, least: int = 0) -> None:
    """Raise ValueError unless this is an integer in range."""
    if not is_integer(value) or not least <= value <= most:
        fail(argument, f"an integer from {least} to {most}", repr(value))


def check_drafter(drafter: Any, tokens: Tensor, members: list[Tensor]) -> None:
    if isinstance(drafter, Tensor):
        check_integers("drafter", drafter, tokens.shape, members[0].device)
    elif drafter is not None and (not is_integer(drafter) or not 0 <= drafter < len(members)):
        fail("drafter", f"a member's index from 0 to {len(members) - 1}", repr(drafter))


def check_rule(call: Any, operation: str, draft_len: int) -> RuleKind:
    """Raise ValueError unless the rule of a call can be followed with its other arguments."""
    kind, settings = chosen(call.rule, operation)
    if settings is not None:
        settings.numbers(draft_len)
    if kind.needs_draft and call.drafter is None and call.draft_logits is None:
        fail("drafter", "a drafter or draft_logits, whose probabilities the rule compares", None)
    for name in kind.without:
        value = getattr(call, name, None)
        if value is not None:
            got = "a tensor" if isinstance(value, Tensor) else value
            fail(name, f"None, as it plays no part in rule {kind.name.lower()!r}", got)
    return kind
