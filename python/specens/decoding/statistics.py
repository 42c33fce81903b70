"""What a generation cost, and what became of the drafts."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

from specens_kernels import Status

# In place of the member that drafted: a drafter that is none, as all numbers below; in lists it comes last.
OUTSIDE = -1


@dataclass
class Statistics:
    """Counts and times of one generation. Lists have one entry a member.

    Of a forward that several generations share, each is charged an equal part of the time.

    forwards, tokens_fed, forward_seconds: what went through each member, its prompt included; a batched forward counts
        for every member in it, and its time is divided among them. model_calls: forwards as the machine sees them.
    prompt_seconds: of the members' forwards that read the prompts. overlapped_seconds: of forwards, while others ran.
    drafter_forwards, drafter_tokens_fed, drafter_seconds: the same of outside drafters that are models.
    drafted, tested, accepted: draft tokens by the member that proposed them; the last of one entry more is for those
        of a drafter that is no member. A draft after the first rejection of its chain is never tested.
    recovered, bonus: tokens drawn after a rejection, and after a fully accepted chain. emitted: all tokens of the text;
        what accepted, recovered and bonus leave of them was drawn where nothing was drafted.
    seconds: of the whole generation; propose_seconds, score_seconds, verify_seconds: of its phases, each with the
        forwards in it. On a GPU a phase that does not wait for the device hands its time on to the next that does.
    status: the status bits that any operation reported.
    """

    forwards: list[int]
    tokens_fed: list[int]
    forward_seconds: list[float]
    drafted: list[int]
    tested: list[int]
    accepted: list[int]
    model_calls: int = 0
    rounds: int = 0
    recovered: int = 0
    bonus: int = 0
    emitted: int = 0
    seconds: float = 0.0
    prompt_seconds: float = 0.0
    overlapped_seconds: float = 0.0
    drafter_forwards: int = 0
    drafter_tokens_fed: int = 0
    drafter_seconds: float = 0.0
    propose_seconds: float = 0.0
    score_seconds: float = 0.0
    verify_seconds: float = 0.0
    status: Status = Status.OK

    @classmethod
    def of(cls, num_members: int) -> Statistics:
        """Empty statistics of an ensemble."""
        forwards, tokens_fed = ([0] * num_members for _ in range(2))
        drafted, tested, accepted = ([0] * (num_members + 1) for _ in range(3))
        return cls(forwards, tokens_fed, [0.0] * num_members, drafted, tested, accepted)

    @property
    def acceptance_rate(self) -> float | None:
        """Accepted among the tested drafts; None where none was tested."""
        return sum(self.accepted) / sum(self.tested) if any(self.tested) else None

    @property
    def tokens_per_second(self) -> float:
        """Emitted tokens by the time of the whole generation, prompts included."""
        return self.emitted / self.seconds if self.seconds else 0.0

    @property
    def all_forward_seconds(self) -> float:
        """Of the members and an outside drafter."""
        return sum(self.forward_seconds) + self.drafter_seconds

    @property
    def overhead_seconds(self) -> float:
        """Time outside forwards."""
        return self.seconds - self.all_forward_seconds + self.overlapped_seconds

    @property
    def seconds_per_forward(self) -> float:
        """Mean time of one forward of one member, those that read the prompts aside."""
        later = sum(self.forwards) - len(self.forwards)
        return (sum(self.forward_seconds) - self.prompt_seconds) / later if later > 0 else 0.0

    def count_forward(self, counts: Sequence[tuple[int, int]], seconds: float, *, reads_prompt: bool) -> None:
        """Book a forward of some members, or of an outside drafter alone. counts: who read how many tokens.

        seconds: the part of it of each.
        """
        self.model_calls += 1
        for index, num_read in counts:
            if index < 0:
                self.drafter_forwards += 1
                self.drafter_tokens_fed += num_read
                self.drafter_seconds += seconds
                continue
            self.prompt_seconds += seconds * reads_prompt
            self.forwards[index] += 1
            self.tokens_fed[index] += num_read
            self.forward_seconds[index] += seconds

    def to_dict(self) -> dict:
        """Everything as plain values for JSON."""
        values = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        values["status"] = [flag.name for flag in Status if flag and flag in self.status]
        for name in ("acceptance_rate", "tokens_per_second", "overhead_seconds"):
            values[name] = getattr(self, name)
        return values
