"""Files of prompts become files of texts: nothing is lost and nothing is written twice, whatever ends a run."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest
import torch
from driver.tiny_models import relative_of, save_pair, tiny_llama, tiny_tokenizer
from specens import SpeculativeEnsemble
from specens.cli.main import app
from specens.engines.transformers.ragged_cache import RaggedCache
from specens.files.batch_files import missing, open_texts, write_texts
from specens.files.prompt_file import read_prompts
from specens.settings.jobs import derived_seed
from typer.testing import CliRunner

from specens_kernels import Contrastive, LogitMixture, Mixture, Sampling

LINES = [
    {"prompt": "w5 w3 w8", "id": "plain"},
    {"prompt": [5, 3, 8]},
    {"prompt": "w1", "seed": 7, "temperature": 0.5, "top_k": 5},
    {"member_prompts": ["w1 w2", "w3"], "weights": [0.1, 0.9]},
    {"prompt": "w9", "max_new_tokens": 3, "id": 4},
    {"prompt": "w2 w2", "temperature": 0, "top_p": None},
]
OPTIONS = ["--samples", 2, "--max-new-tokens", 30, "--batch-size", 3, "--dtype", "fp32"]
SEED = ["--seed", 5]


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    return save_pair(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module")
def ensemble():
    first = tiny_llama(0)
    return SpeculativeEnsemble([first, relative_of(first, 1, noise=0.2)], tiny_tokenizer())


@pytest.fixture
def prompts(tmp_path):
    return write_lines(tmp_path / "prompts.jsonl", LINES)


@pytest.fixture(scope="module")
def undisturbed(models, tmp_path_factory):
    """The texts of the prompts, with the seed 5."""
    folder = tmp_path_factory.mktemp("undisturbed")
    prompts = write_lines(folder / "prompts.jsonl", LINES)
    assert generate(models, prompts, folder / "texts.jsonl", *SEED).exit_code == 0
    return texts_of(folder / "texts.jsonl")


def write_lines(path, lines):
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def read_lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def texts_of(path):
    """Of each prompt and sample its tokens and seed; fails where one is there twice."""
    records = read_lines(path)
    found = {(record["index"], record["sample"]): (record["tokens"], record["seed"]) for record in records}
    assert len(found) == len(records)
    return found


def generate(models, prompts, output, *arguments):
    command = ["generate", *models, "--input", prompts, "--output", output, *OPTIONS, *arguments]
    return CliRunner().invoke(app, [str(part) for part in command])


def test_every_prompt_gives_its_texts_with_its_own_settings(models, prompts, tmp_path):
    result = generate(models, prompts, tmp_path / "texts.jsonl", *SEED)
    assert result.exit_code == 0, result.stderr
    assert "12 texts, " in result.stderr
    assert result.stdout == ""
    records = sorted(read_lines(tmp_path / "texts.jsonl"), key=lambda record: (record["index"], record["sample"]))
    assert [(record["index"], record["sample"]) for record in records] == [(i, s) for i in range(6) for s in range(2)]
    assert [record["id"] for record in records[::2]] == ["plain", None, None, None, 4, None]
    seeds = [derived_seed(7, 0, s) if i == 2 else derived_seed(5, i, s) for i in range(6) for s in range(2)]
    assert [record["seed"] for record in records] == seeds
    assert (seeds[0], seeds[4]) == (5, 7)
    assert [len(record["tokens"]) for record in records[::2]] == [30, 30, 30, 30, 3, 30]
    loaded = SpeculativeEnsemble(models, dtype=torch.float32)
    own = [
        {"prompt": "w5 w3 w8", "seed": 5},
        {"prompt": "w1", "seed": 7, "sampling": Sampling(0.5, top_k=5)},
        {"prompt": "w2 w2", "seed": seeds[10], "sampling": Sampling(0)},
    ]
    for record, settings in zip((records[0], records[4], records[10]), own, strict=True):
        assert record["tokens"] == loaded.generate(**settings, max_new_tokens=30).tokens
        assert record["text"] == tiny_tokenizer().decode(record["tokens"])
        assert record["finish_reason"] == "length"
        assert record["statistics"]["emitted"] == 30


def test_a_run_that_is_killed_and_started_again_writes_what_an_undisturbed_one_writes(models, tmp_path):
    prompts = write_lines(tmp_path / "prompts.jsonl", LINES * 2)
    output = tmp_path / "texts.jsonl"
    short = ["--max-new-tokens", 10]
    command = [sys.executable, "-c", START, *models, "--input", prompts, "--output", output, *OPTIONS, *short]
    with subprocess.Popen([str(part) for part in command], stderr=subprocess.DEVNULL, env=os.environ) as process:
        wait_for_lines(process, output, 4)
        process.send_signal(signal.SIGKILL)
    assert process.returncode == -signal.SIGKILL
    num_before = output.read_bytes().count(b"\n")
    assert 4 <= num_before < 24
    with output.open("ab") as file:
        file.write(b'{"id": null, "index": 11, "sam')
    assert generate(models, prompts, output, *short).exit_code == 0
    drawn = json.loads((tmp_path / "texts.jsonl.settings.json").read_text())["seed"]
    assert generate(models, prompts, tmp_path / "undisturbed.jsonl", *short, "--seed", drawn).exit_code == 0
    assert texts_of(output) == texts_of(tmp_path / "undisturbed.jsonl")
    assert len(texts_of(output)) == 24
    written = output.read_bytes()
    assert generate(models, prompts, output, *short).exit_code == 0
    assert output.read_bytes() == written


# Each forward takes longer, so that there is a middle to be killed in.
START = """
import sys, time
from specens.engines.transformers.ragged_cache import RaggedCache
forward = RaggedCache.forward
def slow(self, *arguments):
    time.sleep(0.05)
    return forward(self, *arguments)
RaggedCache.forward = slow
from specens.cli.main import app
from specens.settings.jobs import derived_seed
app(["generate", *sys.argv[1:]])
"""


def wait_for_lines(process, path, count):
    deadline = time.monotonic() + 120
    while not path.exists() or path.read_bytes().count(b"\n") < count:
        assert process.poll() is None, "the run ended by itself"
        assert time.monotonic() < deadline
        time.sleep(0.005)


@pytest.mark.parametrize(
    ("error", "code", "message"),
    [
        (KeyboardInterrupt, 130, "interrupted: {} of 12 texts are written; the same command writes the others"),
        (torch.OutOfMemoryError("of the device"), 1, "out of memory (of the device): {} of 12 texts are written"),
        (MemoryError("of the host"), 1, "out of memory (of the host): {} of 12 texts are written"),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory"), 1, "perhaps with a smaller --batch-size"),
        (RuntimeError("something else"), 1, "Error: something else"),
    ],
    ids=str,
)
def test_what_is_finished_is_kept_when_a_run_breaks_off(
    monkeypatch, models, prompts, undisturbed, tmp_path, error, code, message
):
    output, forward, calls = tmp_path / "texts.jsonl", RaggedCache.forward, []

    def failing(self, *arguments):
        calls.append(1)
        if len(calls) == 150:
            raise error
        return forward(self, *arguments)

    with monkeypatch.context() as patched:
        patched.setattr(RaggedCache, "forward", failing)
        result = generate(models, prompts, output, *SEED)
    assert result.exit_code == code
    num_written = len(texts_of(output))
    assert 0 < num_written < 12
    assert message.format(num_written) in result.stderr
    assert "Traceback" not in result.stderr
    assert generate(models, prompts, output, *SEED).exit_code == 0
    assert texts_of(output) == undisturbed


def test_prompts_may_be_added_to_a_file_but_not_changed(ensemble, tmp_path):
    path, output = write_lines(tmp_path / "prompts.jsonl", LINES[:2]), tmp_path / "texts.jsonl"
    assert run(ensemble, path, output) == 4
    write_lines(path, LINES[:5])
    assert run(ensemble, path, output) == 6
    assert len(texts_of(output)) == 10
    write_lines(path, [LINES[1], *LINES[1:5]])
    with pytest.raises(ValueError, match=r"expected the 5 prompts that it was begun with; got others"):
        run(ensemble, path, output)


def run(ensemble, path, output, settings=None, seed=None):
    """How many texts were missing and are written now."""
    lines = read_prompts(path)
    texts, first = open_texts(output, lines, settings or {"temperature": 1.0}, seed)
    with texts:
        pieces = missing(texts.kept, lines, 2, first)
        write_texts(ensemble, pieces, texts.append, max_new_tokens=8)
    return len(pieces)


def test_a_run_is_not_continued_with_other_settings_or_another_seed(ensemble, prompts, tmp_path):
    output = tmp_path / "texts.jsonl"
    assert run(ensemble, prompts, output, seed=3) == 12
    with pytest.raises(ValueError, match=r"^temperature: expected 1.0, with which .* was begun; got 0.5"):
        run(ensemble, prompts, output, {"temperature": 0.5})
    with pytest.raises(ValueError, match=r"^seed: expected 3, with which .* was begun; got 4"):
        run(ensemble, prompts, output, seed=4)
    assert run(ensemble, prompts, output, seed=3) == 0
    (tmp_path / "texts.jsonl.settings.json").unlink()
    with pytest.raises(ValueError, match=r"expected a new file, or one with texts.jsonl.settings.json beside it"):
        run(ensemble, prompts, output)


def test_a_run_is_not_continued_by_another_engine(models, prompts, tmp_path, monkeypatch):
    output = tmp_path / "texts.jsonl"
    assert generate(models, prompts, output).exit_code == 0
    monkeypatch.setattr("specens.engines.loading.engine_of", lambda spec: ("llama_cpp", spec))
    refused = generate(models, prompts, output)
    assert refused.exit_code == 2
    assert "engines: expected transformers, transformers, with which" in refused.stderr


@pytest.mark.parametrize(
    ("begun", "options", "message"),
    [
        ((), ("--top-k", 5), "--top-k: expected none, with which {} was begun; got 5."),
        (("--top-k", 5), (), "--top-k: expected 5, with which {} was begun; got none."),
        ((), ("--exact",), "--exact: expected none, with which {} was begun; got --exact."),
        (("--no-chat",), (), "--chat: expected --no-chat, with which {} was begun; got none."),
        (
            ("--stop", "w1", "--stop", "w2"),
            ("--stop", "w3"),
            "--stop: expected w1, w2, with which {} was begun; got w3",
        ),
    ],
    ids=str,
)
def test_a_command_that_does_not_go_on_says_so_in_its_own_words(models, prompts, tmp_path, begun, options, message):
    output = tmp_path / "texts.jsonl"
    assert generate(models, prompts, output, *begun).exit_code == 0
    refused = generate(models, prompts, output, *options)
    assert refused.exit_code == 2
    assert refused.stderr.startswith("Error: " + message.format(output))


@pytest.mark.parametrize("content", [b'{"a": 1}\n{"b": 2}', b'{"b": 2}', b"not JSON\nat all"])
def test_a_file_of_something_else_is_left_as_it_is(models, ensemble, prompts, tmp_path, content):
    other = tmp_path / "other.jsonl"
    other.write_bytes(content)
    with pytest.raises(ValueError, match=r"expected a new file|expected JSON"):
        run(ensemble, prompts, other)
    assert other.read_bytes() == content
    result = generate(models, prompts, tmp_path / "texts.jsonl", "--trace", other)
    assert result.exit_code == 2
    assert "expected a new file for the trace" in result.stderr or "expected JSON" in result.stderr
    assert other.read_bytes() == content


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"prompt": "w1"', "line 2: expected JSON"),
        ("[1, 2]", "line 2: expected a JSON object"),
        ('{"text": "w1"}', "prompt 2: expected the fields prompt, id, .*; got 'text'"),
        ('{"id": 1}', "prompt 2: expected a field 'prompt', 'messages' or 'member_prompts', got 'id'"),
        (
            '{"prompt": "w1", "member_prompts": ["w1", "w2"]}',
            "prompt 2: expected a field 'prompt', 'messages' or 'member_prompts'",
        ),
        ('{"prompt": ["w1", "w2"]}', "prompt 2: prompt: expected text, .* got a list of 2"),
        ('{"prompt": 5}', "prompt 2: prompt: expected text, token ids or chat messages, got 5"),
        ('{"prompt": "w1", "seed": "x"}', "prompt 2: seed: expected an integer of 64 bits, got 'x'"),
        ('{"prompt": "w1", "seed": 18446744073709551616}', "prompt 2: seed: expected an integer of 64 bits, got 184"),
        ('{"prompt": "w1", "top_k": true}', "prompt 2: top_k: expected an integer, got True"),
        ('{"prompt": "w1", "weights": [1, "a"]}', r"prompt 2: weights: expected a list of numbers, got \[1, 'a'\]"),
        ('{"prompt": "w1", "weights": [0.5, 0.9]}', "prompt 2: weights: expected a sum of 1"),
        ('{"prompt": "w1", "weights": [1]}', "prompt 2: ensemble: expected .* for the 2 members"),
        ('{"prompt": "w1", "top_p": 2}', r"prompt 2: top_p: expected a number in \(0, 1\], got 2"),
        ('{"prompt": "w1", "max_new_tokens": 9999}', "prompt 2: max_new_tokens: expected at most 511"),
        ('{"prompt": [77]}', "prompt 2: prompt: expected ids < 61 for member 0, got 77"),
    ],
)
def test_a_wrong_line_is_named_before_anything_is_generated(ensemble, tmp_path, line, message):
    path = tmp_path / "prompts.jsonl"
    path.write_text(json.dumps(LINES[0]) + "\n" + line + "\n")
    with pytest.raises(ValueError, match=message):
        run(ensemble, path, tmp_path / "texts.jsonl")
    assert not (tmp_path / "texts.jsonl").exists() or (tmp_path / "texts.jsonl").read_bytes() == b""


def test_weights_of_a_line_replace_those_of_the_ensemble(tmp_path):
    line = read_prompts(write_lines(tmp_path / "prompts.jsonl", [{"prompt": "w1", "weights": [0.3, 0.7]}]))[0]
    assert line.ensemble(None) == Mixture((0.3, 0.7))
    assert line.ensemble(Mixture((0.5, 0.5), filter="members")) == Mixture((0.3, 0.7), filter="members")
    assert line.ensemble(LogitMixture((2, -1), 0.1)) == LogitMixture((0.3, 0.7), 0.1)
    with pytest.raises(ValueError, match="weights: expected none beside an ensemble of kind Contrastive"):
        line.ensemble(Contrastive(0.5))


def test_several_samples_of_one_prompt_are_lines_of_standard_output(models):
    command = ["generate", *models, "--prompt", "w5", "--stop", "w9", "--stop", "w2", "--top-p", "0.9", *OPTIONS, *SEED]
    result = CliRunner().invoke(app, [str(part) for part in command])
    assert result.exit_code == 0, result.stderr
    records = [json.loads(line) for line in result.stdout.splitlines()]
    assert sorted(record["sample"] for record in records) == [0, 1]
    assert {record["finish_reason"] for record in records} <= {"stop", "length"}
    assert not any(stop in record["text"].split() for record in records for stop in ("w9", "w2"))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--prompt", "w1"], "--prompt: expected none beside --input"),
        (["--json"], "--json: expected none beside --input, --output and --samples"),
        (["--top-k", "-5"], "--top-k: expected an integer"),
    ],
)
def test_wrong_options_are_one_clear_line(models, prompts, tmp_path, arguments, message):
    result = generate(models, prompts, tmp_path / "texts.jsonl", *arguments)
    assert result.exit_code == 2
    assert message in result.stderr
    assert generate(models, prompts, prompts).exit_code == 2
