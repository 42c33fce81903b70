"""Published methods as what they choose on five axes: who drafts, in what shape, for which target, accepted how, when.

`SpeculativeEnsemble.from_preset(name, members)` builds one, `specens methods` prints the table. A method is listed only
where a test runs it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from specens.draft_lens import ByAcceptance, ByConfidence
from specens.drafters import Jacobi, Lookahead, PromptLookup
from specens.schedules.plan import TreePlan
from specens.targets import Cascade
from specens_kernels import Contrastive, LogitMixture, Mixture, Replacement


@dataclass(frozen=True)
class Preset:
    """A published method.

    members: what its members are, in order; a last "..." stands for any number more. drafter, topology, target,
    acceptance, schedule: its choices in words. settings: the same as arguments of SpeculativeEnsemble.
    needs: an argument that the caller must give. lossless: whether the text follows the target distribution exactly.
    """

    source: str
    members: tuple[str, ...]
    drafter: str
    topology: str
    target: str
    acceptance: str
    schedule: str
    settings: dict[str, Any] = field(default_factory=dict)
    needs: str | None = None
    lossless: bool = True

    def to_dict(self) -> dict[str, Any]:
        """What it is, in words, for JSON."""
        names = ("source", "members", "drafter", "topology", "target", "acceptance", "schedule", "needs", "lossless")
        return {name: getattr(self, name) for name in names}

    def check_members(self, name: str, num_members: int) -> None:
        """Raise ValueError where the method is not for so many members."""
        least = len(self.members) - self.members.count("...")
        if num_members < least or (num_members > least and "..." not in self.members):
            raise ValueError(f"members: expected {', '.join(self.members)} for {name}, got {num_members} of them")


TARGET_AND_DRAFTER = ("target", "draft model")
ALONE = Mixture((1.0, 0.0))
DRAFTED = {"ensemble": ALONE, "schedule": "fixed", "drafter": 1, "draft_lens": 5}

PRESETS: dict[str, Preset] = {
    "speculative-decoding": Preset(
        "Leviathan et al., ICML 2023; Chen et al., 2023",
        TARGET_AND_DRAFTER,
        "draft model",
        "chain",
        "one model",
        "token",
        "fixed",
        DRAFTED,
    ),
    "block-verification": Preset(
        "Sun et al., ICLR 2025",
        TARGET_AND_DRAFTER,
        "draft model",
        "chain",
        "one model",
        "block",
        "fixed",
        DRAFTED | {"rule": "block"},
    ),
    "typical-acceptance": Preset(
        "Cai et al., Medusa, ICML 2024",
        TARGET_AND_DRAFTER,
        "draft model",
        "chain",
        "one model",
        "typical",
        "fixed",
        DRAFTED | {"rule": "typical"},
        lossless=False,
    ),
    "confident-drafts": Preset(
        "Kim et al., BiLD, NeurIPS 2023; Du et al., GliDe with CaPE, ICML 2024",
        TARGET_AND_DRAFTER,
        "draft model",
        "chain, as long as it is sure",
        "one model",
        "token",
        "fixed",
        DRAFTED | {"draft_lens": ByConfidence(0.4, most=8)},
    ),
    "prompt-lookup": Preset(
        "Saxena, 2023; Yang et al., LLMA, 2023",
        ("target",),
        "prompt lookup",
        "chain",
        "one model",
        "token",
        "fixed",
        {"schedule": "fixed", "drafter": PromptLookup(max_match=16), "draft_lens": 8},
    ),
    "adaptive-prompt-lookup": Preset(
        "lengths by measured acceptance: Liu et al., SpecDec++, 2024; Mamou et al., 2024",
        ("target",),
        "prompt lookup",
        "chain, by acceptance so far",
        "one model",
        "token",
        "fixed",
        {"schedule": "fixed", "drafter": PromptLookup(max_match=16), "draft_lens": ByAcceptance(10, 0.05)},
    ),
    "retrieval": Preset(
        "He et al., REST, NAACL 2024",
        ("target",),
        "texts: PromptLookup(store=...)",
        "chain",
        "one model",
        "token",
        "fixed",
        {"schedule": "fixed", "draft_lens": 8},
        needs="drafter",
    ),
    "early-exit": Preset(
        "Elhoushi et al., LayerSkip, ACL 2024",
        ("target",),
        "its own first layers: LayerSkip(exit_layer=...)",
        "chain",
        "one model",
        "token",
        "fixed",
        {"schedule": "fixed", "draft_lens": 4},
        needs="drafter",
    ),
    "draft-and-verify": Preset(
        "Zhang et al., ACL 2024",
        ("target",),
        "itself without some layers: LayerSkip([...])",
        "chain",
        "one model",
        "token",
        "fixed",
        {"schedule": "fixed", "draft_lens": 4},
        needs="drafter",
    ),
    "jacobi": Preset(
        "Santilli et al., ACL 2023",
        ("target",),
        "fill tokens, refined in parallel",
        "chain",
        "one model",
        "token",
        "fixed",
        {"schedule": "fixed", "drafter": Jacobi(), "draft_lens": 4},
    ),
    "lookahead": Preset(
        "Fu et al., Lookahead Decoding, ICML 2024 (n-grams of Jacobi iteration, without its second branch)",
        ("target",),
        "n-grams of fill tokens",
        "chain",
        "one model",
        "token",
        "fixed",
        {"schedule": "fixed", "drafter": Lookahead(4), "draft_lens": 6},
    ),
    "medusa": Preset(
        "Cai et al., ICML 2024",
        ("target",),
        "extra heads: Heads(...)",
        "chain",
        "one model",
        "token",
        "fixed",
        {"schedule": "fixed", "draft_lens": 4},
        needs="drafter",
    ),
    "several-chains": Preset(
        "Sun et al., SpecTr, NeurIPS 2023 (its chains, tested as a tree)",
        TARGET_AND_DRAFTER,
        "draft model",
        "several chains",
        "one model",
        "token",
        "tree",
        {"ensemble": ALONE, "schedule": "tree", "drafter": 1, "tree": TreePlan((4, 1, 1))},
    ),
    "speculative-ensemble": Preset(
        "Fu et al., ICML 2025",
        ("member", "member", "..."),
        "every member",
        "chain",
        "mixture of probabilities",
        "token",
        "alternate",
        {"schedule": "alternate"},
    ),
    "speculative-ensemble-fixed": Preset(
        "Fu et al., ICML 2025, section 3.2",
        ("member", "member", "..."),
        "member",
        "chain",
        "mixture of probabilities",
        "token",
        "fixed",
        {"schedule": "fixed", "draft_lens": 3},
    ),
    "speculative-contrastive-ensemble": Preset(
        "Fu et al., ICML 2025, section 4",
        ("expert", "amateur"),
        "every member",
        "chain",
        "contrastive",
        "token",
        "alternate",
        {"ensemble": Contrastive(0.1), "schedule": "alternate", "draft_lens": (1, 5)},
    ),
    "contrastive-decoding": Preset(
        "Li et al., ACL 2023; O'Brien and Lewis, 2023",
        ("expert", "amateur"),
        "every member",
        "chain",
        "contrastive, plausible tokens",
        "token",
        "alternate",
        {"ensemble": LogitMixture((1.5, -0.5), plausibility=0.1), "schedule": "alternate", "draft_lens": (1, 3)},
    ),
    "speculative-contrastive-decoding": Preset(
        "Yuan et al., ACL 2024",
        ("expert", "amateur"),
        "the amateur",
        "chain",
        "contrastive, plausible tokens",
        "token",
        "fixed",
        {"ensemble": Contrastive(0.5, plausibility=0.1), "schedule": "fixed", "drafter": 1, "draft_lens": 3},
    ),
    "guidance": Preset(
        "Sanchez et al., 2023; Shi et al., context-aware decoding, NAACL 2024",
        ("model with the context", "the same model without"),
        "none",
        "none",
        "product of experts",
        "none",
        "standard",
        {"ensemble": LogitMixture((1.5, -0.5)), "schedule": "standard"},
    ),
    "experts": Preset(
        "Liu et al., DExperts, ACL 2021; Liu et al., proxy tuning, COLM 2024",
        ("model", "expert", "anti-expert"),
        "every member",
        "chain",
        "product of experts",
        "token",
        "alternate",
        {"ensemble": LogitMixture((1.0, 1.0, -1.0)), "schedule": "alternate"},
    ),
    "speculative-cascade": Preset(
        "Narasimhan et al., ICLR 2025",
        ("small model", "large model"),
        "the small model",
        "chain",
        "cascade",
        "token",
        "fixed",
        {"ensemble": Cascade("opt", 0.1), "schedule": "fixed", "drafter": 0, "draft_lens": 5},
    ),
    "cosd": Preset(
        "Wang et al., ICML 2025",
        ("draft model", "assistant"),
        "draft model",
        "chain",
        "the assistant",
        "replacement rule",
        "fixed",
        {
            "ensemble": Mixture((0.0, 1.0)),
            "schedule": "fixed",
            "drafter": 0,
            "draft_lens": 5,
            "rule": Replacement(0.5, 0.5),
        },
        lossless=False,
    ),
    "cosd-tokenizers": Preset(
        "Wang et al., ICML 2025",
        ("assistant",),
        "a model with another tokenizer: OtherTokenizer(..., probabilities=True)",
        "chain",
        "the assistant",
        "replacement rule",
        "fixed",
        {"schedule": "fixed", "draft_lens": 5, "rule": Replacement(0.5, 0.5)},
        needs="drafter",
        lossless=False,
    ),
    "cosd-tree": Preset(
        "Wang et al., ICML 2025",
        ("draft model", "assistant"),
        "draft model",
        "chain",
        "the assistant",
        "decision tree",
        "fixed",
        {"ensemble": Mixture((0.0, 1.0)), "schedule": "fixed", "drafter": 0, "draft_lens": 5},
        needs="rule",
        lossless=False,
    ),
    "specinfer": Preset(
        "Miao et al., ASPLOS 2024; recursive rejection sampling, Yang et al., 2024",
        TARGET_AND_DRAFTER,
        "draft model",
        "static tree",
        "one model",
        "without replacement",
        "tree",
        {"ensemble": ALONE, "schedule": "tree", "drafter": 1, "tree": TreePlan((3, 2, 1), children="sampled")},
    ),
    "traversal-verification": Preset(
        "Weng et al., 2025",
        TARGET_AND_DRAFTER,
        "draft model",
        "static tree",
        "one model",
        "traversal",
        "tree",
        {
            "ensemble": ALONE,
            "schedule": "tree",
            "drafter": 1,
            "tree": TreePlan((3, 2, 1), children="sampled", rule="traversal"),
        },
    ),
    "dynamic-trees": Preset(
        "Li et al., EAGLE-2, EMNLP 2024",
        TARGET_AND_DRAFTER,
        "draft model",
        "dynamic tree",
        "one model",
        "token",
        "tree",
        {"ensemble": ALONE, "schedule": "tree", "drafter": 1, "tree": TreePlan(nodes=24)},
    ),
}


def preset(name: str) -> Preset:
    """The method of this name. Raises ValueError where there is none."""
    if name not in PRESETS:
        raise ValueError(f"preset: expected one of {', '.join(PRESETS)}; got {name!r}")
    return PRESETS[name]
