"""Every drafter under every topology: one text whatever drafts it in whatever shape; the table of docs/drafters.md."""

import functools
import math
from pathlib import Path

import pytest
import specens.drafters
import torch
from cases import FULL
from driver.test_drafters import JOBS, REPETITIVE, drafters, law_drafters
from driver.test_other_tokenizer import LETTERS, renumbered, tokenizer
from driver.test_preset_mechanisms import logits_after
from driver.test_schedules import GREEDY
from driver.test_trees import TreeBigram
from driver.text_law import fit_of_texts
from driver.tiny_models import PROMPT, HeadedBigram, relative_of, tiny_llama
from specens import SpeculativeEnsemble, TreePlan
from specens.analysis.acceptance import acceptance_by_rank
from specens.decoding.request import OUTSIDE
from specens.drafters import Drafter, DraftModel, OtherTokenizer, PromptLookup, Several
from specens.drafters.drafter import add_chosen
from specens.targets import Custom

from specens_kernels import (
    Contrastive,
    LogitMixture,
    Mixture,
    Processing,
    Sampling,
    Threshold,
    TokenTree,
    Typical,
    target_logprobs,
)

PAGE = Path(__file__).parents[2] / "docs" / "drafters.md"
TOPOLOGIES = {
    "chain": None,
    "`(3, 2, 1)`": TreePlan((3, 2, 1)),
    "a `TokenTree`": TreePlan(shape=TokenTree.best_for_acceptance((0.5, 0.25, 0.1), 7)),
    "drawn, without replacement": TreePlan((3, 2), children="sampled"),
    "drawn, with replacement": TreePlan((3, 2), children="independent"),
    "grown, level by level": TreePlan(nodes=7, width=3, levels=3),
    "grown, best first": TreePlan(nodes=7, width=2, levels=4, order="best"),
    "grown by draws": TreePlan(nodes=7, levels=3, children="sampled"),
}


class OnlyChains(Drafter):
    """As a user's own that knows no trees."""

    def propose(self, batch, requests, draft_lens, min_probability=0.0):  # noqa: ARG002
        for request, most in zip(requests, draft_lens, strict=True):
            add_chosen(request, [7] * most)


@pytest.fixture(scope="module")
def pair():
    first = tiny_llama(0, num_hidden_layers=3)
    return [first, relative_of(first, 1, noise=0.2)]


def cast(pair):
    """The rows of the table."""
    own = drafters(pair)
    return {
        "a member": 1,
        "all members, in turns": None,
        "`DraftModel`": own["model"],
        "`LayerSkip`": own["layer skip"],
        "`PromptLookup`": own["prompt lookup"],
        "`PromptLookup(store=)`": own["store"],
        "`Jacobi`": own["jacobi"],
        "`Lookahead`": own["lookahead"],
        "`Heads`": own["heads"],
        "`OtherTokenizer`": OtherTokenizer(renumbered(pair[1], LETTERS[::-1]), tokenizer(LETTERS[::-1])),
        "`Several`": Several([own["heads"], 1, own["model"], PromptLookup(), own["early exit"]]),
        "your own, with `propose` alone": OnlyChains(),
    }


NAMES = [
    "a member",
    "all members, in turns",
    "`DraftModel`",
    "`LayerSkip`",
    "`PromptLookup`",
    "`PromptLookup(store=)`",
    "`Jacobi`",
    "`Lookahead`",
    "`Heads`",
    "`OtherTokenizer`",
    "`Several`",
    "your own, with `propose` alone",
]
REFUSALS = {  # by the beginning of their messages
    "drafter: expected one that proposes trees, so has `candidates`": "no `candidates`",
    "tree: expected draft trees, tree=, with a Several": "no chain",
}


def make(pair, drafter, plan, **arguments):
    """An ensemble of the pair, both members with a weight; without a drafter each drafts in its turn."""
    lens = 3 if plan is None else None
    words, schedule = tokenizer(LETTERS), "alternate" if drafter is None else "fixed"
    return SpeculativeEnsemble(pair, words, None, lens, schedule, drafter=drafter, tree=plan, **arguments)


@pytest.fixture(scope="module")
def expected(pair):
    """Greedy texts of `standard`, by job."""
    standard = SpeculativeEnsemble(pair, schedule="standard")
    return {text.index: text.tokens for text in standard.generate_many(JOBS, sampling=GREEDY)}


def cell(drafter, plan):
    """What the table says of a drafter that proposes such trees."""
    draws = drafter is None or isinstance(drafter, int) or drafter.has_probabilities or drafter.indices
    return "yes" if draws or plan is None or (plan.children == "top" and not plan.is_grown) else "candidates"


@pytest.mark.parametrize("name", NAMES)
def test_a_greedy_text_is_that_of_standard_in_every_cell_or_the_page_says_why_there_is_none(pair, expected, name):
    drafter, cells = cast(pair)[name], []
    for plan in TOPOLOGIES.values():
        try:
            ensemble = make(pair, drafter, plan)
        except ValueError as refusal:
            cells.append(next(cell for start, cell in REFUSALS.items() if str(refusal).startswith(start)))
            continue
        jobs = JOBS[: 1 if name == "`OtherTokenizer`" else 5 if FULL else 2]  # which takes many forwards for a tree
        texts = list(ensemble.generate_many(jobs, batch_size=3, sampling=GREEDY))
        assert {text.index: text.tokens for text in texts} == {text.index: expected[text.index] for text in texts}
        assert sum(sum(text.statistics.tested) for text in texts) > 0
        cells.append(cell(drafter, plan))
    assert f"| {name} | {' | '.join(cells)} |" in PAGE.read_text().splitlines()


def test_the_table_of_the_page_has_every_topology_and_every_drafter_that_there_is():
    lines = PAGE.read_text().splitlines()
    head = lines.index(f"| drafter | {' | '.join(TOPOLOGIES)} |")
    assert [line.split(" | ")[0] for line in lines[head + 2 :][: len(NAMES)]] == [f"| {name}" for name in NAMES]
    own = {name for name in specens.drafters.__all__ if hasattr(getattr(specens.drafters, name), "propose")}
    assert own - {"Drafter", "MemberDrafter"} == {name.strip("`") for name in NAMES} & own


GROWN = TreePlan(nodes=3, levels=2, children="sampled", threshold=0.2)
PLANS = [TreePlan((2, 2)), TreePlan((3, 1), children="sampled"), TreePlan((2, 2), children="independent")]


@pytest.mark.parametrize("name", law_drafters(torch.zeros(3, 3, 3)))
@pytest.mark.parametrize("plan", [*PLANS[:1], *PLANS[1:] * FULL], ids=str)
def test_texts_follow_the_law_of_the_target(name, plan):
    tables = 1.5 * torch.randn(3, 3, 3, generator=torch.Generator().manual_seed(4))
    drafter = law_drafters(tables)[name]
    plan = PLANS[1] if plan is PLANS[0] and drafter.has_probabilities else plan
    ensemble = SpeculativeEnsemble([HeadedBigram(tables[0])], tree=plan, drafter=drafter)
    assert fit_of_texts(ensemble, tables[0].double().softmax(-1))[0] > 1e-4


def only_some(tokens):
    """A grammar: after token 1 only 0 and 1 may stand, after others all but themselves."""
    last = tokens[-1] if tokens else 0
    return torch.tensor([0b0011 if last == 1 else 0b1111 & ~(1 << last)], dtype=torch.int32)


def restricted(scores):
    """The transition probabilities under the grammar."""
    allowed = ~torch.eye(4, dtype=torch.bool)
    allowed[1] = torch.tensor([True, True, False, False])
    return scores.double().masked_fill(~allowed, float("-inf")).softmax(-1)


CHILDREN = [TreePlan((3, 2)), TreePlan((3, 2), children="sampled"), TreePlan(nodes=5, width=2, levels=3)]


@pytest.mark.parametrize("plan", CHILDREN, ids=str)
@pytest.mark.parametrize("how", ["constraint", *["logits_processors"] * FULL])
def test_texts_of_trees_follow_the_law_under_a_grammar(plan, how):
    tables = 1.5 * torch.randn(2, 4, 4, generator=torch.Generator().manual_seed(5))

    def process(ids, scores):
        mask = int(only_some(ids[0].tolist())[0])
        excluded = torch.tensor([not mask >> token & 1 for token in range(4)])
        return scores.masked_fill(excluded, float("-inf"))

    given = {"constraint": only_some} if how == "constraint" else {"logits_processors": [process]}
    ensemble = SpeculativeEnsemble([TreeBigram(own) for own in tables], None, Mixture((1.0, 0.0)), tree=plan, drafter=1)
    assert fit_of_texts(ensemble, restricted(tables[0]), **given)[0] > 1e-4


@pytest.mark.parametrize("target", [Mixture((1, 0, 0)), Mixture((0.5, 0.5, 0)), LogitMixture((1, 0, 0))], ids=str)
@pytest.mark.parametrize("plan", [TreePlan((2, 1), children="independent"), *[TreePlan((2, 2))] * FULL], ids=str)
def test_texts_of_several_drafters_follow_the_law(target, plan):
    tables = list(1.5 * torch.randn(3, 3, 3, generator=torch.Generator().manual_seed(4)))
    texts = check_law_of_several(target, plan, tables, Several([1, PromptLookup(), 2]))
    assert min(sum(text.statistics.accepted[index] for text in texts) for index in (1, 2, OUTSIDE)) > 20


@pytest.mark.parametrize("first", [1, PromptLookup()], ids=["two members", "a lookup and a member"])
@pytest.mark.parametrize("plan", [TreePlan((1, 1), children="sampled"), *[PLANS[1], GROWN] * FULL], ids=str)
def test_children_of_several_drafters_that_are_drawn_without_replacement_follow_the_law(first, plan):
    """Both members mostly think of a token that the target rarely takes: each draws without what others proposed."""
    rows = torch.tensor([[0.05, 0.45, 0.3, 0.2], [0.85, 0.05, 0.05, 0.05], [0.85, 0.05, 0.05, 0.05]]).log()
    tables = [row.expand(4, 4).contiguous() for row in rows]
    texts = check_law_of_several(Mixture((1, 0, 0)), plan, tables, Several([first, 2]))
    assert sum(text.statistics.accepted[2] for text in texts) > 20


def check_law_of_several(target, plan, tables, drafter, **arguments):
    """Texts, once their law is right."""
    members = [TreeBigram(own) for own in tables]
    ensemble = SpeculativeEnsemble(members, None, target, tree=plan, drafter=drafter, **arguments)
    fit, texts = fit_of_texts(ensemble, target_logprobs(tables, ensemble=target).double().exp())
    assert fit > 1e-4
    return texts


OUTSIDE_PLANS = [TreePlan((2, 1), children="independent"), TreePlan((2, 1), children="sampled"), GROWN]


@pytest.mark.parametrize("plan", [OUTSIDE_PLANS[1], *OUTSIDE_PLANS[::2] * FULL], ids=str)
@pytest.mark.parametrize("target", [None, *[Mixture((0.2, 0.8)), Contrastive(0.4)] * FULL], ids=str)
@pytest.mark.parametrize("rule", ["token", *["traversal"] * FULL])
def test_texts_of_several_draft_models_that_are_no_members_follow_the_law(target, plan, rule):
    """They think of different tokens, which the target rarely takes: whose a draft was makes a difference."""
    rows = [[0.1, 0.2, 0.3, 0.4], [0.4, 0.1, 0.3, 0.2], [0.7, 0.1, 0.1, 0.1], [0.1, 0.7, 0.1, 0.1]]
    tables = [torch.tensor(row).log().expand(4, 4).contiguous() for row in rows]
    models = [DraftModel(TreeBigram(own)) for own in tables[2:]]
    drafter = Several([models[0], PromptLookup(2), models[1]])
    texts = check_law_of_several(target, plan, tables[: 1 + (target is not None)], drafter, rule=rule)
    assert sum(text.statistics.accepted[OUTSIDE] for text in texts) > 200
    assert all(sum(text.statistics.accepted[:OUTSIDE]) == 0 < text.statistics.drafter_forwards for text in texts)


@pytest.mark.parametrize("plan", [OUTSIDE_PLANS[1], *[TreePlan((3, 2)), GROWN] * FULL], ids=str)
def test_several_draft_models_write_the_text_of_a_seed_under_gumbel_in_any_batch(pair, plan):
    """One has fewer tokens, and one is drawn from a row of heads that there is not in a request's first round."""
    models = [DraftModel(relative_of(pair[0], 2, noise=0.2)), DraftModel(tiny_llama(0, vocab=37), index=1)]
    drafter, sampling = Several([drafters(pair)["heads"], *models]), Sampling(temperature=0.8)
    standard = SpeculativeEnsemble(pair, schedule="standard", rule="gumbel")
    for rule in ("gumbel", "token"):
        ensemble = SpeculativeEnsemble(pair, tree=plan, drafter=drafter, rule=rule)
        for text in ensemble.generate_many(JOBS, batch_size=4, seed=3, sampling=sampling):
            own, same = JOBS[text.index], {"seed": text.seed, "sampling": sampling}
            one = standard if rule == "gumbel" else ensemble
            assert one.generate(own.prompt, max_new_tokens=own.max_new_tokens, **same).tokens == text.tokens
            assert sum(text.statistics.accepted) > 0


def test_a_lookup_after_other_drafters_goes_on_from_the_text(pair):
    """What the store knows of the text's end is right, whatever a member has drafted before it was asked."""
    text = SpeculativeEnsemble(pair[:1], schedule="standard").generate(PROMPT, max_new_tokens=31, sampling=GREEDY)
    drafter = Several([1, PromptLookup(store=[text.tokens], choose="frequent")])
    ensemble = SpeculativeEnsemble(pair, None, Mixture((1.0, 0.0)), tree=(3, 2), drafter=drafter)
    again = ensemble.generate(PROMPT, max_new_tokens=31, sampling=GREEDY)
    assert again.tokens == text.tokens
    assert again.statistics.accepted[OUTSIDE] > 10


class Probable(Drafter):
    """Of the user's own, with a distribution."""

    has_probabilities = True


WRONG = {
    "text": "12",
    "none": [],
    "fraction": [1.5],
    "None": [None],
    "class": [PromptLookup],
    "probable": [Probable()],
    "several": [Several([1])],
}


@pytest.mark.parametrize("given", WRONG.values(), ids=WRONG)
def test_several_of_something_else_than_drafters_is_refused(given):
    with pytest.raises(ValueError, match="drafters: expected"):
        Several(given)


def test_chosen_paths_of_several_drafters_are_merged(pair):
    """As often as both find the same token likely; and a twin of the drafter adds nothing."""
    rounds = []
    twins = [pair[0], pair[1], relative_of(pair[1], 0, noise=0.0)]
    target = Mixture((1.0, 0.0, 0.0))
    for drafter in (1, Several([1, 2])):
        ensemble = SpeculativeEnsemble(twins, None, target, tree=(3, 2), drafter=drafter)
        ensemble.generate(PROMPT, max_new_tokens=20, sampling=GREEDY, on_round=rounds.append)
    sizes = [len(own.drafts) for own in rounds]
    assert sizes[: len(sizes) // 2] == sizes[len(sizes) // 2 :]


@pytest.mark.parametrize("who", ["a member", "a model", "several"])
@pytest.mark.parametrize("plan", [CHILDREN[1], *CHILDREN[2:] * FULL], ids=str)
def test_texts_of_trees_follow_a_target_that_the_caller_computes(plan, who):
    tables = 1.5 * torch.randn(2, 4, 4, generator=torch.Generator().manual_seed(6))
    target = Custom(lambda logits, temperatures: (logits[0] + logits[1] ** 2) / temperatures[:, None])
    members = [TreeBigram(own) for own in tables]
    model = DraftModel(TreeBigram(tables[1].flip(0)))
    drafter = {"a member": 1, "a model": model, "several": Several([1, model, PromptLookup()])}[who]
    ensemble = SpeculativeEnsemble(members, None, target, tree=plan, drafter=drafter)
    assert fit_of_texts(ensemble, (tables[0] + tables[1] ** 2).double().softmax(-1))[0] > 1e-4


EDITS = {
    "processing": Processing(repetition_penalty=1.3, presence_penalty=0.4, frequency_penalty=0.2),
    "min_new_tokens": 20,
    "stop_tokens": [44],
    "constraint": lambda tokens: torch.tensor([-1 if len(tokens) % 3 else 0, 0x0FFFFFFF], dtype=torch.int32),
    "logits_processors": [lambda ids, scores: scores - 0.01 * ids[:, -3:].sum(-1, keepdim=True) * torch.arange(61) % 3],
}


@pytest.mark.parametrize("name", ["a member", "`PromptLookup`", "`Heads`", *["`DraftModel`", "`Jacobi`"] * FULL])
def test_penalties_grammars_and_processors_hold_on_trees_whoever_drafts(pair, name):
    settings = EDITS | {"sampling": GREEDY, "max_new_tokens": 25}
    expected = SpeculativeEnsemble(pair, schedule="standard").generate(REPETITIVE, **settings)
    for plan in (TreePlan((3, 2)), TreePlan(nodes=6, width=3, levels=3)):
        text = make(pair, cast(pair)[name], plan).generate(REPETITIVE, **settings)
        assert text.tokens == expected.tokens
        assert text.statistics.rounds < 25 or name in ("`Heads`", "`PromptLookup`", "`Jacobi`")


def test_every_setting_of_a_request_holds_at_the_nodes(pair):
    """Each draft has the probability that the penalties of its own path give it, so a twin's are all accepted."""
    twins = [pair[0], relative_of(pair[0], 0, noise=0.0)]
    for plan in (TreePlan((1, 1, 1), children="sampled"), TreePlan((2, 2, 1), children="sampled")):
        ensemble = SpeculativeEnsemble(twins, None, Mixture((1.0, 0.0)), tree=plan, drafter=1)
        text = ensemble.generate(REPETITIVE, max_new_tokens=40, seed=1, **EDITS)
        assert text.statistics.recovered == 0
        assert text.statistics.rounds == 10


@pytest.mark.parametrize("plan", CHILDREN, ids=str)
def test_a_seed_gives_one_text_in_any_batch_of_trees(pair, plan):
    ensemble = SpeculativeEnsemble(pair, tree=plan, drafter=1)
    sampling = Sampling(temperature=0.7, top_p=0.9)
    for text in ensemble.generate_many(JOBS, batch_size=4, seed=5, sampling=sampling, logprobs=True):
        job = JOBS[text.index]
        alone = ensemble.generate(job.prompt, max_new_tokens=job.max_new_tokens, seed=text.seed, sampling=sampling)
        assert alone.tokens == text.tokens
        assert alone.statistics.accepted == text.statistics.accepted


def test_the_trees_of_a_batch_are_read_in_one_forward(pair, monkeypatch):
    calls = []
    forward = type(pair[0]).forward

    @functools.wraps(forward)
    def counted(self, *arguments, **more):
        calls.append(self)
        return forward(self, *arguments, **more)

    monkeypatch.setattr(type(pair[0]), "forward", counted)
    ensemble = SpeculativeEnsemble(pair, tree=(3, 2), drafter=1)
    list(ensemble.generate_many([PROMPT] * 6, batch_size=6, max_new_tokens=12, sampling=GREEDY))
    together = len(calls)
    rounds = ensemble.generate(PROMPT, max_new_tokens=12, sampling=GREEDY).statistics.rounds
    assert together <= 4 * rounds < 3 * 6 * rounds


def test_typical_acceptance_takes_the_longest_path_of_a_tree_that_is_likely_enough(pair):
    rule, rounds = Typical(0.09, 0.3), []
    ensemble = SpeculativeEnsemble(pair, None, Mixture((1.0, 0.0)), tree=(3, 2), drafter=1, rule=rule)
    text = ensemble.generate(PROMPT, max_new_tokens=40, seed=2, on_round=rounds.append)
    for own in rounds[:-2]:
        depths = []
        for draft in own.drafts:
            above = [] if draft["parent"] < 0 else depths[draft["parent"]]
            row = logits_after(pair[0], text.tokens[: own.position] + (above or [])).double().softmax(-1)
            limit = min(0.09, 0.3 * math.exp(-float(torch.special.entr(row).sum())))
            stands = above is not None and float(row[draft["token"]]) > limit
            depths.append([*above, draft["token"]] if stands else None)
        assert own.num_accepted == max((len(path) for path in depths if path), default=0)
    assert text.statistics.accepted[1] > 10


def test_rules_of_chains_are_refused_with_trees_and_that_of_trees_without(pair):
    for rule in ("block", Threshold(0.3)):
        with pytest.raises(
            ValueError, match="expected one of token, gumbel, traversal, k_seq, typical or a Typical with"
        ):
            SpeculativeEnsemble(pair, tree=(2, 2), rule=rule)
    with pytest.raises(ValueError, match="rule: expected draft trees, tree=, beside 'traversal'"):
        SpeculativeEnsemble(pair, schedule="fixed", rule="traversal")
    for tree in (None, (2, 2), TreePlan((2, 2), children="sampled")):
        with pytest.raises(ValueError, match=r"rule: expected trees of independent children, .*, beside 'k_seq'"):
            SpeculativeEnsemble(pair, schedule="fixed", tree=tree, rule="k_seq")


def test_a_draft_that_a_member_cannot_read_is_tested_in_a_tree_and_never_read(pair):
    large = tiny_llama(0, vocab=80)
    target = Mixture((0.5, 0.5))
    ensemble = SpeculativeEnsemble([large, pair[1]], None, target, tree=TreePlan((4, 2)), drafter=0)
    standard = SpeculativeEnsemble([large, pair[1]], None, target, schedule="standard")
    for prompt in (PROMPT, [1, 2], [60]):
        texts = []
        for one in (standard, ensemble):
            try:
                texts.append(one.generate(prompt, max_new_tokens=30, sampling=GREEDY).tokens)
            except ValueError as error:
                texts.append(str(error)[:40])
        assert texts[0] == texts[1]


def test_acceptance_by_rank_is_measured_and_plans_the_tree_of_sequoia():
    """Draws of one distribution for another that does not hang on the text: the chances are known."""
    draft, target = torch.tensor([0.5, 0.3, 0.2]), torch.tensor([0.2, 0.3, 0.5])
    members = [TreeBigram(own.log().repeat(3, 1)) for own in (target, draft)]
    ensemble = SpeculativeEnsemble(members, None, Mixture((1, 0)), tree=TreePlan((3,), children="sampled"), drafter=1)
    rounds = []
    list(ensemble.generate_many([[0]] * 60, batch_size=60, max_new_tokens=30, seed=1, on_round=rounds.append))
    rates = acceptance_by_rank(rounds)
    assert rates[0] == pytest.approx(0.7, abs=0.04)  # the sum of the smaller ones of both
    assert sum(rates) == pytest.approx(1.0, abs=1e-6)  # three drafts of three tokens
    assert len(TokenTree.best_for_acceptance(rates, 8)) == 8
    with pytest.raises(ValueError, match="rounds: expected some in which drafts were tested, got none"):
        acceptance_by_rank([])
