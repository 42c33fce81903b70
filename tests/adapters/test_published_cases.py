"""What the test suites of SGLang, FlashInfer, vLLM and transformers expect, restated: the same inputs and outcomes."""

from __future__ import annotations

import pytest
import torch
from specens.adapters.flashinfer import chain_speculative_sampling
from specens.adapters.sglang import (
    chain_block_speculative_sampling_triton,
    chain_speculative_sampling_triton,
    tree_speculative_sampling_target_only,
)
from torch import Tensor

from specens_kernels import Processing, Sampling, verify_chain

NONE = -1


def buffers(batch: int, slots: int, width: int) -> dict[str, Tensor]:
    return {
        "predicts": torch.full((batch * slots,), NONE, dtype=torch.int32),
        "accept_index": torch.full((batch, width), NONE, dtype=torch.int32),
        "accept_token_num": torch.zeros(batch, dtype=torch.int32),
        "retrive_index": torch.arange(batch * slots).view(batch, slots),
    }


# SGLang, sgl-kernel/tests/speculative/test_speculative_sampling.py: temperature .01, uniforms at random.
@pytest.mark.parametrize(
    ("threshold", "predicts", "accept_index", "accept_token_num"),
    [
        (1, [3, -1, -1, 4, 5, 18, 11, -1, -1, -1, 12, 18], [[0, 3, 4, 5], [6, 10, 11, -1]], [3, 2]),
        (0, [1, 2, 18, -1, -1, -1, 11, -1, -1, -1, 12, 18], [[0, 1, 2, -1], [6, 10, 11, -1]], [2, 2]),
    ],
)
def test_sglang_tree_with_a_link_to_an_earlier_sibling(threshold, predicts, accept_index, accept_token_num):
    peaks = torch.full((2, 6), 18)
    peaks[0, 0], peaks[0, 3], peaks[0, 4], peaks[1, 0], peaks[1, 4] = 3, 4, 5, 11, 12
    logits = torch.ones(2, 6, 20).scatter(2, peaks[..., None], 10.0)
    case = buffers(2, 6, 4)
    tree_speculative_sampling_target_only(
        **case,
        candidates=torch.tensor([[0, 1, 2, 3, 4, 5], [7, 8, 9, 10, 11, 12]]),
        retrive_next_token=torch.tensor([[1, 2, -1, 4, 5, -1], [4, 2, 3, -1, 5, -1]]),
        retrive_next_sibling=torch.tensor([[-1, 3, -1, -1, -1, -1], [-1, -1, -1, -1, 1, -1]]),
        uniform_samples=torch.rand(2, 6),
        uniform_samples_for_final_sampling=torch.rand(2),
        target_probs=(logits / 0.01).softmax(-1),
        draft_probs=torch.zeros(2, 6, 20),
        threshold_single=threshold,
        threshold_acc=threshold,
        deterministic=True,
    )
    assert case["predicts"].tolist() == predicts
    assert case["accept_index"].tolist() == accept_index
    assert case["accept_token_num"].tolist() == accept_token_num


def test_sglang_a_rejected_draft_of_a_chain_is_not_the_last_token():
    """SGLang, the same file: the first draft is accepted by threshold_single, the second one, of mass .9, is not."""
    target = torch.zeros(1, 3, 32)
    target[0, 0, [0, 3]] = torch.tensor([0.05, 0.95])
    target[0, 1, [5, 31]] = torch.tensor([0.9, 0.1])
    target[0, 2, 0] = 1.0
    case = buffers(1, 3, 3)
    tree_speculative_sampling_target_only(
        **case,
        candidates=torch.tensor([[0, 3, 5]]),
        retrive_next_token=torch.tensor([[1, 2, -1]]),
        retrive_next_sibling=torch.full((1, 3), -1),
        uniform_samples=torch.tensor([[0.0, 0.99, 0.0]]),
        uniform_samples_for_final_sampling=torch.tensor([0.5]),
        target_probs=target,
        threshold_single=0.91,
    )
    assert case["predicts"].tolist() == [3, 31, -1]


def chain(function, target, draft, candidates, random_numbers, final) -> tuple[list, list, list]:
    """predicts, accept_index and accept_token_num as lists."""
    batch, slots = candidates.shape
    case = buffers(batch, slots, slots)
    function(
        **case,
        candidates=candidates,
        retrive_next_token=None,
        retrive_next_sibling=None,
        uniform_samples=random_numbers,
        uniform_samples_for_final_sampling=final,
        target_probs=target,
        draft_probs=draft,
        threshold_single=1.0,
        threshold_acc=1.0,
        deterministic=True,
    )
    return case["predicts"].tolist(), case["accept_index"].tolist(), case["accept_token_num"].tolist()


def probabilities(*rows: dict[int, float], vocab: int) -> Tensor:
    """[1, rows, vocab]."""
    table = torch.zeros(1, len(rows), vocab)
    for row, masses in enumerate(rows):
        for token, mass in masses.items():
            table[0, row, token] = mass
    return table


# SGLang, test/registered/unit/spec/test_chain_speculative_sampling.py.
@pytest.mark.parametrize(
    ("target", "draft", "drafts", "uniform", "final", "predicts", "accepted"),
    [
        ([{3: 1}, {4: 1}, {5: 1}, {2: 1}], [{3: 1}, {4: 1}, {5: 1}], [3, 4, 5], 0.99, 0.5, [3, 4, 5, 2], 3),
        ([{3: 1}, {5: 0.5}, {}, {}], [{3: 1}, {4: 0.5}, {}], [3, 4, 5], 0.5, 0.9, [3, 5], 1),
        ([{2: 1}, {}], [{2: float("nan")}], [1], 0.5, 0.5, [2], 0),
        ([{1: 1}, {4: 1}, {}], [{1: 1}, {}], [1, 2], 0.5, 0.5, [1, 4], 1),
        ([{3: 1}, {}, {}], [{}, {}], [1, 2], 0.5, 0.5, [3], 0),
        ([{0: 0.1, 1: 0.2, 2: 0.7}, {0: 0.2, 1: 0.3, 2: 0.5}], [{0: 0.1, 1: 0.2, 2: 0.7}], [2], 0.5, 0.6, [2, 2], 1),
        # nothing is left of the target where the draft distribution is the same: then the target itself is drawn from
        ([{0: 0.2, 1: 0.3, 2: 0.5}] * 2, [{0: 0.2, 1: 0.3, 2: 0.5}], [5], 0.5, 0.25, [1], 0),
    ],
)
def test_sglang_chains_worked_out_by_hand(target, draft, drafts, uniform, final, predicts, accepted):
    slots = len(drafts) + 1
    random_numbers = torch.full((1, slots - 1), uniform)
    tables = probabilities(*target, vocab=6), probabilities(*draft, vocab=6)
    got = chain(
        chain_speculative_sampling_triton, *tables, torch.tensor([[0, *drafts]]), random_numbers, torch.tensor([final])
    )
    padding = [-1] * (slots - 1 - accepted)
    assert got == (predicts + padding, [[*range(accepted + 1), *padding]], [accepted])


def test_sglang_blocks_accept_by_a_uniform_of_0_what_is_possible_and_nothing_else():
    """SGLang, its test of block verification: a draft of target mass 0, and one that the target likes better."""
    target = torch.tensor([0.5, 0.5, 0.0]).expand(2, 3, 3)
    draft = torch.tensor([0.6, 0.3, 0.1]).expand(2, 3, 3)
    candidates = torch.tensor([[0, 2, 2], [0, 1, 1]])
    random_numbers, final = torch.zeros(2, 3), torch.full((2,), 0.5)
    predicts, _, accepted = chain(
        chain_block_speculative_sampling_triton, target, draft, candidates, random_numbers, final
    )
    assert accepted[0] == 0
    assert accepted[1] >= 1
    assert predicts[0] == 1


@pytest.mark.parametrize("num_drafts", [1, 3, 5, 7])
@pytest.mark.parametrize("certain", [False, True])
def test_flashinfer_outputs_are_a_prefix_a_token_and_padding(num_drafts, certain):
    """FlashInfer, tests/utils/test_sampling.py: random drafts; a target that is certain of them accepts them all."""
    batch, vocab = 99, 111
    draft = torch.rand(batch, num_drafts, vocab)
    ids = torch.randint(vocab, (batch, num_drafts))
    target = torch.rand(batch, num_drafts + 1, vocab)
    if certain:
        wanted = torch.cat([ids, torch.randint(vocab, (batch, 1))], dim=1)
        target = torch.nn.functional.one_hot(wanted, vocab).float()
    before = torch.randint(0, 99, (2, batch)).int()
    accepted, emitted = before.clone()
    output, *_ = chain_speculative_sampling(
        draft / draft.sum(-1, keepdim=True), ids, target / target.sum(-1, keepdim=True), accepted, emitted
    )
    if certain:
        assert torch.equal(output, wanted.int())
    same = (output[:, :-1] == ids).int().cumprod(dim=1).sum(dim=1)
    num_emitted = emitted - before[1]
    assert bool((num_emitted <= same).all())
    assert bool((num_emitted <= accepted - before[0]).all())
    after = torch.arange(num_drafts + 1) > num_emitted[:, None]
    assert torch.equal(output < 0, after)


def greedy(spec: list[list[int]], wanted: list[list[int]], *, other: int | None = None, **more) -> list[list[int]]:
    """Verify drafts in packed rows whose most likely tokens are these, the next one `other`, as vLLM's tests do."""
    logits = torch.full((sum(map(len, wanted)), 100), -100.0)
    logits.scatter_(1, torch.tensor([[token] for row in wanted for token in row]), 100.0)
    if other is not None:
        logits[:, other] = 99.0
    lens = [len(row) for row in wanted]
    drafts = torch.tensor([row + [NONE] * (max(map(len, spec)) - len(row)) for row in spec], dtype=torch.int64)
    verdict = verify_chain(
        logits,
        drafts.view(len(spec), -1),
        row_offsets=torch.tensor([0, *lens]).cumsum(0),
        draft_lens=torch.tensor([len(row) for row in spec]),
        sampling=Sampling(0.0),
        **more,
    )
    return verdict.tokens.tolist()


# vLLM, tests/v1/sample/test_rejection_sampler.py: the last wanted token of a request is its bonus token.
@pytest.mark.parametrize(
    ("spec", "wanted", "expected"),
    [
        ([[1, 2, 3]], [[1, 2, 3, 4]], [[1, 2, 3, 4]]),
        ([[1, 2, 3]], [[1, 5, 3, 4]], [[1, 5, -1, -1]]),
        ([[1, 2], [3]], [[1, 2, 5], [3, 4]], [[1, 2, 5], [3, 4, -1]]),
        ([[]], [[5]], [[5]]),
        ([[1, 2, 3], [4, 5, 6]], [[1, 2, 7, 6], [4, 8, 6, 9]], [[1, 2, 7, -1], [4, 8, -1, -1]]),
        ([[1]], [[2, 3]], [[2, -1]]),
        ([[1, 2], [3, 4]], [[1, 5, 6], [3, 4, 7]], [[1, 5, -1], [3, 4, 7]]),
    ],
)
def test_vllm_greedy_requests_emit_what_matches_and_the_token_after_it(spec, wanted, expected):
    assert greedy(spec, wanted) == expected


def test_vllm_frequency_penalties_count_the_drafts_before_a_row():
    spec = [[1, 1, 1], [], [1, 1, 1]]
    processing = Processing(
        frequency_penalty=torch.tensor([1.5, 1.5, 0.7]), output_tokens=torch.tensor([[2], [3], [4]])
    )
    got = greedy(spec, [[1, 1, 1, 1], [7], [1, 1, 1, 1]], other=15, processing=processing)
    assert got == [[1, 15, -1, -1], [7, -1, -1, -1], [1, 1, 15, -1]]


def test_vllm_tokens_that_are_not_allowed_are_rejected():
    forbidden = torch.zeros(3, 128, dtype=torch.bool)
    forbidden[0, 0:5] = forbidden[2, 2:7] = True  # the request between them may emit anything
    bits = (~forbidden).view(3, 4, 32).long() << torch.arange(32)
    words = bits.sum(-1).to(torch.uint32).view(torch.int32)
    spec = [[1, 2, 10], [10, 5, 3], [7, 10, 12]]
    wanted = [[1, 2, 10, 5], [10, 5, 10, 5], [7, 10, 12, 9]]
    got = greedy(spec, wanted, other=15, allowed=words.repeat_interleave(4, dim=0))
    assert got == [[15, -1, -1, -1], [10, 5, 10, -1], [7, 10, 12, 9]]


@pytest.mark.parametrize(
    ("name", "value"), [("top_k", 1), ("top_k", 5), ("top_k", 99), ("top_p", 0.5), ("top_p", 0.99)]
)
def test_vllm_filtered_tokens_are_never_emitted(name, value):
    generator = torch.Generator().manual_seed(0)
    batch, vocab = 100, 100
    logits = torch.randn(batch, 4, vocab, generator=generator)
    draft = torch.rand(batch, 3, vocab, generator=generator)
    drafts = torch.multinomial(draft.softmax(-1).view(-1, vocab), 1, generator=generator).view(batch, 3)
    verdict = verify_chain(
        logits,
        drafts,
        draft_logits=draft,
        draft_sampling=Sampling(),
        sampling=Sampling(**{name: value}),
        seeds=torch.arange(batch),
        positions=torch.zeros(batch, dtype=torch.int64),
    )
    ordered, ids = logits.softmax(-1).sort(dim=-1, descending=True)
    before = torch.arange(vocab).expand_as(ids) if name == "top_k" else ordered.cumsum(-1) - ordered
    kept = torch.zeros(batch, 4, vocab, dtype=torch.bool).scatter(2, ids, before < value)
    emitted = verdict.tokens >= 0
    assert bool(kept.gather(2, verdict.tokens.clamp(min=0)[..., None])[..., 0][emitted].all())


def test_transformers_accepts_what_the_target_expects_and_replaces_the_rest():
    """transformers, tests/generation/test_utils.py: a sure drafter drafts 1, 4 and 5, the target wants 1, 4 and 8."""

    def sure(*tokens: int, otherwise: float = -10.0) -> Tensor:
        rows = torch.full((1, len(tokens), 10), otherwise)
        return rows.scatter(2, torch.tensor(tokens)[None, :, None], 10.0)

    target = torch.cat([sure(1, 4), sure(8, otherwise=float("-inf")), sure(0)], dim=1)
    drafts = torch.tensor([[1, 4, 5]])
    for seed in range(20):
        verdict = verify_chain(
            target,
            drafts,
            draft_logits=sure(1, 4, 5),
            seeds=torch.tensor([seed]),
            positions=torch.tensor([5]),
        )
        assert int(verdict.num_accepted) == 2
        assert verdict.tokens.tolist() == [[1, 4, 8, -1]]
