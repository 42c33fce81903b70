"""LayerSkip's early exit: the member goes on from the states, keys and values of the layers that drafted."""

from collections import Counter

import pytest
from driver.cache_models import tiny_model
from driver.test_drafters import JOBS
from driver.test_schedules import GREEDY
from driver.tiny_models import PROMPT, relative_of, tiny_llama
from specens import SpeculativeEnsemble, TreePlan
from specens.drafters import LayerSkip
from specens.engines.transformers.causal_lm import CausalLM
from transformers import StaticCache

from specens_kernels import Mixture

PLANS = [None, TreePlan((3, 2, 1)), TreePlan((2, 2), children="sampled"), TreePlan(nodes=7, width=3, levels=3)]


@pytest.fixture(scope="module")
def deep():
    return tiny_llama(0, num_hidden_layers=4)


def exiting(members, plan=None, layer=2, reuse=True, **given):
    """An ensemble in which the first layers of a member draft."""
    drafter = LayerSkip(exit_layer=layer, reuse=reuse, index=given.pop("index", 0))
    lens = 3 if plan is None else None
    return SpeculativeEnsemble(members, None, given.get("target"), lens, "fixed", drafter=drafter, tree=plan)


def tokens_by_layer(model, ensemble, prompt):
    """How many tokens each layer of a model read for a text."""
    counts = Counter()

    def count(number):
        return lambda _, given: counts.update({number: given[0].shape[1]})

    layers = enumerate(model.model.layers)
    hooks = [layer.mlp.register_forward_pre_hook(count(number)) for number, layer in layers]
    text = ensemble.generate(prompt, max_new_tokens=30, sampling=GREEDY)
    for hook in hooks:
        hook.remove()
    return [counts[number] for number in range(4)], text.statistics


@pytest.mark.parametrize("plan", PLANS, ids=str)
def test_each_layer_reads_a_token_once(deep, plan):
    """Only what a grown tree leaves out of its nodes is read by the first layers alone."""
    read, statistics = tokens_by_layer(deep, exiting([deep], plan), PROMPT)
    assert read == [read[0]] * 4 or (plan.is_grown and read[0] == read[1] > read[2] == read[3])
    assert statistics.tokens_fed == [read[3]]
    again, _ = tokens_by_layer(deep, exiting([deep], plan, reuse=False), PROMPT)
    assert again[2:] == read[2:]
    assert again[0] >= read[0] + statistics.drafter_tokens_fed


@pytest.mark.parametrize("plan", PLANS, ids=str)
@pytest.mark.parametrize("exact", [False, True])
def test_greedy_texts_are_those_of_standard_in_batches(deep, plan, exact):
    pair = [relative_of(deep, 1, noise=0.2), deep]
    standard = SpeculativeEnsemble(pair, schedule="standard").generate_many(JOBS, sampling=GREEDY)
    texts = exiting(pair, plan, index=1).generate_many(JOBS, batch_size=3, exact=exact, sampling=GREEDY)
    assert {text.index: text.tokens for text in texts} == {text.index: text.tokens for text in standard}


def test_members_that_share_its_weights_and_prompts_of_their_own_go_on_from_it_too(deep):
    members, target = [deep, deep], Mixture((0.7, 0.3))
    standard = SpeculativeEnsemble(members, None, target, schedule="standard")
    ensemble = exiting(members, target=target, index=1)
    assert ensemble.models[0] is ensemble.models[1]
    expected = standard.generate(PROMPT, max_new_tokens=25, sampling=GREEDY).tokens
    assert ensemble.generate(PROMPT, max_new_tokens=25, sampling=GREEDY).tokens == expected


@pytest.mark.parametrize("kind", ["sliding_hybrid", "sliding"])
def test_layers_with_windows_go_on_too(kind):
    model = tiny_model(kind)
    expected = SpeculativeEnsemble([model], schedule="standard").generate(PROMPT, max_new_tokens=25, sampling=GREEDY)
    text = exiting([model], layer=1).generate(PROMPT, max_new_tokens=25, sampling=GREEDY)
    assert text.tokens == expected.tokens


def test_a_model_that_cannot_go_on_drafts_for_itself_unless_it_was_asked_to(deep):
    fixed = CausalLM(deep, lambda config: StaticCache(config, max_cache_len=96))
    refused = r"reuse: expected an exit before the last layer .*; got layers \[0, 1\] of LlamaForCausalLM"
    with pytest.raises(ValueError, match=refused):
        exiting([fixed])
    ensemble = exiting([fixed], reuse=None)
    assert not ensemble.plan.drafter.reuses
    assert exiting([deep], reuse=None).plan.drafter.reuses
    expected = SpeculativeEnsemble([deep], schedule="standard").generate(PROMPT, max_new_tokens=9, sampling=GREEDY)
    assert ensemble.generate(PROMPT, max_new_tokens=9, sampling=GREEDY).tokens == expected.tokens
    with pytest.raises(ValueError, match="reuse: expected an exit before the last layer"):
        exiting([deep], layer=4)
    with pytest.raises(ValueError, match="reuse: expected an exit before the last layer"):
        SpeculativeEnsemble([deep], schedule="fixed", drafter=LayerSkip([1], reuse=True))
    with pytest.raises(ValueError, match="reuse: expected True, False or None, got 1"):
        LayerSkip(exit_layer=2, reuse=1)
