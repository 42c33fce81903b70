"""Who proposes draft tokens: one file a kind."""

from specens.drafters.draft_model import DraftModel
from specens.drafters.drafter import Drafter
from specens.drafters.heads import Heads
from specens.drafters.jacobi import Jacobi, Lookahead
from specens.drafters.layer_skip import LayerSkip
from specens.drafters.member import MemberDrafter
from specens.drafters.other_tokenizer import OtherTokenizer
from specens.drafters.prompt_lookup import PromptLookup
from specens.drafters.several import Several
from specens.drafters.tree_plan import TreePlan

__all__ = [
    "DraftModel",
    "Drafter",
    "Heads",
    "Jacobi",
    "LayerSkip",
    "Lookahead",
    "MemberDrafter",
    "OtherTokenizer",
    "PromptLookup",
    "Several",
    "TreePlan",
]
