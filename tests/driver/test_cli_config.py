"""The options --config, --save-config and --preset, and what a shell completes."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import specens.presets
import typer
from driver.tiny_models import save_pair
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from specens import SpeculativeEnsemble
from specens.cli import config
from specens.cli.main import app
from specens.cli.models import check_beside_preset
from typer.testing import CliRunner

COMMANDS = {name: typer.main.get_command(app).commands[name] for name in ("generate", "chat", "compare", "plan")}
TEXT = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), min_size=1)
NAME = st.text("abc0-_ 'é", min_size=1)
VALUES = {int: st.integers(1, 2**70), float: st.floats(allow_nan=False), Path: NAME}
JOB = ["--prompt", "w5 w3", "--max-new-tokens", "8", "--seed", "1", "--dtype", "fp32"]


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    return save_pair(tmp_path_factory.mktemp("models"))


def run(*arguments, **settings):
    return CliRunner().invoke(app, [str(argument) for argument in arguments], **settings)


def refused(*arguments):
    """The one line that a wrong call prints."""
    result = run(*arguments)
    assert (result.exit_code, result.stdout) == (2, ""), result.stderr
    assert result.stderr.startswith("Error: ")
    assert result.stderr.count("\n") == 1
    return result.stderr


@st.composite
def calls(draw):
    """A command, and arguments with any of its options."""
    name = draw(st.sampled_from(sorted(COMMANDS)))
    arguments = []
    kinds = config.types_of(COMMANDS[name])
    for parameter in COMMANDS[name].params:
        if parameter.name in kinds and parameter.nargs == 1 and draw(st.booleans()):
            kind = kinds[parameter.name]
            if kind is bool:
                arguments.append(draw(st.sampled_from([*parameter.opts, *parameter.secondary_opts])))
                continue
            number = draw(st.integers(1, 3)) if kind == list[str] else 1
            arguments += [f"{parameter.opts[0]}={draw(VALUES.get(kind, TEXT))}" for _ in range(number)]
    return name, [*arguments, "--", *draw(st.lists(TEXT, min_size=1, max_size=3))]


def parsed(name, arguments):
    context = COMMANDS[name].make_context(name, list(arguments))
    return context, {key: value for key, value in context.params.items() if key not in config.OF_THIS_CALL}


@pytest.mark.parametrize("ending", ["toml", "yaml"])
@given(call=calls())
@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
def test_any_call_comes_back_from_the_file_that_it_is_saved_in(tmp_path_factory, ending, call):
    name, arguments = call
    path = tmp_path_factory.getbasetemp() / f"call.{ending}"
    context, values = parsed(name, [f"--save-config={path}", *arguments])
    config.save_config(context)
    again = COMMANDS[name].make_context(name, [f"--config={path}"])
    assert {key: again.params[key] for key in values} == values
    given_names = {key for key in values if again.get_parameter_source(key).name != "DEFAULT"}
    assert given_names == {key for key in values if context.get_parameter_source(key).name == "COMMANDLINE"}


def test_every_option_of_a_call_is_one_of_its_config_or_of_the_call_itself():
    for command in COMMANDS.values():
        assert {"config", "save_config"} <= {parameter.name for parameter in command.params}
        for parameter in command.params:
            assert "--" + parameter.name.replace("_", "-") in parameter.opts or parameter.nargs == -1


@pytest.mark.parametrize("ending", ["toml", "yml"])
def test_a_saved_call_is_repeated_and_options_beside_it_win(models, tmp_path, ending):
    saved = tmp_path / f"call.{ending}"
    first = run("generate", *models, *JOB, "--weights", "1,0", "--top-k", 5, "--json", "--save-config", saved)
    assert first.exit_code == 0, first.stderr
    again = run("generate", "--config", saved)
    tokens = json.loads(first.stdout)["tokens"]
    assert json.loads(again.stdout)["tokens"] == tokens
    shorter = run("generate", "--config", saved, "--max-new-tokens", 3, "--prompt", "w5 w3")
    assert json.loads(shorter.stdout)["tokens"] == tokens[:3]
    other = run("generate", "--config", saved, "--seed", 2)
    assert json.loads(other.stdout)["tokens"] != tokens


def test_a_file_may_use_underscores_lists_and_numbers(models, tmp_path):
    path = tmp_path / "call.toml"
    path.write_text(
        f"models = {json.dumps([str(model) for model in models])}\nprompt = 'w5 w3'\nmax_new_tokens = 4\nseed = 1\n"
        "draft-lens = [2, 1]\nweights = [0.5, 0.5]\ntemperature = 0\ndtype = 'fp32'\njson = true\n"
        "stop-strings = 'w99'\n"
    )
    result = run("generate", "--config", path)
    assert result.exit_code == 0, result.stderr
    assert len(json.loads(result.stdout)["tokens"]) == 4


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.toml", "temprature = 1", "no setting temprature of specens generate; it has models, preset, weights, "),
        ("a.yaml", "config: other.toml", "no setting config of specens generate"),
        ("a.toml", "top_k = 1\ntop-k = 2", "expected top-k once, got it twice"),
        ("a.yaml", "top_k: 1\ntop_k: 2", "expected top_k once, got it twice"),
        ("a.toml", "top_k = 1.5", "top-k: expected an integer, got 1.5"),
        ("a.yaml", "top_k: yes", "top-k: expected an integer, got True"),
        ("a.yaml", "chat: 1", "chat: expected true or false, got 1"),
        ("a.yaml", "prompt: [a, 1]", "prompt: expected a text or a list of texts, got ['a', 1]"),
        ("a.yaml", "weights: {a: 1}", "weights: expected a text, a number or a list of numbers, got [{'a': 1}]"),
        ("a.toml", "top_k = ", "a.toml: Invalid value"),
        ("a.yaml", "a: [", "a.yaml: while parsing"),
        ("a.yaml", "- a", "expected option: value, one a line"),
        ("a.json", "{}", "--config: expected a name that ends in .toml, .yaml or .yml"),
    ],
)
def test_a_file_that_says_something_else_is_one_clear_line(tmp_path, name, text, message):
    (tmp_path / name).write_text(text)
    line = refused("generate", "model", "--config", tmp_path / name)
    assert message in line
    assert str(tmp_path / name) in line


def test_a_file_that_is_not_there_or_cannot_be_written_is_one_clear_line(models, tmp_path):
    assert "is not there" in refused("generate", "model", "--config", tmp_path / "none.toml")
    assert "--save-config: expected a name" in refused("generate", *models, *JOB, "--save-config", tmp_path / "a.txt")
    refused(
        "generate", *models, *JOB, "--schedule", "zigzag", "--draft-lens", "x", "--save-config", tmp_path / "a.toml"
    )
    assert not list(tmp_path.iterdir())


def test_a_preset_is_the_method_of_that_name(models):
    job = [*models, *JOB, "--temperature", 0, "--json"]
    preset = json.loads(run("generate", *job, "--preset", "speculative-decoding", "--draft-lens", 3).stdout)
    by_hand = run("generate", *job, "--schedule", "fixed", "--weights", "1,0", "--drafter", 1, "--draft-lens", 3)
    for values in (preset, by_hand := json.loads(by_hand.stdout)):
        del values["statistics"]["seconds"]
    assert preset["tokens"] == by_hand["tokens"]
    assert preset["statistics"]["drafted"] == by_hand["statistics"]["drafted"]
    other = run("generate", models[0], *JOB, "--preset", "medusa", "--drafter", "lookup")
    contradiction = "--drafter: expected none that contradicts --preset medusa (extra heads: Heads(...)), got lookup"
    assert contradiction in other.stderr
    needed = run("generate", models[0], *JOB, "--json", "--preset", "early-exit", "--drafter", "exit:1")
    assert needed.exit_code == 0, needed.stderr


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("nothing", (), "preset: expected one of speculative-decoding, "),
        ("guidance", ("--contrast", ".1"), "--contrast: expected none that contradicts --preset guidance"),
        ("experts", (), "members: expected model, expert, anti-expert for experts, got 2 of them"),
        (
            "speculative-decoding",
            ("--rule", "block"),
            "--rule: expected none that contradicts --preset speculative-dec",
        ),
        ("speculative-decoding", ("--tree", "2,2"), "--tree: expected none that contradicts --preset"),
        ("speculative-decoding", ("--weights", "0,1"), "--weights: expected none that contradicts --preset"),
        ("dynamic-trees", ("--tree-nodes", "3"), "--tree-nodes: expected none that contradicts --preset dynamic-trees"),
        ("confident-drafts", ("--draft-lens", "3"), "--draft-lens: expected none that contradicts --preset confident"),
        ("sequoia", (), "--tree: expected one beside --preset sequoia (the best shape for measured acceptance"),
        ("cosd-tree", ("--rule", "token"), "--rule: expected none that contradicts --preset cosd-tree (decision tree)"),
        ("cosd-tree", (), "is given in Python: SpeculativeEnsemble.from_preset('cosd-tree', members, rule=...)"),
        ("speculative-ensemble", ("--logit-weights", "1,1"), "--logit-weights: expected none that contradicts"),
    ],
)
def test_what_contradicts_a_preset_is_one_clear_line_with_both_names(models, name, options, message):
    assert message in refused("generate", *models, *JOB, "--preset", name, *options)


@pytest.mark.parametrize("name", specens.presets.PRESETS)
def test_what_a_preset_chooses_does_not_contradict_it(name):
    method = specens.presets.PRESETS[name]
    num_members = len(method.members)
    own = method.settings_under(None, num_members)
    needed = {} if method.needs is None else {method.needs: object.__new__((*method.needs_one_of, object)[0])}
    check_beside_preset(name, num_members, own | needed)
    if method.needs_one_of:
        with pytest.raises(ValueError, match=f"--{method.needs}: expected none that contradicts --preset {name} "):
            check_beside_preset(name, num_members, own | {method.needs: 0})


@pytest.mark.parametrize(("name", "schedule"), [("specinfer", "alternate"), ("block-verification", "standard")])
def test_a_preset_runs_under_another_schedule_as_in_python(models, name, schedule):
    job = [*models, *JOB, "--temperature", 0, "--json", "--preset", name]
    values = json.loads(run("generate", *job, "--schedule", schedule).stdout)
    ensemble = SpeculativeEnsemble.from_preset(name, models, schedule=schedule)
    text = ensemble.generate(JOB[1], max_new_tokens=len(values["tokens"]), temperature=0.0, chat=False, stop_tokens=())
    assert values["schedule"] == schedule
    assert values["tokens"] == text.tokens
    assert values["statistics"]["drafted"] == text.statistics.drafted
    contrary = ("--schedule", schedule, "--logit-weights", "1,1")
    assert "--logit-weights: expected none that contradicts" in refused("generate", *job, *contrary)


def test_compare_shows_a_preset_beside_standard(models):
    job = [*models, *JOB[2:], "--repeats", 1, "--json", "--preset"]
    rows = json.loads(run("compare", *job, "block-verification").stdout)["rows"]
    assert [(row["schedule"], row["rule"]) for row in rows] == [("standard", "token"), ("fixed", "block")]
    assert "expected one that speculates" in refused("compare", *job, "guidance")
    assert "--fixed-draft-len: expected --draft-lens" in refused("compare", *job, "cosd", "--fixed-draft-len", 2)


def test_a_shell_completes_commands_options_and_presets():
    for words, expected in (("specens ge", "generate"), ("specens chat --sys", "--system")):
        environment = os.environ | {
            "_SPECENS_COMPLETE": "complete_bash",
            "COMP_WORDS": words,
            "COMP_CWORD": str(words.count(" ")),
        }
        done = subprocess.run(
            [sys.executable, "-m", "specens"], env=environment, capture_output=True, text=True, check=False
        )
        assert done.stdout.split() == [expected], done.stderr
    preset = next(one for one in COMMANDS["generate"].params if one.name == "preset")
    context = COMMANDS["generate"].make_context("generate", ["model"])
    assert [item.value for item in preset.shell_complete(context, "self-")] == ["self-speculation"]


def test_a_saved_call_reads_like_its_options(tmp_path):
    context, _ = parsed("generate", ["model", "--input", Path("a") / "b", "--save-config", str(tmp_path / "a.yaml")])
    config.save_config(context)
    assert (tmp_path / "a.yaml").read_text() == f'models: ["model"]\ninput: "{Path("a") / "b"}"\n'
