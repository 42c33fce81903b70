"""Names of the Hugging Face hub load as in transformers: from its cache, by revision, offline, with clear errors."""

import os
import socket
import subprocess
import sys
import time

import huggingface_hub.constants
import pytest
import specens.engines.transformers.loader
import torch
from driver.tiny_models import tiny_llama, tiny_tokenizer
from specens import SpeculativeEnsemble
from specens.engines.transformers import hub
from specens.engines.transformers.load import load_model, load_tokenizer, resolve_model

NAME = "someone/tiny-model"
COMMITS = {"main": "1" * 40, "old": "2" * 40}


@pytest.fixture(scope="module")
def hub_home(tmp_path_factory):
    """An HF_HOME whose cache holds two revisions of one model, as `hf download` leaves it."""
    home = tmp_path_factory.mktemp("hf-home")
    repository = home / "hub" / f"models--{NAME.replace('/', '--')}"
    (repository / "refs").mkdir(parents=True)
    for seed, (revision, commit) in enumerate(COMMITS.items()):
        (repository / "refs" / revision).write_text(commit)
        tiny_llama(seed).to(torch.float16).save_pretrained(repository / "snapshots" / commit)
        tiny_tokenizer().save_pretrained(repository / "snapshots" / commit)
    return home


@pytest.fixture
def cached(hub_home, monkeypatch):
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(hub_home / "hub"))


def weights_of(spec, **arguments):
    return load_model(spec, **arguments).lm_head.weight


@pytest.mark.usefixtures("cached")
def test_a_name_loads_from_the_cache_at_the_revision_that_is_asked_for():
    first, second = (tiny_llama(seed).lm_head.weight.half() for seed in (0, 1))
    device = load_model(NAME, dtype="fp16").device
    assert torch.equal(weights_of(NAME, dtype="float16").cpu(), first)
    for arguments in ({"spec": NAME, "revision": "old"}, {"spec": f"{NAME}@old"}, {"spec": f"{NAME}@{'2' * 40}"}):
        assert torch.equal(weights_of(**arguments, dtype=torch.float16).cpu(), second)
    assert device.type == ("cuda" if torch.cuda.is_available() else "cpu")
    assert load_tokenizer(f"{NAME}@old").get_vocab() == tiny_tokenizer().get_vocab()
    assert resolve_model(NAME).hub == (NAME, COMMITS["main"])


@pytest.mark.usefixtures("cached")
def test_model_and_tokenizer_are_of_one_commit_however_the_branch_moves(hub_home, monkeypatch):
    """A push between the two look-ups would pair a tokenizer with the weights of another commit."""
    branch = hub_home / "hub" / f"models--{NAME.replace('/', '--')}" / "refs" / "main"
    loaded = []

    def load(spec, **arguments):
        branch.write_text(COMMITS["old"])
        loaded.append(spec)
        return load_tokenizer(spec, **arguments)

    monkeypatch.setattr(specens.engines.transformers.loader, "load_tokenizer", load)
    try:
        ensemble = SpeculativeEnsemble([NAME, NAME], dtype="fp16", schedule="standard")
    finally:
        branch.write_text(COMMITS["main"])
    assert loaded[0] == f"{NAME}@{COMMITS['main']}"
    assert torch.equal(ensemble.models[0].model.lm_head.weight.cpu(), tiny_llama(0).lm_head.weight.half())


@pytest.mark.usefixtures("cached")
def test_a_dtype_may_be_a_name_or_that_of_the_checkpoint():
    for dtype, expected in [("auto", torch.float16), ("bfloat16", torch.bfloat16), ("fp32", torch.float32)]:
        assert SpeculativeEnsemble([NAME], dtype=dtype, schedule="standard").models[0].dtype == expected
    with pytest.raises(ValueError, match=r"^dtype: expected one of fp32, bf16, fp16; got 'int7'"):
        SpeculativeEnsemble([NAME], dtype="int7", schedule="standard")
    with pytest.raises(ValueError, match=r"^device: expected one that is here, got 'nowhere'"):
        SpeculativeEnsemble([NAME], device="nowhere", schedule="standard")


@pytest.mark.usefixtures("cached")
@pytest.mark.parametrize("spec", ["someone/absent", f"{NAME}@absent", "absent"])
def test_a_name_that_is_neither_here_nor_cached_says_so_offline(spec):
    with pytest.raises(ValueError, match=r"which does not exist here; .*HF_HUB_OFFLINE is set") as raised:
        load_model(spec)
    assert f"try: hf download {spec.partition('@')[0]}" in str(raised.value)
    assert repr(spec) in str(raised.value)


@pytest.mark.usefixtures("cached")
def test_without_a_connection_the_cache_serves_at_once_and_a_wrong_name_is_told_at_once(monkeypatch):
    """The hub's own client tries again for half a minute, file by file."""

    def fail(*_, **__):
        raise socket.gaierror(-2, "Name or service not known")

    monkeypatch.setattr(hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(hub, "getproxies", dict)
    monkeypatch.setattr(hub.socket, "getaddrinfo", fail)
    started = time.monotonic()
    assert load_model(NAME).config.vocab_size == 61
    with pytest.raises(ValueError, match=r"co cannot be reached and the cache .* does not have it; .* hf download x/y"):
        load_model("x/y")
    assert time.monotonic() - started < 10


def test_the_command_line_takes_a_name_alone_by_the_environment_of_transformers(hub_home):
    """A lone model, prompt lookup by default, the cache by HF_HOME: `specens generate MODEL --prompt x`."""
    environment = os.environ | {"HF_HOME": str(hub_home), "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""}
    environment.pop("HF_HUB_CACHE", None)
    command = [sys.executable, "-m", "specens", "generate", NAME, "--prompt", "w5 w3 w8", "--max-new-tokens", "9"]
    ran = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert ran.returncode == 0, ran.stderr
    assert len(ran.stdout.split()) == 9
