"""The driver on members that llama.cpp runs: its own greedy text, exact laws, and all that holds of other members."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import llama_cpp
import numpy as np
import pytest
import torch
from scipy import stats
from specens import SpeculativeEnsemble
from specens.cli.main import app
from specens.drafters import DraftModel
from specens.engines.llama_cpp import LlamaCpp
from specens.engines.protocol import Needs, Read
from transformers import LlamaConfig, LlamaForCausalLM
from typer.testing import CliRunner

from specens_kernels import Mixture, Processing, Sampling

PROMPT = "one two three four five one two three four five one two three four"
SAMPLES = 800
SAMPLING = {"temperature": 0.8, "top_k": 12, "top_p": 0.9}
NEAR = 0.5  # logits of SmolLM2's 4 bits that differ less may change places: llama.cpp rounds by what is read together
METHODS: dict[str, dict[str, Any]] = {
    "standard": {"schedule": "standard"},
    "fixed": {"schedule": "fixed", "draft_lens": 3},
    "alternate": {"schedule": "alternate", "draft_lens": 2},
    "tree": {"tree": (3, 2)},
}
METHOD = pytest.mark.parametrize("method", METHODS)


@pytest.fixture(scope="module")
def pair(tiny: tuple[Path, Path]) -> list[LlamaCpp]:
    return [LlamaCpp(path) for path in tiny]


def logits_of(path: Path, tokens: list[int]) -> np.ndarray:
    """By llama-cpp-python: float64 [tokens, vocab] after each of them."""
    llama = llama_cpp.Llama(str(path), n_ctx=512, n_threads=1, logits_all=True, flash_attn=True, verbose=False)
    llama.eval(tokens)
    return np.array(llama.scores[: len(tokens)], dtype=np.float64)


def softmax(logits: np.ndarray) -> np.ndarray:
    chances = np.exp(logits - logits.max())
    return chances / chances.sum()


def filtered(chances: np.ndarray, top_k: int, top_p: float) -> dict[int, float]:
    """The probability of each token that top-k and then top-p leave."""
    order = np.argsort(-chances, kind="stable")[:top_k]
    left = chances[order] / chances[order].sum()
    kept = 1 + int(np.searchsorted(np.cumsum(left), top_p))
    return dict(zip(order[:kept].tolist(), left[:kept] / left[:kept].sum(), strict=True))


def p_value(counts: Counter[int], law: dict[int, float]) -> float:
    """Of the chi-square test; 0 where a token came that cannot come."""
    if set(counts) - set(law):
        return 0.0
    total = sum(counts.values())
    return float(stats.chisquare([counts[token] for token in law], [total * chance for chance in law.values()]).pvalue)


@pytest.mark.parametrize("settings", [{"schedule": "standard"}, {}], ids=["standard", "prompt lookup"])
def test_greedy_text_is_that_of_llama_cpp(smollm2: Path, settings: dict[str, Any]):
    ensemble = SpeculativeEnsemble([smollm2], **settings)
    found = ensemble.generate(PROMPT, temperature=0, max_new_tokens=32, stop_tokens=())
    prompt = ensemble.tokenizer(PROMPT)["input_ids"]
    logits = logits_of(smollm2, [*prompt, *found.tokens[:-1]])[len(prompt) - 1 :]
    chosen = logits[np.arange(len(found.tokens)), found.tokens]
    assert (chosen >= logits.max(1) - NEAR).all()
    assert (chosen == logits.max(1)).mean() > 0.9
    assert found.text.startswith(" five one two")


@METHOD
def test_greedy_text_of_a_pair_is_that_of_their_mixture(tiny: tuple[Path, Path], pair: list[LlamaCpp], method: str):
    ensemble = SpeculativeEnsemble(pair, **METHODS[method])
    found = ensemble.generate(PROMPT, temperature=0, max_new_tokens=24, stop_tokens=())
    prompt = ensemble.tokenizer(PROMPT)["input_ids"]
    rows = [logits_of(path, [*prompt, *found.tokens[:-1]])[len(prompt) - 1 :] for path in tiny]
    target = np.stack([(softmax(one) + softmax(other)) / 2 for one, other in zip(*rows, strict=True)])
    assert (target[np.arange(24), found.tokens] >= 0.98 * target.max(1)).all()


@METHOD
def test_sampled_tokens_follow_the_law_and_no_other(tiny_models: list[Path], method: str):
    files = [tiny_models[0], tiny_models[2]]
    ensemble = SpeculativeEnsemble([*map(LlamaCpp, files)], ensemble=Mixture((0.7, 0.3)), **METHODS[method])
    prompt = ensemble.tokenizer(PROMPT)["input_ids"]
    settings: dict[str, Any] = {"max_new_tokens": 1, "seed": 3, "sampling": Sampling(**SAMPLING)}
    texts = ensemble.generate_many([prompt], samples=SAMPLES, batch_size=20, **settings)
    counts = Counter(text.tokens[0] for text in texts)
    assert sum(counts.values()) == SAMPLES
    first, second = (softmax(logits_of(path, prompt)[-1] / SAMPLING["temperature"]) for path in files)

    def law(weight: float, **filters: Any) -> dict[int, float]:
        filters = {"top_k": SAMPLING["top_k"], "top_p": SAMPLING["top_p"]} | filters
        return filtered(weight * first + (1 - weight) * second, **filters)

    assert p_value(counts, law(0.7)) > 1e-4
    assert p_value(counts, law(0.2)) < 1e-6
    assert p_value(counts, law(0.7, top_p=1.0)) < 1e-6


@pytest.mark.parametrize("method", ["fixed", "alternate"])
def test_a_batch_writes_what_each_request_writes_alone(pair: list[LlamaCpp], method: str):
    ensemble = SpeculativeEnsemble(pair, **METHODS[method])
    prompts = [PROMPT, "What is 2 + 2?", "a"]
    settings: dict[str, Any] = {"max_new_tokens": 16, "temperature": 0, "stop_tokens": ()}
    together = {text.index: text.tokens for text in ensemble.generate_many(prompts, batch_size=3, **settings)}
    alone = [ensemble.generate(prompt, **settings).tokens for prompt in prompts]
    assert [together[index] for index in range(3)] == alone


@METHOD
def test_by_the_rule_gumbel_a_seed_is_a_text(pair: list[LlamaCpp], method: str):
    texts = [
        SpeculativeEnsemble(pair, rule="gumbel", **METHODS[name]).generate(
            PROMPT, seed=5, max_new_tokens=16, stop_tokens=(), temperature=0.7
        )
        for name in ("standard", method)
    ]
    assert texts[0].tokens == texts[1].tokens


@pytest.mark.parametrize("method", ["standard", "fixed", "alternate"])
def test_grammars_penalties_and_processors_edit_the_logits(pair: list[LlamaCpp], method: str):
    words = torch.zeros(49152, dtype=torch.bool)
    words[1000:1040] = True
    bits = torch.from_numpy(np.packbits(words.numpy(), bitorder="little").view(np.int32).copy())

    def forbid_odd(ids: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:  # noqa: ARG001
        logits[:, 1::2] = -torch.inf
        return logits

    found = SpeculativeEnsemble(pair, **METHODS[method]).generate(
        PROMPT,
        max_new_tokens=12,
        temperature=0,
        stop_tokens=(),
        constraint=lambda _: bits,
        processing=Processing(presence_penalty=100.0),
        logits_processors=[forbid_odd],
    )
    assert set(found.tokens) <= set(range(1000, 1040, 2))
    assert len(set(found.tokens)) == 12


@METHOD
def test_a_member_of_transformers_may_stand_beside_one_of_llama_cpp(pair: list[LlamaCpp], method: str):
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=49152, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=1
    )
    members = [pair[0], LlamaForCausalLM(config)]
    settings: dict[str, Any] = {"max_new_tokens": 12, "temperature": 0, "stop_tokens": ()}
    texts = [
        SpeculativeEnsemble(members, ensemble=Mixture((0.8, 0.2)), **METHODS[name]).generate(PROMPT, **settings).tokens
        for name in ("standard", method)
    ]
    assert texts[0] == texts[1]


def test_a_model_of_llama_cpp_drafts_for_another(pair: list[LlamaCpp]):
    found = SpeculativeEnsemble(pair[:1], drafter=DraftModel(pair[1]), draft_lens=4).generate(
        PROMPT, max_new_tokens=20, temperature=0, stop_tokens=()
    )
    plain = SpeculativeEnsemble(pair[:1], schedule="standard").generate(
        PROMPT, max_new_tokens=20, temperature=0, stop_tokens=()
    )
    assert found.tokens == plain.tokens
    assert found.statistics.accepted[-1] > 0


def test_prompts_of_their_own_are_read_with_one_set_of_weights(tiny: tuple[Path, Path]):
    ensemble = SpeculativeEnsemble([tiny[0], tiny[0]], schedule="standard")
    assert ensemble.models[0] is ensemble.models[1]
    found = ensemble.generate(PROMPT, max_new_tokens=6, temperature=0, stop_tokens=())
    assert found.statistics.model_calls == 6


def test_the_command_line_takes_gguf_files(tiny: tuple[Path, Path]):
    models = [str(tiny[0]), f"llama_cpp:{tiny[1]}"]
    job = ["--prompt", "one two", "--max-new-tokens", "6", "--temperature", "0", "--threads", "1", "--json"]
    result = CliRunner().invoke(app, ["generate", *models, *job, "--seed", "1"])
    assert result.exit_code == 0, result.output
    assert len(json.loads(result.stdout)["tokens"]) <= 6


def test_compare_takes_gguf_files_and_names_their_engine(tiny: tuple[Path, Path]):
    models = [str(path) for path in tiny]
    job = ["--prompt", "one two", "--max-new-tokens", "6", "--repeats", "1", "--threads", "1", "--json"]
    result = CliRunner().invoke(app, ["compare", *models, *job, "--engine", "llama_cpp"])
    assert result.exit_code == 0, result.output
    rows = json.loads(result.stdout)["rows"]
    assert [(row["engine"], row["schedule"]) for row in rows] == [
        ("llama_cpp", schedule) for schedule in ("standard", "fixed", "alternate")
    ]


def test_plan_predicts_speeds(tiny: tuple[Path, Path]):
    models = [str(path) for path in tiny]
    job = ["--prompt", "one two", "--max-new-tokens", "12", "--samples", "1", "--longest", "2", "--threads", "1"]
    result = CliRunner().invoke(app, ["plan", *models, *job, "--json"])
    assert result.exit_code == 0, result.output
    assert "standard" in result.stdout


def test_a_forward_that_fails_leaves_its_texts_to_be_read_anew(pair: list[LlamaCpp], monkeypatch: pytest.MonkeyPatch):
    needs, nodes = Needs(2, trees=True), {"nodes": [7, 8, 9], "parents": [-1, -1, 0]}
    context, plain = (pair[0].open(needs) for _ in range(2))
    text, other = (own.add([1, 2, 3]) for own in (context, plain))
    beside = context.add([4, 5])
    free = len(context._cells._free)
    context.read([Read(text, [], nodes=[7], parents=[-1]), Read(beside, [])])
    decode = context._cells._functions.llama_decode
    for result in (lambda *own: decode(*own) - 3, lambda *_: -1):  # after the cells were filled, and before
        with monkeypatch.context() as patch:
            patch.setattr(context._cells, "_functions", Patched(context._cells._functions, llama_decode=result))
            with pytest.raises(RuntimeError, match=r"llama.cpp cannot read with .* \(-[13]\)"):
                context.read([Read(text, [], 2, **nodes)])
        assert len(context._cells._free) == free
    with pytest.raises(ValueError, match=r"token 50000 was generated, but a member has embeddings only"):
        context.read([Read(text, [], 2, **nodes), Read(beside, [50000])])
    (found,), (expected,) = context.read([Read(text, [], 3, **nodes)]), plain.read([Read(other, [], 3, **nodes)])
    torch.testing.assert_close(found, expected)
    for own in (text, other):
        own.keep_path([0, 2])
    (found,), (expected,) = context.read([Read(text, [7, 9, 1])]), plain.read([Read(other, [7, 9, 1])])
    torch.testing.assert_close(found, expected)
    assert context.read([Read(beside, [6])])[0].isfinite().all()


class Patched:
    """The functions of llama.cpp, some of them replaced."""

    def __init__(self, own: Any, **others: Any) -> None:
        self._own = own
        vars(self).update(others)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._own, name)
