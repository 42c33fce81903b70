"""What a generation cost, and what became of the drafts."""

from __future__ import annotations

import dataclasses
import time
from dataclasses import dataclass, field

from specens_kernels import Status


@dataclass
class Statistics:
    """Counts and times of one generation. Lists have one entry a member.

    forwards, tokens_fed, forward_seconds: what went through each member, its prompt included; a batched forward counts
        for every member in it, and its time is divided among them. model_calls: forwards as the machine sees them.
    prompt_seconds: of the forwards that read the prompts.
    drafted, tested, accepted: draft tokens by the member that proposed them. A draft behind the first rejection of its
        chain is never tested.
    recovered, bonus: tokens drawn after a rejection, and after a fully accepted chain. emitted: all tokens of the text.
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
    propose_seconds: float = 0.0
    score_seconds: float = 0.0
    verify_seconds: float = 0.0
    status: Status = Status.OK
    _mark: float = field(default=0.0, repr=False)

    @classmethod
    def of(cls, num_members: int) -> Statistics:
        """Empty statistics of an ensemble."""
        forwards, tokens_fed, drafted, tested, accepted = ([0] * num_members for _ in range(5))
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
    def overhead_seconds(self) -> float:
        """Time outside the members' forwards."""
        return self.seconds - sum(self.forward_seconds)

    @property
    def seconds_per_forward(self) -> float:
        """Mean time of one forward of one member, those that read the prompts aside."""
        later = sum(self.forwards) - len(self.forwards)
        return (sum(self.forward_seconds) - self.prompt_seconds) / later if later > 0 else 0.0

    def start_clock(self) -> None:
        """Begin a phase."""
        self._mark = time.perf_counter()

    def end_phase(self, name: str) -> None:
        """Book the time since the last mark under `propose`, `score` or `verify`, and begin the next phase."""
        now = time.perf_counter()
        field_name = f"{name}_seconds"
        setattr(self, field_name, getattr(self, field_name) + now - self._mark)
        self._mark = now

    def to_dict(self) -> dict:
        """Everything as plain values for JSON."""
        values = {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if not f.name.startswith("_")}
        values["status"] = [flag.name for flag in Status if flag and flag in self.status]
        for name in ("acceptance_rate", "tokens_per_second", "overhead_seconds"):
            values[name] = getattr(self, name)
        return values
