"""Texts by workers are those of one process, whatever is lost on the way, and whatever fails."""

from __future__ import annotations

import itertools
import json
import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor, wait

import pytest
import ray
import torch
from driver.tiny_models import relative_of, save_pair, tiny_llama
from specens import Job, SpeculativeEnsemble
from specens.cli.main import app
from specens.engines.ray import share_of_gpus
from specens.files.workers import Workers
from typer.testing import CliRunner

pytestmark = pytest.mark.usefixtures("cluster")
PROMPTS = [[5, 3, 8], [1], [9, 2], Job([2, 2], seed=7, max_new_tokens=3), [4, 4, 1], [3], [8, 8], [6]]
JOB = {"batch_size": 2, "samples": 2, "max_new_tokens": 12, "seed": 5}
LINES = [{"prompt": f"w{index} w3", "id": index} for index in range(1, 9)] + [{"prompt": "w2", "temperature": 0}]


def make():
    torch.set_num_threads(1)
    first = tiny_llama(0)
    return SpeculativeEnsemble([first, relative_of(first, 1, noise=0.2)], schedule="fixed", draft_lens=3)


def no_good(ids, scores):
    """A logits processor that fails in the middle of the texts after one prompt."""
    if ids[0, 0] == 9 and ids.shape[1] > 5:
        raise ZeroDivisionError("a fault of the caller's")
    return scores


@pytest.fixture(scope="module")
def workers(cluster):  # noqa: ARG001
    return Workers(make, 2)


@pytest.fixture(scope="module")
def expected():
    return texts_of(make().generate_many(PROMPTS, **JOB))


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    return save_pair(tmp_path_factory.mktemp("models"))


def texts_of(generations):
    found = [((text.index, text.sample), (text.tokens, text.seed)) for text in generations]
    assert len(dict(found)) == len(found)
    return dict(found)


def process_of(worker):
    return ray.get(worker.actor.ask.remote(lambda _: os.getpid()))


def test_texts_and_rounds_are_those_of_one_process(workers, expected):
    rounds, plain = [], []
    assert texts_of(workers.generate_many(PROMPTS, on_round=rounds.append, **JOB)) == expected
    list(make().generate_many(PROMPTS, on_round=plain.append, **JOB))
    keys = [[(one.index, one.sample, one.number) for one in own] for own in (rounds, plain)]
    assert sorted(keys[0]) == sorted(keys[1])
    assert workers.ask(lambda ensemble: ensemble.schedule_name) == "fixed"


def test_a_worker_that_is_killed_loses_nothing(workers, expected):
    victims = [process_of(worker) for worker in workers._workers]
    found = {}
    for text in workers.generate_many(PROMPTS, **JOB):
        found[text.index, text.sample] = text.tokens, text.seed
        if len(found) in (2, 7) and victims:
            os.kill(victims.pop(), signal.SIGKILL)
    assert not victims
    assert found == expected
    assert texts_of(workers.generate_many(PROMPTS[:2], **JOB)).items() <= expected.items()


def test_a_text_that_fails_does_so_alone(workers, expected):
    errors = []
    processors = {"logits_processors": [no_good]}
    prompts = [*PROMPTS, Job([1], temperature=-1.0)]
    found = texts_of(workers.generate_many(prompts, on_error=lambda *own: errors.append(own), **JOB, **processors))
    assert found == {key: text for key, text in expected.items() if key[0] != 2}
    errors.sort(key=lambda own: own[:2])
    assert [own[:2] for own in errors] == [(2, 0), (2, 1), (8, 0), (8, 1)]
    assert str(errors[0][2]) == "ZeroDivisionError: a fault of the caller's"
    assert isinstance(errors[2][2], ValueError)
    with pytest.raises(RuntimeError, match="a fault of the caller's"):
        list(workers.generate_many(prompts, **JOB, **processors))


def test_a_text_that_ends_its_worker_twice_fails_alone(expected):
    def deadly(ids, scores):
        return os._exit(1) if ids[0, 0] == 9 else scores

    workers, errors = Workers(make, 1), []
    how = {"on_error": lambda *own: errors.append(own), "logits_processors": [deadly]}
    found = texts_of(workers.generate_many(PROMPTS, **how, **JOB | {"samples": 1}))
    assert found == {key: text for key, text in expected.items() if key[0] != 2 and key[1] == 0}
    assert [own[:2] for own in errors] == [(2, 0)]
    assert str(errors[0][2]).startswith("a worker was lost with this text, twice")
    workers.close()


def test_prompts_without_an_end_are_taken_as_places_are_free_and_let_go(workers, expected):
    taken = []

    def endless():
        for number in itertools.count():
            taken.append(number)
            yield PROMPTS[number % 2]

    texts = workers.generate_many(endless(), **JOB | {"samples": 1})
    first = next(texts)
    assert first.tokens == expected[first.index, 0][0] or first.index > 1
    texts.close()
    assert len(taken) < 20
    assert texts_of(workers.generate_many(PROMPTS, **JOB)) == expected


def test_what_is_wrong_is_raised_as_in_one_process(workers):
    with pytest.raises(ValueError, match="batch_size: expected an integer >= 1, got 0"):
        workers.generate_many(PROMPTS, batch_size=0)
    with pytest.raises(TypeError, match="warmth: no such setting"):
        list(workers.generate_many(PROMPTS, warmth=1))
    with pytest.raises(ValueError, match="num_workers: expected an integer >= 1, got 0"):
        Workers(make, 0)
    with pytest.raises(ValueError, match="members: expected a list"):
        Workers(lambda: SpeculativeEnsemble([]), 1).ask(bool)

    class HubError(Exception):
        def __init__(self, message, *, response):  # noqa: ARG002
            super().__init__(message)

    def fail(_):
        raise HubError("no such model", response=404)  # pickle does not know the response

    with pytest.raises(RuntimeError, match="no such model"):
        workers.ask(fail)


def test_workers_that_are_lost_again_and_again_end_the_call(monkeypatch):
    monkeypatch.setattr("specens.files.workers.LIVES", 2)

    def deadly(ids, scores):  # noqa: ARG001
        os._exit(1)

    workers = Workers(make, 1)
    for settings in ({"logits_processors": [deadly]}, {}):
        with pytest.raises(RuntimeError, match="all workers were lost again and again"):
            list(workers.generate_many(PROMPTS, **JOB, **settings))
    with pytest.raises(RuntimeError, match="all workers were lost again and again"):
        workers.ask(bool)


def test_a_worker_that_is_killed_before_it_is_given_anything_loses_nothing(tmp_path, expected):
    def make_at_the_second_time():
        if not (tmp_path / "loaded").exists():
            (tmp_path / "loaded").touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return make()

    workers = Workers(make_at_the_second_time, 1)
    assert texts_of(workers.generate_many(PROMPTS, **JOB)) == expected
    os.kill(process_of(workers._workers[0]), signal.SIGKILL)
    assert texts_of(workers.generate_many(PROMPTS[:2], **JOB)).items() <= expected.items()
    os.kill(process_of(workers._workers[0]), signal.SIGKILL)
    assert workers.ask(lambda ensemble: ensemble.schedule_name) == "fixed"
    workers.close()
    with pytest.raises(RuntimeError, match="the workers are closed"):
        list(workers.generate_many(PROMPTS, **JOB))


def test_a_worker_that_finds_no_place_is_not_waited_for_once_all_is_written(expected):
    workers = Workers(make, 2, options={"num_cpus": 2})  # all that there are
    assert texts_of(workers.generate_many(PROMPTS, **JOB)) == expected


def test_it_is_said_where_workers_do_not_begin(monkeypatch, caplog):
    monkeypatch.setattr("specens.files.workers.PLACEMENT_TIMEOUT", 0.5)
    waiting = Workers(make, 1, options={"resources": {"moon": 1}})
    with ThreadPoolExecutor() as threads:
        asked = threads.submit(waiting.ask, bool)
        wait([asked], timeout=2)
        waiting.close()
        with pytest.raises(RuntimeError, match="the workers are closed"):
            asked.result()
    assert "it loads or Ray has no place; each asks for resources {'moon': 1}, free are" in caplog.text


def test_workers_write_the_texts_of_one_call_at_a_time(workers, expected):
    texts = workers.generate_many(PROMPTS, **JOB)
    next(texts)
    with pytest.raises(RuntimeError, match="expected all texts of the call before to be taken, or it to be closed"):
        next(workers.generate_many(PROMPTS, **JOB))
    assert len(list(texts)) == len(expected) - 1
    assert texts_of(workers.generate_many(PROMPTS, **JOB)) == expected


def test_gpus_are_shared_evenly_where_there_are_fewer_than_workers():
    assert [share_of_gpus(count) for count in (1, 3, 4, 7)] == [1, 1, 1 / 2, 1 / 3]


def command(models, folder, *arguments):
    prompts = folder / "prompts.jsonl"
    prompts.write_text("".join(json.dumps(line) + "\n" for line in LINES))
    own = ["generate", *models, "--input", prompts, "--max-new-tokens", 20, "--dtype", "fp32", "--device", "cpu"]
    return [str(part) for part in [*own, "--seed", 3, "--samples", 2, "--batch-size", 2, *arguments]]


def lines_of(path):
    records = [json.loads(line) for line in path.read_text().splitlines()]
    return {(record["index"], record["sample"]): (record["id"], record["text"], record["seed"]) for record in records}


def test_the_command_writes_the_same_file_goes_on_after_a_kill_and_traces(models, tmp_path):
    alone = CliRunner().invoke(app, command(models, tmp_path, "--output", tmp_path / "alone.jsonl"))
    assert alone.exit_code == 0, alone.stderr
    output, trace = tmp_path / "texts.jsonl", tmp_path / "trace.jsonl"
    own = command(models, tmp_path, "--output", output, "--workers", 2)
    address = {"RAY_ADDRESS": ray.get_runtime_context().gcs_address}
    call = [sys.executable, "-m", "specens", *own]
    with subprocess.Popen(call, stderr=subprocess.PIPE, env=os.environ | address) as process:
        while not output.exists() or output.read_bytes().count(b"\n") < 3:
            assert process.poll() is None, process.stderr.read()
            time.sleep(0.005)
        process.kill()
    assert 3 <= len(lines_of(output)) < 18
    result = CliRunner().invoke(app, [*own, "--trace", str(trace)])
    assert result.exit_code == 0, result.stderr
    assert lines_of(output) == lines_of(tmp_path / "alone.jsonl")
    assert "18 texts, " in result.stderr
    assert '"line": "text"' in trace.read_text()


def test_the_command_refuses_what_workers_are_not_for(models, tmp_path):
    result = CliRunner().invoke(app, ["generate", *models, "--prompt", "w1", "--workers", "2"])
    assert result.exit_code == 2
    assert "--workers: expected --input, --output or --samples beside it" in result.stderr
    wrong = CliRunner().invoke(app, command(models, tmp_path, "--workers", 1, "--top-k", 3, "--drafter", 5))
    assert wrong.exit_code == 2
    assert "drafter: expected the index of a member" in wrong.stderr
