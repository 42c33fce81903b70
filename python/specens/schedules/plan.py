"""What a user may set about a schedule."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Plan:
    """Settings that every schedule is made from; each uses those that concern it.

    draft_lens: how many tokens each member drafts in a row. drafter: the member that drafts under `fixed`.
    """

    num_members: int
    draft_lens: tuple[int, ...]
    drafter: int
