"""Speculative decoding on llama.cpp through libspecens: greedy text is plain decoding's, samples follow the law."""

from __future__ import annotations

import re
import subprocess
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import llama_cpp
import numpy as np
import pytest
from scipy import stats

Run = Callable[..., "subprocess.CompletedProcess[str]"]
PROMPT = "def add(a, b):\n    return a + b\n\ndef subtract(a, b):\n    return a - b\n\ndef"
REPEATED = "one two three four five one two three four five one two three four"
SAMPLES = 2000
SAMPLING = {"temperature": 0.8, "top_k": 12, "top_p": 0.9}
NEAR = 0.05  # logits that differ less may change places: llama.cpp computes one row otherwise than several


def options(**values: object) -> list[object]:
    return [word for name, value in values.items() for word in (f"--{name.replace('_', '-')}", value)]


def ids(line: str) -> list[int]:
    return [int(word) for word in line.split()]


def logits_of(model: Path, prompt: str, more: list[int]) -> tuple[list[int], np.ndarray]:
    """By llama-cpp-python: the prompt's tokens, and float64 [1 + len(more), vocab] after it and each of `more`."""
    llama = llama_cpp.Llama(str(model), n_ctx=512, logits_all=True, verbose=False)
    tokens = llama.tokenize(prompt.encode(), special=True)
    llama.eval([*tokens, *more])
    return tokens, np.array(llama.scores[len(tokens) - 1 : len(tokens) + len(more)], dtype=np.float64)


def law(logits: np.ndarray, temperature: float, top_k: int, top_p: float) -> dict[int, float]:
    """The probability of each token that top-k and then top-p leave."""
    order = np.argsort(-logits, kind="stable")[:top_k]
    chances = np.exp((logits[order] - logits[order[0]]) / temperature)
    chances /= chances.sum()
    kept = 1 + int(np.searchsorted(np.cumsum(chances), top_p))
    return dict(zip(order[:kept].tolist(), chances[:kept] / chances[:kept].sum(), strict=True))


def p_value(counts: Counter[int], expected: dict[int, float]) -> float:
    """Of the chi-square test; 0 where a token came that cannot come."""
    if set(counts) - set(expected):
        return 0.0
    total = sum(counts.values())
    seen, wanted = zip(*((counts[token], total * chance) for token, chance in expected.items()), strict=True)
    return float(stats.chisquare(seen, wanted).pvalue)


@pytest.mark.parametrize("drafter", ["lookup", "model"])
def test_greedy_text_is_that_of_plain_decoding_token_by_token(speculate: Run, smollm2, smaller, drafter):
    drafted = options(draft_model=smaller) if drafter == "model" else []
    common = ["-m", smollm2, "-p", PROMPT, "-n", 64, "--temperature", 0, "--ids"]
    found, plain = speculate(*common, *drafted), speculate(*common, "--draft-len", 0)
    assert found.stdout == plain.stdout
    tokens = ids(found.stdout)
    _, logits = logits_of(smollm2, PROMPT, tokens[:-1])
    chosen = logits[np.arange(len(tokens)), tokens]
    assert (chosen >= logits.max(1) - NEAR).all()
    assert (chosen == logits.max(1)).mean() > 0.9
    accepted, drafts = map(int, re.search(r"(\d+) of (\d+) drafts accepted", found.stderr).groups())
    assert 4 < accepted <= drafts


@pytest.mark.parametrize("drafter", ["lookup", "model"])
@pytest.mark.parametrize("rule", ["token", "block", "gumbel"])
def test_sampled_tokens_follow_the_law_and_no_other(speculate: Run, tiny, drafter, rule):
    target, draft = tiny
    drafted = options(draft_model=draft) if drafter == "model" else []
    common = ["-m", target, "-p", REPEATED, "-n", 2, "--ids", "--samples", SAMPLES, "--rule", rule]
    found = speculate(*common, *drafted, *options(**SAMPLING))
    counts = Counter(ids(line)[0] for line in found.stdout.splitlines())
    assert sum(counts.values()) == SAMPLES
    drafts = int(re.search(r"of (\d+) drafts accepted", found.stderr)[1])
    assert drafts >= SAMPLES  # each first token was a draft's place
    logits = logits_of(target, REPEATED, [])[1][0]
    assert p_value(counts, law(logits, **SAMPLING)) > 1e-4
    assert p_value(counts, law(logits, **{**SAMPLING, "temperature": 1.1})) < 1e-6
    assert p_value(counts, law(logits, **{**SAMPLING, "top_k": 11, "top_p": 1.0})) < 1e-6
    assert p_value(counts, law(logits_of(draft, REPEATED, [])[1][0], **SAMPLING)) < 1e-6


def test_a_seed_is_a_text_by_the_rule_gumbel_whoever_drafts(speculate: Run, tiny):
    target, draft = tiny
    common = ["-m", target, "-p", REPEATED, "-n", 24, "--ids", "--samples", 30, "--seed", -7, "--rule", "gumbel"]
    texts = [
        speculate(*common, *more).stdout
        for more in ([], ["--draft-len", 0], ["--draft-model", draft], ["--draft-model", draft, "--draft-len", 9])
    ]
    assert len(set(texts)) == 1
    assert len(set(texts[0].splitlines())) == 30


@pytest.mark.parametrize("rule", ["token", "block", "gumbel"])
def test_what_a_model_drafts_for_itself_is_accepted(speculate: Run, tiny, rule):
    target, _ = tiny
    common = ["-m", target, "-p", REPEATED, "-n", 40, "--samples", 20, "--draft-model", target, "--rule", rule]
    found = speculate(*common, *options(**SAMPLING))
    accepted, drafts = map(int, re.search(r"(\d+) of (\d+) drafts accepted", found.stderr).groups())
    assert accepted > 0.99 * drafts > 500


@pytest.mark.parametrize("rule", ["token", "block"])
def test_a_seed_gives_the_same_text_again_and_another_one_another(speculate: Run, tiny, rule):
    target, draft = tiny
    common = ["-m", target, "-p", REPEATED, "-n", 24, "--ids", "--draft-model", draft, "--rule", rule]
    once, again, other = (speculate(*common, "--seed", seed).stdout for seed in (3, 3, 4))
    assert once == again != other


def test_the_text_ends_where_the_model_ends_it_and_the_prompt_may_be_a_file(speculate: Run, smollm2, tmp_path):
    prompt = tmp_path / "prompt"
    prompt.write_text("<|im_start|>user\nWhat is 2 + 2?<|im_end|>\n<|im_start|>assistant\n")
    found = speculate("-m", smollm2, "-f", prompt, "-n", 200, "--temperature", 0, "--compare")
    assert "4" in found.stdout
    assert "<|im_end|>" not in found.stdout
    count = int(re.search(r"speculative: (\d+) tokens in", found.stderr)[1])
    assert count < 200
    assert f"plain: {count} tokens in {count} rounds" in found.stderr
    assert re.search(r"verification \d+\.\d+ %.*\n.*\n\d+\.\d\d times as fast\n$", found.stderr, flags=re.S)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (["--temperature", "warm"], "--temperature: expected 0 or a positive number, got 'warm'"),
        (["--temperature", "nan"], "--temperature: expected 0 or a positive number, got 'nan'"),
        (["--top-p", "1.5"], "--top-p: expected above 0, up to 1, got '1.5'"),
        (["--top-k", "-1"], "--top-k: expected 0 or more, got '-1'"),
        (["--rule", "luck"], "--rule: expected token, block or gumbel, got 'luck'"),
        (["-n", "0"], "--tokens: expected a number above 0, got '0'"),
        (["--draft-len", "257"], "--draft-len: expected 0 to 256, got '257'"),
        (["--seed", "9223372036854775808"], "--seed: expected an integer of 64 bits, got '9223372036854775808'"),
        (["-f", "/none/such"], "--file: cannot read /none/such"),
        (["more"], "expected options, got 'more'"),
        (["--speed"], "unrecognized option '--speed'"),
    ],
)
def test_wrong_options_are_named(speculate: Run, smollm2, wrong, message):
    assert message in speculate("-m", smollm2, "-p", "a", *wrong, code=2).stderr


def test_what_cannot_be_loaded_is_named(speculate: Run, smollm2, tmp_path):
    assert "--model: expected a GGUF file" in speculate("-p", "a", code=2).stderr
    assert "--prompt: expected a text" in speculate("-m", smollm2, code=2).stderr
    assert f"cannot load the model {tmp_path}" in speculate("-m", tmp_path, "-p", "a", code=1).stderr
    assert speculate("--help").stdout.startswith("usage: speculate")
