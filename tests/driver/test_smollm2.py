"""Real models: SmolLM2-135M-Instruct and the demo's expert, in float32, whole or `shallow`."""

import itertools

import pytest
import torch
from cases import FULL
from driver.text_law import chi_square_probability
from specens import MemberPrompts, SpeculativeEnsemble, TreePlan

from specens_kernels import Contrastive, Mixture, Sampling, target_logprobs

QUESTION = "Explain what a Python decorator is."
LENGTH = 48 if FULL else 16


@pytest.mark.parametrize(
    "ensemble",
    [Mixture((0.5, 0.5)), *[Contrastive(0.2, plausibility=0.1)] * FULL],
    ids=["mixture", *["contrastive"] * FULL],
)
def test_greedy_speculation_writes_the_text_of_standard(smollm2, expert, tokenizer, ensemble):
    members = [expert, smollm2]
    job = {"prompt": QUESTION, "chat": True, "max_new_tokens": LENGTH, "sampling": Sampling(temperature=0.0)}
    expected = SpeculativeEnsemble(members, tokenizer, ensemble, schedule="standard").generate(**job)
    for schedule, draft_lens in (*[("fixed", 3), ("alternate", 1)] * FULL, ("alternate", (3, 1))):
        result = SpeculativeEnsemble(members, tokenizer, ensemble, draft_lens, schedule).generate(**job)
        assert result.tokens == expected.tokens
        assert result.text == expected.text == tokenizer.decode(expected.tokens, skip_special_tokens=True)
        assert sum(result.statistics.forwards) < sum(expected.statistics.forwards)
        assert result.statistics.acceptance_rate > 0.5


@pytest.mark.parametrize("weights", [(0.5, 0.5), *[(1.0, 0.0)] * FULL], ids=["ensemble", *["one_model"] * FULL])
def test_greedy_trees_write_the_text_of_standard(shallow, tokenizer, weights):
    ensemble = Mixture(weights)
    job = {"prompt": QUESTION, "chat": True, "max_new_tokens": LENGTH, "sampling": Sampling(temperature=0.0)}
    expected = SpeculativeEnsemble(shallow, tokenizer, ensemble, schedule="standard").generate(**job)
    for tree in ((4, 2, 2), TreePlan(nodes=16)):
        result = SpeculativeEnsemble(shallow, tokenizer, ensemble, schedule="tree", drafter=1, tree=tree).generate(
            **job
        )
        assert result.tokens == expected.tokens
        assert result.text == expected.text
        assert result.statistics.forwards[0] <= 12  # two tokens or more for a forward of the target


def test_sampled_text_is_reproduced_by_its_seed_and_streams_as_it_reads(shallow, tokenizer):
    pieces = []
    ensemble = SpeculativeEnsemble(shallow, tokenizer)
    job = {"prompt": QUESTION, "chat": True, "max_new_tokens": LENGTH, "seed": 7}
    first = ensemble.generate(**job, on_tokens=lambda events: pieces.extend(event.text for event in events))
    assert "".join(pieces) == first.text == tokenizer.decode(first.tokens, skip_special_tokens=True)
    assert ensemble.generate(**job).tokens == first.tokens


def test_one_model_under_two_prompts_is_a_prompt_ensemble(shallow, tokenizer):
    members = shallow[:1] * 2
    prompts = MemberPrompts(["Name a colour.", "Name a colour of the sky on a clear day, please."])
    job = {"chat": True, "max_new_tokens": 12, "sampling": Sampling(temperature=0.0)}
    expected = SpeculativeEnsemble(members, tokenizer, schedule="standard").generate(prompts, **job)
    assert expected.statistics.model_calls == len(expected.tokens)
    for schedule in (*["fixed"] * FULL, "alternate"):
        result = SpeculativeEnsemble(members, tokenizer, schedule=schedule).generate(prompts, **job)
        assert result.tokens == expected.tokens


@torch.inference_mode()
def test_first_tokens_of_alternating_members_follow_the_mixture(shallow, tokenizer):
    """Chi-square of texts against the law of the first token, among the eight most likely ones."""
    prompt, texts = tokenizer(QUESTION)["input_ids"], 160 if FULL else 64
    logits = [member(torch.tensor([prompt])).logits[:, -1] for member in shallow]
    sampling = Sampling(top_k=8)
    law = target_logprobs(logits, ensemble=Mixture((0.4, 0.6)), sampling=sampling)[0].double().exp()
    ensemble = SpeculativeEnsemble(shallow, tokenizer, Mixture((0.4, 0.6)))
    job = {"batch_size": 32, "max_new_tokens": 1, "sampling": sampling, "seed": 0, "stop_tokens": ()}
    counts = torch.zeros(len(law), dtype=torch.float64)
    for text in ensemble.generate_many(itertools.repeat(prompt, texts), **job):
        counts[text.tokens[0]] += 1
    kept = law > 0
    assert counts.sum() == counts[kept].sum() == texts
    assert chi_square_probability(counts[kept], texts * law[kept] / law.sum()) > 1e-3
