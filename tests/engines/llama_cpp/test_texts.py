"""What llama.cpp reads for the driver: its own logits, whatever was rejected, grown or read beside them."""

from __future__ import annotations

from pathlib import Path

import llama_cpp
import numpy as np
import pytest
import torch
from specens.engines.llama_cpp import LlamaCpp
from specens.engines.protocol import Context, Needs, Read, Text
from torch import Tensor

PROMPT, OTHER = list(range(100, 140)), list(range(500, 530))


@pytest.fixture(scope="module")
def engine(tiny: tuple[Path, Path]) -> LlamaCpp:
    return LlamaCpp(tiny[0])


@pytest.fixture
def context(engine: LlamaCpp) -> Context:
    return engine.open(Needs(num_texts=4, trees=True))


def alike(logits: Tensor, others: Tensor) -> bool:
    """But for rounding: llama.cpp sums keys and values in halves, in an order that depends on where they lie."""
    assert others.std() > 1
    return bool((logits - others).abs().max() < 0.03)


def read(context: Context, text: Text, sequence: list[int], rows: int = 1) -> Tensor:
    return context.read([Read(text, sequence, rows)])[0]


def test_logits_are_those_of_llama_cpp_python(tiny: tuple[Path, Path], context: Context):
    llama = llama_cpp.Llama(str(tiny[0]), n_ctx=256, logits_all=True, verbose=False)
    llama.eval([*PROMPT, *OTHER])
    text = context.add(PROMPT)
    found = torch.cat([read(context, text, OTHER[:10], 11), read(context, text, OTHER, 20)])
    assert alike(found, torch.from_numpy(np.array(llama.scores[39:70], dtype=np.float32)))


def test_a_rejected_draft_leaves_no_trace(context: Context):
    text, plain = context.add(PROMPT), context.add(PROMPT)
    for each in (text, plain):
        read(context, each, [])
    read(context, text, [7, 8, 9], 3)
    text.roll_back(1)
    assert torch.equal(read(context, text, [7, 11, 12], 2), read(context, plain, [7, 11, 12], 2))


def test_rows_stay_as_they_are_when_the_next_ones_come(context: Context):
    text = context.add(PROMPT)
    rows = read(context, text, [5, 6], 3)
    before = rows.clone()
    read(context, text, [5, 6, 7, 8, 9, 10], 3)
    assert torch.equal(rows, before)


def test_a_batch_of_ragged_texts_reads_each_as_it_reads_it_alone(context: Context):
    together, alone = ([context.add(PROMPT), context.add(OTHER)] for _ in range(2))
    for sequences, rows in ((([], [4]), (1, 2)), (([5], [4, 6, 7, 8]), (1, 3))):
        found = context.read([Read(*each) for each in zip(together, sequences, rows, strict=True)])
        expected = [read(context, *each) for each in zip(alone, sequences, rows, strict=True)]
        assert all(map(alike, found, expected))


def test_a_cache_that_grows_goes_on_as_it_was(engine: LlamaCpp, context: Context):
    text, second = context.add(PROMPT * 4), context.add(OTHER * 8)
    read(context, text, [])
    read(context, second, [])  # past the cells of a new cache
    others = [context.add(PROMPT) for _ in range(20)]  # past its sequences
    fresh = engine.open(Needs())
    assert alike(read(context, text, [5]), read(fresh, fresh.add([*PROMPT * 4, 5]), []))
    for each in others:
        context.remove(each)


def test_a_cache_that_has_no_space_to_grow_stays_as_it_was(
    engine: LlamaCpp, context: Context, monkeypatch: pytest.MonkeyPatch
):
    text, fresh = context.add(PROMPT), engine.open(Needs())
    read(context, text, [])
    with monkeypatch.context() as patched:
        patched.setattr(engine.model.functions, "llama_init_from_model", lambda *_: None)
        with pytest.raises(MemoryError, match=r"llama.cpp has no space for 512 tokens of target.gguf"):
            read(context, context.add(OTHER * 10), [])
        with pytest.raises(MemoryError, match=r"llama.cpp has no space"):
            assert not [context.add(PROMPT) for _ in range(20)]
    assert alike(read(context, text, [5]), read(fresh, fresh.add([*PROMPT, 5]), []))


def test_a_text_longer_than_a_forward_is_read_in_parts(context: Context):
    ids = [3 + (7 * index) % 1000 for index in range(700)]
    whole, parts = context.add(ids[:10]), context.add(ids[:10])
    read(context, parts, ids[10:400])
    assert alike(read(context, whole, ids[10:], 300), read(context, parts, ids[10:], 300))


def test_the_nodes_of_trees_are_read_as_their_paths(context: Context):
    text, beside, plain = context.add(PROMPT), context.add(OTHER), context.add(PROMPT)
    for each in (text, beside):
        read(context, each, [])
    settled, nodes, parents = [7, 8], [11, 12, 13, 14, 15, 16], [-1, -1, 0, 0, 1, 3]
    first, _ = context.read([Read(text, settled, 4, nodes[:2], parents[:2]), Read(beside, [9])])
    rest = [context.read([Read(text, settled, b - a, nodes[:b], parents[:b])])[0] for a, b in ((2, 5), (5, 6))]
    rows = torch.cat([first[2:], *rest])
    for node, row in enumerate(rows):
        path = [node]
        while parents[path[0]] >= 0:
            path.insert(0, parents[path[0]])
        assert alike(row, read(context, plain, [*settled, *(nodes[index] for index in path)])[0])
        plain.roll_back(0)
    text.keep_path([0, 3])
    assert alike(read(context, text, [*settled, 11, 14, 99]), read(context, plain, [*settled, 11, 14, 99]))


def test_the_sequences_of_a_tree_are_free_again_after_it(context: Context):
    text, plain, sequence = context.add(PROMPT), context.add(PROMPT), []
    for node in range(20):
        context.read([Read(text, sequence, 40, range(20, 60), [-1] * 40)])
        text.keep_path([node])
        sequence = [*sequence, 20 + node, 5]
    assert alike(read(context, text, sequence), read(context, plain, sequence))


def test_trees_that_outgrow_their_share_of_the_sequences_are_read_path_by_path(engine: LlamaCpp):
    context = engine.open(Needs(num_texts=64, trees=True))
    text = context.add(PROMPT)
    read(context, text, [])
    assert context.holds_tree(text, len(PROMPT) + 3)
    assert not context.holds_tree(text, len(PROMPT) + 4)
    assert not engine.open(Needs(num_texts=1)).holds_tree(text, len(PROMPT) + 1)


def test_a_token_without_an_embedding_is_named(context: Context):
    with pytest.raises(ValueError, match="members: token 49152 was generated, but a member has embeddings only for"):
        read(context, context.add(PROMPT), [49152])


@pytest.mark.parametrize("path", ["none.gguf", "."])
def test_a_file_that_cannot_be_loaded_is_named_with_the_reason(tmp_path: Path, path: str):
    with pytest.raises(ValueError, match=r"model: expected a GGUF file that llama.cpp can load, got .*: \S+"):
        LlamaCpp(tmp_path / path)


def test_a_broken_adapter_is_named(tiny: tuple[Path, Path]):
    with pytest.raises(ValueError, match=r"model: expected a LoRA of target\.gguf in a GGUF file after '\+'"):
        LlamaCpp(*tiny)
