"""Whether a result is the reference's."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

UNIFORM_MARGIN = 1e-6  # a draw nearer to the edge between two tokens than this may fall on either side in float32
LAST_UNIFORM = 1 - 2**-53
LOGPROB_TOLERANCE = 2e-5
ROUNDINGS = 16


class WrongResultError(Exception):
    """A result differs from the reference's by more than rounding."""


def shifted(random_numbers: Tensor, shift: float) -> Tensor:
    return (random_numbers + shift).clamp(0, LAST_UNIFORM)


def check_tokens(tokens: Tensor, reference: Callable[[int, float], Tensor]) -> int:
    """Return how many requests differ from the reference by a near tie; raise WrongResultError for any other.

    tokens: [batch, ...]. reference(request, shift): its tokens where the request's uniforms are moved by shift.
    """
    near_ties = 0
    for request, emitted in enumerate(tokens):
        expected = reference(request, 0.0)
        if torch.equal(emitted, expected):
            continue
        if not any(torch.equal(emitted, reference(request, shift)) for shift in (-UNIFORM_MARGIN, UNIFORM_MARGIN)):
            raise WrongResultError(f"request {request}: expected {expected.tolist()}, got {emitted.tolist()}")
        near_ties += 1
    return near_ties


def check_equal(values: Tensor, expected: Tensor) -> int:
    if not torch.equal(values, expected):
        raise WrongResultError(f"{int((values != expected).sum())} of {values.numel()} values differ")
    return 0


def check_logprobs(logprobs: Tensor, expected: Tensor) -> int:
    """Compare log-probabilities by absolute error; both may be -inf."""
    error = torch.where(logprobs == expected, 0.0, (logprobs - expected).abs())
    if not bool((error <= LOGPROB_TOLERANCE).all()):
        raise WrongResultError(f"largest error {float(error.max()):.3g}, allowed are {LOGPROB_TOLERANCE:g}")
    return 0


def check_near(values: Tensor, expected: Tensor) -> int:
    """Compare by absolute error, relative to the largest value: some roundings of the dtype."""
    allowed = ROUNDINGS * torch.finfo(expected.dtype).eps * float(expected.abs().max().clamp(min=1))
    error = float((values.double() - expected.double()).abs().max())
    if not error <= allowed:
        raise WrongResultError(f"largest error {error:.3g}, allowed are {allowed:.3g}")
    return 0
