"""verify_chain: from the raw logits of one or several models to the tokens that a speculative step emits."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from specens_kernels.backend import implementations, run_operator
from specens_kernels.ensembles import Ensemble
from specens_kernels.ops.verify_chain import reference
from specens_kernels.ops.verify_chain.checks import ChainCall, ChainRule, check, out_names
from specens_kernels.packing import (
    Options,
    add_draft,
    add_random,
    add_report,
    add_rule,
    draft_numbers,
    never_greedy,
    sampling_numbers,
    target_options,
)
from specens_kernels.results import Verdict
from specens_kernels.rules import CHAIN, chosen
from specens_kernels.sampling import Processing, Sampling
from specens_kernels.workspace import Workspace

IMPLEMENTATIONS = implementations("verify_chain", reference.verify_chain, fake=reference.empty_verdict)


def verify_chain(
    member_logits: Tensor | Sequence[Tensor],
    draft_tokens: Tensor,
    *,
    ensemble: Ensemble | None = None,
    sampling: Sampling = Sampling(),
    drafter: int | Tensor | None = None,
    draft_logits: Tensor | None = None,
    draft_sampling: Sampling | None = None,
    rule: ChainRule = "token",
    draft_lens: Tensor | None = None,
    max_draft_len: int | None = None,
    row_offsets: Tensor | None = None,
    draft_slots: Tensor | None = None,
    processing: Processing | None = None,
    process_drafts: bool = True,
    allowed: Tensor | None = None,
    seeds: Tensor | None = None,
    positions: Tensor | None = None,
    uniforms: Tensor | None = None,
    logprobs: bool | str = False,
    top_logprobs: int = 0,
    out: Verdict | None = None,
    workspace: Workspace | None = None,
    backend: str | None = None,
) -> Verdict:
    """Accept a prefix of each request's draft tokens and draw the token after it.

    Under the rules "token", "block" and "gumbel" the emitted tokens are distributed exactly as if each had been drawn
    from the target distribution: the ensemble's, after processing and sampling parameters. No host synchronisation;
    traceable by torch.compile(fullgraph=True). No result claims a gradient, whatever the logits do.

    member_logits: float32, bfloat16 or float16 [batch, steps, vocab], a tensor or one a member (vocabularies may
        differ; a token outside a member's vocabulary has probability 0 there). steps is draft_len + 1 with a bonus row
        (a full acceptance emits one more token) or draft_len without. Any stride but in the vocabulary.
        With row_offsets: packed [rows, vocab].
    draft_tokens: int64 or int32 [batch, draft_len]. A chain ends at the first id that is -1 or outside the vocabularies
        of members and drafter; an id that only the drafter knows is rejected like any token of probability 0.
        With row_offsets also packed [drafts], where each request has one row more than drafts, or none has.
    ensemble: Mixture, LogitMixture or Contrastive; None for a single member.
    sampling: what the target distribution is drawn with.
    drafter: the member that drew the draft tokens from its own distribution: an index, or int64 or int32 like
        draft_tokens where several did (-1: none, one-hot). None with draft_logits None: one-hot (greedy, n-gram).
    draft_logits: an outside drafter's logits [batch, draft_len, vocab], or [drafts, vocab] for packed draft_tokens.
    draft_sampling: what the draft tokens were drawn with; default: as sampling. Temperature 0: one-hot.
    rule: "token"; "block" (whole prefixes are tested: longer accepted chains, as lossless); "gumbel" (a seed is a text,
        whatever the drafts are; see below); "typical" (accepts what the target finds likely enough; not lossless), or
        a Typical with settings of its own; a Threshold (accepts what has that target probability; not lossless);
        "synthetic" (accepts at given rates, to plan capacity), or a Synthetic with rates of its own; "replacement", a
        Replacement, or a DecisionTree (see below).
    draft_lens: int64 or int32 [batch], the drafts of each request, 0 to draft_len; default: all, and for packed rows
        one less than the rows of the request.
    max_draft_len: the most drafts of a request, which packed draft_tokens do not tell; only with them.
    row_offsets: int64 or int32 [batch + 1]: request b owns the rows row_offsets[b] to row_offsets[b + 1] - 1 of the
        packed logits, one for each draft and perhaps a bonus row. Rows after the last offset are padding. With packed
        draft_tokens and bonus rows, every request has at least its bonus row.
    draft_slots: int64 or int32 [batch]: draft_logits are kept as [slots, draft_len or more, vocab], and this is the
        slot of each request.
    processing: logit bias, penalties and min_tokens, for every member's logits at every row.
    process_drafts: whether the drafts were drawn from logits with the same processing and bit mask.
    allowed: int32 [batch, steps, words], or [rows, words] for packed rows: token v may be emitted at a row if bit
        v % 32 of word v // 32 is set; tokens beyond the words may not. The layout of xgrammar and llguidance.
    seeds, positions: int64 [batch]: random numbers by Philox; positions is the absolute position of the first draft.
    uniforms: float64 or float32 [batch, draft_len + 1] in [0, 1), instead of seeds and positions: one for each draft
        and, last, one for the next token. Where every request is greedy (temperature 0.0), neither is needed.
    logprobs: True or "target": also return log-probabilities of the emitted tokens under the target distribution; those
        of greedy requests are the ensemble's at temperature 1. "raw": under the ensemble at temperature 1, without
        filters and processing.
    top_logprobs: also return so many most likely tokens at each emitted one, under the same distribution.
    out: a Verdict of contiguous tensors to write into, which is returned; nothing else is allocated but, on a
        GPU, scratch memory: less than 2 % of the logits' where the vocabulary is 32,768 or more, unless logits are
        processed. Its optional fields are those that are asked for. It shares no memory with an argument, nor its
        fields with each other; what lies between the rows of an argument counts as the argument's.
    workspace: a Workspace to take scratch memory on a GPU from: with `out`, the second call of some shapes and settings
        allocates nothing. Not in code that torch.compile traces, and not with the backend "reference".
    backend: "reference", "cpp", "triton" or None (the fastest for the device).

    Under the rule "gumbel" each row has one token, that of the largest log-probability + Gumbel noise, which is a
    function of the seed, the row's own position (positions + j for row j) and the token's id; a draft is accepted while
    it is that token. So a text depends on its seed and the target's logits alone: not on the drafter, the lengths of
    drafts, or rounds. The logits are read once, without exponentials for a lone model or logit mixture, and no row
    after the first difference. Drafts drawn by `sample(method="gumbel")` with the same seeds are accepted most often.
    How drafts were drawn plays no part: drafter, draft_logits, draft_sampling and uniforms must be None.

    A Replacement or DecisionTree lets two models write one text (Wang et al., Speculate, then Collaborate, ICML 2025):
    the target is the assistant, and drafter or draft_logits, of which one is needed, give the draft's probabilities. A
    draft token is kept unless it differs from the most likely token of the target and the rule replaces it by that
    token, which ends the round. One that the target excludes (probability 0: masks, filters, vocabularies) is always
    replaced. After a whole chain the target's most likely token follows if there is a bonus row; the paper's text,
    where the drafter goes on instead, takes rows without. Nothing is drawn, so no numbers are needed or looked at,
    and a temperature of 0, the target's or the draft's, counts as 1. The first call with a tree copies it to the GPU:
    make one before capturing a CUDA graph.

    Returns a Verdict. Raises ValueError naming the argument that is wrong, RuntimeError where a backend that was asked
    for by name is not usable. What only the device can read (lengths, offsets, slots, per-request parameters) is
    checked there: `Status.INVALID_PARAMETER`.
    """
    call = ChainCall(
        member_logits,
        draft_tokens,
        ensemble,
        sampling,
        drafter,
        draft_logits,
        draft_sampling,
        rule,
        draft_lens,
        max_draft_len,
        row_offsets,
        draft_slots,
        processing,
        process_drafts,
        allowed,
        seeds,
        positions,
        uniforms,
        logprobs,
        top_logprobs,
        out,
        workspace,
        backend,
    )
    results = run_operator(IMPLEMENTATIONS, "verify_chain", call, _pack, check, out_names)
    if out is not None:
        return out
    tokens, num_accepted, num_tokens, next_token, status, *reported = results
    if not reported:
        return Verdict(tokens, num_accepted, num_tokens, next_token, None, status)
    return Verdict(tokens, num_accepted, num_tokens, next_token, reported[0], status, *reported[1:])


def _pack(call: ChainCall, members: Sequence[Tensor]) -> tuple[tuple[Any, ...], Options]:
    sampling, draft_sampling = sampling_numbers(call.sampling), draft_numbers(call.draft_sampling)
    rule = chosen(call.rule, CHAIN)
    if rule.kind.compares:
        sampling, draft_sampling = never_greedy(sampling), never_greedy(draft_sampling)
    target = (sampling, call.processing, call.allowed, call.row_offsets, draft_sampling)
    options = target_options(members, call.ensemble, *target)
    if rule.kind.compares:
        options.copied += (call.sampling, call.draft_sampling)
    if call.draft_lens is not None:
        options["draft_lens"] = call.draft_lens
    draft = (call.drafter, call.draft_logits, call.draft_slots, call.max_draft_len, call.process_drafts)
    add_draft(options, *draft)
    add_random(options, call.uniforms, call.seeds, call.positions)
    add_rule(options, call, rule, call.draft_tokens.shape[1] if call.max_draft_len is None else call.max_draft_len)
    add_report(options, call.logprobs, call.top_logprobs)
    return (members, call.draft_tokens), options
