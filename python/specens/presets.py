"""Published methods as what they choose on five axes: who drafts, in what shape, for which target, accepted how, when.

`SpeculativeEnsemble.from_preset(name, members)` builds one, `specens methods` prints the table. A method is listed only
where a test runs it.
"""

from __future__ import annotations

import math
import warnings
from dataclasses import dataclass
from types import FunctionType
from typing import Any

from specens.decoding.draft_lens import ByAcceptance, ByConfidence
from specens.drafters import (
    DraftModel,
    Heads,
    Jacobi,
    LayerSkip,
    Lookahead,
    OtherTokenizer,
    PromptLookup,
    Several,
    TreePlan,
)
from specens.targets import Cascade
from specens_kernels import Contrastive, DecisionTree, LogitMixture, Mixture, Replacement, Threshold, Typical

UNUSED = {  # by schedule: arguments that mean nothing there
    "standard": ("drafter", "tree", "draft_lens"),
    "parallel": ("tree",),
    "tree": ("draft_lens",),
}
# By lossless rule of whole chains or trees: schedules that test others, or parts of them.
RULES_UNUSED: dict[Any, tuple[str, ...]] = {
    "block": ("alternate", "parallel", "tree"),
    "traversal": ("alternate", "parallel"),
    "k_seq": ("alternate", "parallel"),
}


@dataclass(frozen=True)
class Preset:
    """A published method.

    source: who published it. members: what its members are, in order; a last "..." stands for any number more.
    settings: its choices as arguments of SpeculativeEnsemble, or functions of the number of members that make them.
    drafter, topology, target, acceptance: the same in words.
    needs: an argument that the caller must give. needs_one_of: the types that it may have, if not any.
    lossless: whether the text follows the target distribution exactly.
    leaves_out: what the source describes beyond that.
    """

    source: str
    members: tuple[str, ...]
    settings: dict[str, Any]
    drafter: str = "draft model"
    topology: str = "chain"
    target: str = "one model"
    acceptance: str = "token"
    needs: str | None = None
    needs_one_of: tuple[type, ...] = ()
    lossless: bool = True
    leaves_out: str = ""

    @property
    def schedule(self) -> str:
        """Its schedule, which is a word already."""
        return self.settings["schedule"]

    def settings_under(self, schedule: str | None, num_members: int) -> dict[str, Any]:
        """Its settings for so many members, without the choices of drafts that a schedule in place of its own has no
        use for.

        Under `standard` these are all; a rule that changes the target stays.
        """
        unused = set(UNUSED.get(schedule or self.schedule, ()))
        if schedule in ("alternate", "parallel") and not isinstance(self.settings.get("drafter", 0), int):
            unused.add("drafter")
        of_other_drafts = schedule in RULES_UNUSED.get(self.settings.get("rule", "token"), ())
        if (schedule == "standard" and self.lossless) or of_other_drafts:
            unused.add("rule")
        return {
            name: value(num_members) if isinstance(value, FunctionType) else value
            for name, value in self.settings.items()
            if name not in unused
        }

    def to_dict(self) -> dict[str, Any]:
        """What it is, in words, for JSON."""
        words = ("source", "members", "drafter", "topology", "target", "acceptance", "schedule")
        return {name: getattr(self, name) for name in (*words, "needs", "lossless", "leaves_out")}

    def check_members(self, name: str, num_members: int) -> None:
        """Raise ValueError where the method is not for so many members."""
        least = len(self.members) - self.members.count("...")
        if num_members < least or (num_members > least and "..." not in self.members):
            raise ValueError(f"members: expected {', '.join(self.members)} for {name}, got {num_members} of them")


ALONE = ("target",)
PAIR = ("target", "draft model")
EXPERT = ("expert", "amateur")
ENSEMBLE = ("member", "member", "...")
COLLABORATORS = ("draft model", "assistant")
EVERY = "every member"


def _fixed(draft_len: Any, **more: Any) -> dict[str, Any]:
    return {"schedule": "fixed", "draft_lens": draft_len} | more


def _drafted(draft_len: Any = 5, **more: Any) -> dict[str, Any]:
    """Member 1 drafts for member 0, which is the target."""
    return _fixed(draft_len, ensemble=Mixture((1.0, 0.0)), drafter=1, **more)


def _assisted(**more: Any) -> dict[str, Any]:
    """Member 0 drafts, and member 1 has a say."""
    return _fixed(5, ensemble=Mixture((0.0, 1.0)), drafter=0, **more)


def _tree(rule: str = "token", **plan: Any) -> dict[str, Any]:
    """Member 1 drafts trees for member 0, which is the target."""
    target = {"schedule": "fixed", "ensemble": Mixture((1.0, 0.0)), "drafter": 1}
    return target | {"tree": TreePlan(**plan)} | ({} if rule == "token" else {"rule": rule})


def _alternate(draft_lens: Any = 1, **more: Any) -> dict[str, Any]:
    return {"schedule": "alternate", "draft_lens": draft_lens} | more


SAMPLED: dict[str, Any] = {"branches": (3, 2, 1), "children": "sampled"}
CONTRAST = "contrastive, plausible tokens"
LOOKUP = "prompt lookup"
OTHER = "a model with another tokenizer: OtherTokenizer(..., probabilities=True)"
REPLACE = Replacement(0.5, 0.5)

PRESETS: dict[str, Preset] = {
    # one target and a draft model
    "speculative-decoding": Preset("Leviathan et al., ICML 2023; Chen et al., 2023", PAIR, _drafted()),
    "block-verification": Preset("Sun et al., ICLR 2025", PAIR, _drafted(rule="block"), acceptance="block"),
    "typical-acceptance": Preset(
        "Cai et al., Medusa, ICML 2024",
        PAIR,
        _drafted(rule=Typical(0.09, 0.3)),
        acceptance="typical",
        lossless=False,
        leaves_out="its heads and trees; the greedy first token of each round, drawn here",
    ),
    "confident-drafts": Preset(
        "assistant_confidence_threshold of transformers; Liu et al., Kangaroo, NeurIPS 2024",
        PAIR,
        _drafted(ByConfidence(0.4, most=20)),
        topology="chain, as long as it is sure",
        leaves_out="a threshold that adapts",
    ),
    "big-little-decoder": Preset(
        "Kim et al., BiLD, NeurIPS 2023",
        PAIR,
        _drafted(ByConfidence(0.6, most=16, hands_over=True), rule=Threshold(math.exp(-3))),
        topology="chain, until it falls back to the target",
        acceptance="rollback where the target's surprise at the draft is above 3 nats",
        lossless=False,
        leaves_out="both thresholds by the task; at temperature 0 all that the target would not write is rolled back",
    ),
    "pearl": Preset(
        "Liu et al., PEARL, ICLR 2025; McDanel, AMUSD, 2024",
        PAIR,
        {"schedule": "parallel", "draft_lens": 5, "ensemble": Mixture((1.0, 0.0)), "drafter": 1},
        leaves_out="lengths measured on the clock: --draft-lens, about the target's cost over the draft model's",
    ),
    # one target that drafts for itself, or from texts
    "prompt-lookup": Preset(
        "Saxena, 2023",
        ALONE,
        _fixed(10, drafter=PromptLookup(max_match=3)),
        drafter=LOOKUP,
        leaves_out="its copy from the first place that matches: here the last, looked for anew at each token",
    ),
    "adaptive-prompt-lookup": Preset(
        "Saxena, 2023; lengths: Leviathan et al., ICML 2023, section 3.5",
        ALONE,
        _fixed(ByAcceptance(10, 0.05), drafter=PromptLookup(max_match=3)),
        drafter=LOOKUP,
        topology="chain, of the best length at the acceptance so far",
    ),
    "retrieval-chain": Preset(
        "He et al., REST, NAACL 2024",
        ALONE,
        _fixed(8),
        drafter="texts: PromptLookup(store=...)",
        needs="drafter",
        needs_one_of=(PromptLookup,),
        leaves_out="the tree of all continuations that were found, which rest drafts: here the last one",
    ),
    "rest": Preset(
        "He et al., REST, NAACL 2024",
        ALONE,
        {"schedule": "fixed", "tree": TreePlan(nodes=64, levels=10)},
        drafter="texts: PromptLookup(16, store=..., choose='frequent')",
        topology="trie of the most frequent continuations",
        needs="drafter",
        needs_one_of=(PromptLookup,),
        leaves_out="its test by sampling from the target: the rule token gives the same text",
    ),
    "early-exit": Preset(
        "Elhoushi et al., LayerSkip, ACL 2024",
        ALONE,
        _fixed(4),
        drafter="its own first layers: LayerSkip(exit_layer=...)",
        needs="drafter",
        needs_one_of=(LayerSkip,),
        leaves_out="training for exits",
    ),
    "self-speculation": Preset(
        "Zhang et al., Draft & Verify, ACL 2024",
        ALONE,
        _fixed(ByConfidence(0.8, most=8)),
        drafter="itself without some layers: LayerSkip([...])",
        topology="chain, as long as it is sure",
        needs="drafter",
        needs_one_of=(LayerSkip,),
        leaves_out="the search for the layers; a threshold that adapts",
    ),
    "jacobi": Preset(
        "Santilli et al., ACL 2023", ALONE, _fixed(4, drafter=Jacobi()), drafter="fill tokens, refined in parallel"
    ),
    "lookahead-ngrams": Preset(
        "Fu et al., Lookahead Decoding, ICML 2024",
        ALONE,
        _fixed(4, drafter=Lookahead(5)),
        drafter="n-grams of fill tokens",
        leaves_out="the window that makes n-grams beside the drafts, and several candidates: see lookahead",
    ),
    "lookahead": Preset(
        "Fu et al., Lookahead Decoding, ICML 2024",
        ALONE,
        {"schedule": "fixed", "tree": TreePlan((15, 1, 1, 1)), "drafter": Lookahead(5, window=15)},
        drafter="n-grams of a window of guesses",
        topology="n-grams and the window, one tree",
    ),
    "medusa-heads": Preset(
        "Cai et al., Medusa, ICML 2024",
        ALONE,
        _fixed(4),
        drafter="extra heads: Heads(...)",
        needs="drafter",
        needs_one_of=(Heads,),
        leaves_out="the tree of the heads' candidates, and typical acceptance: see medusa; files of published heads",
    ),
    "medusa": Preset(
        "Cai et al., Medusa, ICML 2024",
        ALONE,
        {"schedule": "fixed", "tree": TreePlan((4, 3, 2)), "rule": Typical(0.09, 0.3)},
        drafter="extra heads: Heads(...)",
        topology="product of the heads' candidates",
        acceptance="typical",
        needs="drafter",
        needs_one_of=(Heads,),
        lossless=False,
        leaves_out="trees by measured accuracy, as TokenTrees are; the greedy first token of a round, drawn here; "
        "files of published heads",
    ),
    # one target and trees of a draft model
    "several-chains": Preset(
        "Sun et al., SpecTr, NeurIPS 2023",
        PAIR,
        _tree("k_seq", branches=(4, 1, 1), children="independent"),
        topology="several chains, independent",
        acceptance="k-SEQ",
        leaves_out="that chains which begin alike go on together: here each goes on alone",
    ),
    "specinfer": Preset(
        "Miao et al., SpecInfer, ASPLOS 2024",
        ("target", "draft model", "..."),
        {
            "schedule": "fixed",
            "tree": TreePlan((1, 1, 3, 1, 1, 1, 1, 1), children="independent"),
            "ensemble": lambda num_members: Mixture((1.0, *[0.0] * (num_members - 1))),
            "drafter": lambda num_members: Several(range(1, num_members)),
        },
        drafter="every draft model",
        topology="static trees, independent, merged",
        acceptance="with replacement",
        leaves_out="the training of draft models that complete each other",
    ),
    "specinfer-draft-models": Preset(
        "Miao et al., SpecInfer, ASPLOS 2024",
        ALONE,
        {"schedule": "fixed", "tree": TreePlan((1, 1, 3, 1, 1, 1, 1, 1), children="independent")},
        drafter="models that are no members: Several([DraftModel(...), DraftModel(...)])",
        topology="static trees, independent, merged",
        acceptance="with replacement",
        needs="drafter",
        needs_one_of=(Several, DraftModel),
        leaves_out="the training of draft models that complete each other",
    ),
    "recursive-speculative-decoding": Preset(
        "Jeon et al., 2024 (RSD-C); Yang et al., Multi-Candidate Speculative Decoding, 2024",
        PAIR,
        _tree(**SAMPLED),
        topology="static tree",
        acceptance="without replacement",
    ),
    "traversal-verification": Preset(
        "Weng et al., 2025", PAIR, _tree(**SAMPLED, rule="traversal"), topology="static tree", acceptance="traversal"
    ),
    "dynamic-trees": Preset(
        "Li et al., EAGLE-2, EMNLP 2024",
        PAIR,
        _tree(nodes=60, width=10, levels=6),
        topology="dynamic tree",
        leaves_out="EAGLE's own drafter, which reads the target's features: here any draft model",
    ),
    "opt-tree": Preset(
        "Wang et al., OPT-Tree, TACL 2025",
        PAIR,
        _tree(nodes=50, width=50, levels=10, gain=0.2),
        topology="dynamic tree, until a level adds too little",
    ),
    "specexec": Preset(
        "Svirschevski et al., SpecExec, NeurIPS 2024",
        PAIR,
        _tree(nodes=128, width=16, levels=16, order="best"),
        topology="dynamic tree, best first, until nothing better is left",
        leaves_out="what it does about weights that are in memory elsewhere",
    ),
    "dyspec": Preset(
        "Xiong et al., DySpec, 2024",
        PAIR,
        _tree(nodes=64, levels=8, children="sampled", threshold=0.02),
        topology="dynamic tree, drawn, level by level",
        acceptance="without replacement",
        leaves_out="its greedy variant, which reads one node at a time",
    ),
    "sequoia": Preset(
        "Chen et al., Sequoia, NeurIPS 2024",
        PAIR,
        _tree(children="sampled"),
        topology="the best shape for measured acceptance: TreePlan(shape=..., children='sampled')",
        acceptance="without replacement",
        needs="tree",
        leaves_out="the choice of size and depth by the hardware",
    ),
    # ensembles
    "speculative-ensemble": Preset(
        "Fu et al., ICML 2025", ENSEMBLE, _alternate(), drafter=EVERY, target="mixture of probabilities"
    ),
    "speculative-ensemble-fixed": Preset(
        "Fu et al., ICML 2025, section 3.2 (Naive-CoS)",
        ENSEMBLE,
        _fixed(3),
        drafter="a member",
        target="mixture of probabilities",
    ),
    "speculative-contrastive-ensemble": Preset(
        "Fu et al., ICML 2025, section 4",
        EXPERT,
        _alternate((1, 5), ensemble=Contrastive(0.1), drafter=1),
        drafter=EVERY,
        target="contrastive",
    ),
    "contrastive-decoding": Preset(
        "O'Brien and Lewis, 2023, after Li et al., ACL 2023",
        EXPERT,
        _alternate((1, 3), ensemble=LogitMixture((1.5, -0.5), plausibility=0.1), drafter=1),
        drafter=EVERY,
        target=CONTRAST,
        leaves_out="the amateur's temperature of Li et al.; the drafts are those of Fu et al., ICML 2025",
    ),
    "speculative-contrastive-decoding": Preset(
        "Yuan et al., ACL 2024",
        EXPERT,
        _fixed(4, ensemble=LogitMixture((1.5, -0.5), plausibility=0.1), drafter=1),
        drafter="the amateur",
        target=CONTRAST,
    ),
    "guidance": Preset(
        "Sanchez et al., 2023; Shi et al., context-aware decoding, NAACL 2024",
        ("model with the context", "the same model without"),
        {"schedule": "standard", "ensemble": LogitMixture((1.5, -0.5))},
        drafter="none",
        topology="none",
        target="product of experts",
        acceptance="none",
    ),
    "experts": Preset(
        "Liu et al., proxy tuning, COLM 2024; with other weights Liu et al., DExperts, ACL 2021",
        ("model", "expert", "anti-expert"),
        _alternate(ensemble=LogitMixture((1.0, 1.0, -1.0))),
        drafter=EVERY,
        target="product of experts",
    ),
    "speculative-cascade": Preset(
        "Narasimhan et al., ICLR 2025",
        ("small model", "large model"),
        _fixed(5, ensemble=Cascade("opt", 0.1), drafter=0),
        drafter="the small model",
        target="cascade",
    ),
    # a draft model and an assistant that write together
    "cosd": Preset(
        "Wang et al., ICML 2025",
        COLLABORATORS,
        _assisted(rule=REPLACE),
        target="the assistant",
        acceptance="replacement rule",
        lossless=False,
    ),
    "cosd-tree": Preset(
        "Wang et al., ICML 2025",
        COLLABORATORS,
        _assisted(),
        target="the assistant",
        acceptance="decision tree",
        needs="rule",
        needs_one_of=(DecisionTree,),
        lossless=False,
    ),
    "cosd-tokenizers": Preset(
        "Wang et al., ICML 2025",
        ("assistant",),
        _fixed(5, rule=REPLACE),
        drafter=OTHER,
        target="the assistant",
        acceptance="replacement rule",
        needs="drafter",
        needs_one_of=(OtherTokenizer,),
        lossless=False,
    ),
}


RENAMED = {  # methods that were listed by the name of more than they do
    "draft-and-verify": "self-speculation",
    "retrieval": "retrieval-chain",
}


def preset(name: str) -> Preset:
    """The method of this name. Raises ValueError where there is none."""
    if name in RENAMED:
        warnings.warn(f"preset: {name} is now {RENAMED[name]}", DeprecationWarning, stacklevel=3)
        name = RENAMED[name]
    if name not in PRESETS:
        raise ValueError(f"preset: expected one of {', '.join(PRESETS)}; got {name!r}")
    return PRESETS[name]
