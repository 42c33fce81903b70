"""Many prompts at once: each text is the one that its prompt and seed give alone."""

import itertools

import pytest
import scipy.stats
import torch
from cases import FULL
from driver.cache_models import tiny_model
from driver.test_schedules import ENSEMBLES, GREEDY
from driver.text_law import fit_of_texts
from driver.tiny_models import PROMPT, Bigram, relative_of, tiny_llama, tiny_tokenizer
from specens import Job, SpeculativeEnsemble, TreePlan
from specens.engines.transformers.causal_lm import CausalLM
from specens.engines.transformers.ragged_cache import RaggedCache
from specens.settings.jobs import derived_seed
from transformers import GenerationConfig

from specens_kernels import Contrastive, LogitMixture, Mixture, Processing, Sampling, target_logprobs

PROMPTS = [PROMPT, [1, 2], [7] * 20, [3, 4, 5], [9, 8, 7, 6, 5, 4], [60], [2, 2]]
JOBS = [Job(prompt, max_new_tokens=9 + 5 * (index % 4)) for index, prompt in enumerate(PROMPTS)]
SCHEDULES = {"standard": 1, "fixed": 3, "alternate": 1, "alternate, long chains": (3, 1, 2), "parallel": 3}
SCHEDULES |= {"alternate, trees": TreePlan((2, 2)), "alternate, drawn trees": TreePlan((3, 1), children="sampled")}


@pytest.fixture(scope="module")
def members():
    first = tiny_llama(0)
    return [first, relative_of(first, 1, noise=0.2), relative_of(first, 2, noise=0.2)]


def alone_and_together(ensemble, jobs, batch_size=3, **settings):
    """The texts of the jobs, each generated alone, and in batches; both in the order of the jobs."""
    alone = []
    for index, job in enumerate(jobs):
        own = {
            name: value for name, value in vars(job).items() if value is not None and name not in ("prompt", "ensemble")
        }
        alone.append(ensemble.generate(job.prompt, **(settings | {"seed": derived_seed(5, index, 0)} | own)))
    together = sorted(ensemble.generate_many(jobs, batch_size=batch_size, seed=5, **settings), key=lambda g: g.index)
    return alone, together


@pytest.mark.parametrize("num_members", [3, *[2] * FULL])
@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("sampling", [GREEDY, Sampling(temperature=0.8, top_p=0.9)], ids=["greedy", "sampled"])
def test_a_batch_writes_the_texts_that_its_requests_write_alone(members, name, num_members, sampling):
    lens = SCHEDULES[name]
    tree = lens if isinstance(lens, TreePlan) else None
    lens = lens[:num_members] if isinstance(lens, tuple) else lens
    how = {"draft_lens": lens} if tree is None else {"tree": tree}
    ensemble = SpeculativeEnsemble(members[:num_members], schedule=name.split(",")[0], **how)
    jobs = JOBS if FULL else JOBS[:5]
    alone, together = alone_and_together(ensemble, jobs, sampling=sampling, logprobs=True)
    assert [text.tokens for text in together] == [text.tokens for text in alone]
    assert [len(text.tokens) for text in together] == [job.max_new_tokens for job in jobs]
    for own, other in zip(alone, together, strict=True):
        assert own.seed == other.seed
        torch.testing.assert_close(torch.tensor(own.logprobs), torch.tensor(other.logprobs), rtol=1e-3, atol=1e-3)
        # Of a text alone a forward reads the prompt, and another one the first tree.
        assert own.statistics.forwards == other.statistics.forwards or tree is not None
        assert own.statistics.tokens_fed == other.statistics.tokens_fed
        assert own.statistics.accepted == other.statistics.accepted


def test_requests_enter_and_leave_while_others_go_on(members):
    started, ended = [], []

    def prompts():
        for number, job in enumerate(JOBS):
            started.append((number, len(ended)))
            yield job

    ensemble = SpeculativeEnsemble(members[:2])
    for generation in ensemble.generate_many(prompts(), batch_size=2, sampling=GREEDY):
        ended.append(generation.index)
    assert sorted(ended) == list(range(len(JOBS)))
    assert started == [(0, 0), (1, 0), *((number, number - 1) for number in range(2, len(JOBS)))]


def test_requests_differ_in_every_setting(members):
    jobs = [
        Job(PROMPT, sampling=GREEDY, max_new_tokens=12),
        Job(PROMPT, sampling=Sampling(temperature=0.7, top_k=5), seed=3),
        Job([1, 2], sampling=Sampling(temperature=0.7, top_p=0.8), seed=4, max_new_tokens=17),
        Job([1, 2], ensemble=Mixture((0.1, 0.9)), seed=4),
        Job([1, 2], ensemble=LogitMixture((1.2, -0.2)), seed=5),
        Job([4], ensemble=Contrastive(0.3), sampling=Sampling(min_p=0.1, filter_order="vllm"), seed=-1),
        Job([4], ensemble=Mixture((1.0, 0.0)), seed=1, max_new_tokens=3),
        Job([4, 4], processing=Processing(repetition_penalty=1.3, frequency_penalty=0.2), seed=2),
        Job([4, 4], min_new_tokens=9, seed=2),
    ]
    ensemble = SpeculativeEnsemble(members[:2], draft_lens=2)
    together = sorted(
        ensemble.generate_many(jobs, batch_size=len(jobs), max_new_tokens=15, seed=8, stop_tokens=[7]),
        key=lambda text: text.index,
    )
    for job, text in zip(jobs, together, strict=True):
        own = SpeculativeEnsemble(members[:2], ensemble=job.ensemble, draft_lens=2)
        settings = {"max_new_tokens": 15, "seed": derived_seed(8, text.index, 0), "stop_tokens": [7]}
        names = ("sampling", "seed", "max_new_tokens", "min_new_tokens", "processing")
        settings |= {name: getattr(job, name) for name in names if getattr(job, name) is not None}
        assert own.generate(job.prompt, **settings).tokens == text.tokens
    assert len({tuple(text.tokens) for text in together}) >= 8


def test_each_prompt_gives_as_many_samples_as_are_asked_for(members):
    ensemble = SpeculativeEnsemble(members[:2])
    texts = list(ensemble.generate_many([PROMPT, [1]], samples=3, batch_size=4, max_new_tokens=12, seed=20))
    assert sorted((text.index, text.sample, text.seed) for text in texts) == [
        (index, sample, derived_seed(20, index, sample)) for index in range(2) for sample in range(3)
    ]
    for text in texts:
        prompt = (PROMPT, [1])[text.index]
        assert ensemble.generate(prompt, max_new_tokens=12, seed=text.seed).tokens == text.tokens
    drawn = list(ensemble.generate_many([PROMPT], samples=2, max_new_tokens=12))
    assert drawn[0].tokens != drawn[1].tokens


def test_members_that_share_weights_read_a_batch_in_one_forward(members):
    model, other = members[:2]
    calls = []
    hook = model.register_forward_pre_hook(
        lambda _, __, arguments: calls.append(tuple(arguments["input_ids"].shape)), with_kwargs=True
    )
    jobs = [Job([[5, 3, 8, 1], [2, 2, 9, 9, 4, 7, 1], [1, 2]]), Job([[1], [2, 3], [4]])]
    ensemble = SpeculativeEnsemble([model, model, other], ensemble=LogitMixture((1.5, -0.5, 0.3)), schedule="standard")
    together = list(ensemble.generate_many(jobs, batch_size=2, max_new_tokens=10, sampling=GREEDY))
    hook.remove()
    assert calls == [(4, 7)] + [(4, 1)] * 9
    for schedule in ("standard", "fixed", "alternate"):
        apart = SpeculativeEnsemble(
            [model, relative_of(model, 0, noise=0.0), other],
            ensemble=LogitMixture((1.5, -0.5, 0.3)),
            schedule=schedule,
        )
        expected = [apart.generate(job.prompt, max_new_tokens=10, sampling=GREEDY).tokens for job in jobs]
        shared = SpeculativeEnsemble([model, model, other], ensemble=LogitMixture((1.5, -0.5, 0.3)), schedule=schedule)
        texts = sorted(shared.generate_many(jobs, max_new_tokens=10, sampling=GREEDY), key=lambda text: text.index)
        assert [text.tokens for text in texts] == expected
    assert [text.tokens for text in sorted(together, key=lambda text: text.index)] == expected


def test_events_are_streamed_by_request(members):
    streamed = {}

    def collect(index, sample, events):
        streamed.setdefault((index, sample), []).extend(event.token for event in events)

    ensemble = SpeculativeEnsemble(members[:2])
    texts = list(ensemble.generate_many(JOBS, samples=2, batch_size=5, seed=0, on_tokens=collect))
    assert streamed == {(text.index, text.sample): text.tokens for text in texts}


def test_ctrl_c_passes_through_after_what_is_finished_was_handed_out(members):
    streamed, finished = [], []

    def interrupt(index, sample, events):  # noqa: ARG001
        streamed.extend(events)
        if len(streamed) >= 60:
            raise KeyboardInterrupt

    texts = SpeculativeEnsemble(members[:2]).generate_many(JOBS, batch_size=3, seed=1, on_tokens=interrupt)
    with pytest.raises(KeyboardInterrupt):
        finished.extend(text.index for text in texts)
    assert 0 < len(finished) < len(JOBS)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"batch_size": 0}, "batch_size: expected an integer >= 1, got 0"),
        ({"samples": True}, "samples: expected an integer >= 1, got True"),
        ({"max_new_tokens": -1}, "max_new_tokens: expected an integer >= 0, got -1"),
        ({"stop_strings": ["a"]}, "stop_strings: text needs a tokenizer"),
        ({"stop_strings": [""]}, "stop_strings: expected a list of texts that are not empty"),
        ({"sampling": Sampling(top_k=torch.tensor([1, 2]))}, r"sampling: expected one number as top_k, got \[2\]"),
        ({"processing": 3}, "processing: expected specens_kernels.Processing, got int"),
        ({"processing": Processing(output_tokens=torch.ones(1, 1, dtype=torch.int64))}, "expected no output_tokens"),
    ],
    ids=lambda value: value[:30] if isinstance(value, str) else next(iter(value)),
)
def test_wrong_settings_of_a_batch_are_named(members, settings, message):
    with pytest.raises(ValueError, match=message):
        list(SpeculativeEnsemble(members[:2]).generate_many([PROMPT], **settings))
    with pytest.raises(TypeError, match="max_tokens: no such setting; there are max_new_tokens, "):
        SpeculativeEnsemble(members[:2]).generate(PROMPT, max_tokens=3)


@pytest.mark.parametrize("kind", ["full", "sliding", "sliding_hybrid", "gated_delta", "mamba"])
def test_batches_suit_every_kind_of_cache(kind):
    first = tiny_model(kind)
    pair = [first, relative_of(first, 1, 0.2)]
    alone, together = alone_and_together(SpeculativeEnsemble(pair, draft_lens=2), JOBS, sampling=GREEDY)
    assert [text.tokens for text in together] == [text.tokens for text in alone]
    assert RaggedCache.suits(CausalLM(first)) == (kind in ("full", "sliding", "sliding_hybrid"))


@pytest.mark.parametrize("kind", ["full", "sliding", "sliding_hybrid"])
@torch.inference_mode()
def test_rows_of_a_ragged_cache_score_as_if_they_were_alone(kind):
    model = CausalLM(tiny_model(kind))
    cache, generator = RaggedCache(model), torch.Generator().manual_seed(0)
    texts = [[5], [1, 2, 3], [9] * 30]
    rows = [cache.add_row() for _ in texts]
    held = [0, 0, 0]
    for number in range(25):
        subset = [index for index in range(3) if number == 0 or int(torch.randint(3, (1,), generator=generator))] or [1]
        logits = cache.forward(
            [rows[index] for index in subset],
            [held[index] for index in subset],
            [texts[index][held[index] :] for index in subset],
            1,
        )
        for index, row in zip(subset, logits, strict=True):
            whole = model.model(torch.tensor([texts[index]])).logits[0, -1:]
            torch.testing.assert_close(row, whole, rtol=1e-4, atol=1e-3)
            held[index] = len(texts[index]) - (number + index) % 3 if len(texts[index]) > 3 else len(texts[index])
            del texts[index][held[index] :]  # rejected tokens, which the next ones are written over
            texts[index] += torch.randint(61, (1 + (number * index) % 4,), generator=generator).tolist()
        if number == 12:  # the last row takes the place of the first, and a new one comes
            assert cache.remove_row(0) == 2
            rows, texts, held = [1, 0, cache.add_row()], [texts[1], texts[2], [4, 4]], [held[1], held[2], 0]


@pytest.mark.parametrize("name", [*ENSEMBLES, "three members"])
@pytest.mark.parametrize(
    ("schedule", "draft_lens"), [("fixed", 2), ("alternate", 1), ("alternate", (2, 1, 3)), ("parallel", 2)]
)
def test_texts_of_batches_follow_the_law_of_the_ensemble(name, schedule, draft_lens):
    num_members = 3 if name == "three members" else 2
    ensemble = Mixture((0.5, 0.2, 0.3)) if name == "three members" else ENSEMBLES[name]
    tables = list(1.5 * torch.randn(num_members, 3, 3, generator=torch.Generator().manual_seed(4)))
    lens = draft_lens if isinstance(draft_lens, int) else draft_lens[:num_members]
    batches = SpeculativeEnsemble([Bigram(table) for table in tables], None, ensemble, lens, schedule)
    assert fit_of_texts(batches, target_logprobs(tables, ensemble=ensemble).double().exp())[0] > 1e-4


@pytest.mark.parametrize("num_members", [3, 4])
@pytest.mark.parametrize("noise", [0.0, 0.05, 0.4, 3.0])
def test_alternating_members_never_need_more_forwards_than_standard(members, num_members, noise):
    ensemble = [members[0], *(relative_of(members[0], seed, noise) for seed in range(1, num_members))]
    for text in SpeculativeEnsemble(ensemble).generate_many([PROMPT] * 4, seed=0, max_new_tokens=60):
        forwards = sum(text.statistics.forwards)
        most = 60 + (num_members - 1) * (text.statistics.recovered + 1)
        assert 60 <= forwards <= min(most, num_members * 60)
        if noise == 0.0:
            assert forwards == 60 + num_members - 1


def test_four_members_write_the_tokens_of_standard(members):
    four = [*members, relative_of(members[0], 3)]
    expected = SpeculativeEnsemble(four, schedule="standard").generate(PROMPT, max_new_tokens=50, sampling=GREEDY)
    for lens in (1, (2, 1, 1, 3), 4):
        result = SpeculativeEnsemble(four, draft_lens=lens).generate(PROMPT, max_new_tokens=50, sampling=GREEDY)
        assert result.tokens == expected.tokens
        assert sum(result.statistics.accepted) > 0


@pytest.mark.parametrize("schedule", ["standard", "fixed", "alternate", "parallel"])
def test_a_text_ends_before_the_first_stop_string(members, schedule):
    ensemble = SpeculativeEnsemble(members[:2], tiny_tokenizer(), schedule=schedule, draft_lens=4)
    endless = ensemble.generate(PROMPT, max_new_tokens=40, sampling=GREEDY)
    middle = len(endless.text) // 2
    for stop in (endless.text[middle : middle + 6], endless.text[:3], "never"):
        pieces = []
        result = ensemble.generate(
            PROMPT,
            max_new_tokens=40,
            sampling=GREEDY,
            stop_strings=["absent", stop],
            on_tokens=lambda events, pieces=pieces: pieces.extend(event.text for event in events),
        )
        index = endless.text.find(stop)
        assert result.text == "".join(pieces) == (endless.text if index < 0 else endless.text[:index])
        assert result.finish_reason == ("length" if index < 0 else "stop")
        assert result.tokens == endless.tokens[: len(result.tokens)]
        if index >= 0:  # the last token is the one that completes it
            assert stop in tiny_tokenizer().decode(result.tokens)
            assert stop not in tiny_tokenizer().decode(result.tokens[:-1])


@pytest.mark.parametrize("schedule", ["standard", "fixed", "alternate", "parallel"])
def test_a_text_does_not_end_before_min_new_tokens(members, schedule):
    ensemble = SpeculativeEnsemble(members[:2], schedule=schedule, draft_lens=3)
    endless = ensemble.generate(PROMPT, max_new_tokens=60, sampling=GREEDY).tokens
    stop = endless[2]
    assert len(ensemble.generate(PROMPT, max_new_tokens=60, sampling=GREEDY, stop_tokens=[stop]).tokens) <= 3
    longer = ensemble.generate(PROMPT, max_new_tokens=60, sampling=GREEDY, stop_tokens=[stop], min_new_tokens=20)
    assert stop not in longer.tokens[:20]


def test_a_text_cannot_be_shorter_than_its_least_length(members):
    ensemble = SpeculativeEnsemble(members[:2])
    for lengths in ({"max_new_tokens": 3, "min_new_tokens": 4}, {"min_new_tokens": 300}):
        with pytest.raises(ValueError, match=r"^min_new_tokens: expected at most max_new_tokens, (3|256); got"):
            ensemble.generate(PROMPT, **lengths)
    model = tiny_llama(0)
    model.generation_config = GenerationConfig(min_new_tokens=9)
    assert len(SpeculativeEnsemble([model]).generate(PROMPT, max_new_tokens=3).tokens) == 3


class NoRepeats:
    """As transformers writes processors: no token that is among the ids already."""

    def __call__(self, input_ids, scores):
        return scores.scatter(1, input_ids, float("-inf"))


@pytest.mark.parametrize("schedule", ["standard", "fixed", "alternate", "parallel"])
def test_logits_processors_see_the_tokens_before_each_row(members, schedule):
    ensemble = SpeculativeEnsemble(members[:2], schedule=schedule, draft_lens=3)
    result = ensemble.generate(PROMPT, max_new_tokens=40, logits_processors=[NoRepeats()], seed=1)
    assert len(set(PROMPT + result.tokens)) == len(PROMPT) + 40
    plain = SpeculativeEnsemble(members[:2], schedule="standard")
    greedy = [
        owner.generate(PROMPT, max_new_tokens=40, logits_processors=[NoRepeats()], sampling=GREEDY).tokens
        for owner in (plain, ensemble)
    ]
    assert greedy[0] == greedy[1]


@pytest.mark.parametrize("schedule", ["standard", "fixed", "alternate"])
def test_penalties_are_those_of_a_plain_loop(members, schedule):
    processing = Processing(
        repetition_penalty=1.4,
        presence_penalty=0.6,
        frequency_penalty=0.3,
        logit_bias=(torch.tensor([[3, 9]]), torch.tensor([[2.0, -1.0]])),
    )
    result = SpeculativeEnsemble(members[:2], schedule=schedule, draft_lens=3).generate(
        PROMPT, max_new_tokens=30, sampling=GREEDY, processing=processing
    )
    expected = []
    with torch.inference_mode():
        for _ in range(30):
            rows = []
            for member in members[:2]:
                row = member(torch.tensor([PROMPT + expected])).logits[0, -1]
                row[[3, 9]] += torch.tensor([2.0, -1.0])
                counts = torch.bincount(torch.tensor(expected, dtype=torch.int64), minlength=61)
                seen = counts + torch.bincount(torch.tensor(PROMPT), minlength=61) > 0
                row = torch.where(seen, torch.where(row > 0, row / 1.4, row * 1.4), row)
                rows.append((row - 0.3 * counts - 0.6 * (counts > 0)).softmax(-1))
            expected.append(int((rows[0] + rows[1]).argmax()))
    assert result.tokens == expected


def test_sampled_batches_under_a_penalty_follow_the_law():
    """The first two tokens of a bigram ensemble with a presence penalty."""
    vocab, texts = 3, 1500
    generator = torch.Generator().manual_seed(7)
    tables = [1.5 * torch.randn(vocab, vocab, generator=generator) for _ in range(2)]
    ensemble = SpeculativeEnsemble([Bigram(table) for table in tables], draft_lens=2)
    processing = Processing(presence_penalty=1.0)
    counts = torch.zeros(vocab, vocab, dtype=torch.float64)
    for text in ensemble.generate_many(
        itertools.repeat([0], texts), batch_size=200, max_new_tokens=2, seed=0, processing=processing
    ):
        counts[text.tokens[0], text.tokens[1]] += 1
    first = sum(table[0].double().softmax(-1) for table in tables) / 2
    law = torch.stack(
        [
            first[token] * sum((table[token] - torch.eye(vocab)[token]).double().softmax(-1) for table in tables) / 2
            for token in range(vocab)
        ]
    )
    assert scipy.stats.chisquare(counts.flatten(), texts * law.flatten() / law.sum()).pvalue > 1e-4


@pytest.mark.parametrize("name", [*SCHEDULES, "lookup"] if FULL else ["alternate, long chains", "lookup"])
def test_exact_texts_are_the_same_bit_by_bit_alone_and_in_any_batch(name):
    first = tiny_llama(0)
    members = [model.to(torch.bfloat16) for model in (first, relative_of(first, 1), relative_of(first, 2))]
    if name == "lookup":
        ensemble = SpeculativeEnsemble(members[:1])
    else:
        ensemble = SpeculativeEnsemble(members, draft_lens=SCHEDULES[name], schedule=name.split(",")[0])
    jobs = [Job(prompt * 2, max_new_tokens=20 + 3 * index, seed=index) for index, prompt in enumerate(PROMPTS[:5])]

    def texts(jobs, **settings):
        made = ensemble.generate_many(jobs, logprobs=True, **settings)
        return {text.seed: (text.tokens, text.logprobs) for text in made}

    alone = {job.seed: texts([job], batch_size=1)[job.seed] for job in jobs}
    for batch_size, order in ((2, jobs), (5, jobs[::-1]), (3, jobs[2:] + jobs[:2])):
        assert texts(order, batch_size=batch_size, exact=True) == alone
    assert texts(jobs, batch_size=5) != alone  # rounded otherwise, which is what exact is for
