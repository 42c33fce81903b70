"""Trees as SGLang links them: of each node its first child and its next sibling, in any numbering."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from specens.adapters.shim_arguments import fail, readable


class Links(NamedTuple):
    """A tree that is linked from node 0.

    parents: int64 [batch, nodes], -1 of node 0 and of nodes that it does not lead to.
    order: int64 [batch, nodes], the nodes with parents and earlier siblings first, and what is not linked last.
    """

    parents: Tensor
    order: Tensor


def read_links(first_child: Tensor, next_sibling: Tensor) -> Links:
    """The tree of links, int64 [batch, nodes] each, -1 where there is none; log2(nodes) steps, no synchronisation."""
    nodes = first_child.shape[1]
    node = torch.arange(nodes, device=first_child.device).expand_as(first_child)
    above, beside = _sources(first_child), _sources(next_sibling)
    parents, sibling = above, torch.where((above < 0) & (beside >= 0), beside, node)
    first, steps = torch.where(above >= 0, above, sibling), ((above >= 0) | (beside >= 0)).long()
    for _ in range(nodes.bit_length()):
        parents = torch.where(parents < 0, parents.gather(1, sibling), parents)
        sibling = sibling.gather(1, sibling)
        steps = steps + steps.gather(1, first)  # links on the way from node 0
        first = first.gather(1, first)
    order = torch.where(first == 0, steps, nodes).argsort(dim=1, stable=True)
    return Links(torch.where(first == 0, parents, -1), order)


def _sources(links: Tensor) -> Tensor:
    """int64 [batch, nodes]: the node that links to each, -1 where none does, and of node 0, which is the root."""
    nodes = links.shape[1]
    node = torch.arange(nodes, device=links.device).expand_as(links)
    target = torch.where((links > 0) & (links < nodes), links, nodes)  # a column more, for no link
    return links.new_full((len(links), nodes + 1), -1).scatter(1, target, node)[:, :nodes]


def in_order(links: dict[str, Tensor]) -> bool:
    """Whether nodes are known to be numbered with parents and earlier siblings first."""

    def ascend(link: Tensor) -> bool:
        return bool(((link < 0) | (link > torch.arange(link.shape[1]))).all())

    return all(readable(link) and ascend(link) for link in links.values())


def check_links(links: dict[str, Tensor]) -> None:
    """Raise ValueError, on the CPU, naming links that lead out of the nodes, twice to one of them, or in a circle."""
    led_to: set[tuple[int, int]] = set()
    for name, link in links.items():
        if not readable(link):
            return
        for request, row in enumerate(link.tolist()):
            for target in (target for target in row if target != -1):
                if not 0 < target < len(row) or (request, target) in led_to:
                    fail(name, f"-1 or a node from 1 to {len(row) - 1}, each once", row)
                led_to.add((request, target))
    _check_no_circle(links)


def _check_no_circle(links: dict[str, Tensor]) -> None:
    (_, children), (name, siblings) = links.items()
    for child, sibling in zip(children.tolist(), siblings.tolist(), strict=True):
        led_to = {*child, *sibling}
        waiting = [node for node in range(len(child)) if node not in led_to]
        num_seen = len(waiting)
        while waiting:
            node = waiting.pop()
            following = [target for target in (child[node], sibling[node]) if target >= 0]
            waiting += following
            num_seen += len(following)
        if num_seen < len(child):
            fail(name, "links without a circle", f"{sibling} beside {child}")
