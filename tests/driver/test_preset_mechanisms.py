"""What makes each listed method the method of its name: its drafts, its target and its test, read afresh by hand."""

from __future__ import annotations

import math

import pytest
import specens.decoding.verification
import torch
from driver.test_schedules import GREEDY
from driver.tiny_models import PROMPT, Bigram, relative_of, tiny_llama, tiny_tokenizer
from specens import SpeculativeEnsemble, TreePlan
from specens.decoding.request import OUTSIDE
from specens.drafters import DraftModel, Heads, LayerSkip, PromptLookup, Several
from specens.engines.transformers.fewer_layers import with_layers
from specens.presets import PRESETS, RENAMED, preset

from specens_kernels import DecisionTree, Sampling, TokenTree

LENGTH = 40


@pytest.fixture(scope="module")
def family():
    first = tiny_llama(0)
    return [first, relative_of(first, 1, noise=0.25), relative_of(first, 2, noise=0.25)]


@pytest.fixture
def calls(monkeypatch):
    """The arguments of every call of verify_chain and verify_tree by the driver."""
    seen = []
    for name in ("verify_chain", "verify_tree"):
        operation = getattr(specens.decoding.verification, name)

        def noted(*args, operation=operation, **kwargs):
            seen.append(kwargs)
            return operation(*args, **kwargs)

        monkeypatch.setattr(specens.decoding.verification, name, noted)
    return seen


def run(name, members, sampling=Sampling(), seed=1, prompt=PROMPT, length=LENGTH, **given):
    """A text by a method, and its rounds."""
    rounds = []
    ensemble = SpeculativeEnsemble.from_preset(name, members, tokenizer=tiny_tokenizer(), **given)
    settings = {"max_new_tokens": length, "sampling": sampling, "seed": seed, "logprobs": True}
    return ensemble.generate(prompt, on_round=rounds.append, **settings), rounds


@torch.inference_mode()
def logits_after(model, text, prompt=PROMPT):
    return model(torch.tensor([prompt + text])).logits[0, -1].float()


def chance(model, text, token):
    return float(logits_after(model, text).softmax(-1)[token])


def drafts_of(result, rounds):
    """The drafts of chains up to the first rejected one: the tokens before it, itself, and whether it was accepted."""
    for own in rounds:
        before = result.tokens[: own.position]
        for step, draft in enumerate(own.drafts[: own.num_accepted + 1]):
            yield before, draft["token"], step < own.num_accepted
            before = [*before, draft["token"]]


@pytest.mark.parametrize(
    ("name", "rule"),
    [("speculative-decoding", "token"), ("block-verification", "block"), ("confident-drafts", "token")],
)
def test_a_draft_model_drafts_for_a_target_that_tests_by_the_rule(family, calls, name, rule):
    result, rounds = run(name, family[:2])
    assert {call["rule"] for call in calls} == {rule}
    assert result.statistics.drafted[0] == 0 < result.statistics.drafted[1]
    assert {draft["proposer"] for own in rounds for draft in own.drafts} == {1}
    assert max(len(own.drafts) for own in rounds) <= (20 if name == "confident-drafts" else 5)


def test_typical_acceptance_asks_for_more_than_epsilon_or_delta_by_the_entropy(family):
    result, rounds = run("typical-acceptance", family[:2], length=80)
    outcomes = set()
    for before, token, accepted in drafts_of(result, rounds):
        row = logits_after(family[0], before).double().softmax(-1)
        limit = min(0.09, 0.3 * math.exp(-float(torch.special.entr(row).sum())))
        assert accepted == (float(row[token]) > limit)
        outcomes.add((accepted, limit < 0.09))
    assert len(outcomes) >= 3


@pytest.mark.parametrize(
    ("name", "threshold", "most", "given"),
    [("confident-drafts", 0.4, 20, {}), ("self-speculation", 0.8, 8, {"drafter": LayerSkip([0])})],
)
def test_confident_chains_end_behind_the_first_draft_that_is_not_sure(family, name, threshold, most, given):
    members = family[:1] if given else family[:2]
    drafter = with_layers(family[0], [1]) if given else family[1]
    lengths = set()
    result, rounds = run(name, members, length=60, **given)
    for own in rounds[:-5]:
        text, tokens = result.tokens[: own.position], [draft["token"] for draft in own.drafts]
        chances = [chance(drafter, text + tokens[:step], token) for step, token in enumerate(tokens)]
        assert min(chances[:-1], default=1.0) >= threshold - 1e-5
        assert chances[-1] < threshold + 1e-5 or len(tokens) == most
        lengths.add(len(tokens))
    assert len(lengths) > 2


def test_the_little_decoder_hands_over_where_it_is_not_sure_and_is_rolled_back_where_the_big_one_is_surprised(family):
    result, rounds = run("big-little-decoder", family[:2], length=120)
    outcomes = {accepted for *_, accepted in drafts_of(result, rounds)}
    for before, token, accepted in drafts_of(result, rounds):
        assert accepted == (chance(family[0], before, token) >= math.exp(-3))
    lengths = set()
    for own in rounds[:-8]:
        text = result.tokens[: own.position] + [draft["token"] for draft in own.drafts]
        sure = [
            float(logits_after(family[1], text[:length]).double().softmax(-1).max())
            for length in range(own.position, len(text) + 1)
        ]
        assert min(sure[:-1], default=1.0) >= 0.6 - 1e-5
        assert sure[-1] < 0.6 + 1e-5 or len(own.drafts) == 16
        lengths.add(len(own.drafts))
    assert outcomes == {True, False}
    assert len(lengths) > 2


def looked_up(text, count, most=3):
    """Token by token, what followed the longest n-gram that text and drafts end with, where the text had it last."""
    drafts = []
    for _ in range(count):
        context = text + drafts
        sizes = range(min(most, len(context)), 0, -1)
        ends = ((size, end) for size in sizes for end in range(len(text) - 1, size - 1, -1))
        drafts += [next(text[end] for size, end in ends if text[end - size : end] == context[-size:])]
    return drafts


@pytest.mark.parametrize("name", ["prompt-lookup", "adaptive-prompt-lookup"])
def test_lookup_drafts_what_followed_the_last_three_tokens_before(family, name):
    prompt = PROMPT * 3
    result, rounds = run(name, family[:1], GREEDY, prompt=prompt, length=120)
    drafted = 0
    for own in rounds:
        tokens = [draft["token"] for draft in own.drafts]
        assert tokens == looked_up(prompt + result.tokens[: own.position], len(tokens))
        assert len(tokens) <= 10
        drafted += len(tokens)
    assert drafted > 20
    if name.startswith("adaptive"):
        assert len({len(own.drafts) for own in rounds}) > 2


def test_retrieval_drafts_from_texts(family):
    stored, _ = run("speculative-decoding", family[:2], GREEDY, length=60)
    result, _ = run("retrieval-chain", family[:1], GREEDY, length=60, drafter=PromptLookup(store=[stored.tokens]))
    assert result.tokens == stored.tokens
    assert result.statistics.accepted[OUTSIDE] > 30
    assert result.statistics.forwards[0] < 30


@pytest.mark.parametrize(
    ("name", "given", "kept"),
    [("early-exit", {"exit_layer": 1}, [0]), ("self-speculation", {"skip_layers": [0]}, [1])],
)
def test_some_of_its_own_layers_draft(family, name, given, kept):
    fewer = with_layers(family[0], kept)
    result, rounds = run(name, family[:1], GREEDY, drafter=LayerSkip(**given))
    drafts = [(before, token) for before, token, _ in drafts_of(result, rounds)]
    assert len(drafts) > 20
    assert all(token == int(logits_after(fewer, before).argmax()) for before, token in drafts)


def counting():
    """A model that counts: what it says to a wrong token is wrong there, and right at a later place."""
    table = torch.full((61, 61), -9.0)
    table[torch.arange(61), (torch.arange(61) + 1) % 61] = 9.0
    return Bigram(table)


def test_jacobi_iterates_guesses_and_lookahead_keeps_their_n_grams():
    seven = torch.zeros(61, 61)
    seven[:, 7] = 9.0  # whatever came before: guesses after a rejected token come true
    settings = {"sampling": GREEDY, "prompt": [0], "length": 42}
    kinds = [event.kind for event in run("jacobi", [Bigram(seven)], **settings)[0].events]
    assert kinds == (["recovered"] + ["draft accepted"] * 4 + ["bonus"]) * 7
    settings["length"] = 200
    assert run("jacobi", [counting()], **settings)[0].statistics.accepted[OUTSIDE] == 0
    assert run("lookahead-ngrams", [counting()], **settings)[0].statistics.accepted[OUTSIDE] > 100
    assert PRESETS["lookahead-ngrams"].settings["drafter"].ngram == 5


def test_the_heads_of_medusa_read_the_state_that_the_last_token_came_from(family):
    weights = torch.randn(2, 32, 61, generator=torch.Generator().manual_seed(0))
    heads = Heads(lambda hidden: torch.stack([hidden @ own for own in weights], dim=1))
    result, rounds = run("medusa-heads", family[:1], GREEDY, drafter=heads)
    seen = 0
    for own in rounds[1:]:
        ids = torch.tensor([PROMPT + result.tokens[: own.position - 1]])
        with torch.inference_mode():
            state = family[0].model(ids).last_hidden_state[0, -1]
        for draft, head in zip(own.drafts, weights, strict=False):
            assert draft["token"] == int((state @ head).argmax())
            seen += 1
    assert seen > 20


TREES = {
    "several-chains": ("with_replacement", "k_seq", [4, 1, 1]),
    "specinfer": ("with_replacement", "token", [1, 1, 3, 1, 1, 1, 1, 1]),
    "sequoia": ("without_replacement", "token", [3, 2]),
    "recursive-speculative-decoding": ("without_replacement", "token", [3, 2, 1]),
    "traversal-verification": ("without_replacement", "traversal", [3, 2, 1]),
}


SEQUOIA = TreePlan(shape=TokenTree.branching((3, 2)), children="sampled")


def children_of(own):
    """The tokens below each node of a tree, and below its root."""
    groups = {}
    for draft in own.drafts:
        groups.setdefault(draft["parent"], []).append(draft["token"])
    return groups


def test_rest_drafts_a_trie_of_what_followed_in_its_texts(family):
    store = PromptLookup(16, store=[[5, 3, 8, 1, 2, 4], [3, 8, 1, 2, 6], [8, 1, 7], [1, 9]], choose="frequent")
    rounds = run("rest", family[:1], drafter=store, length=4)[1]
    own = rounds[0].drafts
    texts = [own[0]["token"], *[draft["token"] for draft in own if draft["parent"] == 0]]
    assert texts == [2, 4]  # of the longest n-gram, and only what followed it
    assert {draft["token"] for draft in own if draft["parent"] == -1} == {2, 7, 9}  # and those of shorter ones


def test_lookahead_makes_n_grams_in_a_window_beside_its_drafts():
    """A row of 15 tokens and columns of 3 more: what is likely after each column ends an n-gram, and rows move up."""
    prompt = [4 * index for index in range(15)]  # where the columns begin to count
    rounds = run("lookahead", [counting()], GREEDY, prompt=prompt, length=60)[1]
    assert max(len(own.drafts) for own in rounds) <= 15 * 4 + 15 * 4
    assert [own.num_accepted for own in rounds[8:-1]] == [4] * len(rounds[8:-1])
    assert len(rounds) < 25


def test_medusa_drafts_the_product_of_its_heads_candidates(family, calls):
    weights = torch.randn(2, 32, 61, generator=torch.Generator().manual_seed(0))
    rounds = run("medusa", family[:1], drafter=Heads(lambda state: torch.stack([state @ own for own in weights], 1)))[1]
    assert {type(call["rule"]).__name__ for call in calls} == {"Typical"}
    for own in rounds[1:-3]:
        groups = children_of(own)
        assert len(groups[-1]) == 4
        assert len({tuple(groups[node]) for node in groups if node >= 0}) == 1  # whatever came before
        assert [len(groups[node]) for node in groups if node >= 0] == [3] * 4


@pytest.mark.parametrize("name", TREES)
def test_trees_are_drawn_and_tested_as_their_papers_say(family, calls, name):
    siblings, rule, branches = TREES[name]
    given = {"tree": SEQUOIA} if name == "sequoia" else {}
    rounds = run(name, family[:2], length=60, **given)[1]
    trees = [call for call in calls if "parents" in call]  # at the end of the text there are chains
    assert {call["siblings"] for call in trees} == {siblings}
    assert {call["rule"] for call in calls} == {rule}
    assert all(call["draft_logits"].shape[1] == call["draft_tokens"].shape[1] + 1 for call in trees)
    assert {draft["proposer"] for own in rounds for draft in own.drafts} == {1}
    repeats = 0
    for own in rounds[: -len(branches)]:
        groups, parents = children_of(own), [draft["parent"] for draft in own.drafts]
        level = [-1]
        for count in branches:
            assert [len(groups[node]) for node in level] == [count] * len(level)
            level = [node for node, parent in enumerate(parents) if parent in level]
        repeats += sum(len(set(tokens)) < len(tokens) for tokens in groups.values())
    assert (repeats > 0) == (siblings == "with_replacement")  # independent draws meet


def test_specinfer_merges_the_trees_of_its_draft_models(family, calls):
    rounds = run("specinfer", family, length=40)[1]
    assert {call["siblings"] for call in calls if "parents" in call} == {"with_replacement"}
    for own in rounds[:-8]:
        proposers = [draft["proposer"] for draft in own.drafts]
        assert [proposers.count(index) for index in (1, 2)] == [20, 20]
        for draft, proposer in zip(own.drafts, proposers, strict=True):
            assert draft["parent"] < 0 or proposers[draft["parent"]] == proposer


def test_draft_models_of_specinfer_that_are_no_members_draft_and_accept_as_members_do(family):
    """By uniforms of their own nodes: the trees and texts are the same."""
    members = run("specinfer", family, length=40)
    models = Several([DraftModel(own) for own in family[1:]])
    outside = run("specinfer-draft-models", family[:1], length=40, drafter=models)
    assert outside[0].tokens == members[0].tokens
    trees = [
        [[(draft["token"], draft["parent"]) for draft in own.drafts] for own in rounds]
        for _, rounds in (members, outside)
    ]
    assert trees[0] == trees[1]


def test_dyspec_draws_children_as_long_as_they_are_likely_to_be_come_to(family, calls):
    rounds = run("dyspec", family[:2], length=30)[1]
    assert {call["siblings"] for call in calls if "parents" in call} == {"without_replacement"}
    sizes = {len(own.drafts) for own in rounds}
    assert max(sizes) <= 64
    assert len(sizes) > 3
    own = rounds[0]
    left, value = logits_after(family[1], []).double().softmax(-1), 1.0
    for token in children_of(own)[-1]:
        assert value >= 0.02
        value *= 1 - float(left[token] / left.sum())
        left[token] = 0
    assert value < 0.02 or len(own.drafts) == 64


@pytest.mark.parametrize(("name", "nodes"), [("opt-tree", 50), ("specexec", 128)])
def test_grown_trees_end_by_the_rule_of_their_papers(family, name, nodes):
    rounds = run(name, family[:2], GREEDY, length=24)[1]
    assert max(len(own.drafts) for own in rounds) == nodes
    if name == "specexec":  # nothing outside is more probable than what is in it
        chances, groups = {-1: 1.0}, children_of(rounds[0])
        paths = {-1: []}
        for node, draft in enumerate(rounds[0].drafts):
            paths[node] = [*paths[draft["parent"]], draft["token"]]
            chances[node] = chances[draft["parent"]] * chance(family[1], paths[draft["parent"]], draft["token"])
        least = min(chances.values())
        for node in [node for node in chances if len(paths[node]) < 3][:20]:
            best = logits_after(family[1], paths[node]).softmax(-1).max()
            assert node in groups or chances[node] * float(best) <= least + 1e-6


def test_dynamic_trees_are_the_most_probable_nodes_of_the_draft_model(family, calls):
    result, rounds = run("dynamic-trees", family[:2], GREEDY, length=20)
    assert not any(name in call for call in calls for name in ("siblings", "draft_logits", "drafter"))
    own = rounds[0]
    paths, chances = [], []
    for draft in own.drafts:
        above = ([], 1.0) if draft["parent"] < 0 else (paths[draft["parent"]], chances[draft["parent"]])
        chances.append(above[1] * chance(family[1], above[0], draft["token"]))
        paths.append([*above[0], draft["token"]])
    assert len(paths) == 60
    assert max(map(len, paths)) <= 6
    first = logits_after(family[1], []).softmax(-1).topk(10)
    left_out = [
        float(value)
        for token, value in zip(first.indices.tolist(), first.values.tolist(), strict=True)
        if [token] not in paths
    ]
    assert max(left_out, default=0.0) <= min(chances) + 1e-6
    best = paths.index([int(first.indices[0])])
    for token, value in zip(*(part.tolist() for part in _top(family[1], paths[best])), strict=True):
        assert ([*paths[best], token] in paths) or chances[best] * value <= min(chances) + 1e-6
    assert len(result.tokens) == 20


def _top(model, text):
    top = logits_after(model, text).softmax(-1).topk(10)
    return top.indices, top.values


def mixed(*weights):
    return lambda rows: sum(weight * row.softmax(-1) for weight, row in zip(weights, rows, strict=True)).log()


def summed(*weights, plausibility=0.0):
    def target(rows):
        plausible = rows[0].softmax(-1) >= plausibility * rows[0].softmax(-1).max()
        total = sum(weight * row for weight, row in zip(weights, rows, strict=True))
        return total.masked_fill(~plausible, -math.inf).log_softmax(-1)

    return target


def cascaded(rows):
    """Equation of the optimal rule: defer where max(small) < max(large) - alpha * total variation."""
    small, large = (row.softmax(-1) for row in rows)
    defers = small.max() < large.max() - 0.1 * (large - small).clamp(min=0).sum()
    return (large if defers else small).log()


TARGETS = {
    "speculative-ensemble": mixed(0.5, 0.5),
    "speculative-ensemble-fixed": mixed(0.5, 0.5),
    "speculative-contrastive-ensemble": summed(1, -0.1),  # mu of Fu et al., section 4
    "contrastive-decoding": summed(1.5, -0.5, plausibility=0.1),  # beta and alpha of O'Brien and Lewis
    "speculative-contrastive-decoding": summed(1.5, -0.5, plausibility=0.1),
    "guidance": summed(1.5, -0.5),  # gamma of Sanchez et al., 1 + alpha of Shi et al.
    "experts": summed(1, 1, -1),
    "speculative-cascade": cascaded,
}
PROPOSERS = {
    "speculative-ensemble": {0, 1},
    "speculative-ensemble-fixed": {0},
    "speculative-contrastive-ensemble": {0, 1},
    "contrastive-decoding": {0, 1},
    "speculative-contrastive-decoding": {1},
    "guidance": set(),
    "experts": {0, 1, 2},
    "speculative-cascade": {0},
}


@pytest.mark.parametrize("name", TARGETS)
def test_an_ensemble_writes_from_its_formula_and_its_members_draft(family, name):
    members = family[: len(PRESETS[name].members) - PRESETS[name].members.count("...")]
    result, rounds = run(name, members, seed=3, length=60)
    for index in range(0, 60, 5):
        rows = [logits_after(member, result.tokens[:index]) for member in members]
        expected = float(TARGETS[name](rows)[result.tokens[index]])
        assert result.logprobs[index] == pytest.approx(expected, abs=2e-3)
    assert {draft["proposer"] for own in rounds for draft in own.drafts} == PROPOSERS[name]
    if name in ("speculative-contrastive-ensemble", "contrastive-decoding"):
        assert rounds[0].drafts[0]["proposer"] == 1  # the amateur is the default proposer


def test_the_assistant_of_cosd_replaces_what_its_rule_says(family):
    result, rounds = run("cosd", family[:2], GREEDY, length=60)
    outcomes = set()
    for before, token, kept in drafts_of(result, rounds):
        own, assistant = (logits_after(member, before).softmax(-1) for member in family[:2])
        best = int(assistant.argmax())
        replaced = best != token and float(own[token]) < 0.5 and float(assistant[best]) > 0.5 * float(own[token])
        assert kept != replaced
        outcomes.add(kept)
    assert outcomes == {True, False}


@pytest.mark.parametrize("replaces", [True, False])
def test_the_tree_of_cosd_decides(family, replaces):
    tree = DecisionTree(feature=(-1,), threshold=(0.0,), left=(-1,), right=(-1,), replace=(replaces,))
    result, _ = run("cosd-tree", family[:2], GREEDY, length=30, rule=tree)
    author = family[1] if replaces else family[0]
    assert result.tokens == [int(logits_after(author, result.tokens[:index]).argmax()) for index in range(30)]


def test_old_names_of_methods_warn_and_give_the_new_ones():
    for old, new in RENAMED.items():
        with pytest.warns(DeprecationWarning, match=f"preset: {old} is now {new}"):
            assert preset(old) is PRESETS[new]


def test_what_a_method_leaves_out_is_said():
    """Methods that do a part of what their paper describes."""
    parts = {"typical-acceptance", "confident-drafts", "prompt-lookup", "retrieval-chain", "early-exit"}
    parts |= {"self-speculation", "lookahead-ngrams", "medusa-heads", "several-chains", "specinfer", "dynamic-trees"}
    assert {name for name, method in PRESETS.items() if method.leaves_out} >= parts
    assert all("leaves_out" in method.to_dict() for method in PRESETS.values())
