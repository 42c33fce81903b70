"""The sampling parameters of a batch as kernels take them, and those of a request in a kernel."""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from specens_kernels.arguments import LARGEST_NUMBER, SMALLEST_NUMBER, SamplingArguments
from specens_kernels.sampling import LARGEST_TOP_P

INFINITY = tl.constexpr(float("inf"))
FLOAT_MAX = tl.constexpr(3.4028234663852886e38)
SMALLEST_SCALE = tl.constexpr(1e-37)  # a scale of 0 would make -inf * scale a NaN
TOP_P_LIMIT = tl.constexpr(LARGEST_TOP_P)
LARGEST_RANK = 2**24  # after every token; exact in float32
LOG2_E = tl.constexpr(1.4426950408889634)


class FilterView(NamedTuple):
    """Filters of which some may be on; tensors win where they are not None. A float is not compiled in, an int is."""

    top_k: float  # 0 is off
    top_ks: Tensor | None  # int64 [batch]
    top_ks_stride: int
    top_p: float  # 1 is off
    top_ps: Tensor | None  # float32 [batch]
    top_ps_stride: int
    min_p: float  # 0 is off
    min_ps: Tensor | None  # float32 [batch]
    min_ps_stride: int
    MIN_P_FIRST: tl.constexpr


def parameter_number(number: float) -> float:
    """A temperature or another parameter of at least 0 that float32 holds."""
    return min(max(number, SMALLEST_NUMBER), LARGEST_NUMBER) if number > 0 else 0.0


def stride_of(numbers: Tensor | None) -> int:
    """Between the parameters of two requests."""
    return 0 if numbers is None else numbers.stride(0)


def filter_view(sampling: SamplingArguments) -> FilterView | None:
    """The filters of an operator's arguments; None where all are known to be off."""
    if not sampling.filters:
        return None
    return FilterView(
        top_k=float(min(sampling.top_k, LARGEST_RANK)),
        top_ks=sampling.top_ks,
        top_ks_stride=stride_of(sampling.top_ks),
        top_p=parameter_number(sampling.top_p),
        top_ps=sampling.top_ps,
        top_ps_stride=stride_of(sampling.top_ps),
        min_p=parameter_number(sampling.min_p),
        min_ps=sampling.min_ps,
        min_ps_stride=stride_of(sampling.min_ps),
        MIN_P_FIRST=tl.constexpr(sampling.min_p_first),
    )


def same_filters(one: FilterView | None, other: FilterView | None) -> bool:
    """Whether two are known to be the same."""
    if one is None or other is None:
        return one is other
    if one.MIN_P_FIRST.value != other.MIN_P_FIRST.value:
        return False
    pairs = zip(one[:-1], other[:-1], strict=True)
    return all(a is b if isinstance(a, Tensor) or isinstance(b, Tensor) else a == b for a, b in pairs)


def any_size(size: int) -> int:
    """A size, from 0, for which no kernel is compiled: in a tuple, the JIT does so for 1 and for multiples of 16."""
    return 2 * size + 3


@triton.jit
def size_of(any_size):
    """The size."""
    return (any_size - 3) // 2


@triton.jit
def request_number(number, numbers, stride, request):
    """A parameter that is one number for all requests, or one a request; float32."""
    if numbers is not None:
        return tl.load(numbers + request * stride).to(tl.float32)
    else:
        return tl.full([], number, tl.float32)


@triton.jit
def top_k_of(filters, request):
    """The rank of the last token that is surely kept, float32; 0 and less is off."""
    return request_number(filters.top_k, filters.top_ks, filters.top_ks_stride, request)


@triton.jit
def top_p_of(filters, request):
    top_p = request_number(filters.top_p, filters.top_ps, filters.top_ps_stride, request)
    return tl.where((top_p > TOP_P_LIMIT) & (top_p <= 1), 1.0, top_p)


@triton.jit
def min_p_of(filters, request):
    return request_number(filters.min_p, filters.min_ps, filters.min_ps_stride, request)


@triton.jit
def filters_are_valid(filters, request):
    """Whether a request's filters are in range."""
    top_p = top_p_of(filters, request)
    min_p = min_p_of(filters, request)
    return (top_p > 0) & (top_p <= 1) & (min_p >= 0) & (min_p <= 1)


@triton.jit
def over_temperature(number, temperature):
    """number / temperature, float32, finite and positive; temperature 1 where it is 0 or out of range."""
    used = tl.where(temperature > 0, temperature, 1.0)
    quotient = tl.div_rn(tl.zeros_like(used) + number, used)
    return tl.minimum(tl.maximum(quotient, SMALLEST_SCALE), FLOAT_MAX)


@triton.jit
def logit_scale(temperature):
    """From logits to powers of 2."""
    return over_temperature(LOG2_E, temperature)
