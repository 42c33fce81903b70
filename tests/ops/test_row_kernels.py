"""The tile functions of the C++ backend in each instruction set: one machine runs only the best that it has."""

from __future__ import annotations

import ctypes
import os
import platform
import re
import subprocess
from pathlib import Path

import numpy as np
import pytest

from specens_kernels import instruction_set

PARTS = Path(__file__).parents[2] / "csrc" / "parts"
SETS = {"x86_64": ["plain", "avx2", "avx512"], "aarch64": ["plain", "neon"], "arm64": ["plain", "neon"]}
SETS = SETS.get(platform.machine(), ["plain"])
SET_FLAGS = {
    "plain": ["-ffp-contract=off"],
    "avx2": ["-mavx2", "-mfma", "-mf16c"],
    "avx512": ["-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mavx2", "-mfma", "-mf16c"],
    "neon": [],
}
CONSTANTS = dict(re.findall(r"constexpr \w+ (\w+) = ([\d.]+);", (PARTS / "rows.h").read_text()))
GROUP = int(CONSTANTS["group_size"])
ROUGH_EXCESS, ROUGH_ROUNDING = float(CONSTANTS["rough_excess"]), float(CONSTANTS["rough_rounding"])
SIZES = [1, 15, 16, 17, 63, 64, 65, 127, 128, 129, 1000, 2048]
ROUNDING = 6e-7  # of a power and a sum

FLOAT, INT, POINTER = ctypes.c_float, ctypes.c_int64, ctypes.c_void_p


class TileScan(ctypes.Structure):
    _fields_ = [("max", FLOAT), ("has_nan", ctypes.c_bool)]


class TileSum(ctypes.Structure):
    _fields_ = [("sum", FLOAT), ("max", FLOAT)]


class ScaledPowers(ctypes.Structure):
    _fields_ = [(name, FLOAT) for name in ("scale", "offset", "threshold", "factor")]


def function(result, *arguments):
    return ctypes.CFUNCTYPE(result, *arguments)


def of_each_type(result, *rest):
    """Functions of float32, bfloat16 and float16 logits."""
    return function(result, POINTER, INT, *rest) * 3


class RowKernels(ctypes.Structure):
    """As rows.h declares it."""

    _fields_ = [
        ("widen_bf16", function(None, POINTER, INT, POINTER)),
        ("widen_fp16", function(None, POINTER, INT, POINTER)),
        ("scan", of_each_type(TileScan)),
        ("scan_groups", of_each_type(TileScan, POINTER)),
        ("gather", function(INT, POINTER, INT, FLOAT, POINTER)),
        ("clean", function(None, POINTER, INT, FLOAT, FLOAT, POINTER)),
        ("exp2_sum", of_each_type(TileSum, FLOAT, FLOAT)),
        ("rough_exp2_sum", of_each_type(FLOAT, FLOAT, FLOAT)),
        ("exp2_add", function(None, POINTER, INT, FLOAT, FLOAT, FLOAT, FLOAT, POINTER)),
        ("excess", function(FLOAT, POINTER, POINTER, POINTER, POINTER, INT, POINTER)),
        ("weight_add", function(None, POINTER, INT, FLOAT, POINTER)),
        ("replace_below", function(None, POINTER, INT, FLOAT, FLOAT, POINTER)),
        ("keep_bits", function(None, POINTER, INT, FLOAT, POINTER)),
        ("log2_sum", function(FLOAT, POINTER, INT)),
        ("clamp_sum", function(FLOAT, POINTER, INT)),
    ]


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    folder = tmp_path_factory.mktemp("rows")
    compiler, flags = os.environ.get("CXX", "c++"), ["-std=c++20", "-O2", "-fPIC", f"-I{PARTS.parent}"]
    objects = []
    for name in SETS:
        objects.append(str(folder / f"{name}.o"))
        source = str(PARTS / f"rows_{name}.cpp")
        subprocess.run([compiler, *flags, *SET_FLAGS[name], "-c", source, "-o", objects[-1]], check=True)
    output, source = str(folder / "rows.so"), str(Path(__file__).with_name("row_kernels.cpp"))
    subprocess.run([compiler, *flags, "-shared", source, *objects, "-o", output], check=True)
    loaded = ctypes.CDLL(output)
    loaded.kernels_of.restype = ctypes.POINTER(RowKernels)
    return loaded


@pytest.fixture(params=SETS)
def kernels(library, request):
    table = library.kernels_of(instruction_set.NAMES.index(request.param))
    if not table:
        pytest.skip(f"this processor has no {request.param}")
    return table.contents


class Address(int):
    """Of an array or struct, which it keeps, for kernels that lie elsewhere (tests/remote)."""

    memory: np.ndarray | ctypes.Structure


def address(memory):
    found = Address(memory.ctypes.data if isinstance(memory, np.ndarray) else ctypes.addressof(memory))
    found.memory = memory
    return found


def fields(result):
    """What a function gave, to be compared."""
    return result if isinstance(result, float) else [getattr(result, name) for name, _ in result._fields_]


def logits_of(size, seed=0, dead=True):
    rng = np.random.default_rng(seed + size)
    logits = rng.normal(0, 6, size).astype(np.float32)
    if dead:
        logits[rng.random(size) < 0.1] = -np.inf
    return logits


def powers(logits, scale, offset):
    return np.exp2(logits.astype(np.float64) * np.float64(np.float32(scale)) - np.float64(np.float32(offset)))


def rounding(logits, scale, offset):
    """What each power may be off by in a sum; its exponent is a float32."""
    exact = powers(logits, scale, offset)
    exponents = np.where(exact > 0, np.abs(np.log2(np.where(exact > 0, exact, 1))), 0)
    return exact * (ROUNDING + exponents * 2.0**-24) + 2.0**-125


def test_every_16_bit_number_is_widened_exactly(kernels):
    patterns = np.arange(1 << 16, dtype=np.uint16)
    out = np.empty(patterns.size, np.float32)
    kernels.widen_bf16(address(patterns), patterns.size, address(out))
    assert np.array_equal(out.view(np.uint32), patterns.astype(np.uint32) << 16)
    kernels.widen_fp16(address(patterns), patterns.size - 3, address(out))
    wanted = patterns.view(np.float16).astype(np.float32)
    assert np.array_equal(out[:-3], wanted[:-3], equal_nan=True)


@pytest.mark.parametrize("size", SIZES)
def test_the_largest_of_a_tile_and_of_its_groups(kernels, size):
    values = logits_of(size)
    for with_nan in (False, True):
        if with_nan:
            values[size // 2] = np.nan
        groups = np.empty(-(-size // GROUP), np.float32)
        wanted = np.where(np.isnan(values), -np.inf, values)
        for seen in (
            kernels.scan[0](address(values), size),
            kernels.scan_groups[0](address(values), size, address(groups)),
        ):
            assert (seen.max, seen.has_nan) == (wanted.max(), with_nan)
        assert groups.tolist() == [wanted[first : first + GROUP].max() for first in range(0, size, GROUP)]


@pytest.mark.parametrize("size", SIZES)
def test_values_from_a_bound_on_are_gathered_in_order(kernels, size):
    values, out = logits_of(size), np.empty(size + 16, np.float32)
    for bound in (-np.inf, 0.0, float(values.max())):
        found = kernels.gather(address(values), size, bound, address(out))
        assert out[:found].tolist() == values[values >= np.float32(bound)].tolist()


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize(("scale", "offset"), [(1.4427, 20.0), (0.3, -3.0), (5.0, 100.0)])
def test_sums_of_powers(kernels, size, scale, offset):
    logits = logits_of(size)
    exact = powers(logits, scale, offset).sum()
    seen = kernels.exp2_sum[0](address(logits), size, scale, offset)
    assert abs(seen.sum - exact) <= rounding(logits, scale, offset).sum()
    assert seen.max == logits.max()
    logits[size - 1] = np.nan
    assert np.isnan(kernels.exp2_sum[0](address(logits), size, scale, offset).sum)


@pytest.mark.parametrize(
    "exponent", [-126.0, -1.0, -1e-9, 0.0, 1e-9, 0.03125, 0.5, 0.96875, 0.999999, 1.0, 63.7, 100.0]
)
def test_a_power_beside_the_steps_of_a_table(kernels, exponent):
    logit = np.float32(exponent)
    for near in (np.nextafter(logit, np.float32(-200)), logit, np.nextafter(logit, np.float32(200))):
        one = np.array([near], np.float32)
        assert kernels.exp2_sum[0](address(one), 1, 1.0, 0.0).sum == pytest.approx(2.0 ** float(near), rel=3e-7)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("low", [-np.inf, -1e38, -128.5])
def test_what_is_excluded_or_far_below_the_others_has_no_power(kernels, size, low):
    logits, out = np.full(size, low, np.float32), np.zeros(size, np.float32)
    none = ScaledPowers(1.0, 0.0, -np.inf, 0.0)
    for index, exact in ((0, True), (1, low < -1e4), (2, low == -np.inf)):  # of each type that has the number
        if exact:
            bits = logits.view(np.uint32) >> 16
            halves = (logits, bits.astype(np.uint16), np.full(size, 0xFC00, np.uint16))[index]
            assert kernels.exp2_sum[index](address(halves), size, 1.0, 0.0).sum <= (
                size * 2.0**-128 if low > -1e4 else 0
            )
            assert kernels.rough_exp2_sum[index](address(halves), size, 1.0, 0.0) == 0
    kernels.exp2_add(address(logits), size, 1.0, 0.0, -np.inf, 1.0, address(out))
    own = ScaledPowers(1.0, 0.0, -np.inf, 1.0)
    total = kernels.excess(address(logits), address(own), address(logits), address(none), size, None)
    assert max(out.max(), total / size) <= (2.0**-128 if low > -1e4 else 0)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize(
    ("scale", "offset"), [(1.4427, 20.0), (0.3, -3.0), (5.0, 100.0), (1.0, 4095.0), (1.0, -4095.0)]
)
def test_a_rough_sum_is_in_its_bounds(kernels, size, scale, offset):
    logits = logits_of(size) + np.float32(offset / scale)
    exact = powers(logits, scale, offset).sum()
    rough = kernels.rough_exp2_sum[0](address(logits), size, scale, offset)
    assert exact / ROUGH_ROUNDING - 2.0**-120 <= rough <= exact * ROUGH_EXCESS * ROUGH_ROUNDING


def test_the_bounds_of_a_rough_sum_are_reached(kernels):
    ratios = []
    for exponent in np.linspace(0, 1, 1001, dtype=np.float32):
        one = np.array([exponent], np.float32)
        ratios.append(kernels.rough_exp2_sum[0](address(one), 1, 1.0, 0.0) / 2.0 ** float(exponent))
    assert min(ratios) == pytest.approx(1, abs=1e-6)
    assert max(ratios) == pytest.approx(ROUGH_EXCESS, abs=1e-4)


@pytest.mark.parametrize("bad", [np.nan, np.inf, 3e38, 400.0, 129.5, 128.5])
@pytest.mark.parametrize("index", [0, 40, 99])
def test_a_rough_sum_tells_numbers_that_it_cannot_use(kernels, bad, index):
    logits = np.zeros(100, np.float32)
    logits[index] = bad
    assert np.isnan(kernels.rough_exp2_sum[0](address(logits), 100, 1.0, 0.0))


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("kind", ["bfloat16", "float16"])
def test_16_bit_logits_are_read_as_the_same_numbers_in_float32(kernels, size, kind):
    if kind == "float16":
        halves = logits_of(size).astype(np.float16)
        wide, halves = halves.astype(np.float32), halves.view(np.uint16)
    else:
        halves = (logits_of(size).view(np.uint32) >> 16).astype(np.uint16)
        wide = (halves.astype(np.uint32) << 16).view(np.float32)
    index = 1 if kind == "bfloat16" else 2
    groups = np.empty((2, -(-size // GROUP)), np.float32)
    for name, rest in (("scan", ()), ("exp2_sum", (1.4427, 20.0)), ("rough_exp2_sum", (1.4427, 20.0))):
        both = [
            getattr(kernels, name)[which](address(data), size, *rest) for which, data in ((0, wide), (index, halves))
        ]
        first, second = (fields(result) for result in both)
        assert first == second, name
    seen = [
        kernels.scan_groups[which](address(data), size, address(row))
        for which, data, row in ((0, wide, groups[0]), (index, halves, groups[1]))
    ]
    assert fields(seen[0]) == fields(seen[1])
    assert np.array_equal(*groups)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("threshold", [-np.inf, 1.0])
def test_powers_are_added(kernels, size, threshold):
    logits, out = logits_of(size), np.full(size, 0.5, np.float32)
    kernels.exp2_add(address(logits), size, 1.4427, 10.0, threshold, -0.25, address(out))
    added = np.where(logits >= threshold, powers(logits, 1.4427, 10.0), 0)
    assert np.all(np.abs(out - (0.5 - 0.25 * added)) <= ROUNDING * 0.5 + 0.25 * rounding(logits, 1.4427, 10.0))


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("thresholds", [(-np.inf, -np.inf), (1.0, -np.inf), (-np.inf, 2.0), (1.0, 2.0)])
def test_what_one_distribution_has_more_than_another(kernels, size, thresholds):
    target, draft, out = logits_of(size), logits_of(size, seed=9), np.empty(size, np.float32)
    own, other = ScaledPowers(1.4427, 10, thresholds[0], 0.5), ScaledPowers(1.2, 9, thresholds[1], 0.7)
    masses = [
        np.where(logits >= part.threshold, part.factor * powers(logits, part.scale, part.offset), 0)
        for logits, part in ((target, own), (draft, other))
    ]
    wanted = np.maximum(masses[0] - masses[1], 0)
    pointers = address(target), address(own), address(draft), address(other), size
    total = kernels.excess(*pointers, address(out))
    assert np.allclose(out, wanted, rtol=ROUNDING, atol=ROUNDING * float(max(part.max() for part in masses)))
    assert total == pytest.approx(out.astype(np.float64).sum(), rel=ROUNDING)
    assert kernels.excess(*pointers, None) == total


@pytest.mark.parametrize("size", SIZES)
def test_logits_are_mixed_cleaned_and_replaced(kernels, size):
    values = logits_of(size)
    values[:: max(size // 7, 1)] = 3.0
    out = np.ones(size, np.float32)
    kernels.weight_add(address(values), size, 2.0, address(out))
    mixed = np.float32(1) + 2 * values
    assert np.array_equal(out, mixed)
    kernels.replace_below(address(values), size, 3.0, -7.0, address(out))
    assert np.array_equal(out, np.where(values < 3, np.float32(-7), mixed))
    values[-1] = np.nan
    kernels.clean(address(values), size, 1.0, 0.5, address(out))
    assert np.array_equal(out, np.where(np.isnan(values), np.float32(-np.inf), (values - 1) / 2))


@pytest.mark.parametrize("size", SIZES)
def test_bits_of_a_mask_keep_values(kernels, size):
    out = values = logits_of(size)
    words = np.random.default_rng(size).integers(-(2**31), 2**31, -(-size // 32)).astype(np.int32)
    kept = np.unpackbits(words.view(np.uint8), bitorder="little")[:size].astype(bool)
    wanted = np.where(kept, values, np.float32(-5))
    kernels.keep_bits(address(words), size, -5.0, address(out))
    assert np.array_equal(out, wanted)


@pytest.mark.parametrize("size", SIZES)
def test_masses_are_summed(kernels, size):
    masses = logits_of(size, dead=False)
    wanted = np.maximum(masses, 0)
    total = kernels.clamp_sum(address(masses), size)
    assert np.array_equal(masses, wanted)
    assert total == pytest.approx(wanted.astype(np.float64).sum(), rel=ROUNDING)
    exact = wanted.astype(np.float64)
    entropy = (exact * np.log2(np.where(exact > 0, exact, 1))).sum()
    assert kernels.log2_sum(address(masses), size) == pytest.approx(entropy, abs=4e-6 * (1 + exact.sum()))
