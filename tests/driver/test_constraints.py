"""Grammars: asked only where a token can stand, whoever drafts; their end is the end of the text."""

import pytest
import torch
from driver.tiny_models import Bigram, word_tokenizer
from specens import Job, SpeculativeEnsemble
from specens.drafters import Drafter, DraftModel, Jacobi, Lookahead, OtherTokenizer, PromptLookup
from specens.files.batch_files import missing, write_texts
from specens.files.prompt_file import PromptLine

from specens_kernels import Mixture, Replacement, Sampling

VOCAB, STOP, OPEN, CLOSE, DEEPEST = 40, 0, 1, 33, 5
LETTERS = {5, 31, 32, 39}
PROMPT = [OPEN, 5, CLOSE, 9, OPEN, OPEN, CLOSE]
WORDS = word_tokenizer([f"w{number}" for number in range(VOCAB)])


def bits(tokens, words=2):
    mask = torch.zeros(words, dtype=torch.int64)
    for token in tokens:
        mask[token // 32] |= 1 << token % 32
    return (mask - ((mask >> 31) << 32)).to(torch.int32)


class Brackets:
    """One bracketed text, then a stop token, or nothing where `stops` is False; strict, as matchers of grammars are.

    It hands out one buffer, as those do that fill the caller's.
    """

    def __init__(self, stops):
        self.stops, self.buffer, self.num_asked = stops, torch.zeros(2, dtype=torch.int32), 0

    def allowed(self, depth, begun):
        if begun and depth == 0:
            return {STOP} if self.stops else set()
        return {OPEN} if not begun else {CLOSE, *LETTERS, *({OPEN} if depth < DEEPEST else ())}

    def __call__(self, tokens):
        self.num_asked += 1
        depth = 0
        for index, token in enumerate(tokens):
            assert token in self.allowed(depth, index > 0), f"asked after {tokens[: index + 1]}, which cannot be"
            assert token != STOP, "asked after the stop token"
            depth += (token == OPEN) - (token == CLOSE)
        allowed = self.allowed(depth, bool(tokens))
        self.buffer.copy_(bits(allowed))
        return self.buffer if allowed else None


class Careless(Drafter):
    """Of a user who does not ask whether anything can be drafted."""

    def propose(self, batch, requests, draft_lens, min_probability=0.0):  # noqa: ARG002
        for request, most in zip(requests, draft_lens, strict=True):
            for token in [OPEN, 5, STOP, CLOSE, 39, 2][: min(most, request.remaining)]:
                request.add_draft(token, -1)


def table(seed):
    return 2 * torch.randn(VOCAB, VOCAB, generator=torch.Generator().manual_seed(seed))


def ensembles():
    one, two, three = (Bigram(table(seed)) for seed in range(3))
    lone = {
        "lookup": PromptLookup(),
        "jacobi": Jacobi(),
        "lookahead": Lookahead(2),
        "careless": Careless(),
        "other tokenizer": OtherTokenizer(two, WORDS),
        "draft model": DraftModel(two),
    }
    made = {name: SpeculativeEnsemble([one], WORDS, None, 6, "fixed", drafter=own) for name, own in lone.items()}
    made["member of weight 0"] = SpeculativeEnsemble([one, two], WORDS, Mixture((1, 0)), 4, "fixed", drafter=1)
    for name, schedule in (("fixed", "fixed"), ("alternate", "alternate"), ("long chains", "alternate")):
        lens = 4 if name == "long chains" else 1
        made[name] = SpeculativeEnsemble([one, two, three], WORDS, draft_lens=lens, schedule=schedule)
    return made


@pytest.mark.parametrize("stops", [True, False], ids=["stop token", "own end"])
@pytest.mark.parametrize("name", ensembles())
def test_a_grammar_is_asked_only_where_a_token_can_stand(name, stops):
    ensemble, stop = ensembles()[name], {"stop_tokens": [STOP] if stops else []}
    standard = SpeculativeEnsemble(ensemble.models, WORDS, ensemble.ensemble, schedule="standard")
    greedy = {"sampling": Sampling(temperature=0.0), "max_new_tokens": 30, "constraint": Brackets(stops)} | stop
    assert ensemble.generate(PROMPT, **greedy).tokens == standard.generate(PROMPT, **greedy).tokens
    ends = 0
    for seed in range(12):
        settings = {"seed": seed, "max_new_tokens": 25, "constraint": Brackets(stops)} | stop
        text = ensemble.generate(PROMPT, **settings)
        depth = sum((token == OPEN) - (token == CLOSE) for token in text.tokens)
        assert text.finish_reason == ("length" if depth or (stops and text.tokens[-1] != STOP) else "stop")
        ends += text.finish_reason == "stop"
        (again,) = ensemble.generate_many([Job(PROMPT, seed=seed)], batch_size=2, **settings)
        assert again.tokens == text.tokens
    assert ends > 0
    together = ensemble.generate_many(
        [PROMPT[:2], PROMPT] * 3, seed=0, max_new_tokens=25, constraint=Brackets(stops), **stop
    )
    assert all(text.tokens[0] == OPEN for text in together)


@pytest.mark.parametrize("num_drafts", [1, 4])
def test_a_rule_that_keeps_every_draft_keeps_none_that_the_grammar_excludes(num_drafts):
    one, two = Bigram(table(0)), Bigram(table(1))
    drafter = OtherTokenizer(two, WORDS, probabilities=True)
    rule = Replacement(0.0, 0.0)
    ensemble = SpeculativeEnsemble([one], WORDS, None, num_drafts, "fixed", drafter=drafter, rule=rule)
    for seed in range(5):
        text = ensemble.generate(PROMPT, seed=seed, max_new_tokens=20, constraint=Brackets(True), stop_tokens=[STOP])
        if text.finish_reason == "length":
            Brackets(True)(text.tokens)  # which raises where they are none that it allows
    assert sum(text.statistics.accepted) + sum(event.kind == "standard" for event in text.events) > 0


def test_a_resumed_run_writes_the_texts_of_an_undisturbed_one():
    ensemble = ensembles()["fixed"]
    lines, settings = [PromptLine({"prompt": PROMPT}, "here")], {"max_new_tokens": 12, "stop_tokens": [STOP]}
    whole, parts = [], []
    pieces = missing([], lines, 5, seed=3)
    write_texts(ensemble, pieces, whole.append, constraint=Brackets(True), **settings)
    write_texts(ensemble, pieces[:2], parts.append, constraint=Brackets(True), **settings)
    left = missing(parts, lines, 5, seed=3)
    write_texts(ensemble, left, parts.append, constraint=Brackets(True), **settings)
    assert [text["tokens"] for text in sorted(parts, key=lambda text: text["sample"])] == [
        text["tokens"] for text in sorted(whole, key=lambda text: text["sample"])
    ]


@pytest.mark.parametrize("schedule", ["fixed", "alternate"])
def test_each_position_is_asked_about_once_while_drafts_are_accepted(schedule):
    twins = [Bigram(table(0)), Bigram(table(0))]
    grammar = Brackets(True)
    ensemble = SpeculativeEnsemble(twins, draft_lens=4, schedule=schedule)
    text = ensemble.generate(PROMPT, constraint=grammar, max_new_tokens=30, seed=5, stop_tokens=[STOP])
    assert grammar.num_asked <= len(text.tokens) + text.statistics.rounds


def test_a_constraint_that_is_complete_at_once_gives_an_empty_text():
    text = ensembles()["alternate"].generate(PROMPT, constraint=lambda _: None)
    assert (text.tokens, text.text, text.finish_reason) == ([], "", "stop")


@pytest.mark.parametrize("schedule", ["standard", "fixed", "alternate"])
def test_what_a_drafter_cannot_say_the_ensemble_still_can(schedule):
    """Only the larger vocabulary has the tokens that are allowed at every other place."""
    members = [Bigram(table(0)[:30, :30]), Bigram(table(1))]
    members[0].table = torch.nn.Embedding.from_pretrained(table(0)[:, :30])
    ensemble = SpeculativeEnsemble(members, draft_lens=3, schedule=schedule)
    text = ensemble.generate(
        PROMPT,
        max_new_tokens=20,
        seed=1,
        constraint=lambda tokens: bits(range(30, 40) if len(tokens) % 2 else range(30)),
    )
    assert [token >= 30 for token in text.tokens] == [index % 2 == 1 for index in range(20)]


@pytest.mark.parametrize("schedule", ["fixed", "alternate"])
def test_a_dead_end_that_only_drafts_run_into_is_none(schedule):
    """Behind token 5 nothing is allowed; the drafter wants it, the ensemble does not."""
    tables = [table(0), table(1)]
    tables[0][:, 5], tables[1][:, 5] = float("-inf"), 50.0
    ensemble = SpeculativeEnsemble([Bigram(own) for own in tables], None, Mixture((1, 0)), 3, schedule, drafter=1)
    everything = bits(range(VOCAB))
    text = ensemble.generate(
        PROMPT, max_new_tokens=20, seed=1, constraint=lambda tokens: 0 * everything if 5 in tokens else everything
    )
    assert len(text.tokens) == 20
    with pytest.raises(RuntimeError, match="no token can be drawn at generated token 3"):
        ensemble.generate(PROMPT, constraint=lambda tokens: everything * (len(tokens) < 3))


def test_wrong_masks_are_named():
    ensemble = ensembles()["alternate"]
    with pytest.raises(ValueError, match=r"constraint: expected it to return an int32 tensor .* got torch.float32"):
        ensemble.generate(PROMPT, constraint=lambda _: torch.zeros(2))
    with pytest.raises(ValueError, match=r"constraint: expected it to return an int32 tensor .* got 3"):
        ensemble.generate(PROMPT, constraint=lambda _: 3)
    with pytest.raises(ValueError, match="constraint: expected 2 words as before, got 3"):
        ensemble.generate(PROMPT, constraint=lambda tokens: bits(range(40), 2 + (len(tokens) > 2)), max_new_tokens=9)
