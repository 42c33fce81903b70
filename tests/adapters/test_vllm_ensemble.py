"""What configs and requests say of an ensemble inside vLLM, and its folder; runs without vLLM."""

import json
from pathlib import Path

import pytest
import torch
from driver.tiny_models import save_pair
from specens.adapters.vllm import ensemble_folder, v2
from specens.adapters.vllm.arguments import Target, seeds_of
from specens.adapters.vllm.ensemble_settings import EnsembleSettings
from specens.cli.main import app
from specens.engines.transformers.load import ModelSource
from transformers import AutoConfig, AutoTokenizer
from typer.testing import CliRunner

from specens_kernels import Contrastive, LogitMixture, Mixture

PAIR = {"members": ["a", "b"]}


@pytest.mark.parametrize(
    ("ensemble", "entry"),
    [
        (None, {"kind": "mixture", "weights": [0.5, 0.5]}),
        (Mixture((0.2, 0.8), "members"), {"kind": "mixture", "weights": [0.2, 0.8], "filter": "members"}),
        (LogitMixture((1.5, -0.5)), {"kind": "logit_mixture", "weights": [1.5, -0.5]}),
        (Contrastive(0.3, 0.1), {"kind": "contrastive", "amateur_weight": 0.3, "plausibility": 0.1}),
    ],
)
def test_an_ensemble_is_what_its_entry_says(ensemble, entry):
    settings = EnsembleSettings.of_ensemble(["a", "b"], ensemble)
    assert settings.to_config() == PAIR | entry
    assert EnsembleSettings.of_config(PAIR | entry) == settings
    assert settings.ensemble() == (ensemble or Mixture((0.5, 0.5)))


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        (None, "specens: expected an object with members, kind, weights .* got None"),
        ({"members": ["a"]}, r"specens.members: expected two folders or names of models, or more, got \['a'\]"),
        ({"members": "ab"}, "specens.members: expected two folders .* got 'ab'"),
        (PAIR | {"weight": 1}, "specens: expected members, kind, .* got weight"),
        (PAIR | {"kind": "sum"}, "specens.kind: expected mixture, logit_mixture, contrastive, got 'sum'"),
        (PAIR | {"weights": [1.0]}, "specens.weights: expected one number for each of 2 members"),
        (PAIR | {"weights": [0.6, 0.6]}, "specens.weights: expected numbers from 0 on with the sum 1"),
        (PAIR | {"weights": ["x", 1]}, "specens.weights: expected a finite number, got 'x'"),
        (PAIR | {"weights": 1}, "specens.weights: expected 2 numbers, got 1"),
        (PAIR | {"kind": "logit_mixture", "amateur_weight": 1}, "specens.amateur_weight: expected weights of the kind"),
        (PAIR | {"kind": "contrastive", "weights": [1, -1]}, "specens: expected two members and amateur_weight"),
        (PAIR | {"kind": "contrastive"}, "specens.amateur_weight: expected a finite number, got None"),
        (PAIR | {"plausibility": 0.1}, "specens.plausibility: expected none of a mixture"),
        (PAIR | {"kind": "logit_mixture", "filter": "members"}, "specens.filter: expected none of a logit_mixture"),
        (PAIR | {"filter": "all"}, "filter: expected 'mixture' or 'members'"),
    ],
)
def test_a_wrong_entry_is_refused(entry, message):
    with pytest.raises(ValueError, match=message):
        EnsembleSettings.of_config(entry)


def test_a_request_has_the_weights_that_it_asks_for():
    mixture = EnsembleSettings.of_config(PAIR)
    assert mixture.weights_of(None) == mixture.weights_of({"other": 1}) == (0.5, 0.5)
    assert mixture.weights_of({"specens_weights": [1, 0]}) == (1.0, 0.0)
    contrastive = EnsembleSettings.of_config(PAIR | {"kind": "contrastive", "amateur_weight": 0.3})
    assert contrastive.weights_of({"specens_amateur_weight": 2}) == (1.0, -2.0)
    weights = mixture.weights_of({"specens_weights": [0.5005, 0.5]})  # within the tolerance, and exact from then on
    assert sum(weights) == pytest.approx(1, abs=1e-12)


@pytest.mark.parametrize(
    ("kind", "asked", "message"),
    [
        ("mixture", {"specens_weights": [0.5]}, "specens_weights: expected one number for each of 2 members"),
        ("mixture", {"specens_weights": [1.5, -0.5]}, "specens_weights: expected numbers from 0 on with the sum 1"),
        ("mixture", {"specens_weights": "1,0"}, "specens_weights: expected 2 numbers, got '1,0'"),
        ("mixture", {"specens_weights": [float("nan"), 1]}, "specens_weights: expected a finite number, got nan"),
        ("mixture", {"specens_weights": [True, 0]}, "specens_weights: expected a finite number, got True"),
        ("mixture", {"specens_amateur_weight": 1}, "specens_amateur_weight: expected specens_weights of an ensemble"),
        ("mixture", {"specens_weigths": [1, 0]}, "specens_weigths: expected specens_weights of an ensemble"),
        ("contrastive", {"specens_weights": [1, 0]}, "specens_weights: expected specens_amateur_weight"),
        ("contrastive", {"specens_amateur_weight": 1e300}, "specens_amateur_weight: expected a finite number"),
    ],
)
def test_wrong_weights_of_a_request_are_refused(kind, asked, message):
    entry = PAIR | {"kind": kind} | ({"amateur_weight": 0.3} if kind == "contrastive" else {})
    with pytest.raises(ValueError, match=message):
        EnsembleSettings.of_config(entry).weights_of(asked)


def test_seeds_are_those_of_the_requests_that_have_one():
    generators = {1: torch.Generator().manual_seed(9), 2: torch.Generator().manual_seed(2**64 - 1)}
    first, again = (seeds_of(generators, 4, torch.device("cpu")) for _ in range(2))
    assert first[1:3].tolist() == again[1:3].tolist() == [9, -1]
    assert (first[[0, 3]] != again[[0, 3]]).all()


def test_rows_of_an_ensemble_have_the_weights_of_their_requests():
    offsets = torch.tensor([0, 3, 4, 6], dtype=torch.int32)
    owners = v2.requests_of_rows(offsets, 7)
    assert owners.tolist() == [0, 0, 0, 1, 2, 2, 2]  # the last one is padding
    weights = torch.tensor([[0.1, 0.9], [0.5, 0.5], [1.0, 0.0]])
    rows = Target((), Mixture(weights, "members")).of_requests(owners)
    assert torch.equal(rows.weights, weights[owners])
    assert rows.filter == "members"
    assert Target((), Mixture((0.5, 0.5))).of_requests(owners) == Mixture((0.5, 0.5))


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    return [str(model) for model in save_pair(tmp_path_factory.mktemp("models"))]


def run(*arguments):
    return CliRunner().invoke(app, ["vllm-config", *map(str, arguments)])


def test_the_command_writes_a_config_and_the_tokenizer(models, tmp_path):
    result = run(*models, "--logit-weights", "1.3,-.3", "--out", tmp_path / "ensemble")
    assert result.exit_code == 0, result.stderr
    config = json.loads((tmp_path / "ensemble" / "config.json").read_text())
    first, other = (AutoConfig.from_pretrained(model) for model in models)
    assert config["architectures"] == ["SpecensEnsemble"]
    assert config["specens"] == {"members": models, "kind": "logit_mixture", "weights": [1.3, -0.3]}
    assert config["vocab_size"] == max(first.vocab_size, other.vocab_size)
    assert config["num_hidden_layers"] == first.num_hidden_layers
    assert "_name_or_path" not in config
    own = AutoTokenizer.from_pretrained(tmp_path / "ensemble")
    assert own.get_vocab() == AutoTokenizer.from_pretrained(models[0]).get_vocab()
    result = run(*models, "--out", tmp_path / "ensemble")
    assert result.exit_code == 2
    assert "--out: expected a new or empty folder" in result.stderr


def test_models_that_are_written_show_no_bars_in_what_the_command_says(models, tmp_path, monkeypatch, capfd):
    monkeypatch.setattr(ensemble_folder, "resolve_model", lambda _: ModelSource(Path("model.gguf")))
    capfd.readouterr()
    ensemble_folder.write_ensemble(models, None, tmp_path / "written")
    assert (tmp_path / "written" / "member1" / "config.json").exists()
    assert capfd.readouterr().err == ""


def test_an_ensemble_of_one_is_refused(models, tmp_path):
    result = run(models[0], "--out", tmp_path / "one")
    assert result.exit_code == 2
    assert "MODELS: expected two members or more, got 1" in result.stderr
    assert not (tmp_path / "one").exists()
