"""Drafters that are no members: whatever drafts, the text is the ensemble's."""

import pytest
import torch
from cases import FULL
from driver.cache_models import tiny_model
from driver.test_schedules import GREEDY
from driver.text_law import fit_of_texts
from driver.tiny_models import PROMPT, Bigram, HeadedBigram, relative_of, tiny_llama
from specens import Job, SpeculativeEnsemble
from specens.decoding.request import OUTSIDE
from specens.drafters import Drafter, DraftModel, Heads, Jacobi, LayerSkip, Lookahead, OtherTokenizer, PromptLookup
from specens.drafters.drafter import add_chosen

from specens_kernels import LogitMixture, Mixture, Processing, Sampling, target_logprobs

REPETITIVE = [5, 3, 8, 1, 9, 2] * 4
PROMPTS = [PROMPT, [1, 2], REPETITIVE, [60], [9, 8, 7, 6, 5, 4]]
JOBS = [Job(prompt, max_new_tokens=8 + 5 * (index % 3)) for index, prompt in enumerate(PROMPTS)]


def shared_heads(model, count=3):
    """Heads that draft as if the output layer itself said the next tokens, each a little worse."""
    weights = [model.lm_head.weight.roll(-head - 1, 1) for head in range(count)]
    return lambda hidden: torch.stack([hidden @ weight.T for weight in weights], 1)


@pytest.fixture(scope="module")
def pair():
    first = tiny_llama(0, num_hidden_layers=3)
    return [first, relative_of(first, 1, noise=0.2)]


def drafters(pair):
    return {
        "model": DraftModel(relative_of(pair[0], 2, noise=0.2)),
        "smaller vocabulary": DraftModel(tiny_llama(0, vocab=37)),
        "layer skip": LayerSkip([1]),
        "early exit": LayerSkip(exit_layer=2, index=1),
        "prompt lookup": PromptLookup(),
        "store": PromptLookup(4, 2, store=[[5, 3, 8, 1, 4, 4], list(range(61))], choose="frequent"),
        "jacobi": Jacobi(),
        "lookahead": Lookahead(3, index=1),
        "heads": Heads(shared_heads(pair[0])),
    }


NAMES = list(drafters([tiny_llama(0)]))


@pytest.fixture(scope="module")
def written(pair):
    """Of a lone target and an ensemble: members, target, and what `standard` writes of all jobs and of one text."""
    found = []
    for members, target in ((pair[:1], None), (pair, LogitMixture((1.4, -0.3)))):
        standard = SpeculativeEnsemble(members, ensemble=target, schedule="standard")
        texts = {text.index: text.tokens for text in standard.generate_many(JOBS, sampling=GREEDY)}
        alone = standard.generate(REPETITIVE, max_new_tokens=30, sampling=GREEDY).tokens
        found.append((members, target, texts, alone))
    return found


@pytest.mark.parametrize("name", NAMES)
def test_greedy_texts_are_those_of_standard_alone_and_in_batches(pair, written, name):
    drafter = drafters(pair)[name]
    for members, target, expected, expected_alone in written:
        if len(members) == 1 and name in ("early exit", "lookahead"):
            continue  # these ask for member 1
        ensemble = SpeculativeEnsemble(members, None, target, 4, "fixed", drafter=drafter)
        texts = list(ensemble.generate_many(JOBS, batch_size=3, sampling=GREEDY))
        assert {text.index: text.tokens for text in texts} == expected
        alone = ensemble.generate(REPETITIVE, max_new_tokens=30, sampling=GREEDY)
        assert alone.tokens == expected_alone
        assert alone.statistics.drafted[OUTSIDE] >= alone.statistics.tested[OUTSIDE] > 0
        assert alone.statistics.drafted[:OUTSIDE] == [0] * len(members)


@pytest.mark.parametrize("name", NAMES)
def test_a_seed_gives_one_text_in_any_batch(pair, name):
    ensemble = SpeculativeEnsemble(pair, draft_lens=3, schedule="fixed", drafter=drafters(pair)[name])
    sampling = Sampling(temperature=0.7, top_p=0.9)
    texts = ensemble.generate_many(JOBS, batch_size=4, seed=5, sampling=sampling, logprobs=True)
    for text in texts:
        job = JOBS[text.index]
        own = ensemble.generate(job.prompt, max_new_tokens=job.max_new_tokens, seed=text.seed, sampling=sampling)
        assert own.tokens == text.tokens
        own, other = own.statistics, text.statistics
        assert (own.drafted, own.accepted, own.forwards) == (other.drafted, other.accepted, other.forwards)
        assert own.drafter_forwards == other.drafter_forwards


def law_drafters(tables):
    return {
        "model": DraftModel(Bigram(tables[2])),
        "smaller vocabulary": DraftModel(Bigram(tables[2][:2, :2])),
        "prompt lookup": PromptLookup(2),
        "store": PromptLookup(2, store=[[0, 1, 2, 0, 0, 2]]),
        "jacobi": Jacobi(),
        "lookahead": Lookahead(2),
        "heads": Heads(lambda hidden: torch.stack([hidden.roll(1, 1), 0.5 * hidden], 1)),
    }


LAW_NAMES = list(law_drafters(torch.zeros(3, 3, 3)))
LAWS = [(count, name) for count in (1, 2) for index, name in enumerate(LAW_NAMES) if FULL or index % 2 == count % 2]


@pytest.mark.parametrize(("num_members", "name"), LAWS)
def test_texts_follow_the_law_of_the_target(name, num_members):
    tables = 1.5 * torch.randn(3, 3, 3, generator=torch.Generator().manual_seed(4))
    target = Mixture((0.4, 0.6)) if num_members == 2 else None
    transition = target_logprobs(list(tables[:num_members]), ensemble=target).double().exp()
    members = [HeadedBigram(table) for table in tables[:num_members]]
    ensemble = SpeculativeEnsemble(members, None, target, 2, "fixed", drafter=law_drafters(tables)[name])
    assert fit_of_texts(ensemble, transition)[0] > 1e-4


def test_a_drafter_of_the_users_own_needs_one_method(pair):
    class Counting(Drafter):
        def propose(self, batch, requests, draft_lens, min_probability=0.0):  # noqa: ARG002
            for request, most in zip(requests, draft_lens, strict=True):
                add_chosen(request, range(60, 60 - most, -1))

    ensemble = SpeculativeEnsemble(pair, draft_lens=70, schedule="fixed", drafter=Counting())
    result = ensemble.generate(PROMPT, max_new_tokens=20, sampling=GREEDY)
    standard = SpeculativeEnsemble(pair, schedule="standard").generate(PROMPT, max_new_tokens=20, sampling=GREEDY)
    assert result.tokens == standard.tokens


@pytest.mark.parametrize("name", ["smaller vocabulary", "layer skip", "prompt lookup", "jacobi", "heads"])
def test_processing_and_constraints_hold_whoever_drafts(pair, name):
    settings = {
        "processing": Processing(repetition_penalty=1.3, presence_penalty=0.4),
        "constraint": lambda tokens: torch.tensor([-1 if len(tokens) % 3 else 0, 0x0FFFFFFF], dtype=torch.int32),
        "stop_tokens": [44],
        "min_new_tokens": 20,
        "sampling": GREEDY,
        "max_new_tokens": 25,
    }
    ensemble = SpeculativeEnsemble(pair, draft_lens=3, schedule="fixed", drafter=drafters(pair)[name])
    standard = SpeculativeEnsemble(pair, schedule="standard").generate(REPETITIVE, **settings)
    assert ensemble.generate(REPETITIVE, **settings).tokens == standard.tokens
    assert min(standard.tokens[::3]) >= 32


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: PromptLookup(0), "max_match: expected an integer from 1 to 536870912, got 0"),
        (lambda: PromptLookup(2**63), "max_match: expected an integer from 1 to 536870912, got 9223372036854775808"),
        (lambda: PromptLookup(2, 3), "min_match: expected at most max_match, 2; got 3"),
        (lambda: PromptLookup(choose="last"), "choose: expected one of recent, frequent; got 'last'"),
        (lambda: PromptLookup(store="text"), "store: expected a list of texts"),
        (lambda: PromptLookup(store=3), "store: expected an NgramIndex or a list of texts, got int"),
        (lambda: PromptLookup(store=["text"]), "store: text needs a tokenizer"),
        (LayerSkip, "skip_layers: expected either it or exit_layer"),
        (lambda: LayerSkip(3), "skip_layers: expected the numbers of layers, got 3"),
        (lambda: LayerSkip([0, 1, 2]), "skip_layers: expected some of the member's layers, 0 to 2, and not all"),
        (lambda: LayerSkip([3]), "skip_layers: expected some of the member's layers, 0 to 2"),
        (lambda: LayerSkip(exit_layer=4), "exit_layer: expected at most the member's 3 layers, got 4"),
        (lambda: LayerSkip([0], index=2), "index: expected the index of a member, 0 to 1; got 2"),
        (lambda: Jacobi(True), "index: expected the index of a member, 0 to 1; got True"),
        (lambda: Lookahead(1), "ngram: expected an integer from 2 to 536870912, got 1"),
        (lambda: Lookahead(window=2**63), "window: expected an integer from 0 to 16384, got 9223372036854775808"),
        (lambda: Heads(3), "heads: expected a function of hidden states, got 3"),
        (lambda: DraftModel("nowhere"), "model: expected a folder"),
        (lambda: DraftModel(None), "model: expected a causal LM, an Engine, or what names a model, got NoneType"),
        (lambda: OtherTokenizer(tiny_llama(0), "name"), "tokenizer: expected one of transformers, loaded, got str"),
        (lambda: OtherTokenizer(tiny_llama(0), len, probabilities=1), "probabilities: expected True or False, got 1"),
        (lambda: DraftModel(tiny_model("mamba"), index=5), "index: expected the index of a member"),
        (lambda: "lookup", "drafter: expected the index of a member, 0 to 1, or a Drafter, .*; got 'lookup'"),
        (lambda: PromptLookup, "drafter: expected the index of a member, 0 to 1, or a Drafter"),
    ],
    ids=lambda value: value[:30] if isinstance(value, str) else "drafter",
)
def test_wrong_drafters_are_named(pair, make, message):
    with pytest.raises(ValueError, match=message):
        SpeculativeEnsemble(pair, schedule="fixed", drafter=make())


def test_drafters_that_do_not_suit_an_ensemble_are_named(pair):
    with pytest.raises(ValueError, match="drafter: expected the index of a member under schedule 'alternate'"):
        SpeculativeEnsemble(pair, schedule="alternate", drafter=PromptLookup())
    with pytest.raises(ValueError, match="draft_lens: expected one for a drafter that is no member"):
        SpeculativeEnsemble(pair, draft_lens=(1, 2), schedule="fixed", drafter=PromptLookup())
    with pytest.raises(ValueError, match="drafter: expected a model whose layers"):
        SpeculativeEnsemble([tiny_model("mamba")], schedule="fixed", drafter=LayerSkip([0]))
    with pytest.raises(ValueError, match="'fixed', got 1; a lone one needs a drafter that is no member"):
        SpeculativeEnsemble(pair[:1], schedule="fixed")
    short = SpeculativeEnsemble(pair, schedule="fixed", drafter=DraftModel(tiny_llama(0, max_position_embeddings=30)))
    with pytest.raises(ValueError, match="drafter: expected prompt and new tokens within the 30 positions"):
        short.generate(PROMPT, max_new_tokens=27)
    assert len(short.generate(PROMPT, max_new_tokens=26).tokens) == 26
    flat = SpeculativeEnsemble(pair, schedule="fixed", drafter=Heads(lambda hidden: hidden))
    with pytest.raises(ValueError, match=r"heads: expected logits \[1, heads, vocab\], got \[1, 32\]"):
        flat.generate(PROMPT)
