"""The command `specens`, with tiny saved models."""

import json
import os
import subprocess
import sys

import pytest
from driver.tiny_models import save_pair, tiny_tokenizer
from specens.cli.main import app
from specens.decoding.scorer import Scorer
from specens.presets import PRESETS
from typer.testing import CliRunner

JOB = ["--prompt", "w5 w3 w8", "--max-new-tokens", "20", "--seed", "1", "--dtype", "fp32"]


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    return save_pair(tmp_path_factory.mktemp("models"))


def run(*arguments, **settings):
    return CliRunner().invoke(app, [str(argument) for argument in arguments], **settings)


@pytest.mark.parametrize("schedule", ["standard", "fixed", "alternate"])
def test_generate_prints_json_with_text_tokens_and_statistics(models, schedule):
    result = run("generate", *models, *JOB, "--schedule", schedule, "--draft-lens", "2,1", "--json")
    assert result.exit_code == 0, result.stderr
    values = json.loads(result.stdout)
    assert len(values["tokens"]) == 20
    assert values["text"] == tiny_tokenizer().decode(values["tokens"])
    assert values["schedule"] == schedule
    assert values["seed"] == 1
    assert not values["interrupted"]
    assert values["statistics"]["emitted"] == 20
    assert [event["token"] for event in values["events"]] == values["tokens"]


def test_generate_drafts_the_trees_that_were_asked_for(models, tmp_path):
    chosen = {}
    shape = tmp_path / "tree.json"
    shape.write_text("[[0], [0, 0], [1]]")
    for options in [
        ("--tree", "2,2"),
        ("--tree-nodes", "5"),
        ("--schedule", "tree"),
        ("--tree", str(shape)),
        ("--tree", "acceptance:0.5,0.2:6", "--drafter", "lookup"),
        ("--tree", "2,2:sampled", "--drafter", "jacobi"),
        ("--tree", "2,2", "--drafter", f"0,1,model:{models[1]},lookup:3"),
        ("--schedule", "standard"),
    ]:
        result = run("generate", *models, *JOB, *options, "--temperature", 0, "--json")
        assert result.exit_code == 0, result.stderr
        chosen[options] = json.loads(result.stdout)
    assert [values["schedule"] for values in chosen.values()] == ["fixed"] * 7 + ["standard"]
    assert len({tuple(values["tokens"]) for values in chosen.values()}) == 1
    drafted = [values["statistics"]["drafted"][0] / values["statistics"]["rounds"] for values in chosen.values()]
    assert 4 < drafted[0] <= 6
    assert 3 < drafted[1] <= 5
    assert 20 < drafted[2] <= 4 + 8 + 16
    assert 2 < drafted[3] <= 3
    for wrong in ("2;2", "nowhere.json", "acceptance:0.5", "2,2:all"):
        refused = run("generate", *models, *JOB, "--tree", wrong)
        assert refused.exit_code == 2
        assert "tree: expected" in refused.stderr


def test_streamed_and_unstreamed_text_are_the_text_of_the_json(models):
    text = json.loads(run("generate", *models, *JOB, "--json").stdout)["text"]
    streamed, whole = run("generate", *models, *JOB), run("generate", *models, *JOB, "--no-stream")
    assert streamed.stdout == whole.stdout == text + "\n"
    assert "20 tokens" in streamed.stderr
    assert "acceptance" in streamed.stderr


def test_options_choose_the_ensemble(models):
    texts = {
        options: json.loads(run("generate", *models, *JOB, "--json", "--temperature", 0, *options).stdout)["tokens"]
        for options in [
            (),
            ("--weights", "0.5,0.5"),
            ("--weights", "1,0"),
            ("--logit-weights", "3,-2.5"),
            ("--contrast", "0.9", "--plausibility", "0.01"),
        ]
    }
    assert texts[()] == texts[("--weights", "0.5,0.5")]
    assert len({tuple(tokens) for tokens in texts.values()}) >= 3


def test_prompts_are_one_for_each_member_or_come_from_standard_input(models):
    one = json.loads(run("generate", *models, *JOB, "--json").stdout)["tokens"]
    job = JOB[2:]
    twice = run("generate", *models, *job, "--prompt", "w5 w3 w8", "--prompt", "w5 w3 w8", "--json")
    assert json.loads(twice.stdout)["tokens"] == one
    piped = run("generate", *models, *job, "--json", input="w5 w3 w8\n")
    assert json.loads(piped.stdout)["tokens"] == one
    other = run("generate", *models, *job, "--prompt", "w5 w3 w8", "--prompt", "w9", "--json")
    assert json.loads(other.stdout)["tokens"] != one


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--weights", "1"], "--weights: expected 2 numbers, one for each of MODELS; got 1"),
        (["--weights", "a,b"], "--weights: expected numbers between commas, got 'a,b'"),
        (["--weights", "0.9,0.9"], "Error: --weights: expected a sum of 1"),
        (["--logit-weights", "inf,1"], "Error: --logit-weights: expected finite numbers"),
        (["--top-p", "2"], "Error: --top-p: expected a number in (0, 1], got 2.0"),
        (["--min-new-tokens", "21"], "Error: --min-new-tokens: expected at most max_new_tokens, 20; got 21"),
        (["--weights", "0.5,0.5", "--contrast", "1"], "expected at most one of"),
        (["--plausibility", "0.1"], "--plausibility: expected --contrast beside it"),
        (
            ["--schedule", "zigzag"],
            "Error: --schedule: expected one of standard, fixed, alternate, parallel, tree; got 'zigzag'",
        ),
        (["--draft-lens", "0"], "Error: --draft-lens: expected an integer >= 1"),
        (["--tree", "2,x"], "--tree: expected numbers of children such as 4,2,2, acceptance:"),
        (["--tree", "100,100,10"], "--tree: expected 0 to 16384 nodes, got 110100"),
        (["--tree", "2,0"], "--tree: expected a number of children from 1 to 16384 for each level, got (2, 0)"),
        (["--tree", f"{2**63}"], "--tree: expected a number of children from 1 to 16384 for each level, got (92233"),
        (["--tree", "acceptance:0.9,0.9:4"], "--tree: expected a sum of at most 1"),
        (["--tree", f"acceptance:0.5:{2**63}"], f"--tree: expected an integer of 64 bits, got {2**63}"),
        (["--tree-nodes", "0"], "--tree-nodes: expected nodes to be an integer from 1 to 16384, got 0"),
        (["--tree", "2", "--tree-nodes", "3"], "expected at most one of --tree, --tree-nodes; got both"),
        (
            ["--tree", "2", "--schedule", "parallel"],
            "--schedule: expected fixed or alternate beside --tree and --tree-nodes; got 'parallel'",
        ),
        (["--contrast", "nan"], "--contrast: expected "),
        (["--draft-lens", "confidence:2:3"], "--draft-lens: expected "),
        (["--drafter", "lookup:0"], "--drafter: expected an integer from 1 to 536870912, got 0"),
        (["--drafter", "lookahead:1"], "--drafter: expected an integer from 2 to 536870912, got 1"),
        (["--drafter", "5"], "drafter: expected the index of a member"),
        (["--temperature", "-1"], "temperature: expected a finite number >= 0, got -1.0"),
        (["--dtype", "int8"], "--dtype: expected one of fp32, bf16, fp16; got 'int8'"),
        (["--chat"], "chat: the tokenizer has no chat template"),
        (["--prompt", "w1", "--prompt", "w2"], "got 3"),
    ],
)
def test_a_wrong_argument_is_one_clear_line_and_exit_code_2(models, arguments, message):
    result = run("generate", *models, *JOB, *arguments)
    assert result.exit_code == 2
    assert result.stdout == ""
    assert result.stderr.startswith("Error: ")
    assert message in result.stderr
    assert result.stderr.count("\n") == 1


def test_a_model_that_does_not_exist_is_one_clear_line_and_exit_code_2():
    result = run("compare", "/no/such/model", "/no/such/other", *JOB)
    assert result.exit_code == 2
    assert "/no/such/model" in result.stderr
    assert result.stderr.count("\n") == 1


def test_no_prompt_is_an_error(models):
    result = run("generate", *models, input="")
    assert result.exit_code == 2
    assert "--prompt: expected a text" in result.stderr


def interrupt_forward(monkeypatch, number):
    """Let the forward of a text with this number, counted over all members, meet a Ctrl-C."""
    score, calls = Scorer.score, []

    def interrupted_score(self, requests):
        calls.append(1)
        if len(calls) == number:
            raise KeyboardInterrupt
        return score(self, requests)

    monkeypatch.setattr(Scorer, "score", interrupted_score)


@pytest.mark.parametrize("as_json", [True, False])
def test_ctrl_c_prints_what_was_generated_and_exits_with_130(monkeypatch, models, as_json):
    complete = json.loads(run("generate", *models, *JOB, "--json").stdout)["text"]
    interrupt_forward(monkeypatch, 10)
    result = run("generate", *models, *JOB, *(["--json"] if as_json else []))
    assert result.exit_code == 130
    text = json.loads(result.stdout)["text"] if as_json else result.stdout[:-1]
    assert text
    assert complete.startswith(text)
    assert text != complete
    if as_json:
        assert json.loads(result.stdout)["interrupted"]


def test_ctrl_c_while_models_load_still_prints_json(monkeypatch, models):
    def interrupted_load(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr("specens.engines.transformers.loader.load_model", interrupted_load)
    result = run("generate", *models, *JOB, "--json")
    assert result.exit_code == 130
    assert json.loads(result.stdout) == {"interrupted": True}


def test_compare_prints_a_table_and_a_finding(models):
    result = run("compare", *models, *JOB, "--repeats", 1, "--fixed-draft-len", 2, env={"COLUMNS": "80"})
    assert result.exit_code == 0, result.stderr
    for word in ("standard", "fixed 2", "alternate 1", "tokens/s", "speed-up", "ideal", "accepted", "ms/forward"):
        assert word in result.stdout
    assert "times" in result.stdout


def test_compare_takes_the_rules_of_every_schedule_only(models):
    result = run("compare", *models, *JOB, "--rule", "token,block")
    assert result.exit_code == 2
    assert result.stderr.startswith("Error: --rule: expected token, gumbel or both, which every schedule takes; got")


def test_compare_names_both_rules_in_80_columns(models):
    rules = ("--rule", "token,gumbel", "--repeats", 1, "--tree", "2,2", "--max-new-tokens", 128)
    result = run("compare", *models, *JOB, *rules, env={"COLUMNS": "80"})
    assert result.exit_code == 0, result.stderr
    heads = "schedule tokens/s speed-up ideal accepted forwards ms/forward other"
    assert result.stdout.splitlines()[0].split() == heads.split()
    assert "…" not in result.stdout
    assert all(f"{way} {rule}" in result.stdout for way in ("alternate 1", "tree 2,2") for rule in ("token", "gumbel"))
    sentences = " ".join(result.stdout.split()).split(". ")
    assert len(set(sentences)) == len(sentences)


def test_compare_shows_trees_beside_chains(models):
    for options, name in [(("--tree", "2,2"), "tree 2,2"), (("--tree-nodes", 5), "tree 5 nodes")]:
        result = run("compare", *models, *JOB, "--repeats", 1, *options, env={"COLUMNS": "80"})
        assert result.exit_code == 0, result.stderr
        assert [line for line in result.stdout.splitlines() if line.lstrip().startswith(name)]
        assert all(word in result.stdout for word in ("standard", "fixed 1", "alternate 1"))


def test_compare_prints_json(models):
    result = run("compare", *models, *JOB, "--repeats", 2, "--json")
    assert result.exit_code == 0, result.stderr
    values = json.loads(result.stdout)
    assert [row["schedule"] for row in values["rows"]] == ["standard", "fixed", "alternate"]
    assert all(len(row["runs"]) == 2 for row in values["rows"])
    assert values["findings"]


def test_compare_ends_cleanly_with_ctrl_c(monkeypatch, models):
    interrupt_forward(monkeypatch, 150)
    result = run("compare", *models, *JOB, "--repeats", 5, "--json")
    assert result.exit_code == 130
    values = json.loads(result.stdout)
    assert values["interrupted"]
    assert sum(len(row["runs"]) for row in values["rows"]) >= 1


def test_doctor_reports_versions_backends_and_hardware():
    result = run("doctor", "--json")
    assert result.exit_code == 0
    facts = {fact["name"]: fact for fact in json.loads(result.stdout)["facts"]}
    packages = {"python", "torch", "triton", "transformers", "flash-attn", "specens-kernels"}
    assert packages | {"GPU", "processor", "threads"} <= facts.keys()
    assert all(fact["value"] for fact in facts.values())
    assert facts["backend reference"]["ok"]
    unusable = [fact for fact in facts.values() if fact["ok"] is False]
    assert all(len(fact["value"]) > 5 for fact in unusable)
    assert run("doctor", env={"COLUMNS": "140"}).stdout.count("\n") > 10


def test_doctor_reports_for_an_issue_without_paths_of_the_user(monkeypatch):
    monkeypatch.setenv("SPECENS_BACKEND", "cpp")
    monkeypatch.setattr("specens.cli.doctor.chosen", lambda: os.path.expanduser("~/private"))
    report = run("doctor", "--report").stdout
    assert report.startswith("```text\n")
    assert report.endswith("```\n")
    assert "\nSPECENS_BACKEND=cpp\n" in report
    assert "~/private" in report
    assert os.path.expanduser("~/private") not in report
    refused = run("doctor", "--report", "--json")
    assert refused.exit_code == 2
    assert "--report" in refused.stderr


def test_doctor_reports_a_broken_import_instead_of_failing(monkeypatch):
    monkeypatch.setitem(sys.modules, "specens_kernels", None)
    result = run("doctor", "--json")
    assert result.exit_code == 0
    facts = {fact["name"]: fact for fact in json.loads(result.stdout)["facts"]}
    assert not facts["import specens_kernels"]["ok"]
    assert "specens_kernels" in facts["import specens_kernels"]["value"]


def test_help_does_not_wait_for_torch():
    script = "import sys, specens.cli.main; print('torch' in sys.modules or 'transformers' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"


@pytest.mark.parametrize(
    ("drafter", "draft_lens"),
    [
        ("lookup", "6"),
        ("lookup:4", "acceptance:6:0.1"),
        ("skip:0", "2"),
        ("exit:1", "confidence:0.3:4"),
        ("jacobi", "3"),
        ("lookahead:3", "3"),
        ("model:SECOND", "confidence:0.3:4"),
    ],
)
def test_generate_drafts_by_what_was_asked_for(models, drafter, draft_lens):
    expected = run("generate", models[0], *JOB, "--temperature", 0, "--schedule", "standard", "--json")
    option = drafter.replace("SECOND", models[1])
    result = run(
        "generate", models[0], *JOB, "--temperature", 0, "--drafter", option, "--draft-lens", draft_lens, "--json"
    )
    assert result.exit_code == 0, result.stderr
    values = json.loads(result.stdout)
    assert values["schedule"] == "fixed"
    assert values["tokens"] == json.loads(expected.stdout)["tokens"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--drafter", "oracle"], "--drafter: expected the number of a member, model:MODEL"),
        (["--drafter", "skip:"], "--drafter: expected the number of a member, model:MODEL"),
        (["--draft-lens", "confidence:x"], "--draft-lens: expected confidence:THRESHOLD:MOST, got 'confidence:x'"),
        (["--draft-lens", "acceptance:3"], "--draft-lens: expected acceptance:MOST:COST, got 'acceptance:3'"),
    ],
    ids=lambda value: value if isinstance(value, str) else value[-1],
)
def test_wrong_drafters_are_named(models, options, message):
    result = run("generate", *models, *JOB, *options)
    assert result.exit_code == 2
    assert message in result.stderr


def test_methods_lists_every_preset():
    result = run("methods", "--json")
    values = json.loads(result.stdout)
    assert set(values) == set(PRESETS)
    assert values["recursive-speculative-decoding"]["topology"] == "static tree"
    assert values["medusa-heads"]["leaves_out"].startswith("the tree of the heads' candidates")
    table = run("methods", env={"COLUMNS": "80"})
    assert table.exit_code == 0
    assert all(name in table.stdout for name in PRESETS)
    assert "leaves out: the training of draft models that complete each other" in " ".join(table.stdout.split())
