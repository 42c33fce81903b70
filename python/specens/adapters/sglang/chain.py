"""SGLang's verification of draft chains that were drawn from a draft distribution, by `verify_chain`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from specens.adapters.sglang.calls import both_spellings, write_verdict
from specens.adapters.shim_arguments import (
    FLOATS,
    INTEGERS,
    LAST_UNIFORM,
    as_logits,
    check_deterministic,
    check_tensor,
    fail,
)
from specens_kernels import Verdict, sample, verify_chain

MOST_PROBABILITY = 1.001  # what rounding makes of 1, with a margin: SGLang's own bound


@both_spellings
def chain_speculative_sampling_triton(
    predicts: Tensor,
    accept_index: Tensor,
    accept_token_num: Tensor,
    candidates: Tensor,
    retrive_index: Tensor,
    retrive_next_token: Tensor | None,  # noqa: ARG001
    retrive_next_sibling: Tensor | None,  # noqa: ARG001
    uniform_samples: Tensor,
    uniform_samples_for_final_sampling: Tensor,
    target_probs: Tensor,
    draft_probs: Tensor,
    threshold_single: float = 1.0,
    threshold_acc: float = 1.0,
    deterministic: bool = True,
    *,
    block_verification: bool = False,
) -> None:
    """Accept a prefix of each request's drafts and draw the token after it, as SGLang's function of this name does.

    Slot 0 is the last committed token, slot i the draft that was drawn from row i - 1 of draft_probs and is judged by
    row i - 1 of target_probs. The text follows the target distribution exactly.

    predicts: int32 [tokens], written: at retrive_index of each accepted slot, slot 0 first, the token after it.
    accept_index: int32 [batch, slots], written: retrive_index of slot 0 and of the accepted ones; the rest stays as it
        is. accept_token_num: int32 [batch], written: accepted drafts, without the last token.
    candidates: int64 or int32 [batch, slots], the token of each slot; that of slot 0 is not looked at.
    retrive_index: int64 or int32 [batch, slots], different for all slots. retrive_next_token, retrive_next_sibling: not
        looked at, as in SGLang: a chain has no others.
    uniform_samples: float32 or float64 [batch, slots - 1 or more] in [0, 1), that of slot i in column i - 1.
    uniform_samples_for_final_sampling: [batch], for the last token.
    target_probs: [batch, slots, vocab]. draft_probs: [batch, slots - 1 or more, vocab], further rows are not looked at.
        Any floating-point dtype; each row is normalised.
    threshold_single, threshold_acc: 1.0; a chain with draft probabilities has no thresholds, and SGLang ignores others.
    deterministic: True or False; results are the same every time with either.
    block_verification: test the chain as a whole [Sun et al., ICLR 2025].

    A draft probability up to 1.001 counts as 1; what is negative, larger, infinite or NaN counts as 0. A draft of
    probability 0 is never accepted: it ends the chain, and the last token is drawn from what the draft distribution
    leaves of the target, without that draft. Where the residual is nothing but rounding, the last token is drawn from
    the target, where SGLang emits the last id of the vocabulary; where nothing can be drawn, it is -1.
    Raises ValueError naming the argument. `verify_chain` also says what was unusual about a request, takes logits and
    saves the copies that are made here.
    """
    check_tensor("candidates", candidates, (None, None), INTEGERS)
    batch, slots = candidates.shape
    check_tensor("target_probs", target_probs, (batch, slots, None), FLOATS)
    for name, value in {"uniform_samples": uniform_samples, "draft_probs": draft_probs}.items():
        check_tensor(name, value, (batch, None, target_probs.shape[2])[: value.dim()], FLOATS)
        if value.shape[1] < slots - 1:
            fail(name, f"at least {slots - 1} rows for {slots} slots", list(value.shape))
    final = uniform_samples_for_final_sampling
    check_tensor("uniform_samples_for_final_sampling", final, (batch,), (torch.float32, torch.float64))
    check_tensor("predicts", predicts, (None,), INTEGERS)
    check_tensor("accept_index", accept_index, (batch, slots), INTEGERS)
    check_tensor("accept_token_num", accept_token_num, (batch,), INTEGERS)
    check_tensor("retrive_index", retrive_index, (batch, slots), INTEGERS)
    _check_settings(slots, threshold_single, threshold_acc, block_verification)
    check_deterministic(deterministic)

    drafts, draft_probs = candidates[:, 1:].long(), _probabilities(draft_probs[:, : slots - 1])
    usable = _own(draft_probs, drafts) > 0
    final = final.double().clamp(max=LAST_UNIFORM)
    verdict = verify_chain(
        as_logits(target_probs),
        torch.where(usable, drafts, -1),
        draft_logits=as_logits(draft_probs),
        uniforms=torch.cat([uniform_samples[:, : slots - 1].double(), final[:, None]], dim=1),
        rule="block" if block_verification else "token",
    )
    verdict = _without_unusable(verdict, usable, drafts, target_probs, draft_probs, final)
    write_verdict(verdict, retrive_index.long(), predicts, accept_index, accept_token_num)


def chain_block_speculative_sampling_triton(*args: Any, **kwargs: Any) -> None:
    """`chain_speculative_sampling_triton` with block_verification=True, under the name that some releases give it."""
    chain_speculative_sampling_triton(*args, **(kwargs | {"block_verification": True}))


def _check_settings(slots: int, threshold_single: float, threshold_acc: float, block_verification: bool) -> None:
    if slots == 0:
        fail("candidates", "at least slot 0", "no slots")
    for name, value in {"threshold_single": threshold_single, "threshold_acc": threshold_acc}.items():
        if value != 1.0:
            fail(name, "1.0, as a chain with draft probabilities has no thresholds", repr(value))
    if not isinstance(block_verification, bool):
        fail("block_verification", "True or False", repr(block_verification))


def _probabilities(draft_probs: Tensor) -> Tensor:
    """Draft probabilities in float32, those that are none replaced by 0, those just above 1 by 1."""
    probs = draft_probs.float()
    return torch.where((probs >= 0) & (probs <= MOST_PROBABILITY), probs.clamp(max=1), 0)


def _own(draft_probs: Tensor, drafts: Tensor) -> Tensor:
    """The probability of each draft, [batch, slots - 1]; 0 of ids outside the vocabulary."""
    known = (drafts >= 0) & (drafts < draft_probs.shape[2])
    return draft_probs.gather(2, torch.where(known, drafts, 0)[..., None])[..., 0] * known


def _without_unusable(
    verdict: Verdict, usable: Tensor, drafts: Tensor, target_probs: Tensor, draft_probs: Tensor, final: Tensor
) -> Verdict:
    """The verdict with the last token drawn without the draft that ended the chain, where one did."""
    batch, num_drafts = drafts.shape
    if num_drafts == 0:
        return verdict
    request = torch.arange(batch, device=drafts.device)
    step = verdict.num_accepted.clamp(max=num_drafts - 1)
    draft = drafts[request, step][:, None]
    ended = (verdict.num_accepted < num_drafts) & ~usable[request, step]
    ended = ended & (draft[:, 0] >= 0) & (draft[:, 0] < draft_probs.shape[2])
    target = target_probs[request, step].float().nan_to_num(nan=0.0)
    others = target.scatter(1, draft.clamp(min=0, max=target.shape[1] - 1), 0.0)
    residual = (others - draft_probs[request, step]).clamp(min=0)
    left = torch.where((residual.sum(1) > 0)[:, None], residual, others)
    left = torch.where((left.sum(1) > 0)[:, None], left, target)
    last = torch.where(ended, sample(left.log(), uniforms=final).tokens, verdict.next_token)
    tokens = verdict.tokens.scatter(1, verdict.num_accepted[:, None], last[:, None])
    return verdict._replace(tokens=tokens, next_token=last)
