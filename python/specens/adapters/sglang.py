"""SGLang's tree verification, by `verify_tree`: for callers who swap an import. SGLang is not needed."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from specens.adapters.shim_arguments import LAST_COIN, as_logits, check_deterministic, check_tensor, fail, readable
from specens_kernels import Verdict, verify_tree

LEAST_THRESHOLD_ACC = 1e-9
INDEX_DTYPES = (torch.int64, torch.int32)


def _both_spellings(function: Callable[..., None]) -> Callable[..., None]:
    """Releases of SGLang call these arguments retrive_index and so on, others retrieve_index: take either."""

    @functools.wraps(function)
    def take(*args: Any, **kwargs: Any) -> None:
        for name in [name for name in kwargs if name.startswith("retrieve_")]:
            spelling = name.replace("retrieve_", "retrive_", 1)
            if spelling in kwargs:
                fail(name, f"either {spelling} or {name}", "both")
            kwargs[spelling] = kwargs.pop(name)
        function(*args, **kwargs)

    return take


@_both_spellings
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

    Node 0 is the last committed token. A node's children are tried in their order against one coin, its own in
    uniform_samples: one is accepted where the coin is below the target mass of the children up to it, divided by
    threshold_acc, or where its own mass is at least threshold_single; never one of probability 0. The last token is
    drawn from the target without the children that were rejected. Both thresholds 1.0 emit exactly the target
    distribution, other ones do not.

    predicts: int32 [tokens], written: at retrive_index of each node of the path, the token after it.
    accept_index: int32 [batch, num_steps], written: retrive_index of node 0 and of the accepted nodes; what lies behind
        them stays as it is. So a path has at most num_steps - 1 nodes.
    accept_token_num: int32 [batch], written: accepted nodes, without node 0 and without the last token.
    candidates: int64 or int32 [batch, nodes], the token of each node; that of node 0 is not looked at.
    retrive_index: int64 or int32 [batch, nodes]: where a node's token goes in predicts; different for all nodes.
    retrive_next_token, retrive_next_sibling: int64 or int32 [batch, nodes]: the first child and the next sibling of a
        node, -1 where there is none; always later nodes, as SGLang numbers them.
    uniform_samples: float32 or float64 [batch, nodes] in [0, 1). uniform_samples_for_final_sampling: [batch].
    target_probs: float32 or float64 [batch, nodes, vocab]: row i is the distribution after node i; normalised here.
    draft_probs: None, or zeros like target_probs. SGLang's kernel uses it as scratch memory; here it is not written,
        and read on the CPU only, to refuse other numbers than 0.
    threshold_single, threshold_acc: in [0, 1].
    deterministic: True or False; results are the same every time with either.
    All of retrive_... are also taken as retrieve_....

    A token that comes twice among siblings counts once. Where nothing can be drawn, -1 is written as the last token;
    `verify_tree` also says why, takes logits and saves the copy that is made here. Raises ValueError naming the
    argument; links to earlier nodes are found on the CPU only, elsewhere their nodes are never accepted.
    """
    check_tensor("target_probs", target_probs, (None, None, None), (torch.float32, torch.float64))
    batch, nodes, _ = target_probs.shape
    check_tensor("predicts", predicts, (None,), INDEX_DTYPES)
    check_tensor("accept_index", accept_index, (batch, None), INDEX_DTYPES)
    check_tensor("accept_token_num", accept_token_num, (batch,), INDEX_DTYPES)
    links = {"retrive_next_token": retrive_next_token, "retrive_next_sibling": retrive_next_sibling}
    for name, value in {"candidates": candidates, "retrive_index": retrive_index, **links}.items():
        check_tensor(name, value, (batch, nodes), INDEX_DTYPES)
    check_tensor("uniform_samples", uniform_samples, (batch, nodes), (torch.float32, torch.float64))
    final, final_name = uniform_samples_for_final_sampling, "uniform_samples_for_final_sampling"
    check_tensor(final_name, final, (batch,), (torch.float32, torch.float64))
    _check_settings(accept_index, links, target_probs, draft_probs, threshold_single, threshold_acc)
    check_deterministic(deterministic)

    parents = parents_of_links(retrive_next_token.long(), retrive_next_sibling.long())
    accepted = _accepted(candidates.long(), parents, uniform_samples, target_probs, threshold_single, threshold_acc)
    coins = LAST_COIN * (~accepted[:, 1:]).double()
    verdict = verify_tree(
        as_logits(target_probs),
        candidates[:, 1:].contiguous(),
        parents[:, 1:] - 1,
        max_levels=min(accept_index.shape[1], nodes) - 1,
        uniforms=torch.cat([coins, final.double().clamp(max=LAST_COIN)[:, None]], dim=1),
    )
    _write(verdict, retrive_index.long(), predicts, accept_index, accept_token_num)


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
    for name, link in links.items():
        later = torch.arange(1, link.shape[1] + 1, device=link.device)
        if readable(link) and bool(((link >= 0) & (link < later) | (link >= link.shape[1])).any()):
            fail(name, "later nodes or -1", link.tolist())
    if draft_probs is not None:
        check_tensor("draft_probs", draft_probs, tuple(target_probs.shape), (torch.float32, torch.float64))
        if readable(draft_probs) and bool(draft_probs.any()):
            fail("draft_probs", "None or zeros, as the drafts were chosen", "other numbers")


def parents_of_links(first_child: Tensor, next_sibling: Tensor) -> Tensor:
    """int64 [batch, nodes]: the parent of each node, -1 of node 0 and of nodes that no link leads to.

    first_child, next_sibling: int64 [batch, nodes], -1 where there is none. Takes log2(nodes) steps.
    """
    nodes = first_child.shape[1]
    node = torch.arange(nodes, device=first_child.device).expand_as(first_child)
    nowhere = node.new_zeros(len(node), 1)  # a column that links without a target are scattered to

    def source_of(links: Tensor, otherwise: Tensor) -> Tensor:
        target = torch.where((links >= 0) & (links < nodes), links, nodes)
        return torch.cat([otherwise, nowhere], dim=1).scatter(1, target, node)[:, :nodes]

    parents = source_of(first_child, torch.full_like(node, -1))
    before = source_of(next_sibling, node)  # the sibling before, or the node itself
    for _ in range(nodes.bit_length()):
        parents = torch.where(parents < 0, parents.gather(1, before), parents)
        before = before.gather(1, before)
    return parents


def _accepted(
    tokens: Tensor,
    parents: Tensor,
    uniform_samples: Tensor,
    target_probs: Tensor,
    threshold_single: float,
    threshold_acc: float,
) -> Tensor:
    """bool [batch, nodes]: whether a node is accepted once the text has come to it and its earlier siblings were not.

    It depends on no other coin than the parent's, so `verify_tree` is told the answer: a coin of 0, or one next to 1.
    A token of probability 0, or one that a sibling had, is not accepted there with a coin of 0 either.
    """
    known = (tokens >= 0) & (tokens < target_probs.shape[2]) & (parents >= 0)
    rows = parents.clamp(min=0)
    request = torch.arange(len(tokens), device=tokens.device)[:, None]
    mass = target_probs[request, rows, torch.where(known, tokens, 0)].double() * known
    node = torch.arange(tokens.shape[1], device=tokens.device)
    earlier = (parents[:, :, None] == parents[:, None]) & (node < node[:, None])
    repeated = (earlier & (tokens[:, :, None] == tokens[:, None])).any(2)
    up_to = mass + (earlier * torch.where(repeated, 0.0, mass)[:, None]).sum(2)
    coin = uniform_samples.double().gather(1, rows)
    passes = (coin < up_to / max(threshold_acc, LEAST_THRESHOLD_ACC)) | (mass >= threshold_single)
    return known & passes


def _write(
    verdict: Verdict, retrive_index: Tensor, predicts: Tensor, accept_index: Tensor, accept_token_num: Tensor
) -> None:
    path = verdict.path
    assert path is not None  # a tree has one
    rows = torch.nn.functional.pad(path + 1, (1, 0))  # node 0, the accepted nodes, then 0
    places = retrive_index.gather(1, rows)
    used = torch.arange(rows.shape[1], device=rows.device) <= verdict.num_accepted[:, None]
    width = rows.shape[1]
    accept_index[:, :width] = torch.where(used, places, accept_index[:, :width]).to(accept_index.dtype)
    accept_token_num.copy_(verdict.num_accepted)
    end = len(predicts)  # where what is not used is scattered to
    padded = torch.cat([predicts, predicts.new_zeros(1)])
    padded.scatter_(0, torch.where(used, places, end).flatten(), verdict.tokens.to(predicts.dtype).flatten())
    predicts.copy_(padded[:end])
