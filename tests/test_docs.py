"""The pages in docs/ and the examples: what they show runs, and does what they say."""

from __future__ import annotations

import inspect
import itertools
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from scipy.stats import chisquare

import specens_kernels
from specens_kernels import NgramIndex, Sampling, TokenTree, instruction_set, verify_chain

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "embedding.md").read_text()
EXAMPLE = ROOT / "examples" / "batched_decoder.py"
BLOCKS = re.findall(r"^```python\n(.*?)^```$", PAGE, flags=re.DOTALL | re.MULTILINE)
LENGTHS, ENDS = torch.tensor([3, 9, 5, 2]), torch.tensor([60, 40, 80, 5])
GREEDY = Sampling(temperature=0.0)


@pytest.fixture(scope="module")
def shown() -> dict[str, Any]:
    """The names that the page's code defines, run in its order."""
    names: dict[str, Any] = {"__name__": "embedding"}
    for block in BLOCKS:
        exec(block, names)
    return names


def random_text(shown: dict[str, Any], batch: int = 4) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randint(shown["VOCAB"], (batch, shown["SLOTS"]), generator=generator)


def greedy_texts(target: Any, text: torch.Tensor) -> list[list[int]]:
    """Each request alone, token by token, every forward over the whole text."""
    texts = []
    for request, (length, end) in enumerate(zip(LENGTHS.tolist(), ENDS.tolist())):
        tokens = text[request, :length].tolist()
        while len(tokens) < end:
            fed = torch.tensor(tokens).expand(len(text), -1)
            tokens.append(int(target.forward(fed, torch.zeros_like(LENGTHS))[0, -1].argmax()))
        texts.append(tokens)
    return texts


def test_the_page_shows_the_example_as_it_is():
    assert BLOCKS[0] == EXAMPLE.read_text()


def test_the_table_of_variables_is_complete():
    table = dict(re.findall(r"^\| `(SPECENS_\w+)` \| (.*?) \|", PAGE, flags=re.M))
    folders = ("specens_kernels", "python", "bench", "demo", "tests", "_build_backend")
    sources = [path for folder in folders for path in ROOT.joinpath(folder).rglob("*.py")]
    read = {name for path in sources for name in re.findall(r"[\"'](SPECENS_[A-Z_]+)[\"']", path.read_text())}
    scripts = list(ROOT.joinpath("bench").rglob("*.sh"))
    read |= {name for path in scripts for name in re.findall(r"\$\{?(SPECENS_[A-Z_]+)", path.read_text())}
    builds = [ROOT / "CMakeLists.txt", *ROOT.joinpath("cmake").glob("*.cmake")]
    option = r"\b(?:set|option)\((SPECENS_\w+) [^)]*\bCACHE\b|\boption\((SPECENS_\w+)"
    read |= {first or second for path in builds for first, second in re.findall(option, path.read_text())}
    assert len(read) >= 9
    assert read == set(table)
    assert set(re.findall(r"`(\w+)`", table["SPECENS_INSTRUCTION_SET"])) == set(instruction_set.NAMES)
    backends = set(re.findall(r"`(\w+)`", table["SPECENS_BACKEND"]))
    assert backends == set(specens_kernels.ops.verify_chain.IMPLEMENTATIONS)


def test_the_example_runs():
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    command = [sys.executable, str(EXAMPLE)]
    run = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    tokens, rounds = map(int, re.fullmatch(r"(\d+) tokens of 4 requests in (\d+) rounds\n", run.stdout).groups())
    assert tokens == 57 + 31 + 75 + 98
    assert rounds < 98


@pytest.mark.parametrize(("width", "most_rounds"), [(10, 74), (14, 60), (16, 16)])
def test_the_decoder_gives_the_greedy_text_of_each_request(shown, width, most_rounds):
    target = shown["ToyModel"](width=16, batch=4)
    text = random_text(shown)
    expected = greedy_texts(target, text)
    before = text.clone()
    drafter = shown["ToyModel"](width=width, batch=4)
    rounds = shown["generate"](target, drafter, text, LENGTHS, ENDS, GREEDY, torch.arange(4))
    for request, tokens in enumerate(expected):
        assert text[request, : len(tokens)].tolist() == tokens
        assert torch.equal(text[request, len(tokens) :], before[request, len(tokens) :])
    assert rounds <= most_rounds  # 75 without speculation, 15 if all drafts are accepted


def test_the_decoder_samples_the_law_of_the_target(shown):
    """Two new tokens of many requests with one prompt, against the target forwarded over all texts."""
    batch, vocab = 12_000, shown["VOCAB"]
    sampling = Sampling(temperature=2.0)
    target, drafter = shown["ToyModel"](width=16, batch=batch), shown["ToyModel"](width=14, batch=batch)
    text = random_text(shown, 1).repeat(batch, 1)
    lengths, ends = torch.full((batch,), 2), torch.full((batch,), 4)
    shown["generate"](target, drafter, text, lengths, ends, sampling, torch.arange(batch), draft_len=2)

    prompt = text[:1, :2].expand(vocab, 2)
    every = torch.cat([prompt, torch.arange(vocab)[:, None]], 1)
    scorer = shown["ToyModel"](width=16, batch=vocab)
    logits = scorer.forward(every, torch.zeros(vocab, dtype=torch.int64)).double() / 2
    law = logits[0, 1].softmax(0)[:, None] * logits[:, 2].softmax(-1)  # of both new tokens, [vocab, vocab]
    counts = torch.bincount(text[:, 2] * vocab + text[:, 3], minlength=vocab**2)
    often = (law * batch).flatten() >= 5
    observed = torch.cat([counts[often], counts[~often].sum()[None]])
    expected = torch.cat([law.flatten()[often], law.flatten()[~often].sum()[None]]) * batch
    assert often.sum() > 50
    assert chisquare(observed, expected).pvalue > 1e-3


@pytest.mark.parametrize("branches", [[3], [2, 2, 1], [1, 1, 1]], ids=str)
def test_the_tree_decoder_gives_the_greedy_text_of_each_request(shown, branches):
    target = shown["ToyModel"](width=16, batch=4)
    text = random_text(shown)
    expected = greedy_texts(target, text)
    ranks = max(branches)
    followers = torch.zeros(shown["VOCAB"], ranks, dtype=torch.int64)
    for tokens in expected:  # a table that often knows what follows
        for before, after in itertools.pairwise(tokens):
            followers[before] = torch.tensor([after, *followers[before].tolist()][:ranks])
    tree = TokenTree.branching(branches)
    rounds = shown["generate_with_trees"](target, followers, tree, text, LENGTHS, ENDS, GREEDY, torch.arange(4))
    for request, tokens in enumerate(expected):
        assert text[request, : len(tokens)].tolist() == tokens
    assert rounds < 0.8 * int((ENDS - LENGTHS).max())


@pytest.mark.parametrize("temperature", [0.0, 0.3])
def test_the_decoder_without_a_drafter_gives_the_text_of_plain_decoding(shown, temperature):
    """Uniforms are those of the round, so a sampled text is only compared in length; the greedy one token by token."""
    target = shown["ToyModel"](width=16, batch=4)
    text, lengths, ends = random_text(shown), torch.full((4,), 8), torch.full((4,), 200)
    text[:, 4:8] = text[:, :4]
    plain = text.clone()
    sampling = Sampling(temperature=temperature)
    rounds = shown["generate_with_lookup"](target, text, lengths, ends, sampling, torch.arange(4))
    nothing = shown["generate_with_lookup"](target, plain, lengths, ends, sampling, torch.arange(4), draft_len=0)
    assert nothing == 192
    assert rounds < 192
    assert (text[:, 8:200] < shown["VOCAB"]).all()
    if temperature == 0:
        assert torch.equal(text, plain)


def test_vllm_layouts_give_the_verdict_of_the_dense_call(shown):
    batch, draft_len, vocab = 3, 4, 30
    generator = torch.Generator().manual_seed(2)
    logits = torch.randn(batch, draft_len + 1, vocab, generator=generator)
    draft_logits = logits[:, :draft_len] + 0.5 * torch.randn(batch, draft_len, vocab, generator=generator)
    drafts = draft_logits.argmax(-1)
    lens = torch.tensor([2, 0, 4])
    random_numbers = {"seeds": torch.arange(batch), "positions": torch.tensor([7, 8, 9])}
    dense = verify_chain(logits, drafts, draft_logits=draft_logits, draft_lens=lens, **random_numbers)
    rows = torch.cat([row[: length + 1] for row, length in zip(logits, lens.tolist())])

    packed_drafts = torch.cat([row[:length] for row, length in zip(drafts, lens.tolist())])
    packed_logits = torch.cat([row[:length] for row, length in zip(draft_logits, lens.tolist())])
    arguments = shown["from_vllm_v1"](packed_drafts, lens.cumsum(0).int(), draft_len)
    assert torch.equal(
        verify_chain(rows, draft_logits=packed_logits, **arguments, **random_numbers).tokens, dense.tokens
    )

    sampled = torch.cat([torch.cat([torch.tensor([99]), row[:n]]) for row, n in zip(drafts, lens.tolist())])
    slots = torch.tensor([4, 0, 2])
    kept = torch.zeros(5, draft_len, vocab).index_copy(0, slots, draft_logits)
    offsets = torch.nn.functional.pad((lens + 1).cumsum(0), (1, 0))
    arguments = shown["from_vllm_v2"](sampled, offsets, slots, draft_len)
    assert torch.equal(verify_chain(rows, draft_logits=kept, **arguments, **random_numbers).tokens, dense.tokens)


def test_every_argument_that_the_page_names_is_one_of_a_public_function():
    prose = re.sub(r"^```python\n.*?^```$", "", PAGE, flags=re.DOTALL | re.MULTILINE)
    named = set(re.findall(r"`(?:\w+\()?(?:\w+=\w+, )*(\w+)=", prose))
    functions = [getattr(specens_kernels, name) for name in specens_kernels.__all__]
    known = {name for function in functions if inspect.isfunction(function) for name in parameters(function)}
    known |= set(re.findall(r"(\w+):", NgramIndex.propose_batch.__doc__.partition("\n")[0]))
    assert {"sampling", "draft_sampling", "layout", "block_table", "out"} <= named
    assert named <= known


def parameters(function: Any) -> list[str]:
    return list(inspect.signature(function).parameters)


def test_the_functions_to_swap_have_the_names_of_theirs(shown):
    chain, tree = (shown[name] for name in ("chain_speculative_sampling", "tree_speculative_sampling_target_only"))
    assert parameters(chain)[:3] == ["draft_probs", "draft_token_ids", "target_probs"]
    assert parameters(chain)[5:] == ["deterministic", "generator", "seed", "offset"]
    assert parameters(tree)[:3] == ["predicts", "accept_index", "accept_token_num"]
    assert parameters(tree)[-4:] == ["draft_probs", "threshold_single", "threshold_acc", "deterministic"]
