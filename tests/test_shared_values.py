"""Numbers that two languages have, or code and README: each is read in the sources and held equal."""

from __future__ import annotations

import re
from dataclasses import fields
from math import inf
from pathlib import Path

import pytest
import torch

from specens_kernels import Status, arguments, backend, checks, instruction_set, rules, sampling
from specens_kernels.decision_tree import NODE_FIELDS
from specens_kernels.ensembles import WEIGHT_SUM_TOLERANCE, EnsembleKind
from specens_kernels.ops.sample import gumbel
from specens_kernels.ops.tree_mask.reference import MAX_NODES, Layout
from specens_kernels.ops.uniforms import reference as philox
from specens_kernels.ops.verify_tree import PADDING
from specens_kernels.ops.verify_tree.reference import LEAST_MASS_LEFT
from specens_kernels.rules import BY_NAME, CHAIN, TREE, RuleKind

ROOT = Path(__file__).parents[1]
HEADER = (ROOT / "csrc" / "include" / "specens.h").read_text()
CODES = {name: int(value) for name, value in re.findall(r"\bSPECENS_(\w+) = (\d+)", HEADER)}
TAKEN = {"by_chains": (CHAIN,), "by_trees": (TREE,), "by_both": (CHAIN, TREE)}


def source(path: str) -> str:
    return (ROOT / "csrc" / path).read_text()


def constant(path: str, name: str) -> float:
    """The value of a constant of C++: a number, a product, or a power of two as a shift."""
    (value,) = re.findall(rf"\b{name} = ([^;,]+)[;,]", source(path))
    value = re.sub(r"int64_t\{(\d+)\}", r"\1", value)
    value = re.sub(r"0x1p([+-]\d+)", r"2.0 ** \1", value)
    return eval(value, {"__builtins__": {}}, {"block_size": gumbel.BLOCK})


@pytest.mark.parametrize(
    ("prefix", "codes"),
    [
        ("RULE_", RuleKind),
        ("STATUS_", [bit for bit in Status if bit]),
        ("MASK_", Layout),
        ("", EnsembleKind),
    ],
)
def test_the_codes_of_the_header_are_those_of_python(prefix, codes):
    own = {prefix + code.name: int(code) for code in codes}
    found = {name: value for name, value in CODES.items() if (name.startswith(prefix) if prefix else name in own)}
    assert found == own


def test_the_kinds_of_reports_are_those_of_the_header():
    names = ("NO_LOGPROBS", "TARGET_LOGPROBS", "RAW_LOGPROBS")
    assert {name: CODES[name] for name in names} == {name: getattr(arguments, name) for name in names}


def test_cpp_says_of_each_rule_what_its_description_says():
    rows = re.findall(r"RuleTraits\{RuleKind::(\w+), Taken::(\w+), Next::(\w+)\}", source("parts/rule.h"))
    found = {name: (TAKEN[taken], following) for name, taken, following in rows}
    assert found == {kind.name.lower(): (kind.operations, kind.next.name.lower()) for kind in RuleKind}
    for trait in ("has_table", "tests_greedy"):
        (own,) = re.findall(rf"bool {trait}\(.*\) (?:const )?\{{ return (.*); \}}", source("parts/rule.h"))
        assert set(re.findall(r"RuleKind::(\w+)", own)) == {k.name.lower() for k in RuleKind if getattr(k, trait)}


@pytest.mark.parametrize(
    ("path", "name", "value"),
    [
        ("parts/rule.h", "empty_residual_mass", rules.EMPTY_RESIDUAL_MASS),
        ("parts/draft_arguments.h", "most_drafts", rules.MOST_DRAFTS),
        ("parts/draft_arguments.h", "no_drafter", arguments.NO_DRAFTER),
        ("parts/target_arguments.h", "largest_top_p", sampling.LARGEST_TOP_P),
        ("parts/target_arguments.h", "weight_sum_tolerance", WEIGHT_SUM_TOLERANCE),
        ("parts/report.h", "most_top_logprobs", checks.MOST_TOP_LOGPROBS),
        ("parts/decision_tree.h", "node_fields", NODE_FIELDS),
        ("token_tree/tree.h", "max_tree_nodes", MAX_NODES),
        ("token_tree/bindings.cpp", "padding_parent", PADDING),
        ("verify_tree/child_draft.h", "least_mass_left", LEAST_MASS_LEFT),
        ("sample/rows.h", "block_size", gumbel.BLOCK),
        ("sample/noise.h", "maximum_stream", gumbel.MAXIMUM_STREAM),
        ("sample/noise.h", "rest_stream", gumbel.REST_STREAM),
        ("sample/noise.h", "tokens_per_word", gumbel.LANES),
        ("operators/call.h", "weight_row", arguments.WEIGHT_ROW),
        ("operators/call.h", "draft_rows", arguments.DRAFT_ROWS),
    ],
)
def test_a_constant_of_cpp_is_that_of_python(path, name, value):
    assert constant(path, name) == value


def test_the_constants_of_philox_are_the_same():
    text = source("parts/philox.h")
    assert tuple(int(word, 16) for word in re.findall(r"uint64_t\{(0x\w+)\} \*", text)) == philox.MULTIPLIERS
    assert tuple(int(word, 16) for word in re.findall(r"key\.word\[\d\] \+= (0x\w+);", text)) == philox.KEY_INCREMENTS
    assert re.findall(r"round < (\d+);", text) == [str(philox.ROUNDS)]


def test_what_the_library_can_be_asked_is_the_same():
    assert torch.ops.specens.operator_version() == backend.OPERATOR_VERSION
    defaults = {own.name: own.default_value for own in torch.ops.specens.sample.default._schema.arguments}
    assert defaults["stream"] == arguments.DRAFT_STREAM
    names = re.findall(r"enum class InstructionSet \{ ([^}]*) \}", source("parts/instruction_set.h"))[0].split(", ")
    assert tuple(names) == instruction_set.NAMES


def described(kind: RuleKind) -> tuple[str, ...]:
    """A rule's row in docs/concepts/rules.md."""
    taken = " and ".join(operation.removeprefix("verify_") + "s" for operation in kind.operations)
    calls = [f'`"{kind.name.lower()}"`'] if kind.name.lower() in BY_NAME else []
    ranges: dict[str, rules.Range] = {}
    if kind.settings is not None:
        given = [field for field in fields(kind.settings) if field.init]
        values = ", ".join(f"{field.name}={field.default}" if calls else field.name for field in given)
        calls.append(f"`{kind.settings.__name__}({values})`")
        ranges = getattr(kind.settings, "RANGES", {})
    own = ", ".join(f"{name} {'in ' if allowed.most < inf else ''}{allowed}" for name, allowed in ranges.items())
    return ", ".join(calls), taken, "yes" if kind.lossless else "no", kind.next.value, own, kind.source


def test_the_table_of_rules_is_that_of_the_descriptions():
    lines = (ROOT / "docs" / "concepts" / "rules.md").read_text().splitlines()
    start = next(index for index, line in enumerate(lines) if line.startswith("| `rule=` |"))
    rows = [tuple(cell.strip() for cell in line.strip("|").split("|")) for line in lines[start + 2 :][: len(RuleKind)]]
    assert rows == [described(kind) for kind in RuleKind]
