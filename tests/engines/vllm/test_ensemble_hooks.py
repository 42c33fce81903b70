"""An ensemble's model class, and the hooks of the V2 model runner: vLLM's own classes on tensors of a CPU."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from adapters.vllm_round import PenaltiesState, V2Round
from specens.adapters.vllm import v1_ensemble, v2
from specens.adapters.vllm.ensemble_config import check_engine, check_member
from specens.adapters.vllm.ensemble_model import SpecensEnsemble
from specens.adapters.vllm.ensemble_settings import EnsembleSettings
from specens.adapters.vllm.member_drafter import drafter_index
from specens.adapters.vllm.v2_ensemble import EnsembleRejectionSampler, EnsembleSampler, EnsembleState
from vllm import SamplingParams
from vllm.sampling_params import StructuredOutputsParams
from vllm.v1.worker.gpu.model_states import resolve_model_state_cls
from vllm.v1.worker.gpu.sample.sampler import Sampler
from vllm.v1.worker.gpu.spec_decode.rejection_sampler import RejectionSampler

from specens_kernels import Mixture, Sampling, sample, target_logprobs, verify_chain

VOCAB, ROWS, SLOTS = V2Round.VOCAB, 8, 5
WEIGHTS = {4: (0.2, 0.8), 0: (0.5, 0.5), 2: (0.9, 0.1)}  # of the slots in a round


class Linear(torch.nn.Module):
    """A member whose hidden states are given, with logits of its own."""

    def __init__(self, vocab, seed):
        super().__init__()
        self.weight = torch.randn(4, vocab, generator=torch.Generator().manual_seed(seed)) * 2

    def compute_logits(self, hidden_states):
        return hidden_states @ self.weight


def model_of(*vocabs):
    """An ensemble in vLLM without an engine: members of these vocabularies, each with 4 hidden units."""
    model = SpecensEnsemble.__new__(SpecensEnsemble)
    torch.nn.Module.__init__(model)
    model.settings = EnsembleSettings.of_config({"members": ["a", "b"]})
    model.members = torch.nn.ModuleList(Linear(vocab, seed) for seed, vocab in enumerate(vocabs))
    model.vocabs, model.hidden_sizes, model.vocab = list(vocabs), [4, 4], max(vocabs)
    model.carrier, model.reporting, model._rows = vocabs.index(max(vocabs)), False, None
    return model


@pytest.fixture
def hidden():
    return torch.randn(ROWS, 8, generator=torch.Generator().manual_seed(5))


def members_of(model, hidden):
    return [member.compute_logits(part) for member, part in zip(model.members, hidden.split(4, -1))]


def test_logits_stand_for_those_of_all_members_once(hidden):
    model = model_of(VOCAB, VOCAB)
    logits = model.compute_logits(hidden)
    rows = model.take_rows(logits, has_grammar=False)
    assert rows[0] is logits
    assert all(torch.equal(own, expected) for own, expected in zip(rows, members_of(model, hidden)))
    with pytest.raises(RuntimeError, match="not those that the ensemble computed last"):
        model.take_rows(logits, has_grammar=False)


def test_a_smaller_vocabulary_is_padded_and_a_grammar_masks_every_member(hidden):
    model = model_of(VOCAB - 3, VOCAB)
    logits = model.compute_logits(hidden)
    logits[2, 5:] = -torch.inf  # as vLLM masks them
    small, large = model.take_rows(logits, has_grammar=True)
    assert large is logits
    expected = members_of(model, hidden)[0]
    assert torch.equal(small[3, : VOCAB - 3], expected[3])
    assert torch.isneginf(small[:, VOCAB - 3 :]).all()
    assert torch.isneginf(small[2, 5:]).all()
    assert torch.equal(small[2, :5], expected[2, :5])
    ids = torch.tensor([0, VOCAB - 4, VOCAB - 1])
    assert model._known(ids, 0).tolist() == [0, VOCAB - 4, VOCAB - 4]
    assert model._known(ids, 1) is ids


def test_reports_on_prompts_are_the_ensembles(hidden):
    model = model_of(VOCAB, VOCAB)
    model.reporting = True
    expected = target_logprobs(members_of(model, hidden), ensemble=Mixture((0.5, 0.5)))
    assert torch.equal(model.compute_logits(hidden), expected)


class Hooked(V2Round):
    """A round of the V2 model runner through an ensemble's hooks: slots with weights of their own."""

    def __init__(self, hidden, draft_logits=True, rule="token", grammar=()):
        super().__init__(draft_logits, rule)
        self.model = model_of(VOCAB, VOCAB)
        assert resolve_model_state_cls(None, self.model) is EnsembleState
        self.state = EnsembleState.__new__(EnsembleState)
        self.state.rope_state = self.state.prompt_embeds_state = None
        self.state.rule = rule
        self.state.keep_slots(self.model, SLOTS, torch.device("cpu"))
        for slot, weights in WEIGHTS.items():
            structured = StructuredOutputsParams(regex="a") if slot in grammar else None
            params = SamplingParams(extra_args={"specens_weights": weights}, structured_outputs=structured)
            self.state.add_request(slot, SimpleNamespace(sampling_params=params))
        self.state.apply_staged_writes()
        self.hidden = hidden
        self.members = members_of(self.model, hidden)
        own = vars(self.sampler) | {"num_speculative_tokens": self.STEPS, "return_sampling_mask": False}
        sampler = Sampler.__new__(Sampler)
        vars(sampler).update(own)
        speculative = SimpleNamespace(
            num_speculative_tokens=self.STEPS, enable_adaptive_verification=False, rejection_sample_method="standard"
        )
        self.state.vllm_config = SimpleNamespace(speculative_config=speculative)
        self.state.device = torch.device("cpu")
        self.own_sampler, self.own_rejection = self.state.custom_sampler(sampler)

    def computed(self):
        self.model.reporting = False  # as where a step begins
        return self.model.compute_logits(self.hidden)

    def expected(self, request):
        """The verdict on a request by itself, in plain words."""
        first, end = self.offsets[request : request + 2].tolist()
        slot, states = self.SLOTS[request], self.sampler.sampling_states
        sampling, seed = self.sampling(slot), states.seeds.gpu[slot : slot + 1]
        draws = {}
        if self.draft_logits is not None and self.own_rejection.rule == "token" and end - first > 1:
            draws["draft_logits"] = self.draft_logits[slot, : end - first - 1][None]
            draws["draft_sampling"] = Sampling(states.temperature.gpu[slot].item())
        return verify_chain(
            [own[first:end][None] for own in self.members],
            self.inputs[first + 1 : end][None],
            ensemble=Mixture(torch.tensor([WEIGHTS[slot]])),
            sampling=sampling,
            rule=self.own_rejection.rule,
            seeds=seed if self.own_rejection.rule == "gumbel" else seed ^ v2.SEED_SALT,
            positions=self.positions[first : first + 1] + 1,
            **draws,
        )

    def sampling(self, slot):
        states = self.sampler.sampling_states
        top_k = states.top_k.gpu[slot].item()
        temperature, min_p = states.temperature.gpu[slot].item(), states.min_p.gpu[slot].item()
        return Sampling(temperature, None if top_k >= VOCAB else top_k, None, min_p, filter_order="vllm")

    def verified(self, chunks):
        """Through vLLM's class, in chunks of requests as it makes them."""
        owners, steps = self.of_rows()
        sampler, logits = self.own_rejection, self.computed()
        sampler.members = self.state.members_of(logits, self.slots.numpy())
        sampler.given = logits
        parts = []
        for start, end in chunks:
            lo, hi = int(self.offsets[start]), int(self.offsets[end])
            slots = self.slots[start:end]
            parts.append(
                sampler._verify(
                    logits[lo:hi],
                    self.draft_logits,
                    self.inputs[lo:hi],
                    self.positions[lo:hi],
                    self.offsets[start : end + 1] - lo,
                    slots,
                    slots.numpy(),
                    owners[lo:hi],
                    steps[lo:hi],
                    self.positions[start:end].numpy(),
                    self.inputs[lo:hi],
                )
            )
        return parts


@pytest.mark.parametrize("rule", ["token", "gumbel"])
@pytest.mark.parametrize("chunks", [[(0, 3)], [(0, 1), (1, 3)]])
def test_a_round_verifies_the_weights_of_each_slot(hidden, rule, chunks):
    hooked = Hooked(hidden, rule=rule)
    tokens = torch.cat([part[1] for part in hooked.verified(chunks)])
    counts = torch.cat([part[2] for part in hooked.verified(chunks)])
    for request, length in enumerate(hooked.LENS):
        expected = hooked.expected(request)
        assert tokens[request, : length + 1].tolist() == expected.tokens[0].tolist()
        assert counts[request] == expected.num_tokens[0]
    assert isinstance(hooked.own_rejection, RejectionSampler)


@pytest.mark.parametrize("rule", ["token", "gumbel"])
def test_a_step_without_drafts_is_a_round_of_empty_chains(hidden, rule):
    hooked = Hooked(hidden, rule=rule)
    firsts = hooked.offsets[:-1].long()
    hooked.hidden = hidden[firsts]
    logits, sampler = hooked.computed(), hooked.own_sampler
    sampler.members = hooked.state.members_of(logits, hooked.slots.numpy())
    positions, ids = hooked.positions[firsts], hooked.inputs[firsts]
    context = (hooked.slots, hooked.slots, hooked.slots.numpy(), positions, ids, 0 * ids, positions.numpy())
    tokens, reported = sampler.sample(logits, *context)
    assert reported is logits
    assert isinstance(sampler, EnsembleSampler)
    for request, (slot, first) in enumerate(zip(hooked.SLOTS, firsts)):
        seed = hooked.sampler.sampling_states.seeds.gpu[slot : slot + 1]
        draw = sample(
            [own[first : first + 1] for own in hooked.members],
            ensemble=Mixture(torch.tensor([WEIGHTS[slot]])),
            sampling=hooked.sampling(slot),
            seeds=seed if rule == "gumbel" else seed ^ v2.SEED_SALT,
            positions=hooked.positions[first : first + 1] + 1,
            **({"method": "gumbel"} if rule == "gumbel" else {"stream": 1}),
        )
        assert tokens[request] == draw.tokens[0]


def test_processed_reports_are_the_ensembles_of_each_slot(hidden):
    hooked = Hooked(hidden)
    hooked.own_sampler.logprobs_mode = "processed_logprobs"
    (part,) = hooked.verified([(0, 3)])
    for request, slot in enumerate(hooked.SLOTS):
        first, end = hooked.offsets[request : request + 2].tolist()
        sampling = hooked.sampling(slot)
        sampling = replace(sampling, temperature=sampling.temperature or 1.0)
        weights = torch.tensor([WEIGHTS[slot]])
        expected = target_logprobs(
            [own[first:end][None] for own in hooked.members], ensemble=Mixture(weights), sampling=sampling
        )
        assert torch.equal(part[0][first:end], expected[0])


def test_processors_of_vllm_act_on_every_member(hidden):
    hooked = Hooked(hidden)
    hooked.own_sampler.logits_processors.append(PenaltiesState([4]))
    for own in hooked.members:
        own[:, 0] = -torch.inf
    (part,) = hooked.verified([(0, 3)])
    for request, length in enumerate(hooked.LENS):
        assert part[1][request, : length + 1].tolist() == hooked.expected(request).tokens[0].tolist()


def test_a_grammar_of_one_slot_masks_all_members(hidden):
    hooked = Hooked(hidden, grammar=[0])
    assert hooked.state.has_grammar.tolist() == [True, False, False, False, False]
    logits = hooked.computed()
    logits[4, 10:] = -torch.inf
    rows = hooked.state.members_of(logits, np.array([0]))
    assert all(torch.isneginf(own[4, 10:]).all() for own in rows)
    assert hooked.model.reporting


def test_requests_are_checked_where_they_come_in():
    settings = EnsembleSettings.of_config({"members": ["a", "b"]})
    for params, message in [
        (SamplingParams(extra_args={"specens_weights": [2, 0]}), "specens_weights: expected numbers from 0 on"),
        (SamplingParams(extra_args={"specens_weights": [1, 0]}, prompt_logprobs=1), "prompt_logprobs: expected none"),
        (SamplingParams(logprob_token_ids=[3]), "logprob_token_ids: expected none"),
    ]:
        with pytest.raises(ValueError, match=message):
            v1_ensemble.check_request(settings, params)
    v1_ensemble.check_request(settings, SamplingParams(prompt_logprobs=1, logprobs=2))


def engine_of(model, parallel, load="auto", speculative=None, lora=None):
    """The parts of an engine's configuration that are looked at."""
    usual = {"enable_prompt_embeds": False, "logits_processors": None, "quantization": None, "runner_type": "generate"}
    return SimpleNamespace(
        model_config=SimpleNamespace(**usual | model),
        parallel_config=SimpleNamespace(**{"pipeline_parallel_size": 1} | parallel),
        speculative_config=speculative,
        lora_config=lora,
        load_config=SimpleNamespace(load_format=load),
    )


@pytest.mark.parametrize(
    ("engine", "message"),
    [
        (engine_of({}, {"pipeline_parallel_size": 2}), "pipeline_parallel_size: expected 1 with an ensemble .* got 2"),
        (engine_of({}, {}, lora=object()), "enable_lora: expected no LoRA"),
        (engine_of({"quantization": "fp8"}, {}), "quantization: expected none, as each member brings its own"),
        (engine_of({"logits_processors": ["x"]}, {}), "logits_processors: expected none"),
        (engine_of({"enable_prompt_embeds": True}, {}), "enable_prompt_embeds: expected tokens as prompts"),
        (engine_of({"runner_type": "pooling"}, {}), "runner: expected 'generate' .* got 'pooling'"),
        (engine_of({}, {}, load="tensorizer"), "load_format: expected auto or .* got 'tensorizer'"),
        (
            engine_of({}, {}, speculative=SimpleNamespace(method="eagle3")),
            "speculative_config.method: expected .*eagle3",
        ),
    ],
)
def test_engines_that_an_ensemble_is_not_served_by_are_refused(engine, message):
    with pytest.raises(ValueError, match=message):
        check_engine(engine)
    check_engine(engine_of({}, {}, speculative=SimpleNamespace(method="ngram")))


def member_of(vocab=VOCAB, architecture="LlamaForCausalLM", **kinds):
    usual = dict.fromkeys(("is_multimodal_model", "is_encoder_decoder", "is_hybrid", "is_attention_free"), False)
    config = SimpleNamespace(architectures=[architecture])
    return SimpleNamespace(**usual | kinds, architecture=architecture, hf_config=config, get_vocab_size=lambda: vocab)


@pytest.mark.parametrize(
    ("member", "message"),
    [
        (member_of(is_multimodal_model=True), "specens.members: expected models of text alone, got m"),
        (member_of(is_hybrid=True), "specens.members: expected models with attention alone, got m"),
        (member_of(architecture="SpecensEnsemble"), "specens.members: expected models, got m, which is an ensemble"),
        (member_of(vocab=VOCAB + 1), "vocab_size: expected the largest of the members, 68 of m, .* got 67"),
    ],
)
def test_models_that_cannot_be_members_are_refused(member, message):
    with pytest.raises(ValueError, match=message):
        check_member("m", member, member_of())


def test_an_engine_with_an_ensemble_and_lora_does_not_start(run_engine, target, draft_model):
    overrides = {"architectures": ["SpecensEnsemble"], "specens": {"members": [str(target), str(draft_model)]}}
    run = run_engine(target, [], hf_overrides=overrides, skip_tokenizer_init=True, enable_lora=True)
    assert run.texts is None
    assert "enable_lora: expected no LoRA with an ensemble (SpecensEnsemble), got True" in run.stderr


def test_the_draft_model_that_is_a_member_is_found_by_folder_or_name(tmp_path):
    configs = [SimpleNamespace(model=str(tmp_path), revision=None), SimpleNamespace(model="a/b", revision="1")]
    model = SimpleNamespace(configs=configs)
    for draft, index in [
        (SimpleNamespace(model=f"{tmp_path}/", revision="any"), 0),
        (SimpleNamespace(model="a/b", revision="1"), 1),
        (SimpleNamespace(model="a/b", revision="2"), None),
    ]:
        assert drafter_index(model, draft) == index
    assert issubclass(EnsembleRejectionSampler, RejectionSampler)
