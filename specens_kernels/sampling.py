"""What is drawn with: sampling parameters, and what is done to the logits before."""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import Tensor

from specens_kernels.values import (
    INTEGER_DTYPES,
    Range,
    check_integer_rows,
    check_numbers,
    check_requests,
    fail,
    is_integer,
    readable,
)

LARGEST_TOP_P = 1 - 2.0**-20  # above it top-p is off: sums of float32 powers could not tell


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
            fail("filter_order", "'transformers' or 'vllm'", repr(self.filter_order))
        check_numbers("temperature", self.temperature, Range(0))
        if self.top_k is not None:
            check_integer_rows("top_k", self.top_k, -1)
        if self.top_p is not None:
            check_numbers("top_p", self.top_p, Range(0, 1, above=True))
        if self.min_p is not None:
            check_numbers("min_p", self.min_p, Range(0, 1))

    @property
    def greedy(self) -> bool:
        """Whether every request is known to be greedy."""
        return not isinstance(self.temperature, Tensor) and self.temperature == 0

    @property
    def filters(self) -> bool:
        """Whether any filter may be on."""
        return self.top_k is not None or self.top_p is not None or self.min_p is not None


def _check_token_table(name: str, value: object, dims: tuple[int, ...] = (2,)) -> None:
    """Raise ValueError unless this is None or an integer tensor of so many dimensions."""
    if value is None:
        return
    if not isinstance(value, Tensor) or value.dim() not in dims or value.dtype not in INTEGER_DTYPES:
        got = f"{value.dtype} {list(value.shape)}" if isinstance(value, Tensor) else repr(value)
        fail(name, "an int64 or int32 tensor [batch, tokens]", got)


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
        check_numbers("repetition_penalty", self.repetition_penalty, Range(0, above=True))
        for name in ("frequency_penalty", "presence_penalty"):
            check_numbers(name, getattr(self, name), Range())
        check_integer_rows("min_tokens", self.min_tokens)
        _check_token_table("end_tokens", self.end_tokens, (1, 2))
        _check_token_table("prompt_tokens", self.prompt_tokens)
        _check_token_table("output_tokens", self.output_tokens)
        if self.end_tokens is None and not (is_integer(self.min_tokens) and self.min_tokens <= 0):
            fail("end_tokens", "the tokens that min_tokens holds back", None)


def _check_logit_bias(value: object) -> None:
    if value is None:
        return
    if not isinstance(value, tuple) or len(value) != 2 or not isinstance(value[1], Tensor):
        fail("logit_bias", "a pair of tensors (tokens, values)", repr(value))
    tokens, values = value
    _check_token_table("logit_bias[0]", tokens)
    if tokens is None or not values.is_floating_point() or values.shape != tokens.shape:
        got = f"{values.dtype} {list(values.shape)}"
        fail("logit_bias[1]", "floating-point values for each of logit_bias[0]", got)
    if readable(values):
        check_requests("logit_bias[1]", "numbers below +inf", values, values < math.inf)
