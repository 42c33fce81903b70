"""The plug-in for vLLM with SPECENS_VLLM_RULE=gumbel; runs without vLLM. The engine itself: tests/engines/vllm."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from adapters.vllm_round import PenaltiesState, V2Round
from specens.adapters import vllm as plug_in
from specens.adapters.vllm import arguments, install

from specens_kernels import Sampling, sample


@pytest.fixture
def installed(monkeypatch):
    """The rules that `register` installs."""
    rules = []
    monkeypatch.setattr(install, "install", rules.append)
    for name in ("SPECENS_VLLM", "SPECENS_VLLM_RULE"):
        monkeypatch.delenv(name, raising=False)
    return rules


@pytest.mark.parametrize(("asked", "rule"), [(None, "token"), ("", "token"), ("token", "token"), ("gumbel", "gumbel")])
def test_the_rule_is_token_unless_gumbel_is_asked_for(monkeypatch, installed, asked, rule):
    monkeypatch.setenv("SPECENS_VLLM", "1")
    if asked is not None:
        monkeypatch.setenv("SPECENS_VLLM_RULE", asked)
    plug_in.register()
    assert installed == [rule]


def test_another_rule_and_a_rule_without_the_switch_are_refused(monkeypatch, installed):
    monkeypatch.setenv("SPECENS_VLLM_RULE", "gumbel")
    with pytest.raises(ValueError, match=r"SPECENS_VLLM: expected 1 .* beside SPECENS_VLLM_RULE=gumbel, got ''"):
        plug_in.register()
    monkeypatch.setenv("SPECENS_VLLM", "0")
    plug_in.register()
    monkeypatch.setenv("SPECENS_VLLM", "1")
    monkeypatch.setenv("SPECENS_VLLM_RULE", "Gumbel")
    with pytest.raises(ValueError, match="SPECENS_VLLM_RULE: expected token or gumbel, got 'Gumbel'"):
        plug_in.register()
    assert installed == []


def test_other_ways_to_accept_drafts_are_refused_beside_gumbel():
    assert arguments.chain_rule("gumbel", "standard") == "gumbel"
    assert [arguments.chain_rule("token", method) for method in ("standard", "block")] == ["token", "block"]
    for method in ("block", "synthetic"):
        with pytest.raises(ValueError, match=f"rejection_sample_method: expected 'standard' with .*, got '{method}'"):
            arguments.chain_rule("gumbel", method)


def test_generators_on_a_gpu_move_as_in_the_sampler_of_vllm():
    class Generator(SimpleNamespace):
        """Stands in for torch's, which vLLM moves back by 4 where it throws the token of a prompt's part away."""

        def initial_seed(self):
            return 7

        def get_offset(self):
            return self.offset

        def set_offset(self, offset):
            self.offset = offset

    generator = Generator(offset=0, device=torch.device("cuda"))
    seeds, _ = arguments.random_numbers({1: generator}, torch.tensor([4, 5]), 2, torch.device("cpu"))
    assert seeds[1] == 7
    assert generator.offset == 4


@pytest.mark.parametrize("draft_logits", [False, True], ids=["one_hot", "draft_logits"])
@pytest.mark.parametrize("accepted", range(4))
def test_a_round_of_the_v2_runner_emits_what_steps_without_drafts_draw(draft_logits, accepted):
    packed = V2Round(draft_logits, rule="gumbel")
    if draft_logits:
        packed.draft_logits.fill_(torch.nan)
    drawn, report = packed.draw()
    assert report is packed.logits
    drafts = torch.cat((packed.inputs[:1], drawn[:-1]))
    for first, length in zip(packed.offsets.tolist(), packed.LENS):
        if accepted < length:
            drafts[first + 1 + accepted] = (drawn[first + accepted] + 1) % packed.VOCAB
    _, tokens, num_tokens = packed.verify(drafts)
    for request, (first, length) in enumerate(zip(packed.offsets.tolist(), packed.LENS)):
        count = min(accepted, length) + 1
        assert num_tokens[request] == count
        assert torch.equal(tokens[request, :count], drawn[first : first + count])
        assert (tokens[request, count:] == -1).all()


def test_a_step_of_the_v2_runner_is_a_draw_by_seed_and_position():
    packed = V2Round(False, rule="gumbel")
    packed.sampler.logits_processors = [PenaltiesState([4])]
    packed.sampler.logprobs_mode = "processed_logprobs"
    packed.sampler.apply_sampling_params = lambda logits, **context: logits + len(context)
    before, edited = packed.logits.clone(), packed.logits.float()
    edited[:, 0] = -torch.inf
    tokens, report = packed.draw()
    assert torch.equal(packed.logits, before)
    assert torch.equal(report, before + 7)
    alone = sample(
        edited[5:6],
        sampling=Sampling(0.0, top_k=5),
        seeds=torch.tensor([7]),
        positions=torch.tensor([51]),
        method="gumbel",
    )
    assert tokens[5] == alone.tokens == edited[5].argmax()
    alone = sample(
        edited[:4],
        sampling=Sampling(0.7, top_k=9, filter_order="vllm"),
        seeds=torch.full((4,), 2**60),
        positions=torch.arange(21, 25),
        method="gumbel",
    )
    assert torch.equal(tokens[:4], alone.tokens)
    packed.logits.fill_(-torch.inf)
    assert packed.draw()[0].tolist() == [0] * 8
