"""Packed rows, slots and padding: the results of the same requests in dense rows, bit for bit."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from cases import far_apart, lay_out, tensors_of
from packed import assert_equal, packed_arguments, ragged, verify_packed
from torch import Tensor

from specens_kernels import Processing, Status, target_logprobs, verify_chain

BACKENDS = pytest.mark.parametrize("backend", ["reference", "cpp"])
GENERATOR = torch.Generator().manual_seed(0)
FEATURES = ("logits", "draft_logits", "allowed")  # float or bits [batch, steps, ...]


@BACKENDS
@pytest.mark.parametrize("bonus", [True, False], ids=["bonus", "no bonus"])
@pytest.mark.parametrize("padding", [0, 3])
def test_packed_rows_and_drafts_give_the_verdict_of_dense_ones(backend, bonus, padding):
    for seed in range(60):
        requests = ragged(seed, bonus)
        assert_equal(verify_packed(requests, backend, padding), requests.problem.verify(backend))


@BACKENDS
def test_packed_rows_with_dense_drafts_give_the_verdict_of_dense_ones(backend):
    """Here each request has a bonus row or none, as it likes."""
    for seed in range(60):
        requests = ragged(seed, bonus=True)
        with_row = [index % 2 == 0 for index in range(len(requests.lens))]
        rows = [length + own for length, own in zip(requests.lens, with_row, strict=True)]
        requests = replace(requests, num_rows=rows)
        arguments = packed_arguments(requests, 2) | {"draft_lens": torch.tensor(requests.lens)}
        del arguments["max_draft_len"]
        for name in ("draft_logits", "drafter"):
            if name in arguments:
                arguments[name] = requests.problem.arguments[name]
        logits = [requests.packed_rows(values, 2) for values in requests.problem.logits]
        result = verify_chain(logits, requests.problem.tokens, backend=backend, **arguments)
        whole = requests.problem.verify(backend)
        cut = replace(requests.problem, logits=[values[:, :-1] for values in requests.problem.logits])
        mask = cut.arguments["allowed"]
        bare = cut.verify(backend, allowed=None if mask is None else mask[:, :-1])
        kept = torch.tensor(with_row)
        for own, other, short in zip(tensors_of(result), tensors_of(whole), tensors_of(bare), strict=True):
            assert torch.equal(own[kept], other[kept])
            assert torch.equal(own[~kept], short[~kept])


@BACKENDS
def test_the_lengths_of_packed_rows_follow_from_their_offsets(backend):
    """Without draft_lens a request has one draft less than rows."""
    requests = ragged(3, bonus=True)
    arguments = packed_arguments(requests)
    del arguments["max_draft_len"]
    for name in ("draft_logits", "drafter"):
        if name in arguments:
            arguments[name] = requests.problem.arguments[name]
    logits = [requests.packed_rows(values) for values in requests.problem.logits]
    result = verify_chain(logits, requests.problem.tokens, backend=backend, **arguments)
    assert_equal(result, requests.problem.verify(backend))


@BACKENDS
def test_offsets_of_32_bits_and_strided_packed_arguments_give_the_same(backend):
    for seed in range(20):
        requests = ragged(seed, bonus=True)
        expected = verify_packed(requests, backend)
        arguments = packed_arguments(requests)
        for name in FEATURES:
            if isinstance(arguments.get(name), Tensor):
                arguments[name] = lay_out(arguments[name], "sliced")
        arguments["row_offsets"] = lay_out(requests.offsets.int(), "sliced")
        logits = [lay_out(requests.packed_rows(values), "sliced") for values in requests.problem.logits]
        tokens = lay_out(requests.packed_drafts(requests.problem.tokens).int(), "sliced")
        assert_equal(verify_chain(logits, tokens, backend=backend, **arguments), expected)


@BACKENDS
def test_seeds_belong_to_the_requests_of_packed_rows(backend):
    requests = ragged(8, bonus=True)
    batch = len(requests.lens)
    random_numbers = {"uniforms": None, "seeds": torch.arange(batch), "positions": torch.arange(batch) + 9}
    assert_equal(verify_packed(requests, backend, **random_numbers), requests.problem.verify(backend, **random_numbers))


@BACKENDS
@pytest.mark.parametrize("rows", [0, 4])
def test_no_requests_and_requests_without_rows_emit_nothing(backend, rows):
    logits, tokens = torch.full((rows, 5), torch.nan), torch.zeros(rows, dtype=torch.int64)
    for batch in (0, 2):
        arguments = {"row_offsets": torch.zeros(batch + 1, dtype=torch.int64), "uniforms": torch.rand(batch, 4)}
        verdict = verify_chain(logits, tokens, max_draft_len=3, backend=backend, **arguments)
        assert verdict.tokens.tolist() == [[-1] * 4] * batch
        assert verdict.status.tolist() == [0] * batch
        dense = torch.zeros(batch, 3, dtype=torch.int64)
        verdict = verify_chain(logits, dense, backend=backend, **arguments)
        assert verdict.num_tokens.tolist() == [0] * batch
        assert verdict.status.tolist() == [0] * batch


PLAIN = {"uniforms": torch.full((3, 3), 0.5), "max_draft_len": 2}
ROWS = torch.zeros(9, 5)


@BACKENDS
@pytest.mark.parametrize(
    ("offsets", "faulty"),
    [
        ([0, 3, 6, 10], [2]),
        ([-3, 0, 3, 6], [0, 1]),
        ([0, 3, 2, 5], [1]),
        ([0, 3, 7, 9], [1]),
        ([0, 2**62, 3, 6], [0, 1]),
        ([-(2**63), 0, 3, 6], [0, 1]),
        ([2**63 - 3, 2**63 - 1, 6, 9], [0, 1]),
        ([0, 0, 3, 6], [0, 1]),
        ([3, 6, 9, 9], [1, 2]),
    ],
    ids=str,
)
def test_offsets_that_cannot_be_are_a_status_of_their_request(backend, offsets, faulty):
    """With packed drafts and a bonus row each: also requests whose drafts would lie before or after them all."""
    tokens = torch.tensor([0, 1] * 3)
    verdict = verify_chain(ROWS, tokens, row_offsets=torch.tensor(offsets), backend=backend, **PLAIN)
    for request in faulty:
        assert verdict.status[request] == Status.INVALID_PARAMETER
        assert verdict.num_tokens[request] == 0
        assert (verdict.tokens[request] == -1).all()
    fine = [request for request in range(3) if request not in faulty]
    assert verdict.status[fine].tolist() == [0] * len(fine)
    assert (verdict.num_tokens[fine] > 0).all()


@BACKENDS
@pytest.mark.parametrize(("length", "status"), [(-1, 128), (1, 0), (2, 0), (3, 128), (2**40, 128)])
def test_lengths_that_do_not_fit_the_rows_are_a_status_of_their_request(backend, length, status):
    """The request has two rows: for one draft and a bonus, or for two drafts."""
    lens, offsets = torch.tensor([2, length, 2]), torch.tensor([0, 3, 5, 8])
    tokens = torch.zeros(3, 2, dtype=torch.int64)
    random_numbers = {"uniforms": PLAIN["uniforms"]}
    verdict = verify_chain(ROWS, tokens, row_offsets=offsets, draft_lens=lens, backend=backend, **random_numbers)
    assert verdict.status.tolist() == [0, status, 0]


@BACKENDS
def test_slots_give_the_verdict_of_dense_draft_logits(backend):
    for seed in range(40):
        requests = ragged(seed, bonus=True)
        problem = requests.problem
        if "draft_logits" not in problem.arguments:
            continue
        own = problem.arguments["draft_logits"]
        batch, draft_len = problem.tokens.shape
        slots = torch.randperm(batch + 3, generator=GENERATOR)[:batch]
        kept = torch.full((batch + 3, draft_len + 2, own.shape[-1]), torch.nan, dtype=own.dtype)
        kept[slots, :draft_len] = own
        for layout in ("contiguous", "sliced", "steps first"):
            in_slots = {"draft_logits": lay_out(kept, layout), "draft_slots": slots}
            assert_equal(problem.verify(backend, **in_slots), problem.verify(backend))
        in_slots["draft_slots"] = slots.int()
        assert_equal(verify_packed(requests, backend, **in_slots), problem.verify(backend))


@BACKENDS
def test_requests_may_share_a_slot(backend):
    logits, kept = torch.randn(2, 2, 9, generator=GENERATOR), torch.randn(4, 3, 9, generator=GENERATOR)
    tokens, random_numbers = (
        torch.tensor([[1], [2]]),
        {"uniforms": torch.rand(2, 2, generator=GENERATOR), "backend": backend},
    )
    shared = verify_chain(logits, tokens, draft_logits=kept, draft_slots=torch.tensor([2, 2]), **random_numbers)
    assert_equal(shared, verify_chain(logits, tokens, draft_logits=kept[[2, 2], :1], **random_numbers))


@BACKENDS
@pytest.mark.parametrize("count", [3, 0])
@pytest.mark.parametrize("slot", [-1, 3, 2**40, -(2**63)])
def test_a_slot_that_is_not_there_is_a_status_of_its_request(backend, slot, count):
    logits, tokens = torch.zeros(2, 2, 5), torch.zeros(2, 1, dtype=torch.int64)
    arguments = {"uniforms": torch.full((2, 2), 0.25), "draft_logits": torch.zeros(count, 1, 5)}
    verdict = verify_chain(logits, tokens, draft_slots=torch.tensor([slot, 0]), backend=backend, **arguments)
    assert verdict.status.tolist() == [Status.INVALID_PARAMETER, 0 if count else Status.INVALID_PARAMETER]
    assert verdict.num_tokens.tolist() == [0, 2 if count else 0]


@BACKENDS
@pytest.mark.parametrize("packed", [False, True])
def test_padding_inside_the_drafts_ends_a_chain_and_is_not_read_further(backend, packed):
    logits = torch.zeros(1, 4, 5)
    logits[0, 2:] = torch.nan
    tokens, random_numbers = torch.tensor([[0, -1, 0]]), torch.tensor([[0.1, torch.nan, torch.nan, 0.9]])
    random_numbers = torch.nan_to_num(random_numbers, 0.5)
    processing = Processing(presence_penalty=1.0)
    arguments = {"uniforms": random_numbers, "processing": processing, "backend": backend}
    if packed:
        offsets = torch.tensor([0, 4])
        verdict = verify_chain(logits[0], tokens[0], row_offsets=offsets, max_draft_len=3, **arguments)
    else:
        verdict = verify_chain(logits, tokens, **arguments)
    assert verdict.tokens.tolist() == [[0, 4, -1, -1]]
    assert verdict.status.tolist() == [Status.INVALID_DRAFT_TOKEN]


def test_packed_rows_drafts_slots_and_masks_beyond_two_to_the_31_elements_are_read(tmp_path):
    """Rows so far apart that 32 bits do not count the elements between them."""
    stride, device = 2**31 + 5, torch.device("cpu")
    rows, draft = (
        torch.randn(2, 9, generator=GENERATOR).bfloat16(),
        torch.randn(1, 1, 9, generator=GENERATOR).bfloat16(),
    )
    mask = torch.tensor([[-1], [0b10110]], dtype=torch.int32)

    def far(values: Tensor, name: str, *strides: int) -> Tensor:
        (tmp_path / name).mkdir()
        size = sum((length - 1) * step for length, step in zip(values.shape, strides)) + 1
        return far_apart(size, values.dtype, device, tmp_path / name).as_strided(values.shape, strides).copy_(values)

    kept = far(torch.cat([draft, draft + 1]), "slots", stride, 9, 1)
    arguments = {"row_offsets": torch.tensor([0, 2]), "uniforms": torch.tensor([[0.9, 0.4]]), "max_draft_len": 1}
    arguments |= {"draft_slots": torch.tensor([1]), "backend": "cpp", "logprobs": True}
    tokens = torch.tensor([3])
    expected = verify_chain(rows, tokens, allowed=mask, draft_logits=kept.clone(), **arguments)
    result = verify_chain(
        far(rows, "rows", stride, 1),
        far(tokens, "tokens", stride),
        allowed=far(mask, "mask", stride, 1),
        draft_logits=kept,
        **arguments,
    )
    assert_equal(result, expected)


def test_words_of_a_mask_beyond_two_to_the_31_are_read(tmp_path):
    stride = 2**31 + 5
    far = far_apart(stride + 64, torch.int32, torch.device("cpu"), tmp_path)
    mask = far.as_strided((2, 2, 2), (stride, 2, 1))
    mask.copy_(torch.tensor([[[1, 2], [4, 8]], [[16, 32], [64, 128]]], dtype=torch.int32))
    logits = torch.randn(2, 2, 64, generator=GENERATOR)
    result = target_logprobs(logits, allowed=mask, backend="cpp")
    assert torch.equal(result, target_logprobs(logits, allowed=mask.clone(), backend="cpp"))
