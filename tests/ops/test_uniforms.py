"""The uniforms: published vectors, equal bits on every backend, and the statistics that random numbers must have."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

import specens_kernels.ops.uniforms as operation
from specens_kernels import uniforms
from specens_kernels.ops.uniforms.reference import philox4x32_10

ONES = 0xFFFFFFFF
# Counter, key and output words: the known-answer vectors for philox4x32-10 published with Random123.
KNOWN_ANSWERS = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((ONES, ONES, ONES, ONES), (ONES, ONES), (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]
INT64 = st.integers(-(2**63), 2**63 - 1)
WORD = st.integers(0, ONES)


def int64(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int64)


def signed(low: int, high: int) -> int:
    value = low | high << 32
    return value - 2**64 if value >= 2**63 else value


def random_int64(count: int, seed: int) -> torch.Tensor:
    return torch.randint(-(2**63), 2**63 - 1, (count,), generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(("counter", "key", "words"), KNOWN_ANSWERS, ids=["zeros", "ones", "pi"])
def test_the_reference_gives_the_published_words(counter, key, words):
    result = philox4x32_10(tuple(int64(word) for word in counter), tuple(int64(word) for word in key))
    assert tuple(int(word) for word in result) == words


@pytest.mark.parametrize("backend", ["reference", "cpp", "triton"])
@pytest.mark.parametrize(("counter", "key", "words"), KNOWN_ANSWERS, ids=["zeros", "ones", "pi"])
def test_the_uniform_is_made_of_the_published_words(backend, device, counter, key, words):
    seed, position = int64(signed(*key)).to(device), int64(signed(*counter[:2])).to(device)
    uniform = uniforms(seed, position, step=counter[2], stream=counter[3], backend=backend)
    assert uniform.item() == ((words[0] >> 5) * 2**26 + (words[1] >> 6)) / 2**53


@pytest.mark.parametrize("batch", [0, 1, 33, 4097, 10_000])
def test_a_backend_gives_the_bits_of_the_reference(backend, device, batch):
    seeds, positions, steps = (random_int64(batch, seed).to(device) for seed in (1, 2, 3))
    for step, stream in ((0, 0), (7, 2), (ONES, ONES), (steps, 1)):
        expected = uniforms(seeds, positions, step=step, stream=stream, backend="reference")
        result = uniforms(seeds, positions, step=step, stream=stream, backend=backend)
        assert result.dtype == torch.float64
        assert torch.equal(result, expected)


def test_strided_inputs_are_read_where_they_are(backend, device):
    seeds, positions, steps = (random_int64(99, seed).to(device)[::3] for seed in (1, 2, 3))
    positions, steps = positions.flip(0), steps[:1].expand(33)
    expected = uniforms(seeds.contiguous(), positions.contiguous(), step=steps.contiguous(), backend="reference")
    assert torch.equal(uniforms(seeds, positions, step=steps, backend=backend), expected)


@given(seed=INT64, position=INT64, step=WORD, stream=WORD)
def test_every_key_and_counter_gives_the_bits_of_the_reference(seed, position, step, stream):
    arguments = int64(seed), int64(position)
    expected = uniforms(*arguments, step=step, stream=stream, backend="reference")
    assert torch.equal(uniforms(*arguments, step=step, stream=stream, backend="cpp"), expected)
    assert 0 <= expected.item() < 1


def test_a_tensor_of_steps_is_taken_modulo_two_to_the_32(backend, device):
    seeds, positions = int64(5, 5).to(device), int64(9, 9).to(device)
    random_numbers = uniforms(seeds, positions, step=int64(3, 3 + 2**32).to(device), backend=backend)
    assert random_numbers[0] == random_numbers[1] == uniforms(seeds, positions, step=3, backend=backend)[0]


def test_a_uniform_does_not_depend_on_the_batch_around_it(backend, device):
    seeds, positions = random_int64(1000, 1).to(device), random_int64(1000, 2).to(device)
    together = uniforms(seeds, positions, backend=backend)
    alone = [uniforms(seeds[i : i + 1], positions[i : i + 1], backend=backend) for i in (0, 255, 256, 999)]
    assert torch.equal(together[[0, 255, 256, 999]], torch.cat(alone))


def test_the_uniforms_of_neighbouring_keys_and_counters_are_uniform():
    count = 100_000
    counting, fixed = torch.arange(count), torch.full((count,), 11)
    for step, stream in itertools.product((0, 1, 5), (0, 1, 2)):
        for seeds, positions in ((counting, fixed), (fixed, counting)):
            random_numbers = uniforms(seeds, positions, step=step, stream=stream).numpy()
            assert stats.kstest(random_numbers, "uniform").pvalue > 1e-4


def test_uniforms_that_differ_in_one_argument_are_independent():
    """Chi-square of pairs on a grid of 16 x 16 cells."""
    seeds, positions = torch.arange(100_000), torch.full((100_000,), 3)
    first = uniforms(seeds, positions, step=1, stream=0)
    others = {
        "seed": uniforms(seeds + 1, positions, step=1, stream=0),
        "position": uniforms(seeds, positions + 1, step=1, stream=0),
        "step": uniforms(seeds, positions, step=2, stream=0),
        "stream": uniforms(seeds, positions, step=1, stream=1),
    }
    for argument, second in others.items():
        cells = torch.bincount((first * 16).long() * 16 + (second * 16).long(), minlength=256)
        assert stats.chisquare(cells.numpy()).pvalue > 1e-4, argument


def test_no_number_comes_twice():
    seeds, positions = torch.meshgrid(torch.arange(-20, 20), torch.arange(40), indexing="ij")
    random_numbers = [
        uniforms(seeds.flatten(), positions.flatten(), step=step, stream=stream)
        for step, stream in itertools.product(range(8), range(3))
    ]
    everything = torch.cat(random_numbers)
    assert everything.unique().numel() == everything.numel() == 40 * 40 * 8 * 3


SEEDS = torch.zeros(3, dtype=torch.int64)


@pytest.mark.parametrize(
    ("argument", "arguments"),
    [
        ("seeds", {"seeds": [1, 2, 3]}),
        ("seeds", {"seeds": SEEDS.short()}),
        ("seeds", {"seeds": SEEDS[None]}),
        ("positions", {"positions": SEEDS[:2]}),
        ("positions", {"positions": SEEDS.double()}),
        ("positions", {"positions": SEEDS.to("meta")}),
        ("positions", {"positions": None}),
        ("step", {"step": -1}),
        ("step", {"step": 2**32}),
        ("step", {"step": 1.0}),
        ("step", {"step": SEEDS[:1]}),
        ("stream", {"stream": -1}),
        ("stream", {"stream": True}),
        ("stream", {"stream": SEEDS}),
        ("backend", {"backend": "fortran"}),
    ],
    ids=lambda value: str(value) if isinstance(value, str) else "",
)
def test_a_bad_argument_is_named(argument, arguments):
    with pytest.raises(ValueError, match=f"^{argument}: expected .*got"):
        uniforms(**{"seeds": SEEDS, "positions": SEEDS, **arguments})


@pytest.mark.parametrize("name", ["seeds", "positions", "step"])
def test_the_operator_itself_refuses_what_it_cannot_read(name):
    arguments = {"seeds": SEEDS, "positions": SEEDS, "step": SEEDS, "stream": 0}
    with pytest.raises(ValueError, match=f"^{name}: expected int64 or int32, got"):
        torch.ops.specens.uniforms(**{**arguments, name: SEEDS.double()})


def test_the_operator_keeps_its_contract(backend, device):
    operator = operation.IMPLEMENTATIONS[backend]
    seeds, positions, steps = (random_int64(33, seed).to(device) for seed in (1, 2, 3))
    results = torch.library.opcheck(operator, (seeds, positions, steps, 2))
    assert set(results.values()) == {"SUCCESS"}


def test_it_compiles_to_one_graph(backend, device):
    def two_uniforms(seeds, positions, step):
        first = uniforms(seeds, positions, step=step, backend=backend)
        return first, uniforms(seeds, positions + 1, stream=2, backend=backend)

    compiled = torch.compile(two_uniforms, fullgraph=True, backend="aot_eager")
    for batch, step in ((5, 0), (8, 1), (9, torch.arange(9, device=device))):
        seeds, positions = (random_int64(batch, seed).to(device) for seed in (1, 2))
        for result, expected in zip(
            compiled(seeds, positions, step), two_uniforms(seeds, positions, step), strict=True
        ):
            assert torch.equal(result, expected)
