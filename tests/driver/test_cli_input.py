"""The command `specens` with input as it comes: odd bytes, other names, long prompts, places that are none."""

import json
import re

import pytest
import torch
from driver.tiny_models import save_pair, tiny_llama, tiny_tokenizer
from specens import SpeculativeEnsemble
from specens.cli.main import app
from transformers import GenerationConfig
from typer.testing import CliRunner

JOB = ["--max-new-tokens", "4", "--seed", "1", "--dtype", "fp32"]


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    return save_pair(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module")
def chat_models(tmp_path_factory):
    """A pair whose tokenizer has a chat template."""
    paths = save_pair(tmp_path_factory.mktemp("chat"))
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = "{% for message in messages %}{{ message['content'] }} w7 {% endfor %}"
    for path in paths:
        tokenizer.save_pretrained(path)
    return paths


def run(*arguments, **settings):
    return CliRunner().invoke(app, [str(argument) for argument in arguments], **settings)


def refused(*arguments, **settings):
    """The one line that a wrong call prints."""
    result = run(*arguments, **settings)
    assert result.exit_code == 2, result.stderr
    assert result.stdout == ""
    assert result.stderr.startswith("Error: ")
    assert result.stderr.count("\n") == 1
    return result.stderr


def write(path, *lines):
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


@pytest.mark.parametrize("option", ["-h", "--help"])
@pytest.mark.parametrize("command", [[], ["generate"], ["plan"], ["doctor"]], ids=str)
def test_both_names_of_help_work_everywhere(command, option):
    result = run(*command, option)
    assert result.exit_code == 0
    assert "Usage" in result.stdout


def test_the_version_is_that_of_the_package():
    from importlib.metadata import version

    result = run("--version")
    assert (result.exit_code, result.stdout) == (0, f"specens {version('specens-kernels')}\n")


@pytest.mark.parametrize("dtype", ["bf16", "bfloat16", "torch.bfloat16", "fp32", "float32", "fp16", "float16"])
def test_types_have_torchs_names_too(models, dtype):
    result = run("generate", *models, "--prompt", "w5", *JOB[:4], "--dtype", dtype)
    assert result.exit_code == 0, result.stderr


@pytest.mark.parametrize("device", ["cuda:99" if torch.cuda.is_available() else "cuda", "tpu", "meta", "cpu:x", ""])
@pytest.mark.parametrize("command", ["generate", "compare", "plan"])
def test_a_device_that_is_not_here_is_refused(models, device, command):
    assert "device: expected" in refused(command, *models, "--prompt", "w5", *JOB, "--device", device)


def test_bytes_of_another_encoding_are_named_wherever_they_come_from(models, tmp_path):
    given = ["generate", *models, *JOB]
    assert "UTF-8" in refused(*given, input=b"w1 \xff w2")
    assert "prompt: expected Unicode text" in refused(*given, "--prompt", "w1 \udcff w2")
    (tmp_path / "odd.jsonl").write_bytes(b'{"prompt": "w1 \xff"}\n')
    assert "odd.jsonl, line 1: expected JSON" in refused(*given, "--input", tmp_path / "odd.jsonl")
    (tmp_path / "half.jsonl").write_text('{"prompt": "w1 \\ud83d w2"}\n')
    assert "prompt 1: prompt: expected Unicode text" in refused(*given, "--input", tmp_path / "half.jsonl")


def test_a_prompt_that_is_longer_than_a_model_is_told_without_negative_numbers(tmp_path):
    tiny_llama(0, max_position_embeddings=32).save_pretrained(tmp_path / "short")
    tiny_tokenizer().save_pretrained(tmp_path / "short")
    given = ["generate", tmp_path / "short", "--schedule", "standard", *JOB]
    assert "prompt: expected at most the 32 tokens" in refused(*given, "--prompt", "w5 " * 40)
    assert "--max-new-tokens: expected at most 2 " in refused(*given, "--prompt", "w5 " * 30)
    (tmp_path / "long.jsonl").write_text(json.dumps({"prompt": "w5 " * 40}))
    assert "prompt 1: prompt: expected at most the 32" in refused(*given, "--input", tmp_path / "long.jsonl")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--weights", "1"], "--weights: expected 2 numbers"),
        (["--weights", ".2,.3,.5"], "--weights: expected 2 numbers"),
        (["--logit-weights", "1"], "--logit-weights: expected 2 numbers"),
        (["--weights", ""], "--weights: expected numbers between commas"),
        (["--weights", "nan,nan"], "weights: expected"),
    ],
    ids=str,
)
@pytest.mark.parametrize("command", ["generate", "compare", "plan"])
def test_weights_of_another_count_are_refused(models, command, options, message):
    assert message in refused(command, *models, "--prompt", "w5", *JOB, *options)


def test_contrast_is_for_two_models(models):
    assert "--contrast: expected two MODELS" in refused(
        "generate", *models, models[0], "--contrast", ".5", "--prompt", "w5", *JOB
    )


def test_prompts_come_by_the_names_of_openais_chat_format_too(chat_models, tmp_path):
    messages = [{"role": "system", "content": "w3"}, {"role": "user", "content": "w5"}]
    prompts = write(
        tmp_path / "prompts.jsonl",
        {"messages": messages, "max_tokens": 3, "seed": 4},
        {"prompt": messages, "max_new_tokens": 3, "seed": 4},
        {"messages": messages, "max_completion_tokens": 6, "seed": 4, "stop": ["w1", "w2", "w9"], "min_new_tokens": 2},
        {"prompt": "w3 w7 w5", "stop": None, "temperature": 0},
    )
    result = run("generate", *chat_models, *JOB, "--input", prompts)
    assert result.exit_code == 0, result.stderr
    texts = sorted(map(json.loads, result.stdout.splitlines()), key=lambda text: text["index"])
    assert texts[0]["tokens"] == texts[1]["tokens"]
    assert [len(text["tokens"]) for text in texts[:2]] == [3, 3]
    free = run(
        "generate", *chat_models, *JOB, "--input", write(tmp_path / "f.jsonl", {"messages": messages, "seed": 4})
    )
    word = f"w{json.loads(free.stdout)['tokens'][1]}"
    stopped = write(tmp_path / "s.jsonl", {"messages": messages, "seed": 4, "stop": word})
    (text,) = map(json.loads, run("generate", *chat_models, *JOB, "--input", stopped).stdout.splitlines())
    assert text["finish_reason"] == "stop"
    assert len(text["tokens"]) <= 2


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ({"prompt": "w1", "colour": 1, "voice": 2}, "got 'colour', 'voice'"),
        ({"max_tokens": 3}, "expected a field 'prompt', 'messages' or"),
        ({"messages": "w1"}, "messages: expected a list of messages"),
        ({"messages": []}, "messages: expected a list of messages"),
        ({"messages": [{"role": "user"}]}, "messages: expected a list of messages"),
        ({"messages": [{"role": "user", "content": None}]}, "messages: expected a list of messages"),
        ({"prompt": "w1", "messages": [{"role": "user", "content": "w1"}]}, "messages: expected no second field"),
        ({"prompt": "w1", "max_tokens": 2, "max_new_tokens": 2}, "max_new_tokens: expected no second field"),
        ({"prompt": "w1", "stop": 3}, "stop: expected a text or a list of texts"),
        ({"prompt": "w1", "stop": [""]}, "expected a list of texts that are not empty"),
        ({"prompt": "w1", "max_tokens": -1}, "max_new_tokens: expected an integer >= 0"),
        ({"prompt": "w1", "min_new_tokens": -1}, "min_new_tokens: expected an integer >= 0"),
        ({"prompt": "w1", "weights": [1.0]}, "expected weights for the 2 members"),
        ({"prompt": "w1", "top_p": float("nan")}, "top_p: expected"),
    ],
    ids=str,
)
def test_a_wrong_field_is_named_with_its_prompt(models, tmp_path, line, message):
    printed = refused("generate", *models, *JOB, "--input", write(tmp_path / "prompts.jsonl", line))
    assert "prompts.jsonl, prompt 1: " in printed
    assert message in printed


@pytest.mark.parametrize("option", ["--output", "--trace", "--plot"])
@pytest.mark.parametrize("index", ["no/such/file.png", "folder.png"])
def test_places_are_looked_at_before_anything_is_loaded(monkeypatch, models, tmp_path, option, index):
    monkeypatch.setattr("specens.engines.transformers.loader.load_model", None)
    (tmp_path / "folder.png").mkdir()
    command = "plan" if option == "--plot" else "generate"
    printed = refused(command, *models, "--prompt", "w5", *JOB, option, tmp_path / index)
    assert f"{option}: expected a file in a folder that there is" in printed


def test_a_lone_model_is_planned_with_lookup(models):
    given = ["plan", models[0], "--prompt", "w5 w3", *JOB, "--repeats", "1", "--longest", "2"]
    for options, drafter in (([], "lookup"), (["--drafter", "lookup:3"], "lookup:3")):
        result = run(*given, *options, "--json")
        assert result.exit_code == 0, result.stderr
        found = {one["options"] for one in json.loads(result.stdout)["predictions"]}
        lookups = {f"--schedule fixed --draft-lens {draft_len} --drafter {drafter}" for draft_len in (1, 2)}
        assert found == {"--schedule standard", *lookups}
    assert "--drafter: expected lookup" in refused(*given, "--drafter", "jacobi")
    chosen = run("generate", models[0], "--prompt", "w5", *JOB, *min(lookups).split())
    assert chosen.exit_code == 0, chosen.stderr


@pytest.mark.parametrize("command", ["compare", "plan"])
def test_compare_and_plan_sample_as_generate_does(models, command):
    short = ["--repeats", "1", "--json", "--prompt", "w5", *JOB]
    result = run(command, *models, *short, "--top-k", "1", "--top-p", ".9", "--min-p", ".01", "--temperature", ".7")
    assert result.exit_code == 0, result.stderr
    values = json.loads(result.stdout)
    same = values["measured"]["acceptance"] if command == "plan" else [values["rows"][1]["acceptance_rate"]]
    assert all(0 <= rate <= 1 for rate in same)
    for option, value in (("--top-k", "-7"), ("--top-p", "2"), ("--min-p", "nan"), ("--temperature", "inf")):
        assert f"{option}: expected" in refused(command, *models, *short, option, value)


def test_settings_have_the_names_of_transformers(models):
    own = [
        "generate",
        *models,
        "--prompt",
        "w5 w3",
        "--max-new-tokens",
        20,
        "--temperature",
        0,
        "--dtype",
        "fp32",
        "--json",
    ]
    settings = {"repetition_penalty": 1.5, "no_repeat_ngram_size": 2}
    ensemble = SpeculativeEnsemble(models, dtype="fp32", device="cpu")
    texts = []
    for name, value in settings.items():
        result = run(*own, "--device", "cpu", "--" + name.replace("_", "-"), value)
        assert result.exit_code == 0, result.stderr
        job = {"generation_config": GenerationConfig(**{name: value}), "max_new_tokens": 20, "temperature": 0}
        texts.append(json.loads(result.stdout)["tokens"])
        assert texts[-1] == ensemble.generate("w5 w3", **job).tokens
    assert texts[0] != texts[1]
    stopped = run(*own, "--stop-strings", f"w{texts[0][3]}")
    assert json.loads(stopped.stdout)["finish_reason"] == "stop"
    assert "--generation-config: expected model beside settings" in refused(
        *own, "--no-repeat-ngram-size", 2, "--generation-config", "none"
    )
    assert "--repetition-penalty: expected" in refused(*own, "--repetition-penalty", -1)
    for given in ("auto", "[1]"):
        expected = '--model-kwargs: expected a JSON object such as \'{"device_map": "auto"}\'; got'
        assert expected in refused(*own, "--model-kwargs", given)
    assert "--device: expected none beside a device_map in" in refused(
        *own, "--device", "cpu", "--model-kwargs", '{"device_map": "auto"}'
    )


@pytest.mark.parametrize("command", ["", "generate", "compare", "plan", "show", "methods", "doctor"])
def test_no_word_of_a_help_page_is_cut_in_80_columns(command, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    page = run(*command.split(), "--help").output
    assert max(map(len, page.splitlines())) <= 80
    assert "…" not in page
    assert not re.search(r"\w\.\.\.$", page, re.MULTILINE)
