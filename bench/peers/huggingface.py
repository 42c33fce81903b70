"""transformers' verification of a chain; one request at a time, with random numbers of its own."""

from __future__ import annotations

from transformers.generation.utils import _speculative_sampling

from bench.case import Rival
from bench.inputs import ChainInputs


def verify_chain(inputs: ChainInputs) -> Rival | None:
    """None for what it does not serve: more than one request, ensembles."""
    if inputs.draft_tokens.shape[0] > 1 or inputs.draft_logits is None:
        return None
    draft_len = inputs.draft_tokens.shape[1]

    def run() -> object:
        return _speculative_sampling(inputs.draft_tokens, inputs.draft_logits, draft_len, inputs.member_logits[0])

    return Rival(run, checked=False)
