"""SGLang's verification of draft trees, by `verify_tree`."""

from __future__ import annotations

import torch
from torch import Tensor

from specens.adapters.sglang.calls import both_spellings, write_verdict
from specens.adapters.sglang.links import check_links, in_order, read_links
from specens.adapters.shim_arguments import (
    INTEGERS,
    LAST_UNIFORM,
    as_logits,
    check_deterministic,
    check_tensor,
    fail,
    readable,
)
from specens_kernels import verify_tree

LEAST_THRESHOLD_ACC = 1e-9
LEAST_LOGIT = -69.0  # a probability of 1e-30
PRECISE = (torch.float32, torch.float64)


@both_spellings
def tree_speculative_sampling_target_only(
    predicts: Tensor,
    accept_index: Tensor,
    accept_token_num: Tensor,
    candidates: Tensor,
    retrive_index: Tensor,
    retrive_next_token: Tensor,
    retrive_next_sibling: Tensor,
    uniform_samples: Tensor,
    uniform_samples_for_final_sampling: Tensor,
    target_probs: Tensor,
    draft_probs: Tensor | None = None,
    threshold_single: float = 1.0,
    threshold_acc: float = 1.0,
    deterministic: bool = True,
) -> None:
    """Accept a path of each request's draft tree and draw the token after it, as `sgl_kernel` does; nodes were chosen.

    Node 0 is the last committed token. A node's children are tried in their order against one uniform, its own in
    uniform_samples: one is accepted where the uniform is below the target mass of the children up to it, divided by
    threshold_acc, or where its own mass is at least threshold_single; so one of probability 0 only where
    threshold_single is 0. The last token is drawn from the target without the children that were rejected. Both
    thresholds 1.0 emit exactly the target distribution, other ones do not.

    predicts: int32 [tokens], written: at retrive_index of each node of the path, the token after it.
    accept_index: int32 [batch, num_steps], written: retrive_index of node 0 and of the accepted nodes; what lies after
        them stays as it is. So a path has at most num_steps - 1 nodes.
    accept_token_num: int32 [batch], written: accepted nodes, without node 0 and without the last token.
    candidates: int64 or int32 [batch, nodes], the token of each node; that of node 0 is not looked at.
    retrive_index: int64 or int32 [batch, nodes]: where a node's token goes in predicts; different for all nodes.
    retrive_next_token, retrive_next_sibling: int64 or int32 [batch, nodes]: the first child and the next sibling of a
        node, -1 where there is none. Nodes may be numbered in any way; where links lead to earlier nodes, and on a GPU
        always, target_probs is copied in another order.
    uniform_samples: float32 or float64 [batch, nodes] in [0, 1). uniform_samples_for_final_sampling: [batch].
    target_probs: float32 or float64 [batch, nodes, vocab]: row i is the distribution after node i; normalised here.
    draft_probs: None, or zeros like target_probs. SGLang's kernel uses it as scratch memory; here it is not written,
        and read on the CPU only, to refuse other numbers than 0.
    threshold_single, threshold_acc: in [0, 1].
    deterministic: True or False; results are the same every time with either.
    All of retrive_... are also taken as retrieve_....

    A token that comes twice among siblings counts once. Where nothing can be drawn, -1 is written as the last token;
    `verify_tree` also says why, takes logits and saves the copy that is made here. Raises ValueError naming the
    argument; links that are no tree are found on the CPU only, elsewhere nodes that node 0 does not lead to are never
    accepted.
    """
    check_tensor("target_probs", target_probs, (None, None, None), PRECISE)
    batch, nodes, _ = target_probs.shape
    check_tensor("predicts", predicts, (None,), INTEGERS)
    check_tensor("accept_index", accept_index, (batch, None), INTEGERS)
    check_tensor("accept_token_num", accept_token_num, (batch,), INTEGERS)
    links = {"retrive_next_token": retrive_next_token, "retrive_next_sibling": retrive_next_sibling}
    for name, value in {"candidates": candidates, "retrive_index": retrive_index, **links}.items():
        check_tensor(name, value, (batch, nodes), INTEGERS)
    check_tensor("uniform_samples", uniform_samples, (batch, nodes), PRECISE)
    final, final_name = uniform_samples_for_final_sampling, "uniform_samples_for_final_sampling"
    check_tensor(final_name, final, (batch,), PRECISE)
    _check_settings(accept_index, links, target_probs, draft_probs, threshold_single, threshold_acc)
    check_deterministic(deterministic)

    indices = retrive_index
    parents, order = read_links(retrive_next_token.long(), retrive_next_sibling.long())
    if not in_order(links):
        request = torch.arange(batch, device=order.device)[:, None]
        candidates, indices = candidates[request, order], retrive_index[request, order]
        uniform_samples, target_probs = uniform_samples[request, order], target_probs[request, order]
        number = order.argsort(dim=1)  # of each node in this order
        parents = torch.where(parents < 0, -1, number.gather(1, parents.clamp(min=0))).gather(1, order)
    accepted = _accepted(candidates.long(), parents, uniform_samples, target_probs, threshold_single, threshold_acc)
    random_numbers = LAST_UNIFORM * (~accepted[:, 1:]).double()
    logits = as_logits(target_probs)
    if threshold_single == 0:
        _make_possible(logits, candidates.long(), parents)
    verdict = verify_tree(
        logits,
        candidates[:, 1:].contiguous(),
        parents[:, 1:] - 1,
        max_levels=min(accept_index.shape[1], nodes) - 1,
        uniforms=torch.cat([random_numbers, final.double().clamp(max=LAST_UNIFORM)[:, None]], dim=1),
    )
    write_verdict(verdict, indices.long(), predicts, accept_index, accept_token_num)


def _check_settings(
    accept_index: Tensor,
    links: dict[str, Tensor],
    target_probs: Tensor,
    draft_probs: Tensor | None,
    threshold_single: float,
    threshold_acc: float,
) -> None:
    if target_probs.shape[1] == 0:
        fail("target_probs", "at least node 0", list(target_probs.shape))
    if accept_index.shape[1] == 0:
        fail("accept_index", "at least one column, for node 0", list(accept_index.shape))
    for name, value in {"threshold_single": threshold_single, "threshold_acc": threshold_acc}.items():
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= 1:
            fail(name, "a number in [0, 1]", repr(value))
    check_links(links)
    if draft_probs is not None:
        check_tensor("draft_probs", draft_probs, tuple(target_probs.shape), PRECISE)
        if readable(draft_probs) and bool(draft_probs.any()):
            fail("draft_probs", "None or zeros, as the drafts were chosen", "other numbers")


def _accepted(
    tokens: Tensor,
    parents: Tensor,
    uniform_samples: Tensor,
    target_probs: Tensor,
    threshold_single: float,
    threshold_acc: float,
) -> Tensor:
    """bool [batch, nodes]: whether a node is accepted once the text has come to it and its earlier siblings were not.

    It depends on the parent's uniform alone, so `verify_tree` is told the answer: a uniform of 0, or one next to 1.
    A token of probability 0, or one that a sibling had, is not accepted there with a uniform of 0 either.
    """
    known = (tokens >= 0) & (tokens < target_probs.shape[2]) & (parents >= 0)
    rows = parents.clamp(min=0)
    request = torch.arange(len(tokens), device=tokens.device)[:, None]
    mass = target_probs[request, rows, torch.where(known, tokens, 0)].double() * known
    node = torch.arange(tokens.shape[1], device=tokens.device)
    earlier = (parents[:, :, None] == parents[:, None]) & (node < node[:, None])
    repeated = (earlier & (tokens[:, :, None] == tokens[:, None])).any(2)
    up_to = mass + (earlier * torch.where(repeated, 0.0, mass)[:, None]).sum(2)
    uniform = uniform_samples.double().gather(1, rows)
    passes = (uniform < up_to / max(threshold_acc, LEAST_THRESHOLD_ACC)) | (mass >= threshold_single)
    return known & passes


def _make_possible(logits: Tensor, tokens: Tensor, parents: Tensor) -> None:
    """Give the token of each node a probability, however small: a threshold of 0 accepts it, `verify_tree` no other."""
    batch, _, vocab = logits.shape
    known = (tokens >= 0) & (tokens < vocab) & (parents >= 0)
    at = torch.where(known, parents * vocab + tokens, 0)
    least = torch.where(known, LEAST_LOGIT, float("-inf"))
    logits.view(batch, -1).scatter_reduce_(1, at, least, "amax")
