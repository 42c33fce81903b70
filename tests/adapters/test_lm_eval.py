"""lm-evaluation-harness: a local task on local data, under the ensemble, by speculation."""

from __future__ import annotations

import json
import re
import shlex
import sys
from functools import partial
from pathlib import Path

import pytest
import torch
from driver.tiny_models import relative_of, tiny_llama, tiny_tokenizer

from specens_kernels import Contrastive, Mixture, target_logprobs

lm_eval = pytest.importorskip("lm_eval", reason="lm-eval is not installed: pip install 'specens-kernels[evaluation]'")

from lm_eval.__main__ import cli_evaluate  # noqa: E402
from lm_eval.tasks import TaskManager  # noqa: E402
from specens import SpeculativeEnsemble  # noqa: E402
from specens.adapters.lm_eval import SpeculativeLM  # noqa: E402

FIRST = tiny_llama(0)
SECOND = relative_of(FIRST, 1, noise=0.2)
TOKENIZER = tiny_tokenizer(bos_token="w0")
MIXTURE = Mixture((0.7, 0.3))
CHOICE = {
    "task": "choice",
    "dataset_path": "json",
    "output_type": "multiple_choice",
    "test_split": "test",
    "doc_to_text": "{{question}}",
    "doc_to_choice": "{{choices}}",
    "doc_to_target": "{{answer}}",
    "metric_list": [{"metric": "acc"}],
}
ANSWER = {
    "task": "answer",
    "dataset_path": "json",
    "output_type": "generate_until",
    "test_split": "test",
    "doc_to_text": "{{question}}",
    "doc_to_target": "{{target}}",
    "generation_kwargs": {"until": ["w5"], "max_gen_toks": 9, "do_sample": False},
    "metric_list": [{"metric": "exact_match"}],
}


def ensemble(**settings):
    return SpeculativeEnsemble([FIRST, SECOND], TOKENIZER, MIXTURE, **settings)


def law(text, mixture=MIXTURE):
    """Log-probabilities of what follows each token of a text."""
    ids = torch.tensor([TOKENIZER(text).input_ids])
    with torch.inference_mode():
        rows = [model(ids).logits for model in (FIRST, SECOND)]
    return target_logprobs(rows, ensemble=mixture)[0], ids[0]


def instances(kind, *arguments):
    from lm_eval.api.instance import Instance

    return [Instance(kind, {}, argument, index) for index, argument in enumerate(arguments)]


@pytest.mark.parametrize("batch_size", [1, 3])
def test_log_likelihoods_are_those_of_the_ensemble(batch_size):
    model = SpeculativeLM(ensemble=ensemble(), batch_size=batch_size)
    pairs = [("w1 w2", " w3"), ("w4 w2", " w9"), ("w1", " w2 w7 w3"), ("w6 w3 w2 w2", " w8"), ("", "w3 w4")]
    found = model.loglikelihood(instances("loglikelihood", *pairs))
    for (context, continuation), (score, is_greedy) in zip(pairs, found, strict=True):
        logprobs, ids = law((context or "w0") + " " + continuation)
        start = len(TOKENIZER(context or "w0").input_ids)
        scored = ids[start:]
        rows = logprobs[start - 1 : -1]
        assert score == pytest.approx(float(rows.gather(-1, scored[:, None]).sum()), abs=1e-4)
        assert is_greedy == bool((rows.argmax(-1) == scored).all())


def test_the_greedy_continuation_is_told_as_such():
    model = SpeculativeLM(ensemble=ensemble())
    text = ensemble().generate("w1 w2", temperature=0.0, max_new_tokens=3, generation_config="none").text
    ((_, is_greedy),) = model.loglikelihood(instances("loglikelihood", ("w1 w2", " " + text)))
    assert is_greedy


def test_a_rolling_log_likelihood_scores_each_token_once_in_windows():
    whole, windows = (SpeculativeLM(ensemble=ensemble(), max_length=length) for length in (64, 4))
    text = " ".join(f"w{index % 7 + 1}" for index in range(11))
    logprobs, ids = law("w0 " + text)
    (score,) = whole.loglikelihood_rolling(instances("loglikelihood_rolling", (text,)))
    assert score == pytest.approx(float(logprobs[:-1].gather(-1, ids[1:, None]).sum()), abs=1e-4)
    (in_windows,) = windows.loglikelihood_rolling(instances("loglikelihood_rolling", (text,)))
    assert in_windows < 0
    assert in_windows != pytest.approx(score)


def test_a_context_that_is_too_long_loses_its_beginning():
    model = SpeculativeLM(ensemble=ensemble(), max_length=6)
    long = " ".join(["w3"] * 20)
    (text,) = model.generate_until(instances("generate_until", (long, {"until": [], "max_gen_toks": 3})))
    expected = ensemble().generate([3, 3, 3], max_new_tokens=3, temperature=0.0, generation_config="none").text
    assert text == expected
    (score, _), (cut, _) = model.loglikelihood(instances("loglikelihood", (long, " w1"), (" ".join(["w3"] * 6), " w1")))
    assert score == pytest.approx(cut, abs=1e-5)


def test_a_local_task_runs_from_model_args(tmp_path):
    for name, model in (("one", FIRST), ("two", SECOND)):
        model.save_pretrained(tmp_path / name)
        TOKENIZER.save_pretrained(tmp_path / name)
    pair = ensemble()
    settings = {"temperature": 0.0, "max_new_tokens": 9, "stop": ["w5"], "generation_config": "none"}
    lines = []
    for question in ("w1 w2 w3", "w9 w4", "w7 w7 w8"):
        logprobs, _ = law(question)
        choices = ["w11", "w22", "w33"]
        best = max(range(3), key=lambda index: float(logprobs[-1, int(choices[index][1:])]))
        target = pair.generate(question, **settings).text
        lines.append({"question": question, "choices": choices, "answer": best, "target": target})
    data = tmp_path / "test.jsonl"
    data.write_text("\n".join(map(json.dumps, lines)))
    tasks = [task | {"dataset_kwargs": {"data_files": {"test": str(data)}}} for task in (CHOICE, ANSWER)]
    members, attention = f"{tmp_path / 'one'};{tmp_path / 'two'}", '{"attn_implementation": "eager"}'
    found = lm_eval.simple_evaluate(
        model="specens",
        model_args=f"members={members},weights=.7;.3,dtype=fp32,draft_lens=2,model_kwargs={attention}",
        tasks=tasks,
        batch_size=2,
        bootstrap_iters=0,
        task_manager=TaskManager(include_defaults=False),
    )["results"]
    assert found["choice"]["acc,none"] == 1.0
    assert found["answer"]["exact_match,none"] == 1.0


PAGE = (Path(__file__).parents[2] / "docs" / "howto" / "evaluation.md").read_text()
ARC = {"question": "w6", "choices": {"text": ["w4", "w8"], "label": ["A", "B"]}, "answerKey": "B"}
DATA = {  # what the tasks of the page ask for, by folder, configuration and split
    ("openai/gsm8k", "main", "train"): [{"question": f"w{index} w1", "answer": "w3 #### 4"} for index in range(6)],
    ("openai/gsm8k", "main", "test"): [{"question": "w2 w9", "answer": "w7 #### 5"}],
    **{("allenai/ai2_arc", "ARC-Easy", split): [ARC] for split in ("train", "validation", "test")},
}


def test_the_command_of_the_page_runs_as_pasted(tmp_path, monkeypatch, capsys):
    for name, model in (("MODEL", FIRST), ("OTHER", SECOND)):
        model.save_pretrained(tmp_path / name)
        TOKENIZER.save_pretrained(tmp_path / name)
    for (folder, configuration, split), rows in DATA.items():
        data = tmp_path / folder / configuration
        data.mkdir(parents=True, exist_ok=True)
        (data / f"{split}.jsonl").write_text("\n".join(map(json.dumps, rows)))
        files = "".join(f"\n  - {{split: {path.stem}, path: {configuration}/{path.name}}}" for path in data.iterdir())
        head = f"configs:\n- config_name: {configuration}\n  data_files:{files}"
        (tmp_path / folder / "README.md").write_text(f"---\n{head}\n---\n")
    command = re.search(r"^```bash\n(python .*?)^```$", PAGE, re.DOTALL | re.MULTILINE)[1]
    python, *words = shlex.split(command.replace("\\\n", ""))
    assert [python, *words[:2]] == ["python", "-m", "specens.adapters.lm_eval"]
    assert "without a GPU add `--device cpu`" in PAGE
    device = [] if torch.cuda.is_available() else ["--device", "cpu"]
    tasks = [str(Path(lm_eval.__file__).parent / "tasks" / name) for name in ("gsm8k", "arc")]  # to read all takes long
    few = partial(TaskManager, include_defaults=False)
    monkeypatch.setattr("lm_eval.tasks.TaskManager", lambda *_, **__: few(include_path=tasks))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["lm_eval", *words[2:], *device])
    cli_evaluate()
    printed = capsys.readouterr().out
    assert re.search(r"^\|arc_easy *\|.*\|acc +\|", printed, re.M)
    assert re.search(r"^\|gsm8k *\|.*\|exact_match\|", printed, re.M)


def test_arguments_of_from_pretrained_are_a_mapping_or_json(tmp_path):
    FIRST.save_pretrained(tmp_path)
    TOKENIZER.save_pretrained(tmp_path)
    for own in ({"attn_implementation": "eager"}, '{"attn_implementation": "eager"}'):
        (member,) = SpeculativeLM(str(tmp_path), dtype="fp32", device="cpu", model_kwargs=own).ensemble.models
        assert member.model.config._attn_implementation == "eager"
    with pytest.raises(ValueError, match=r"--model-kwargs: expected a JSON object such as .*; got 'eager'"):
        SpeculativeLM(str(tmp_path), model_kwargs="eager")


def test_wrong_arguments_are_named():
    model = SpeculativeLM(ensemble=ensemble())
    with pytest.raises(ValueError, match=r"gen_kwargs: expected some of .*; got beams"):
        model.generate_until(instances("generate_until", ("w1", {"beams": 3})))
    with pytest.raises(ValueError, match="batch_size: expected an integer >= 1"):
        SpeculativeLM(ensemble=ensemble(), batch_size="auto")
    contrast = SpeculativeLM(ensemble=SpeculativeEnsemble([FIRST, SECOND], TOKENIZER, Contrastive(0.2, 0.1)))
    ((score, _),) = contrast.loglikelihood(instances("loglikelihood", ("w1 w2", " w3")))
    assert score == pytest.approx(float(law("w1 w2", Contrastive(0.2, 0.1))[0][-1, 3]), abs=1e-4)
