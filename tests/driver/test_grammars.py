"""Grammars by name: JSON schemas, regular expressions and Lark, under every schedule, in chains, trees and batches."""

from __future__ import annotations

import json
import re
import sys

import pytest
from driver.tiny_models import relative_of, tiny_llama, tiny_tokenizer
from specens import Grammar, Job, SpeculativeEnsemble
from specens.cli.main import app
from specens.drafters import PromptLookup
from specens.settings.grammars import Matcher
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerFast
from typer.testing import CliRunner

from specens_kernels import Mixture

SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 4}, "old": {"type": "boolean"}},
    "required": ["name", "old"],
    "additionalProperties": False,
}
SETTINGS = {"max_new_tokens": 80, "seed": 3}


def byte_tokenizer():
    """Each byte is a token, and one more ends a text."""
    alphabet = {token: index for index, token in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(BPE(alphabet | {"<end>": len(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>")


TOKENIZER = byte_tokenizer()
FIRST = tiny_llama(0, vocab=272)  # more ids than the tokenizer has, as padded embeddings have
SECOND = relative_of(FIRST, 1, noise=0.2)


def ensembles():
    return {
        "standard": SpeculativeEnsemble([FIRST, SECOND], TOKENIZER, Mixture((0.5, 0.5)), schedule="standard"),
        "alternate": SpeculativeEnsemble([FIRST, SECOND], TOKENIZER, Mixture((0.5, 0.5)), 3),
        "lookup": SpeculativeEnsemble([FIRST], TOKENIZER, drafter=PromptLookup()),
        "tree": SpeculativeEnsemble([FIRST, SECOND], TOKENIZER, Mixture((0.5, 0.5)), tree=(3, 2)),
    }


@pytest.mark.parametrize("name", ensembles())
def test_a_text_is_a_value_of_the_schema_whoever_drafts(name):
    ensemble = ensembles()[name]
    texts = [ensemble.generate("ab", grammar=SCHEMA, max_new_tokens=80, seed=seed) for seed in range(4)]
    assert {text.finish_reason for text in texts} == {"stop"}
    for text in texts:
        value = json.loads(text.text)
        assert value.keys() == {"name", "old"}
        assert len(value["name"]) <= 4
        assert isinstance(value["old"], bool)


def test_speculation_does_not_change_the_greedy_text_of_a_grammar():
    grammar = Grammar("regex", "(ab|[c-x]{3}){4,9}")
    greedy = {"grammar": grammar, "temperature": 0.0, "max_new_tokens": 40}
    mixed = {name: own for name, own in ensembles().items() if name != "lookup"}
    texts = {name: own.generate("ab", **greedy).text for name, own in mixed.items()}
    assert len(set(texts.values())) == 1
    assert re.fullmatch(grammar.text, texts["tree"])


def test_texts_of_a_batch_have_grammars_of_their_own():
    jobs = [Job("a", grammar=SCHEMA), Job("b", grammar=Grammar("regex", "[0-9]{5}")), Job("c")]
    lark = Grammar("lark", 'start: "yes" | "no"')
    texts = {text.index: text.text for text in ensembles()["alternate"].generate_many(jobs, grammar=lark, **SETTINGS)}
    assert json.loads(texts[0]).keys() == {"name", "old"}
    assert re.fullmatch("[0-9]{5}", texts[1])
    assert texts[2] in ("yes", "no")


def test_a_matcher_goes_back_and_aside():
    end = TOKENIZER.eos_token_id
    matcher = Matcher(Grammar("regex", "a(b|cd)"), TOKENIZER, [end])
    a, b, c, d = TOKENIZER("abcd").input_ids
    for tokens in ([a, b], [a, c, d], [a], [a, c], [], [a, b], [a, c]):
        own, expected = matcher(tokens), Matcher(Grammar("regex", "a(b|cd)"), TOKENIZER, [end])(tokens)
        assert (own is None) == (expected is None) == (tokens in ([a, b], [a, c, d]))
        assert own is None or own.equal(expected)


def test_a_class_of_pydantic_is_its_schema():
    class Kind:
        @staticmethod
        def model_json_schema():
            return {"enum": ["x", "y"]}

    assert ensembles()["lookup"].generate("a", grammar=Kind, **SETTINGS).text in ('"x"', '"y"')


@pytest.mark.parametrize(
    ("grammar", "message"),
    [
        (3, "a JSON schema as a dict"),
        ("{}", "expected a Grammar"),
        ({"type": "nothing of JSON"}, "llguidance reads"),
        (Grammar("regex", "(a"), "llguidance reads"),
    ],
)
def test_what_is_no_grammar_is_refused(grammar, message):
    with pytest.raises(ValueError, match=rf"grammar: .*{message}"):
        ensembles()["lookup"].generate("a", grammar=grammar)


def test_a_grammar_is_refused_beside_a_constraint_without_its_package_and_without_a_tokenizer(monkeypatch):
    alone = ensembles()["lookup"]
    with pytest.raises(ValueError, match="none beside constraint"):
        alone.generate("a", grammar=SCHEMA, constraint=print)
    with pytest.raises(ValueError, match="fast tokenizer"):
        SpeculativeEnsemble([FIRST], drafter=PromptLookup()).generate([1, 2], grammar=SCHEMA)
    with pytest.raises(ValueError, match="expected a kind of json_schema, regex, lark"):
        Grammar("ebnf", "x")
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(ValueError, match=r"pip install 'specens-kernels\[grammar\]'"):
        alone.generate("a", grammar=SCHEMA)


def test_the_command_takes_a_schema_from_a_file(tmp_path):
    FIRST.save_pretrained(tmp_path / "model")
    TOKENIZER.save_pretrained(tmp_path / "model")
    (tmp_path / "schema.json").write_text(json.dumps(SCHEMA))
    (tmp_path / "list.json").write_text("[]")
    arguments = ["generate", str(tmp_path / "model"), "--prompt", "a", "--seed", "1", "--dtype", "fp32"]
    result = CliRunner().invoke(app, [*arguments, "--json-schema", str(tmp_path / "schema.json")])
    assert result.exit_code == 0, result.stderr
    assert json.loads(result.stdout.strip()).keys() == {"name", "old"}
    for wrong in (
        ["--json-schema", "nowhere.json"],
        ["--json-schema", str(tmp_path / "list.json")],
        ["--regex", "a", "--lark", "b"],
    ):
        refused = CliRunner().invoke(app, [*arguments, *wrong])
        assert refused.exit_code == 2
        assert wrong[-2] in refused.stderr


def test_another_schema_in_the_file_does_not_continue_a_run(tmp_path):
    FIRST.save_pretrained(tmp_path / "model")
    TOKENIZER.save_pretrained(tmp_path / "model")
    schema, output = tmp_path / "schema.json", tmp_path / "texts.jsonl"
    command = [
        "generate",
        str(tmp_path / "model"),
        "--prompt",
        "a",
        "--json-schema",
        str(schema),
        "--output",
        str(output),
    ]
    schema.write_text('{"enum": [1]}')
    assert CliRunner().invoke(app, command).exit_code == 0
    schema.write_text('{"enum": [2]}')
    refused = CliRunner().invoke(app, command)
    assert refused.exit_code == 2
    assert json.loads(output.read_text().splitlines()[-1])["text"] == "1"


def test_a_slow_tokenizer_of_words_is_told_apart():
    words = SpeculativeEnsemble([tiny_llama(0)], tiny_tokenizer(), drafter=PromptLookup())
    with pytest.raises(ValueError, match="grammar"):
        words.generate("w1", grammar=Grammar("regex", "[^w]+"), max_new_tokens=3)
