"""Draft trees against `standard`, and what they leave in caches."""

import itertools
import random

import pytest
import torch
from cases import FULL
from driver.cache_models import CACHES, tiny_model
from driver.test_schedules import ENSEMBLES, GREEDY
from driver.text_law import fit_of_texts
from driver.tiny_models import PROMPT, Bigram, relative_of, tiny_llama
from specens import SpeculativeEnsemble, TreePlan
from specens.decoding.reader import open_reader
from specens.decoding.reads import read
from specens.decoding.statistics import Statistics
from specens.engines.transformers.causal_lm import CausalLM
from transformers import Gemma3ForCausalLM, QuantizedCache

from specens_kernels import Contrastive, LogitMixture, Mixture, Sampling, TokenTree, target_logprobs

PLANS = {
    "static": TreePlan((4, 2, 2)),
    "chain": TreePlan((1, 1, 1)),
    "grown": TreePlan(nodes=10, width=3, levels=3),
    "shape": TokenTree.best_for_acceptance((0.6, 0.2, 0.1), 9),
    "best first": TreePlan(nodes=8, width=2, order="best", levels=5),
}
TOLERANCE = {"rtol": 1e-4, "atol": 1e-3}


@pytest.fixture(scope="module")
def pair():
    first = tiny_llama(0)
    return [first, relative_of(first, 1, noise=0.2)]


def generate(members, plan, ensemble=None, drafter=0, rule="token", schedule="fixed", **arguments):
    how = {"schedule": schedule, "drafter": drafter, "rule": rule}
    return SpeculativeEnsemble(members, ensemble=ensemble, tree=plan, **how).generate(
        PROMPT, **({"max_new_tokens": 40, "seed": 3} | arguments)
    )


def standard(members, ensemble=None, **arguments):
    return SpeculativeEnsemble(members, ensemble=ensemble, schedule="standard").generate(
        PROMPT, **({"max_new_tokens": 40, "seed": 3} | arguments)
    )


@pytest.mark.parametrize("name", ENSEMBLES)
def test_greedy_trees_write_the_tokens_of_standard(pair, name):
    expected = standard(pair, ENSEMBLES[name], sampling=GREEDY)
    results = [generate(pair, plan, ENSEMBLES[name], drafter=1, sampling=GREEDY) for plan in PLANS.values()]
    results.append(generate(pair, (3, 2), ENSEMBLES[name], drafter=1, rule="traversal", sampling=GREEDY))
    assert [result.tokens for result in results] == [expected.tokens] * len(results)
    assert sum(sum(result.statistics.accepted) for result in results) >= 40  # all kinds of tokens were put to the test
    assert sum(result.statistics.recovered for result in results) >= 2
    assert sum(result.statistics.bonus for result in results) >= 4


def test_greedy_trees_of_three_members_write_the_tokens_of_standard(pair):
    members = [*pair, relative_of(pair[0], 2)]
    ensemble = Mixture((0.5, 0.3, 0.2))
    expected = standard(members, ensemble, sampling=GREEDY)
    for drafter in range(3):
        assert generate(members, (2, 2), ensemble, drafter, sampling=GREEDY).tokens == expected.tokens


def test_a_member_of_weight_zero_does_not_read_the_last_level(pair):
    outside = generate(pair, (2, 2, 2), Mixture((1.0, 0.0)), drafter=1)
    inside = generate(pair, (2, 2, 2), Mixture((0.5, 0.5)), drafter=1)
    assert outside.statistics.forwards[1] <= 3 * outside.statistics.rounds
    assert inside.statistics.forwards[1] > 3 * inside.statistics.rounds


class TreeBigram(Bigram):
    """Takes what a model needs to read trees, and needs none of it."""

    def __init__(self, logits):
        super().__init__(logits)
        self.config._attn_implementation = "sdpa"

    def forward(self, input_ids, cache=None, attention_mask=None, position_ids=None, use_cache=None, logits_to_keep=0):  # noqa: ARG002
        return super().forward(input_ids, logits_to_keep=logits_to_keep)


@pytest.mark.parametrize("name", ["mixture", *["single_target", "contrastive"] * FULL])
@pytest.mark.parametrize(
    ("plan", "rule"),
    [
        (TreePlan((2, 2)), "token"),
        (TreePlan((2, 1)), "traversal"),
        (TreePlan((2, 2), children="sampled"), "token"),
        (TreePlan((3, 1), children="independent"), "token"),
        (TreePlan((3, 1), children="independent"), "k_seq"),
        (TreePlan((3, 2), children="sampled"), "traversal"),
        (TreePlan(nodes=4, width=2, levels=3), "token"),
        (TreePlan(nodes=5, levels=3, children="sampled", threshold=0.2), "token"),
        (TreePlan(nodes=5, levels=3, children="sampled", threshold=0.2), "traversal"),
    ],
    ids=str,
)
def test_sampled_texts_of_trees_follow_the_law_of_the_ensemble(name, plan, rule):
    tables = list(1.5 * torch.randn(2, 3, 3, generator=torch.Generator().manual_seed(4)))
    ensemble = SpeculativeEnsemble(
        [TreeBigram(table) for table in tables], ensemble=ENSEMBLES[name], tree=plan, drafter=1, rule=rule
    )
    assert fit_of_texts(ensemble, target_logprobs(tables, ensemble=ENSEMBLES[name]).double().exp())[0] > 1e-4


IN_TURNS = {  # targets of members that draft trees for each other
    "two": Mixture((0.3, 0.7)),
    "contrastive": ENSEMBLES["contrastive"],
    "three": Mixture((0.5, 0.2, 0.3)),
    "one that only drafts": Mixture((0.4, 0.0, 0.6)),
    "two that only draft": LogitMixture((0.0, 1.0, 0.0)),
}
TREES_IN_TURNS = [
    TreePlan((2, 2)),
    TreePlan((3, 1), children="sampled"),
    TreePlan((2, 2), children="independent"),
    TreePlan(nodes=4, width=2, levels=3),
    TreePlan(nodes=5, levels=3, children="sampled", threshold=0.2),
    TokenTree([-1, -1, 0]),  # whose drafter has read one of the leaves
]


def num_members(target):
    return 2 if isinstance(target, Contrastive) else len(target.weights)


@pytest.mark.parametrize("name", IN_TURNS)
@pytest.mark.parametrize("drafter", [None, *[1] * FULL])
def test_members_that_draft_trees_in_turns_write_the_greedy_text_of_standard(pair, name, drafter):
    target = IN_TURNS[name]
    members = [*pair, relative_of(pair[0], 2)][: num_members(target)]
    job = {"sampling": GREEDY, "max_new_tokens": 40 if FULL else 24}
    expected = standard(members, target, **job).tokens
    for plan in [*PLANS.values(), *TREES_IN_TURNS]:
        result = generate(members, plan, target, drafter, schedule="alternate", **job)
        assert result.tokens == expected
        assert sum(result.statistics.accepted) > 3
        assert len(result.statistics.drafted) == len(members) + 1


LAWS_IN_TURNS = list(itertools.product(IN_TURNS, TREES_IN_TURNS)) if FULL else list(zip(IN_TURNS, TREES_IN_TURNS))


@pytest.mark.parametrize(("name", "plan"), LAWS_IN_TURNS, ids=str)
def test_texts_of_members_that_draft_trees_in_turns_follow_the_law(name, plan):
    target = IN_TURNS[name]
    tables = list(1.5 * torch.randn(num_members(target), 3, 3, generator=torch.Generator().manual_seed(4)))
    ensemble = SpeculativeEnsemble([TreeBigram(own) for own in tables], None, target, None, "alternate", tree=plan)
    fit, texts = fit_of_texts(ensemble, target_logprobs(tables, ensemble=target).double().exp())
    assert fit > 1e-4
    assert sum(sum(text.statistics.accepted) for text in texts) > 100


@pytest.mark.parametrize("noise", [0.0, 0.05, 0.4, 3.0])
def test_trees_of_one_level_never_need_more_forwards_than_standard(pair, noise):
    """One for each test, as of chains, one more for each tree that opens on a token that no member knew, and of each
    member one for the prompt.
    """
    members = [pair[0], relative_of(pair[0], 5, noise)]
    plans = [TreePlan((4,)), TreePlan((3,), children="sampled")]
    for plan, seed in itertools.product(plans, range(3 if FULL else 1)):
        statistics = generate(members, plan, None, None, seed=seed, schedule="alternate").statistics
        assert 40 <= sum(statistics.forwards) - 2 <= 40 + statistics.recovered
        assert statistics.bonus == 0


def test_twins_that_draft_trees_in_turns_read_each_token_once(pair):
    """The drafter one forward a level but the first, the other one for all; and each one for the prompt."""
    twins = [pair[0], relative_of(pair[0], 1, noise=0.0)]
    statistics = generate(twins, (2, 2, 1, 1), None, None, sampling=GREEDY, schedule="alternate").statistics
    assert statistics.recovered == 0
    assert statistics.accepted[:2] == [20, 20]
    assert sum(statistics.forwards) == 2 + 10 * (3 + 1)


def test_sampled_siblings_end_where_the_draft_distribution_does(pair):
    plan = TreePlan((4, 4), children="sampled")
    narrow = generate(pair, plan, sampling=Sampling(top_k=2), max_new_tokens=30)
    assert len(narrow.tokens) == 30
    assert sum(narrow.statistics.drafted) <= narrow.statistics.rounds * (2 + 4 * 4)
    assert not narrow.statistics.status


@pytest.mark.parametrize("plan", [*PLANS.values(), TreePlan((2, 2), children="sampled")], ids=str)
def test_statistics_of_trees_account_for_every_token(pair, plan):
    result = generate(pair, plan, logprobs=True)
    statistics, kinds = result.statistics, [event.kind for event in result.events]
    assert statistics.emitted == len(result.tokens) == len(result.logprobs) == 40
    assert sum(statistics.accepted) == kinds.count("draft accepted")
    assert statistics.recovered == kinds.count("recovered")
    assert statistics.bonus == kinds.count("bonus")
    assert len(kinds) == sum(statistics.accepted) + statistics.recovered + statistics.bonus
    assert sum(statistics.tested) == sum(statistics.accepted) + statistics.recovered
    ids = torch.tensor([PROMPT + result.tokens])
    with torch.inference_mode():
        logits = [member(ids).logits[0, len(PROMPT) - 1 : -1] for member in pair]
    expected = target_logprobs(logits, ensemble=Mixture((0.5, 0.5))).gather(1, torch.tensor(result.tokens)[:, None])
    torch.testing.assert_close(torch.tensor(result.logprobs), expected[:, 0], **TOLERANCE)


def test_the_text_ends_with_the_first_end_of_sequence_in_an_accepted_path(pair):
    endless = standard(pair, sampling=GREEDY).tokens
    kinds = set()
    for stop in set(endless):
        result = generate(pair, (3, 2, 2), sampling=GREEDY, stop_tokens=[stop])
        assert result.tokens == endless[: endless.index(stop) + 1]
        assert result.finish_reason == "stop"
        kinds.add(result.events[-1].kind)
    assert "draft accepted" in kinds


def test_a_seed_reproduces_the_text_of_trees(pair):
    first, again, other = (generate(pair, PLANS["grown"], seed=seed) for seed in (11, 11, 12))
    assert first.tokens == again.tokens != other.tokens


@pytest.mark.parametrize(("kind", "cache"), [("full", "dynamic"), ("full", "static"), ("sliding_hybrid", "dynamic")])
@torch.inference_mode()
def test_logits_at_the_nodes_are_those_of_each_path_read_afresh(kind, cache):
    model = CausalLM(tiny_model(kind, **({"sliding_window": 300} if kind != "full" else {})), CACHES[cache])
    reader = open_reader(model, [PROMPT], [0], Statistics.of(1), trees=True)
    generator, settled, tree = random.Random(0), [], TokenTree.branching((3, 2, 2))
    parents = tree.parents.tolist()
    paths = [[node for node in line if node >= 0] for line in tree.path_matrix.tolist()]
    for number in range(12):
        tokens = [generator.randrange(61) for _ in parents]
        parts = [3, len(parents)] if number % 2 else [len(parents)]  # a level at first, as a drafter reads them
        starts = [-1, *parts[:-1]]  # the row after the text comes with the first part
        ends = zip(starts, parts, strict=True)
        rows = [read(reader, [*settled, *tokens[:end]], end - start, parents[:end])[0] for start, end in ends]
        logits = torch.cat(rows)
        for path in paths:
            whole = model.model(torch.tensor([PROMPT + settled + [tokens[node] for node in path]])).logits[0]
            torch.testing.assert_close(logits[[0, *(node + 1 for node in path)]], whole[-4:], **TOLERANCE)
        accepted = generator.choice(paths)[: number % 4]
        reader.keep_path(len(settled), accepted)
        settled = settled + [tokens[node] for node in accepted]
        assert int(reader.texts[0].cache.get_seq_length()) == len(PROMPT) + len(settled)
        settled.append(generator.randrange(61))


@pytest.mark.parametrize(
    ("kind", "make_cache"),
    [("gated_delta", None), ("full", lambda config: QuantizedCache("fp8", config)), ("mamba", None)],
    ids=["gated_delta", "fp8", "mamba"],
)
def test_caches_that_cannot_hold_trees_read_them_path_by_path(kind, make_cache):
    first = tiny_model(kind)
    members = [CausalLM(model, make_cache) for model in (first, relative_of(first, 1))]
    result = generate(members, (2, 2), sampling=GREEDY)
    assert result.tokens == standard(members, sampling=GREEDY).tokens or make_cache is not None
    assert sum(result.statistics.accepted) > 0
    assert result.statistics.forwards[1] >= 4 * result.statistics.rounds


def test_models_that_do_not_take_the_masks_of_trees_read_them_path_by_path():
    tables = [2 * torch.randn(11, 11, generator=torch.Generator().manual_seed(seed)) for seed in range(2)]
    other = TreeBigram(tables[1])
    other.config._attn_implementation = "flex_attention"
    for members in ([Bigram(table) for table in tables], [TreeBigram(tables[0]), other]):
        expected = standard(members, sampling=GREEDY).tokens
        assert generate(members, (3, 2), sampling=GREEDY).tokens == expected
        assert generate(members, (3, 2), drafter=None, schedule="alternate", sampling=GREEDY).tokens == expected
    with pytest.raises(ValueError, match="tree: expected at most 11 children"):
        SpeculativeEnsemble([TreeBigram(tables[0])] * 2, schedule="tree", tree=(12,))


def test_trees_that_outgrow_a_sliding_window_are_read_path_by_path():
    first = tiny_model("sliding_hybrid", sliding_window=24)
    assert isinstance(first, Gemma3ForCausalLM)
    members = [first, relative_of(first, 1)]
    job = {"max_new_tokens": 40, "sampling": GREEDY}
    for plan in ((2, 2), PLANS["grown"]):
        result = generate(members, plan, **job)
        assert result.tokens == standard(members, **job).tokens
        assert result.statistics.forwards[1] > 2 * result.statistics.rounds
        assert generate(members, plan, drafter=None, schedule="alternate", **job).tokens == result.tokens


@pytest.mark.parametrize(
    ("tree", "message"),
    [
        ((), "tree: expected a number of children from 1 to 16384 for each level"),
        ((2, 0), "tree: expected a number of children from 1 to 16384 for each level"),
        ("4,2", "tree: expected the number of children on each level, a TokenTree or a TreePlan, got '4,2'"),
        (b"42", "tree: expected the number of children on each level, a TokenTree or a TreePlan, got b'42'"),
    ],
)
def test_a_wrong_tree_is_refused(pair, tree, message):
    with pytest.raises(ValueError, match=message):
        SpeculativeEnsemble(pair, schedule="tree", tree=tree)
    with pytest.raises(ValueError, match="expected two members or more for 'fixed', got 1"):
        SpeculativeEnsemble(pair[:1], schedule="tree")


@pytest.mark.parametrize(
    "settings",
    [
        {"nodes": 0},
        {"nodes": 2**63},
        {"branches": (2**63,)},
        {"nodes": 4, "width": 2**63},
        {"nodes": 4, "levels": 2**63},
        {"nodes": 5, "children": "independent"},
        {"order": "widest"},
        {"width": True},
        {"threshold": 0.0},
        {"threshold": "0.1"},
        {"gain": float("nan")},
        {"branches": 4},
        {"shape": (4, 2)},
        {"shape": TokenTree([-1]), "nodes": 4},
    ],
    ids=str,
)
def test_a_wrong_plan_is_refused(settings):
    with pytest.raises(ValueError, match="tree: expected"):
        TreePlan(**settings)
