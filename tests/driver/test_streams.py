"""Texts token by token: iterators, async iterators, their early end; alternatives; how a Generation shows."""

from __future__ import annotations

import asyncio
import itertools

import pytest
import torch
from driver.tiny_models import relative_of, tiny_llama, tiny_tokenizer
from specens import SpeculativeEnsemble

from specens_kernels import Mixture, Sampling, target_logprobs

FIRST = tiny_llama(0)
SECOND = relative_of(FIRST, 1, noise=0.2)
PROMPT = "w1 w2 w3"
SETTINGS = {"max_new_tokens": 15, "seed": 3}


def ensemble(**settings):
    return SpeculativeEnsemble([FIRST, SECOND], tiny_tokenizer(), Mixture((0.5, 0.5)), **settings)


def test_a_stream_gives_the_events_of_generate():
    pair = ensemble(draft_lens=3)
    expected = pair.generate(PROMPT, **SETTINGS)
    stream = pair.stream(PROMPT, **SETTINGS)
    with pytest.raises(RuntimeError, match="before generation is asked for"):
        stream.generation  # noqa: B018
    events = list(stream)
    assert events == expected.events
    assert stream.generation.to_dict().keys() == expected.to_dict().keys()
    assert (stream.generation.text, stream.generation.finish_reason) == (expected.text, "length")
    assert next(stream, None) is None


def test_a_stream_runs_no_round_before_its_tokens_are_asked_for():
    rounds = []
    stream = ensemble(schedule="standard").stream(PROMPT, on_round=rounds.append, **SETTINGS)
    assert rounds == []
    next(stream)
    assert len(rounds) == 1


def test_a_stream_that_is_closed_is_an_interrupted_text():
    pair = ensemble()
    with pair.stream(PROMPT, **SETTINGS) as stream:
        first = [event.token for event in itertools.islice(stream, 4)]
    text = stream.generation
    assert text.interrupted
    assert len(text.tokens) < 15
    assert text.tokens[:4] == first == pair.generate(PROMPT, **SETTINGS).tokens[:4]
    assert [*first, *(event.token for event in stream)] == text.tokens


def test_an_async_stream_leaves_the_loop_free():
    pair = ensemble(draft_lens=2)

    async def consume():
        ticks, done = 0, asyncio.Event()

        async def tick():
            nonlocal ticks
            while not done.is_set():
                ticks += 1
                await asyncio.sleep(0)

        beside = asyncio.create_task(tick())
        async with pair.stream(PROMPT, **SETTINGS) as stream:
            tokens = [event.token async for event in stream]
        done.set()
        await beside
        return tokens, ticks

    tokens, ticks = asyncio.run(consume())
    assert tokens == pair.generate(PROMPT, **SETTINGS).tokens
    assert ticks > 3


def test_what_is_wrong_is_said_before_the_first_token():
    with pytest.raises(ValueError, match="top_logprobs: expected an integer >= 0"):
        ensemble().stream(PROMPT, top_logprobs=-1)


@pytest.mark.parametrize("how", [{"schedule": "standard"}, {"draft_lens": 3}, {"tree": (2, 2)}], ids=str)
def test_alternatives_are_the_most_likely_tokens_of_the_target(how):
    text = ensemble(**how).generate(PROMPT, top_logprobs=4, temperature=0.8, **SETTINGS)
    prompt = tiny_tokenizer()(PROMPT).input_ids
    ids = torch.tensor([prompt + text.tokens])
    with torch.inference_mode():
        rows = [model(ids).logits[:, len(prompt) - 1 : -1] for model in (FIRST, SECOND)]
    law = target_logprobs(rows, ensemble=Mixture((0.5, 0.5)), sampling=Sampling(temperature=0.8))[0]
    for event, row in zip(text.events, law, strict=True):
        best = row.topk(4)
        assert [token for token, _ in event.top_logprobs] == best.indices.tolist()
        told = torch.tensor([score for _, score in event.top_logprobs], dtype=row.dtype)
        torch.testing.assert_close(told, best.values, atol=1e-4, rtol=0)
        assert event.logprob == pytest.approx(float(row[event.token]), abs=1e-4)
    assert text.logprobs == [event.logprob for event in text.events]
    assert ensemble(**how).generate(PROMPT, **SETTINGS).events[0].top_logprobs is None


def test_a_generation_shows_as_a_line_and_in_a_notebook_as_its_text():
    text = ensemble(draft_lens=2).generate(PROMPT, logprobs=True, **SETTINGS)
    assert repr(text).startswith(f"Generation({text.text[:59]!r}"[:40])
    assert "15 tokens, length" in repr(text)
    assert repr(text).endswith("seed 3)")
    assert len(repr(text)) < 200
    html = text._repr_html_()
    assert html.count("<span") == 15
    assert "draft accepted by member" in html
    text.events[0].text = "<script>"
    assert "<script>" not in text._repr_html_()
