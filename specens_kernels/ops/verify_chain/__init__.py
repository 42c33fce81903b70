"""verify_chain: from the raw logits of one or several models to the tokens that a speculative step emits."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from specens_kernels.backend import implementations, select
from specens_kernels.checks import (
    COINS_SCHEMA,
    INTEGER_DTYPES,
    NO_DRAFTER,
    SAMPLING_SCHEMA,
    TARGET_SCHEMA,
    Draft,
    SamplingArguments,
    check_logits,
    check_tensor,
    coin_arguments,
    fail,
    flat,
    member_list,
    sampling_arguments,
    target_arguments,
)
from specens_kernels.ops.verify_chain import reference
from specens_kernels.ops.verify_chain.rules import RuleKind
from specens_kernels.types import Ensemble, Sampling, Typical, Verdict

SCHEMA = (
    f"({TARGET_SCHEMA}, Tensor draft_tokens, int drafter, Tensor? drafters, Tensor? draft_logits, "
    f"Tensor? draft_lens, {SAMPLING_SCHEMA.format('draft_')}, {COINS_SCHEMA}, "
    "int rule, float typical_threshold, float typical_alpha, bool logprobs)"
    " -> (Tensor tokens, Tensor num_accepted, Tensor num_tokens, Tensor next_token, Tensor logprobs, Tensor status)"
)
RULES = {kind.name.lower(): int(kind) for kind in RuleKind}
IMPLEMENTATIONS = implementations("verify_chain", SCHEMA, reference.verify_chain)


def verify_chain(
    member_logits: Tensor | Sequence[Tensor],
    draft_tokens: Tensor,
    *,
    ensemble: Ensemble | None = None,
    sampling: Sampling = Sampling(),
    drafter: int | Tensor | None = None,
    draft_logits: Tensor | None = None,
    draft_sampling: Sampling | None = None,
    rule: str | Typical = "token",
    draft_lens: Tensor | None = None,
    row_offsets: Tensor | None = None,
    allowed: Tensor | None = None,
    seeds: Tensor | None = None,
    positions: Tensor | None = None,
    uniforms: Tensor | None = None,
    logprobs: bool = False,
    backend: str | None = None,
) -> Verdict:
    """Accept a prefix of each request's draft tokens and draw the token after it.

    Under the rules "token" and "block" the emitted tokens are distributed exactly as if each had been drawn from the
    target distribution: the ensemble's, after the sampling parameters. No host synchronisation; traceable by
    torch.compile(fullgraph=True).

    member_logits: float32, bfloat16 or float16 [batch, steps, vocab], a tensor or one a member (vocabularies may
        differ; a token outside a member's vocabulary has probability 0 there). steps is draft_len + 1 with a bonus row
        (a full acceptance emits one more token) or draft_len without. Any stride but in the vocabulary.
    draft_tokens: int64 or int32 [batch, draft_len]. A chain ends at the first id that is -1 or outside the vocabularies
        of members and drafter; an id that only the drafter knows is rejected like any token of probability 0.
    ensemble: Mixture, LogitMixture or Contrastive; None for a single member.
    sampling: what the target distribution is drawn with.
    drafter: the member that drew the draft tokens from its own distribution: an index, or int64 [batch, draft_len]
        where several did (-1: none, one-hot). None with draft_logits None: one-hot drafts (greedy, n-gram).
    draft_logits: an outside drafter's logits [batch, draft_len, vocab].
    draft_sampling: what the draft tokens were drawn with; default: as sampling. Temperature 0: one-hot.
    rule: "token"; "block" (whole prefixes are tested: longer accepted chains, as lossless); "typical" (accepts what the
        target finds likely enough; not lossless), or a Typical with settings of its own.
    draft_lens: int64 [batch], the drafts of each request, 0 to draft_len; default: all.
    seeds, positions: int64 [batch]: random numbers by Philox; positions is the absolute position of the first draft.
    uniforms: float64 or float32 [batch, draft_len + 1] in [0, 1), instead of seeds and positions: a coin for each draft
        and, last, one for the next token. Where every request is greedy (temperature 0.0), neither is needed.
    logprobs: whether to return log-probabilities of the emitted tokens under the target distribution; those of greedy
        requests are the ensemble's at temperature 1.
    backend: "reference", "cpp", "triton" or None (the fastest for the device).

    Returns a Verdict. Raises ValueError naming the argument that is wrong, NotImplementedError naming a parameter that
    is not served, RuntimeError where a backend that was asked for by name is not usable.
    """
    members = member_list(member_logits, dims=3)
    target = target_arguments(members, ensemble, sampling)
    for name, value in (("row_offsets", row_offsets), ("allowed", allowed)):
        if value is not None:
            raise NotImplementedError(f"{name}: no backend serves this argument yet")
    kind, typical = rule_arguments(rule)
    drawn_with = target.sampling
    if draft_sampling is not None:
        drawn_with = sampling_arguments("draft_sampling", draft_sampling, members[0])
    draft = draft_arguments(members, draft_tokens, drafter, draft_logits, draft_lens, drawn_with)
    batch, draft_len = draft.tokens.shape
    coins = coin_arguments(uniforms, seeds, positions, (batch, draft_len + 1), target)
    _, run = select(IMPLEMENTATIONS, backend, members[0].device, "verify_chain")
    arguments = (*flat(target), *flat(draft), *coins, kind, *typical, logprobs)
    tokens, num_accepted, num_tokens, next_token, emitted_logprobs, status = run(*arguments)
    emitted = emitted_logprobs if logprobs else None
    return Verdict(tokens, num_accepted, num_tokens, next_token, emitted, status)


def rule_arguments(rule: str | Typical) -> tuple[int, tuple[float, float]]:
    """The code of a rule, and threshold and alpha of the typical one."""
    if isinstance(rule, Typical):
        return int(RuleKind.TYPICAL), (rule.threshold, rule.alpha)
    if not isinstance(rule, str) or rule not in RULES:
        fail("rule", f"one of {', '.join(map(repr, RULES))} or a Typical", repr(rule))
    return RULES[rule], (Typical.threshold, Typical.alpha)


def draft_arguments(
    members: list[Tensor],
    draft_tokens: Tensor,
    drafter: int | Tensor | None,
    draft_logits: Tensor | None,
    draft_lens: Tensor | None,
    drawn_with: SamplingArguments,
) -> Draft:
    """Check the draft tokens and what they were drawn from against the members, and flatten them."""
    batch, steps, _ = members[0].shape
    device = members[0].device
    check_tensor("draft_tokens", draft_tokens, (batch, None), INTEGER_DTYPES, device)
    draft_len = draft_tokens.shape[1]
    if steps not in (draft_len, draft_len + 1):
        fail("member_logits", f"draft_len = {draft_len} or draft_len + 1 steps", list(members[0].shape))
    index, drafters = drafter_arguments(drafter, draft_logits, draft_tokens, members)
    if draft_lens is not None:
        check_tensor("draft_lens", draft_lens, (batch,), INTEGER_DTYPES, device)
        draft_lens = draft_lens.to(torch.int64).contiguous()
    return Draft(draft_tokens, index, drafters, draft_logits, draft_lens, drawn_with)


def drafter_arguments(
    drafter: int | Tensor | None, draft_logits: Tensor | None, draft_tokens: Tensor, members: list[Tensor]
) -> tuple[int, Tensor | None]:
    """Check who drafted: the member's index, or NO_DRAFTER and perhaps an index a token."""
    device = members[0].device
    if draft_logits is not None:
        if drafter is not None:
            fail("drafter", "either drafter or draft_logits", "both")
        check_logits("draft_logits", draft_logits, draft_tokens.shape, device)
    if isinstance(drafter, Tensor):
        check_tensor("drafter", drafter, draft_tokens.shape, INTEGER_DTYPES, device)
        return NO_DRAFTER, drafter.to(torch.int64).contiguous()
    if drafter is None:
        return NO_DRAFTER, None
    if not isinstance(drafter, int) or not 0 <= drafter < len(members):
        fail("drafter", f"a member's index from 0 to {len(members) - 1}", drafter)
    return drafter, None
