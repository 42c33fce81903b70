"""What an acceptance rate allows: the speed-up over `standard` if forwards cost the same however many tokens they read.

Source of the model: Fu et al., Fast Large Language Model Collaborative Decoding via Speculation, ICML 2025, theorem 3.1
and section 3.4. `cost` is that of one forward of the drafter, by those of all other members together.
"""

from __future__ import annotations


def alternate_speedup(acceptance: float, num_members: int = 2) -> float:
    """n members of equal cost that draft one token each: a + n (1 - a) forwards a token, where `standard` needs n.

    The forward that tests a position also drafts for the next ones, so that after an accepted token the next position
    is tested by one more forward; after a recovered one all members have to read again. For two members 2 / (2 - a).
    """
    return num_members / (acceptance + num_members * (1 - acceptance))


def alternate_speedup_of_the_paper(draft_lens: tuple[int, int], acceptance: float, cost: float) -> float:
    """Theorem 3.6, two members: (1 - a^g) (1 + c) / ((1 - a) (1 + c g - c a^h)), with g and h their draft lengths.

    The first one drafts after a rejection, and costs c. It is stated here and not used, for it is right for one draft
    each at equal costs only. It counts neither the tokens that the other member adds after an accepted chain nor what
    their forwards cost: with one draft each, c = .2 and a = .8 it gives 1.15, where the turns give 1.67 at least
    (`analysis.simulation`; 1.75 where the cheap member begins after each rejection); with three each 1.95, where they
    give 1.66.
    """
    own, other = draft_lens
    return _mean_emitted(own, acceptance) * (1 + cost) / (1 + cost * own - cost * acceptance**other)


def least_acceptance(weight: float) -> float:
    """Theorem 3.2: drafts of a member of a Mixture are accepted at least as often as its weight says, for any models.

    The chance is sum(min(member, target)) over the vocabulary, and the target is at least weight * member everywhere.
    It is reached where no other member has a token in common with the drafter. For temperatures above 0 and without
    filters of the mixture, which take it off its members.
    """
    return weight


def fixed_speedup(draft_len: int, acceptance: float, cost: float) -> float:
    """A drafter whose fully accepted chains are followed by a bonus token, for which it forwards once more."""
    emitted = _mean_emitted(draft_len + 1, acceptance)
    return emitted * (1 + cost) / (1 + cost * draft_len + cost * acceptance**draft_len)


def outside_speedup(draft_len: int, acceptance: float, cost: float) -> float:
    """A drafter without a part in the target: after every round's drafts a token is drawn without its help."""
    return _mean_emitted(draft_len + 1, acceptance) / (1 + cost * draft_len)


def fixed_speedup_without_bonus(draft_len: int, acceptance: float, cost: float) -> float:
    """The paper's (1 - a^g) (1 + c) / ((1 - a) (1 + c g)): no token follows a fully accepted chain."""
    return _mean_emitted(draft_len, acceptance) * (1 + cost) / (1 + cost * draft_len)


def parallel_speedup(draft_len: int, acceptance: float, cost: float) -> float:
    """Drafts while others verify, on a device of its own, over the drafter and the others in turns of the slower one.

    `cost` is by the slowest of the others, all of which forward at the same time. After accepted drafts a round tests g
    of them, after a rejection one: (1 - a^g) / ((1 - a) (1 + a - a^g)) tokens a round.
    """
    of_a_chain, accepted = _mean_emitted(draft_len, acceptance), acceptance**draft_len
    return of_a_chain / (1 + acceptance - accepted) * max(1, cost) / max(1, cost * draft_len)


def _mean_emitted(num_rows: int, acceptance: float) -> float:
    """1 + a + a^2 + ...: the mean tokens of a round in which `num_rows` rows of the target are at hand."""
    return sum(acceptance**row for row in range(num_rows))
