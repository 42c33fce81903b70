"""What operations touch: no byte outside their tensors, nothing of an earlier call, no input by a result."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch

from specens_kernels import (
    Mixture,
    NgramIndex,
    Sampling,
    TokenTree,
    Verdict,
    compact_kv,
    instruction_set,
    sample,
    target_logprobs,
    verify_chain,
    verify_tree,
)

GUARDED = Path(__file__).parents[1] / "guarded.py"
INF = float("inf")


def run_guarded(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, GUARDED, *arguments], capture_output=True, text=True)


def test_no_operation_touches_what_lies_around_its_tensors():
    result = run_guarded()
    assert result.returncode == 0, result.stdout[-300:] + result.stderr[-3000:]
    assert result.stdout.endswith("done\n")


def test_the_memory_around_guarded_tensors_cannot_be_read():
    assert run_guarded("touch").returncode < 0


def chain_and_buffers() -> tuple[dict, Verdict]:
    logits = torch.randn(2, 4, 9)
    call = {"member_logits": logits, "draft_tokens": logits[:, :3].argmax(-1), "sampling": Sampling(temperature=0.0)}
    call["draft_lens"] = torch.tensor([3, 2])
    wanted = verify_chain(**call, top_logprobs=2)
    return call, Verdict(*(None if value is None else torch.empty_like(value) for value in wanted))


def tokens_over_drafts(call: dict, out: Verdict) -> Verdict:
    call["draft_tokens"] = out.tokens[:, :3]
    return out


def tokens_around_drafts(call: dict, out: Verdict) -> Verdict:
    memory = torch.zeros(32, dtype=torch.int64)
    call["draft_tokens"] = memory.as_strided((2, 3), (16, 1))
    return out._replace(tokens=memory[4:12].view(2, 4))  # between the rows of the drafts


def logprobs_over_logits(call: dict, out: Verdict) -> Verdict:
    return out._replace(logprobs=call["member_logits"].view(-1)[:8].view(2, 4))


def length_over_lengths(call: dict, out: Verdict) -> Verdict:
    return out._replace(num_accepted=call["draft_lens"])


def results_over_each_other(_: dict, out: Verdict) -> Verdict:
    return out._replace(num_tokens=out.num_accepted)


def top_over_tokens(_: dict, out: Verdict) -> Verdict:
    memory = torch.empty(23, dtype=torch.int64)
    return out._replace(tokens=memory[:8].view(2, 4), top_tokens=memory[7:].view(2, 4, 2))


def through_numpy(call: dict, out: Verdict) -> Verdict:
    """Other storages, the same memory."""
    return out._replace(next_token=torch.from_numpy(call["draft_lens"].numpy()))


@pytest.mark.parametrize("backend", ["reference", "cpp", "triton"])
@pytest.mark.parametrize(
    ("name", "overlap"),
    [
        ("out.tokens", tokens_over_drafts),
        ("out.tokens", tokens_around_drafts),
        ("out.logprobs", logprobs_over_logits),
        ("out.num_accepted", length_over_lengths),
        ("out.num_tokens", results_over_each_other),
        ("out.top_tokens", top_over_tokens),
        ("out.next_token", through_numpy),
    ],
)
def test_buffers_that_share_memory_are_refused(backend: str, name: str, overlap: Callable):
    call, out = chain_and_buffers()
    out = overlap(call, out)
    with pytest.raises(ValueError, match=f"^{name}: expected memory of its own"):
        verify_chain(**call, top_logprobs=2, out=out, backend=backend)


@pytest.mark.parametrize("backend", ["reference", "cpp", "triton"])
def test_buffers_that_lie_side_by_side_are_taken(backend: str):
    call, out = chain_and_buffers()
    memory = torch.empty(6, dtype=torch.int64)
    out = out._replace(num_accepted=memory[:2], num_tokens=memory[2:4], next_token=memory[4:])
    wanted = verify_chain(**call, top_logprobs=2, backend="reference")
    verify_chain(**call, top_logprobs=2, out=out, backend=backend)
    assert [torch.equal(getattr(out, name), getattr(wanted, name)) for name in ("tokens", "next_token")] == [True] * 2


@pytest.mark.parametrize("temperature", [1e-300, 1e-50, 1e-38, 1e38, 1e46, 1e300])
def test_no_call_sees_what_another_has_left(backend: str, temperature: float):
    """At temperatures that float32 does not hold, too, every number and every type of it means the same."""
    logits = torch.tensor([[0.0, -INF, 1.0, 2.0]])
    for given in (temperature, np.float64(temperature), torch.tensor([temperature], dtype=torch.float64)):
        asked = {"sampling": Sampling(temperature=given), "uniforms": torch.tensor([0.9]), "logprobs": True}
        wanted = sample(logits, backend="reference", **asked)
        for _ in range(2):
            drawn = sample(logits, backend=backend, **asked)
            assert [drawn.tokens, drawn.status] == [wanted.tokens, wanted.status]
            torch.testing.assert_close(drawn.logprobs, wanted.logprobs, rtol=1e-6, atol=1e-6)
            sample(torch.zeros(1, 1000), uniforms=torch.tensor([0.5]), backend="cpp")
            target_logprobs(torch.zeros(1, 1000), backend="cpp")


def test_large_logits_at_large_temperatures_have_their_probabilities(backend: str):
    largest = 1e38 if backend == "cpp" else 1e36  # a kernel with float32 parameters has no smaller scale
    logits = torch.tensor([[1.5, -1.5, 0.0, -INF]]) * largest
    for temperature in (largest, 3 * largest):
        asked = {"sampling": Sampling(temperature=temperature)}
        wanted = target_logprobs(logits, backend="reference", **asked)
        torch.testing.assert_close(target_logprobs(logits, backend=backend, **asked), wanted, rtol=1e-5, atol=1e-6)


def test_no_log_probability_is_above_0(backend: str):
    rows = 2 if backend == "triton" else 64
    logits = torch.randn(rows, 5) * 20
    for ensemble, members in ((None, logits), (Mixture((0.3, 0.7)), [logits, logits + 1e-3])):
        for sampling in (Sampling(temperature=0.3), Sampling(top_k=2), Sampling(top_p=0.5))[: 1 if rows == 2 else 3]:
            drawn = sample(
                members,
                ensemble=ensemble,
                sampling=sampling,
                uniforms=torch.rand(rows),
                top_logprobs=2,
                backend=backend,
            )
            dense = target_logprobs(members, ensemble=ensemble, sampling=sampling, backend=backend)
            for values in (drawn.logprobs, drawn.top_logprobs, dense):
                assert (values <= 0).all()


@pytest.mark.parametrize("backend", ["reference", "cpp", "triton"])
def test_no_result_claims_a_gradient(backend: str):
    logits = torch.randn(2, 3, 9, requires_grad=True)
    drafts, random_numbers = torch.randint(9, (2, 2)), torch.rand(2, 3)
    results = [target_logprobs(logits, backend=backend)]
    results += verify_chain(logits, drafts, uniforms=random_numbers, top_logprobs=2, backend=backend)
    results += sample(logits[:, 0], uniforms=random_numbers[:, 0], top_logprobs=2, backend=backend)
    parents = torch.tensor([[-1, 0]] * 2)
    results += verify_tree(logits, drafts, parents, uniforms=random_numbers, top_logprobs=2, backend=backend)
    assert not any(value.requires_grad for value in results if value is not None)


@pytest.mark.parametrize("backend", ["reference", "cpp"])
def test_autograd_learns_that_caches_change(backend: str):
    weight = torch.nn.Parameter(torch.randn(1, 2, 6, 4))
    kept, lengths = torch.tensor([[1, 2]]), torch.tensor([2])
    for cache in (weight, weight * 1):
        with pytest.raises(ValueError, match=r"^caches: expected tensors that need no gradient"):
            compact_kv(cache, kept, lengths, backend=backend)
    saved = torch.randn(1, 2, 6, 4)
    loss = (weight * saved).sum()
    with torch.no_grad():
        compact_kv([saved, weight], kept, lengths, backend=backend)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_an_empty_tensor_may_have_any_stride(backend: str):
    none = torch.from_numpy(np.zeros((2, 0, 5), np.float32)).as_strided((2, 0, 5), (0, 0, 0))
    drafts = torch.zeros(2, 0, dtype=torch.int64)
    logits, random_numbers = torch.randn(2, 1, 5), torch.rand(2, 1)
    wanted = verify_chain(logits, drafts, uniforms=random_numbers, backend="reference")
    assert torch.equal(
        verify_chain(logits, drafts, draft_logits=none, uniforms=random_numbers, backend=backend).tokens, wanted.tokens
    )
    words = torch.zeros(2, 0, 3, dtype=torch.int32).as_strided((2, 0, 3), (0, 0, 0))
    assert verify_chain(none, drafts, allowed=words, uniforms=random_numbers, backend=backend).tokens.tolist() == [
        [-1],
        [-1],
    ]


def ticks_during(work: Callable[[], object]) -> int:
    """How often another thread gets its turn."""
    done, ticks = threading.Event(), 0
    thread = threading.Thread(target=lambda: (work(), done.set()))
    thread.start()
    while not done.wait(0.0003):
        ticks += 1
    thread.join()
    return ticks


@pytest.mark.parametrize(
    "work",
    [
        lambda: TokenTree.best_for_acceptance([0.5, 0.3, 0.1], 6000),
        lambda: NgramIndex(np.random.default_rng(0).integers(0, 500, 300_000)),
        lambda: TokenTree(np.arange(-1, 16383)).ancestor_bits,
    ],
    ids=["best_for_acceptance", "NgramIndex", "ancestor_bits"],
)
def test_other_threads_run_while_a_host_object_works(work: Callable[[], object]):
    assert ticks_during(work) >= 3


def test_threads_may_share_host_objects():
    index, store = NgramIndex(max_match=8), NgramIndex(np.arange(1000) % 37)
    growth = TokenTree.grow(nodes=64, width=4)

    def use(seed: int) -> None:
        generator = np.random.default_rng(seed)
        for _ in range(60):
            index.extend(generator.integers(0, 9, 300))
            index.begin_text()
            assert len(NgramIndex.propose_batch([index, store, None], 5, store=index)[0]) == 3
            assert len(index.propose(20)[0]) <= 20
            assert len(store.propose_after([1, 2], 4)[0]) == 4
            assert "NgramIndex" in repr(index)
            frontier = len(growth.frontier)
            with contextlib.suppress(ValueError):  # another thread was faster
                growth.add(np.ones((frontier, 3), np.int64), np.full((frontier, 3), 0.9))
            growth.prune()

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(use, range(4)))
    assert len(index) == 4 * 60 * 300
    assert index.num_texts <= 4 * 60  # one that two threads begin at once is one


@pytest.mark.parametrize("choice", ["plain", "sse", "avx512"])
def test_the_environment_chooses_the_instruction_set(choice: str):
    code = "import specens_kernels as k; print(k.backends()['cpp'].instruction_set)"
    environment = {**os.environ, "SPECENS_INSTRUCTION_SET": choice}
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment)
    if choice in instruction_set.available():
        assert result.stdout.strip() == choice, result.stderr
    else:
        assert result.returncode != 0
        wanted = "ValueError: SPECENS_INSTRUCTION_SET: expected one of plain, avx2, avx512, neon, got 'sse'"
        lacking = "RuntimeError: SPECENS_INSTRUCTION_SET: this processor has"
        assert (wanted if choice == "sse" else lacking) in result.stderr


def test_a_second_import_takes_the_operators_of_the_first():
    code = """
import gc, importlib, sys, torch
import specens_kernels as first
for turn in range(2):
    for name in [name for name in sys.modules if name.startswith("specens_kernels")]:
        del sys.modules[name]
    first = None; gc.collect()
    import specens_kernels as first
    print(first.sample(torch.zeros(1, 5), uniforms=torch.tensor([0.9]), backend="cpp").tokens.tolist())
    first.TokenTree.chains(2, 1)
for name in ("specens_kernels.backend", "specens_kernels.ops.sample", "specens_kernels"):
    importlib.reload(importlib.import_module(name)); gc.collect()
print(first.sample(torch.zeros(1, 5), uniforms=torch.tensor([0.9]), backend="cpp").tokens.tolist())
"""
    result = subprocess.run([sys.executable, "-W", "error::UserWarning", "-c", code], capture_output=True, text=True)
    assert result.stdout.count("[4]") == 3, result.stderr
