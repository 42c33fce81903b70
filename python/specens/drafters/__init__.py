"""Who proposes draft tokens: one file a kind."""

from specens.drafters.member import MemberDrafter

__all__ = ["MemberDrafter"]
