"""The n-gram index against a search through the texts, and what it is as a Python object."""

from __future__ import annotations

import copy
import pickle
import time
from collections import Counter
from collections.abc import Iterator
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from specens_kernels import NgramIndex, verify_chain

CHOICES = ("recent", "frequent")
TOKENS = st.lists(st.integers(0, 3), max_size=25)
TEXTS = st.lists(TOKENS, min_size=1, max_size=4)
SETTINGS = {"draft_len": st.integers(0, 12), "min_match": st.integers(1, 4), "choose": st.sampled_from(CHOICES)}
settings = st.fixed_dictionaries(SETTINGS)


def followers(texts: list[list[int]], ngram: list[int]) -> list[int]:
    """The tokens that follow an n-gram, in the order of the texts."""
    size = len(ngram)
    return [text[end] for text in texts for end in range(size, len(text)) if text[end - size : end] == ngram]


def proposal(
    texts: list[list[int]], context: list[int], max_match: int, draft_len: int, min_match: int, choose: str
) -> tuple[list[int], int]:
    """The definition: token by token, what followed the longest n-gram that context and draft end with."""
    draft: list[int] = []
    match_len = 0
    while len(draft) < draft_len:
        so_far = [*context, *draft]
        sizes = range(min(max_match, len(so_far)), min_match - 1, -1)
        found = next((size for size in sizes if followers(texts, so_far[len(so_far) - size :])), None)
        if found is None:
            break
        known = followers(texts, so_far[len(so_far) - found :])
        match_len = match_len if draft else found
        counts = Counter(known)
        often = [token for token in known if counts[token] == max(counts.values())]
        draft.append(known[-1] if choose == "recent" else often[-1])
    return draft, match_len


def index_of(texts: list[list[int]], max_match: int) -> NgramIndex:
    """Texts one after the other, the last one open."""
    index = NgramIndex(texts[0], max_match=max_match)
    for text in texts[1:]:
        index.begin_text()
        index.extend(text)
    return index


def as_lists(found: tuple[np.ndarray, int]) -> tuple[list[int], int]:
    tokens, match_len = found
    assert tokens.dtype == np.int64
    return tokens.tolist(), match_len


@given(TEXTS, TOKENS, st.integers(1, 6), settings)
def test_a_proposal_is_what_a_search_through_the_texts_finds(texts, tail, max_match, how):
    index = index_of(texts, max_match)
    assert as_lists(index.propose(tail=tail, **how)) == proposal(texts, texts[-1] + tail, max_match, **how)
    assert as_lists(index.propose_after(tail, **how)) == proposal(texts, tail, max_match, **how)
    assert len(index) == sum(map(len, texts))


@given(st.lists(st.lists(st.integers(0, 1), max_size=6), max_size=10), st.integers(1, 5), settings)
def test_an_index_that_grows_token_by_token_is_right_after_each(pieces, max_match, how):
    index, text = NgramIndex(max_match=max_match), []
    for piece in pieces:
        index.extend(piece)
        text += piece
        assert as_lists(index.propose(**how)) == proposal([text], text, max_match, **how)


@pytest.mark.parametrize("choose", CHOICES)
@pytest.mark.parametrize(
    "text",
    [
        [7] * 60,
        [1, 2] * 30,
        [1, 2, 3] * 20 + [1],
        [0] * 20 + [1] + [0] * 20,
        list(range(60)),
        [0, 1, 0, 0, 1, 0, 1, 0] * 7,
    ],
    ids=["equal", "pairs", "triples", "island", "different", "fibonacci"],
)
@pytest.mark.parametrize("max_match", [1, 4, 32, 1000])
def test_texts_that_repeat_themselves_go_on_repeating(text, max_match, choose):
    index = index_of([text], max_match)
    for end in (0, len(text) // 2):
        how = {"draft_len": 9, "min_match": 1, "choose": choose}
        assert as_lists(index.propose(tail=text[:end], **how)) == proposal([text], text + text[:end], max_match, **how)


def test_the_last_or_the_most_frequent_follower_is_chosen():
    index = NgramIndex([1, 2, 1, 2, 1, 3, 1])
    assert as_lists(index.propose(1)) == ([3], 1)
    assert as_lists(index.propose(1, choose="frequent")) == ([2], 1)
    assert as_lists(index.propose(2, tail=[2], choose="frequent")) == ([1, 3], 2)
    tied = NgramIndex([1, 2, 1, 3, 1])
    assert as_lists(tied.propose(1, choose="frequent")) == ([3], 1)


def test_longer_ngrams_come_before_shorter_ones_and_too_short_ones_propose_nothing():
    index = NgramIndex([5, 6, 7, 9, 6, 8, 5, 6])
    assert as_lists(index.propose(3)) == ([7, 9, 6], 2)
    assert as_lists(index.propose(3, min_match=3)) == ([], 0)
    assert as_lists(NgramIndex([5, 6, 7, 9, 6, 8, 5, 6], max_match=1).propose(1)) == ([8], 1)
    assert as_lists(index.propose(3, tail=[99])) == ([], 0)
    assert as_lists(NgramIndex().propose(4)) == ([], 0)
    assert as_lists(index.propose(0)) == ([], 0)


def test_nothing_runs_from_one_text_to_the_next():
    index = NgramIndex([1, 2])
    index.begin_text()
    index.begin_text()
    index.extend([3, 4])
    assert as_lists(index.propose_after([1, 2], 4)) == ([], 0)
    assert as_lists(index.propose_after([2, 3], 4)) == ([4], 1)
    assert (len(index), index.num_texts) == (4, 2)
    index.begin_text()
    assert as_lists(index.propose(4)) == ([], 0)
    assert as_lists(index.propose(4, tail=[3])) == ([4], 1)
    assert (len(index), index.num_texts) == (4, 2)


def shares(texts: list[list[int]], context: list[int], max_match: int, min_match: int) -> Iterator[tuple[Counter, int]]:
    """What followed the longest n-gram that a context ends with, how often, and then each shorter one."""
    for size in range(min(max_match, len(context)), min_match - 1, -1):
        if counts := Counter(followers(texts, context[-size:])):
            yield counts, size


@given(texts=TEXTS, tail=TOKENS, max_match=st.integers(1, 5), min_match=st.integers(1, 3), levels=st.integers(1, 4))
def test_a_tree_holds_what_a_search_through_the_texts_finds(texts, tail, max_match, min_match, levels):
    index, context = index_of(texts, max_match), [*texts[-1], *tail]
    parents, tokens, probabilities, match_len = index.propose_tree(
        60, max_levels=levels, tail=tail, min_match=min_match
    )
    roots = list(shares(texts, context, max_match, min_match))
    assert match_len == (roots[0][1] if roots else 0)
    paths: list[list[int]] = []
    for node, (parent, token) in enumerate(zip(parents.tolist(), tokens.tolist(), strict=True)):
        assert parent < node
        above = paths[parent] if parent >= 0 else []
        paths.append([*above, token])
        if parent >= 0:
            counts = next(shares(texts, context + above, max_match, min_match))[0]
        else:  # of the longest n-gram that the token followed
            counts = next(counts for counts, _ in roots if token in counts)
        share = counts[token] / sum(counts.values()) * (probabilities[parent] if parent >= 0 else 1.0)
        assert probabilities[node] == pytest.approx(share)
    assert len({tuple(path) for path in paths}) == len(paths)
    assert max(map(len, paths), default=0) <= levels
    if len(paths) < 60:  # then nothing is left out
        assert {path[0] for path in paths} == {token for counts, _ in roots for token in counts}
    longest = [node for node, path in enumerate(paths) if roots and path[0] in roots[0][0]]
    assert probabilities[longest].tolist() == sorted(probabilities[longest], reverse=True)


@given(st.lists(st.one_of(st.none(), TEXTS), min_size=1, max_size=5), TEXTS, st.data())
def test_a_batch_holds_each_draft_of_the_index_that_knows_more(own, stored, data):
    max_match = data.draw(st.integers(1, 5))
    tails = [data.draw(TOKENS) for _ in own]
    how = data.draw(settings)
    indices = [None if texts is None else index_of(texts, max_match) for texts in own]
    store = index_of(stored, 3)
    drafts, draft_lens, match_lens = NgramIndex.propose_batch(indices, tails=tails, store=store, **how)
    assert drafts.dtype == draft_lens.dtype == match_lens.dtype == np.int64
    assert drafts.shape == (len(own), how["draft_len"])
    for index, (texts, tail) in enumerate(zip(own, tails, strict=True)):
        context = tail if texts is None else texts[-1] + tail
        best = ([], 0) if texts is None else proposal(texts, context, max_match, **how)
        other = proposal(stored, context, 3, **how)
        expected = other if other[1] > best[1] else best
        padding = [-1] * (how["draft_len"] - len(expected[0]))
        assert drafts[index].tolist() == expected[0] + padding
        assert (draft_lens[index], match_lens[index]) == (len(expected[0]), expected[1])


def test_a_batch_goes_into_verify_chain():
    texts = [[1, 2, 3, 1, 2], [4, 4, 4], [5, 6]]
    indices = [NgramIndex(text) for text in texts]
    drafts, draft_lens, _ = NgramIndex.propose_batch(indices, 3)
    assert drafts.tolist() == [[3, 1, 2], [4, 4, 4], [-1, -1, -1]]
    verdict = verify_chain(
        torch.zeros(3, 4, 10),
        torch.from_numpy(drafts),
        draft_lens=torch.from_numpy(draft_lens),
        seeds=torch.arange(3),
        positions=torch.tensor([5, 3, 2]),
    )
    assert (verdict.status == 0).all()
    assert verdict.num_accepted[2] == 0


@given(TEXTS, st.integers(1, 6), st.booleans())
def test_indices_pickle_and_copy_as_their_texts(texts, max_match, closed):
    index = index_of(texts, max_match)
    if closed:
        index.begin_text()
    twins = [index, pickle.loads(pickle.dumps(index)), copy.deepcopy(index)]
    for more in ([], [1], [0, 1, 2]):
        found = []
        for twin in twins:
            twin.extend(more)
            drafts = [as_lists(twin.propose(6, choose=choose)) for choose in CHOICES]
            found.append((len(twin), twin.num_texts, twin.max_match, drafts))
        assert found[0] == found[1] == found[2]


def test_an_index_describes_itself_and_its_memory():
    rng = np.random.default_rng(0)
    text = rng.zipf(1.3, 20_000) % 5000
    index = NgramIndex(text)
    assert repr(index) == "<NgramIndex: 20000 tokens, 1 texts, max_match 32>"
    assert 20_000 * 60 < index.nbytes < 20_000 * 256
    worst = NgramIndex(np.concatenate([np.ones(5000, dtype=np.int64), rng.integers(2, size=15_000)]))
    assert worst.nbytes < 20_000 * 256


def test_tokens_may_be_any_integers():
    for tokens in (
        (1, 2, 1),
        np.array([1, 2, 1], dtype=np.int32),
        torch.tensor([1, 2, 1]),
        np.repeat([1, 2, 1], 2)[::2],
    ):
        assert as_lists(NgramIndex(tokens).propose(1)) == ([2], 1)


def test_a_wrong_token_leaves_the_index_as_it_was():
    index = NgramIndex([1, 2, 1])
    with pytest.raises(ValueError, match=r"tokens\[1\]"):
        index.extend([5, -1])
    assert len(index) == 3
    assert as_lists(index.propose(1)) == ([2], 1)


INDEX = NgramIndex([1, 2, 1])
NO_COUNTS = (2**63, -(2**63) - 1, 2**64, True, 1.0, "1", None)


@pytest.mark.parametrize(
    ("argument", "call"),
    [
        ("tokens[0]", lambda: NgramIndex([-1])),
        ("tokens[1]", lambda: NgramIndex([1, 2**31])),
        ("tokens", lambda: NgramIndex([0.5])),
        ("tokens", lambda: NgramIndex([[1]])),
        ("tokens", lambda: NgramIndex(None)),
        ("max_match", lambda: NgramIndex(max_match=0)),
        *(("max_match", lambda value=value: NgramIndex(max_match=value)) for value in NO_COUNTS),
        ("max_match", lambda: NgramIndex(max_match=2**40)),
        ("tokens", lambda: NgramIndex([2**70])),
        ("tokens", lambda: NgramIndex(np.array([2**64 - 1], dtype=np.uint64))),
        ("draft_len", lambda: INDEX.propose(-1)),
        ("draft_len", lambda: INDEX.propose(2**40)),
        ("draft_len", lambda: INDEX.propose(2**63)),
        ("draft_len", lambda: INDEX.propose_after([1], 2**63)),
        ("draft_len", lambda: NgramIndex.propose_batch([INDEX], -(2**63) - 1)),
        ("nodes", lambda: INDEX.propose_tree(2**63)),
        ("max_levels", lambda: INDEX.propose_tree(2, max_levels=2**63)),
        ("tail[0]", lambda: INDEX.propose(1, [-1])),
        ("min_match", lambda: INDEX.propose(1, min_match=0)),
        ("min_match", lambda: INDEX.propose(1, min_match=2**63)),
        ("choose", lambda: INDEX.propose(1, choose="first")),
        ("context", lambda: INDEX.propose_after([[1]], 1)),
        ("context[1]", lambda: INDEX.propose_after([1, -1], 1)),
        ("indices[1]", lambda: NgramIndex.propose_batch([INDEX, [1, 2]], 1)),
        ("tails", lambda: NgramIndex.propose_batch([INDEX], 1, tails=[[1], [2]])),
        ("tails[1][0]", lambda: NgramIndex.propose_batch([INDEX, None], 1, tails=[[1], [-2]])),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_bad_argument_is_named(argument, call):
    with pytest.raises(ValueError, match=r"expected .*got") as error:
        call()
    assert str(error.value).startswith(f"{argument}: expected")


@pytest.mark.parametrize("kind", ["equal", "random", "periodic"])
def test_time_grows_with_the_tokens_and_not_with_the_text(kind):
    """Ten times what is promised for the text, so that a busy machine cannot fail it; the bench measures."""
    size = 20_000
    rng = np.random.default_rng(0)
    text = {"equal": np.ones(size), "random": rng.integers(50_000, size=size), "periodic": np.arange(size) % 1000}[kind]
    index, begin = NgramIndex(), time.perf_counter()
    for first, last in pairwise(range(0, size + 1, 100)):
        index.extend(text[first:last].astype(np.int64))
        index.propose(8)
    assert time.perf_counter() - begin < size * 20e-6
