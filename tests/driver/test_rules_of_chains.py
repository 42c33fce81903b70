"""How the schedule `fixed` accepts drafts: lossless and lossy rules, and an assistant that replaces tokens."""

import pytest
import torch
from driver.test_schedules import GREEDY
from driver.text_law import fit_of_texts
from driver.tiny_models import PROMPT, Bigram, relative_of, tiny_llama
from specens import SpeculativeEnsemble

from specens_kernels import DecisionTree, Mixture, Replacement, Sampling, Threshold, Typical, target_logprobs

ASSISTED = Mixture((0.0, 1.0))
# Replace where the drafter is below .3, or below .6 with an assistant above .8.
TREE = DecisionTree(
    feature=(0, -1, 0, 1, -1, -1, -1),
    threshold=(0.3, 0.0, 0.6, 0.8, 0.0, 0.0, 0.0),
    left=(1, -1, 3, 4, -1, -1, -1),
    right=(2, -1, 6, 5, -1, -1, -1),
    replace=(False, True, False, False, False, True, False),
)


@pytest.fixture(scope="module")
def pair():
    first = tiny_llama(0)
    return [first, relative_of(first, 1, noise=0.2)]


def by_hand(pair, decide, length, draft_len):
    """CoSD with greedy models, every prefix read afresh. decide: draft and assistant probability -> replace."""
    text = []
    while len(text) < length:
        drafts = []
        for _ in range(min(draft_len, length - len(text))):
            row = pair[0](torch.tensor([PROMPT + text + drafts])).logits[0, -1].softmax(-1)
            drafts.append(int(row.argmax()))
        for token in drafts:
            ids = torch.tensor([PROMPT + text])
            own, assistant = (member(ids).logits[0, -1].softmax(-1) for member in pair)
            best = int(assistant.argmax())
            replaced = best != token and decide(float(own[token]), float(assistant[best]))
            text.append(best if replaced else token)
            if replaced:
                break
    return text


@pytest.mark.parametrize(
    ("rule", "decide"),
    [
        (Replacement(0.5, 0.5), lambda own, assistant: own < 0.5 and assistant > 0.5 * own),
        (Replacement(0.9, 1.0), lambda own, assistant: own < 0.9 and assistant > own),
        (TREE, lambda own, assistant: own <= 0.3 or (own <= 0.6 and assistant > 0.8)),
    ],
    ids=["rule", "strict rule", "tree"],
)
@torch.inference_mode()
def test_collaborative_decoding_writes_what_its_rule_says(pair, rule, decide):
    expected = by_hand(pair, decide, 50, 4)
    ensemble = SpeculativeEnsemble(pair, ensemble=ASSISTED, schedule="fixed", draft_lens=4, rule=rule)
    result = ensemble.generate(PROMPT, max_new_tokens=50, sampling=GREEDY)
    assert result.tokens == expected
    assert 0 < result.statistics.recovered < 40
    assert result.statistics.bonus == 0
    many = ensemble.generate_many([PROMPT] * 2, max_new_tokens=50, sampling=GREEDY)
    assert [text.tokens for text in many] == [expected] * 2
    alone = [
        SpeculativeEnsemble([member], schedule="standard").generate(PROMPT, max_new_tokens=50, sampling=GREEDY)
        for member in pair
    ]
    assert expected not in [text.tokens for text in alone]


@pytest.mark.parametrize("weights", [(0.3, 0.7), (0.0, 1.0)])
def test_block_acceptance_keeps_the_law_and_accepts_more(weights):
    tables = list(1.5 * torch.randn(2, 3, 3, generator=torch.Generator().manual_seed(4)))
    transition = target_logprobs(tables, ensemble=Mixture(weights)).double().exp()
    accepted = {}
    for rule in ("token", "block"):
        ensemble = SpeculativeEnsemble(
            [Bigram(table) for table in tables], None, Mixture(weights), 3, "fixed", rule=rule
        )
        fit, texts = fit_of_texts(ensemble, transition, 75)
        assert fit > 1e-4
        accepted[rule] = sum(sum(text.statistics.accepted) for text in texts)
    assert accepted["block"] > accepted["token"]


@torch.inference_mode()
def test_a_threshold_accepts_what_the_target_finds_likely_enough(pair):
    ensemble = SpeculativeEnsemble(pair, ensemble=ASSISTED, schedule="fixed", draft_lens=3, rule=Threshold(0.25))
    result = ensemble.generate(PROMPT, max_new_tokens=60, sampling=Sampling(), seed=2)
    for index, event in enumerate(result.events):
        row = pair[1](torch.tensor([PROMPT + result.tokens[:index]])).logits[0, -1].softmax(-1)
        if event.kind == "draft accepted":
            assert row[event.token] >= 0.25 - 1e-5
    lenient = SpeculativeEnsemble(pair, ensemble=ASSISTED, schedule="fixed", draft_lens=3, rule=Typical(1e-6, 1e-6))
    accepts_more = lenient.generate(PROMPT, max_new_tokens=60, seed=2)
    assert accepts_more.statistics.acceptance_rate > result.statistics.acceptance_rate


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"rule": "best"}, "rule: expected token, block, traversal, k_seq, gumbel, typical, or a Typical"),
        ({"rule": "block", "schedule": "alternate"}, "rule: expected 'token' or 'gumbel' under schedule 'alternate'"),
        ({"rule": Replacement()}, "rule: expected a drafter that is no part of the ensemble under Replacement"),
    ],
)
def test_rules_that_do_not_fit_are_named(pair, arguments, message):
    with pytest.raises(ValueError, match=message):
        SpeculativeEnsemble(pair, **({"schedule": "fixed"} | arguments))
