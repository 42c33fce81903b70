"""Targets that are computed densely: custom functions and cascades, against the law that they define."""

from types import SimpleNamespace

import pytest
import torch
from driver.test_schedules import GREEDY
from driver.text_law import fit_of_texts
from driver.tiny_models import PROMPT, Bigram, relative_of, tiny_llama
from specens import Cascade, Custom, SpeculativeEnsemble
from specens.decoding import verification
from specens.decoding.logit_rows import LogitRows

from specens_kernels import LogitMixture, Processing, Sampling, target_logprobs


def geometric_mean(member_logits, temperatures):
    return sum(logits.log_softmax(-1) for logits in member_logits) / len(member_logits) / temperatures[:, None]


def smallest(member_logits, temperatures):
    """The smaller probability of the two, renormalised: nothing that any built-in ensemble computes."""
    return torch.stack([(logits / temperatures[:, None]).log_softmax(-1) for logits in member_logits]).amin(0)


def cascade_by_hand(rule, alpha, small, large):
    """The paper's rules, one position at a time, from probabilities [vocab] of a temperature."""
    if rule == "token":
        mixed, rest = small.clone(), 0.0
        for token in range(len(small)):
            if large[token] < (1 - alpha) * large.max():
                rest += float(small[token])
                mixed[token] = 0.0
        return mixed + rest * large
    distance = float((small - large).abs().sum()) / 2
    limit = {"chow": 1 - alpha, "diff": float(large.max()) - alpha, "opt": float(large.max()) - alpha * distance}[rule]
    return large if float(small.max()) < limit else small


@pytest.mark.parametrize("rule", ["chow", "diff", "opt", "token"])
def test_a_cascade_has_the_distribution_of_its_rule(rule):
    generator = torch.Generator().manual_seed(1)
    small, large = 2 * torch.randn(2, 40, 9, generator=generator)
    temperatures = torch.linspace(0.5, 1.5, 40)
    for alpha in (0.0, 0.1, 0.3, 0.6):
        logits = Cascade(rule, alpha).combine([small, large], temperatures)
        for row, temperature in enumerate(temperatures):
            own = [(member[row].double() / temperature).softmax(-1) for member in (small, large)]
            expected = cascade_by_hand(rule, alpha, *own)
            torch.testing.assert_close(logits[row].double().exp(), expected, rtol=1e-4, atol=1e-6)
    assert Cascade(rule).combine([small[:, :5], large], temperatures).shape == (40, 9)


TARGETS = {
    "geometric": Custom(geometric_mean),
    "smallest": Custom(smallest),
    "cascade": Cascade("opt", 0.3),
    "token cascade": Cascade("token", 0.4),
}


@pytest.mark.parametrize("name", TARGETS)
@pytest.mark.parametrize(("schedule", "draft_lens"), [("standard", 1), ("fixed", 2), ("alternate", (2, 1))])
def test_texts_follow_the_law_of_a_dense_target(name, schedule, draft_lens):
    tables = list(1.5 * torch.randn(2, 3, 3, generator=torch.Generator().manual_seed(4)))
    transition = TARGETS[name].combine(tables, torch.full((3,), 0.8)).double().softmax(-1)
    ensemble = SpeculativeEnsemble([Bigram(table) for table in tables], None, TARGETS[name], draft_lens, schedule)
    assert fit_of_texts(ensemble, transition, sampling=Sampling(temperature=0.8))[0] > 1e-4


@pytest.mark.parametrize("name", TARGETS)
def test_greedy_speculation_of_a_dense_target_writes_the_tokens_of_standard(name):
    first = tiny_llama(0)
    pair = [first, relative_of(first, 1, noise=0.2)]
    expected = SpeculativeEnsemble(pair, ensemble=TARGETS[name], schedule="standard").generate(
        PROMPT, max_new_tokens=24, sampling=GREEDY
    )
    for schedule, draft_lens in (("fixed", 3), ("alternate", 1), ("alternate", (1, 3))):
        ensemble = SpeculativeEnsemble(pair, ensemble=TARGETS[name], schedule=schedule, draft_lens=draft_lens)
        assert ensemble.generate(PROMPT, max_new_tokens=24, sampling=GREEDY).tokens == expected.tokens
        many = ensemble.generate_many([PROMPT] * 3, max_new_tokens=24, sampling=GREEDY)
        assert [text.tokens for text in many] == [expected.tokens] * 3


def test_a_dense_target_that_is_built_in_too_gives_the_same_texts():
    first = tiny_llama(0)
    pair = [first, relative_of(first, 1, noise=0.2)]
    product = Custom(lambda logits, temperatures: sum(logits) / 2 / temperatures[:, None])
    for sampling in (Sampling(temperature=0.7, top_k=9), Sampling(top_p=0.8)):
        texts = [
            SpeculativeEnsemble(pair, ensemble=ensemble, draft_lens=2).generate(
                PROMPT, max_new_tokens=60, sampling=sampling, seed=4, logprobs=True
            )
            for ensemble in (product, LogitMixture((0.5, 0.5)))
        ]
        assert texts[0].tokens == texts[1].tokens
        torch.testing.assert_close(*(torch.tensor(text.logprobs) for text in texts), rtol=1e-3, atol=1e-3)


def test_a_plausible_logit_mixture_is_contrastive_decoding_as_its_second_paper_writes_it():
    """(1 + strength) * expert - strength * amateur among the plausible tokens [O'Brien & Lewis, 2023]."""
    generator = torch.Generator().manual_seed(3)
    expert, amateur = 2 * torch.randn(2, 30, 61, generator=generator)
    result = target_logprobs([expert, amateur], ensemble=LogitMixture((1.5, -0.5), plausibility=0.1))
    kept = expert >= expert.amax(-1, keepdim=True) + torch.tensor(0.1).log()
    expected = (1.5 * expert - 0.5 * amateur).masked_fill(~kept, float("-inf")).log_softmax(-1)
    torch.testing.assert_close(result, expected, rtol=1e-4, atol=1e-4)
    with pytest.raises(ValueError, match=r"plausibility: expected None or a number in \(0, 1\], got 2"):
        LogitMixture((1.5, -0.5), plausibility=2)


def test_wrong_dense_targets_are_named():
    pair = [tiny_llama(0), tiny_llama(1)]
    with pytest.raises(ValueError, match="rule: expected one of chow, diff, opt, token; got 'best'"):
        Cascade("best")
    with pytest.raises(ValueError, match="alpha: expected a finite number, got nan"):
        Cascade("opt", float("nan"))
    with pytest.raises(ValueError, match="ensemble: expected weights for the 3 members, got 2 in Cascade"):
        SpeculativeEnsemble([*pair, pair[0]], ensemble=Cascade())
    wrong = SpeculativeEnsemble(pair, ensemble=Custom(lambda logits, temperatures: logits[0].sum() + temperatures))
    with pytest.raises(ValueError, match=r"ensemble: expected the function to return logits \[1, vocab\], got torch"):
        wrong.generate(PROMPT, max_new_tokens=3)
    with pytest.raises(ValueError, match="ensemble: expected none of kind Cascade with processing"):
        SpeculativeEnsemble(pair, ensemble=Cascade()).generate(PROMPT, processing=Processing(presence_penalty=1.0))


def test_what_members_on_several_devices_drafted_from_goes_to_that_of_the_test():
    rows = [LogitRows(), LogitRows()]
    for own, device in zip(rows, ("cpu", "meta"), strict=True):
        own.add(0, torch.zeros(2, 5, device=device))
    requests = [SimpleNamespace(num_settled=0, rows=rows)] * 2
    logits = verification._draft_logits(requests, [[0, 1], [1, 1]], torch.device("meta"))
    assert (logits.device.type, logits.shape) == ("meta", (2, 2, 5))
