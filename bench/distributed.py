"""What ranks tell each other about rows whose vocabulary lies on several of them: `python -m bench distributed`.

Counted are collectives, and bytes of what a rank tells, over the rows of a call. Neither depends on logits, and only
bytes, by 24 or 48 a rank where float32 is searched, on the number of ranks. Beside them: what a rank tells of a row
where logits are gathered. Then, the time of its own part.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from bench.counts import print_counts
from specens_kernels import Contrastive, LogitMixture, Mixture, Processing, Sampling, Threshold, TokenTree, distributed
from specens_kernels.distributed import local

BATCH, DRAFT_LEN, VOCAB, RANKS = 4, 5, 131072, 8
ROWS = BATCH * (DRAFT_LEN + 1)
MOST_BYTES = 16 * 1024  # of a row that is searched: of the target, or of what drafts were drawn from
TABLE_WIDTH = 150
CALLS = 5
OF_MIXTURES = ("rule gumbel, mixture", "rule token, mixture, top-k 50, top-p", "rule token, mixture, top-p")
OF_CONTRASTS = ("rule gumbel, contrastive, plausible", "rule token, contrastive, plausible")
BY_SCORES = ("rule gumbel, top-k 50, top-p", "rule gumbel, min-p", "rule gumbel, top-p", "rule gumbel, top-p, float32")
OF_FILTERS = ("rule token, top-k 50, top-p", "rule token, min-p", "rule token, top-p", "rule block, top-p")
OF_PROBABILITIES = ("rule token", "rule token, top_logprobs 5", "rule block", "rule typical", "rule token, mixture")
OF_TREES = (
    "tree of 9 nodes, rule gumbel, penalties",
    "tree of 9 nodes, chosen",
    "tree of 9 nodes, drawn",
    "tree of 9 nodes, k_seq",
)
BY_TOKEN = (*OF_PROBABILITIES, *OF_FILTERS, "rule token, top-p, float32")
OWN_PARTS = (
    "rule gumbel",
    "greedy",
    *BY_SCORES,
    *BY_TOKEN,
    *OF_MIXTURES,
    *OF_CONTRASTS,
    *OF_TREES,
    "sample, 5 best tokens",
)


class Counted:
    """A group of ranks that all tell the same; counts what one tells."""

    def __init__(self) -> None:
        self.sizes: list[int] = []

    def all_gather(self, told: Tensor) -> Tensor:
        self.sizes.append(told.numel() * told.element_size())
        return told.expand(RANKS, -1)


class Setting(NamedTuple):
    name: str
    most: int  # collectives
    call: Callable[[Counted], Any]
    rows: int = ROWS
    members: int = 1
    drafts: int = 0  # rows that are searched beside those of the target


def chain(dtype: torch.dtype = torch.bfloat16, members: int = 1, **arguments: Any) -> Callable[[Counted], Any]:
    """A call with drafts of a member, unless they play no part."""
    width = VOCAB // RANKS
    logits = [torch.randn(BATCH, DRAFT_LEN + 1, width).to(dtype) for _ in range(members)]
    drafts = torch.randint(width, (BATCH, DRAFT_LEN))
    numbers = torch.arange(BATCH)
    arguments = {"seeds": numbers, "positions": numbers, "vocab_start": 0, "vocab_size": VOCAB, **arguments}
    if arguments.get("rule", "token") in ("token", "block") and not arguments.get("sampling", Sampling()).greedy:
        arguments["drafter"] = 0
    return lambda group: distributed.verify_chain(logits, drafts, group=group, **arguments)


def draw(**arguments: Any) -> Callable[[Counted], Any]:
    logits, numbers = torch.randn(BATCH, VOCAB // RANKS).bfloat16(), torch.arange(BATCH)
    arguments = {"seeds": numbers, "positions": numbers, "vocab_start": 0, "vocab_size": VOCAB, **arguments}
    return lambda group: distributed.sample(logits, group=group, **arguments)


def tree(**arguments: Any) -> Callable[[Counted], Any]:
    shape = TokenTree.branching([3, 2])
    logits = torch.randn(BATCH, len(shape) + 1, VOCAB // RANKS).bfloat16()
    drafts, numbers = torch.randint(VOCAB // RANKS, (BATCH, len(shape))), torch.arange(BATCH)
    arguments = {"seeds": numbers, "positions": numbers, "vocab_start": 0, "vocab_size": VOCAB, **arguments}
    return lambda group: distributed.verify_tree(logits, drafts, shape, group=group, **arguments)


def settings() -> Iterator[Setting]:
    half, plausible, two = Mixture((0.5, 0.5)), Contrastive(0.5, 0.1), {"members": 2}
    top_k, top_p = Sampling(top_k=50, top_p=0.95), Sampling(top_p=0.95)
    report = {"logprobs": True, "top_logprobs": 5}
    searched = BATCH * DRAFT_LEN
    nodes = BATCH * (len(TokenTree.branching([3, 2])) + 1)
    yield Setting("rule gumbel", 1, chain(rule="gumbel"))
    yield Setting("rule gumbel, logprobs", 2, chain(rule="gumbel", logprobs=True))
    yield Setting("rule gumbel, top_logprobs 5", 3, chain(rule="gumbel", **report))
    yield Setting("greedy", 1, chain(sampling=Sampling(temperature=0.0)))
    yield Setting(
        "rule gumbel, mixture of logits", 1, chain(rule="gumbel", ensemble=LogitMixture((1, 1)), **two), **two
    )
    yield Setting("rule gumbel, mixture", 2, chain(rule="gumbel", ensemble=half, **two), **two)
    yield Setting("rule gumbel, contrastive, plausible", 2, chain(rule="gumbel", ensemble=plausible, **two), **two)
    yield Setting("rule gumbel, top-k 50, top-p", 2, chain(rule="gumbel", sampling=top_k))
    yield Setting("rule gumbel, min-p", 3, chain(rule="gumbel", sampling=Sampling(min_p=0.05)))
    yield Setting("rule gumbel, top-p", 3, chain(rule="gumbel", sampling=top_p))
    yield Setting("rule gumbel, top-p, float32", 3, chain(torch.float32, rule="gumbel", sampling=top_p))
    yield Setting("rule token", 3, chain())
    yield Setting("rule token, top_logprobs 5", 3, chain(**report))
    yield Setting("rule block", 3, chain(rule="block"))
    yield Setting("rule typical", 3, chain(rule="typical"))
    yield Setting("rule threshold", 2, chain(rule=Threshold(0.2)))
    yield Setting("rule token, mixture", 3, chain(ensemble=half, **two), **two)
    yield Setting("rule token, top-k 50, top-p", 3, chain(sampling=top_k))
    yield Setting("rule token, min-p", 4, chain(sampling=Sampling(min_p=0.05)))
    yield Setting("rule token, top-p", 4, chain(sampling=top_p))
    yield Setting(
        "rule token, top-p, min-p, top_logprobs 5", 4, chain(sampling=Sampling(top_p=0.95, min_p=0.05), **report)
    )
    yield Setting("rule block, top-p", 4, chain(rule="block", sampling=top_p))
    yield Setting("rule token, contrastive, plausible", 4, chain(ensemble=plausible, **two), **two)
    yield Setting("rule token, mixture, top-k 50, top-p", 4, chain(ensemble=half, sampling=top_k, **two), **two)
    yield Setting("rule token, mixture, min-p", 5, chain(ensemble=half, sampling=Sampling(min_p=0.05), **two), **two)
    yield Setting("rule token, mixture, top-p", 5, chain(ensemble=half, sampling=top_p, **two), **two, drafts=searched)
    yield Setting("rule token, top-p, float32", 4, chain(torch.float32, sampling=top_p), drafts=searched)
    yield Setting("sample", 2, draw(), BATCH)
    yield Setting("sample, top-k 50, top-p", 2, draw(sampling=top_k), BATCH)
    yield Setting("sample, 5 best tokens", 1, draw(method="gumbel", count=5), BATCH)
    yield Setting("tree of 9 nodes, rule gumbel", 1, tree(rule="gumbel"), nodes)
    penalised = tree(rule="gumbel", processing=Processing(repetition_penalty=1.2))
    yield Setting("tree of 9 nodes, rule gumbel, penalties", 1, penalised, nodes)
    yield Setting("tree of 9 nodes, chosen", 3, tree(), nodes)
    drawn = tree(drafter=0, siblings="without_replacement")
    yield Setting("tree of 9 nodes, drawn", 5, drawn, nodes)
    independent = tree(rule="k_seq", drafter=0, siblings="with_replacement")
    yield Setting("tree of 9 nodes, k_seq", 4, independent, nodes)


class Count(NamedTuple):
    """What one call tells."""

    name: str
    most: int
    collectives: int
    size: float  # bytes of a row
    searched: float  # bytes of a row, those of the drafts counted too
    gathered: int  # of a row where logits are gathered

    @property
    def words(self) -> tuple[str, ...]:
        """A row of the table."""
        share = f"{self.size / self.gathered:.2%}"
        return self.name, str(self.collectives), f"{self.size:.0f}", str(self.gathered), share


def counts() -> Iterator[Count]:
    for setting in settings():
        group = Counted()
        setting.call(group)
        gathered = setting.members * VOCAB // RANKS * (4 if "float32" in setting.name else 2)
        told, rows = sum(group.sizes), setting.rows
        searched = told / (rows + setting.drafts)
        yield Count(setting.name, setting.most, len(group.sizes), told / rows, searched, gathered)


def main() -> int:
    """Print the table and the missed bars; the number of missed bars."""
    title = f"distributed: batch {BATCH}, draft_len {DRAFT_LEN}, vocabulary {VOCAB}, bfloat16, {RANKS} ranks"
    table = Table(title=title, title_justify="left")
    for column in ("setting", "collectives", "bytes a row", "all-gather of logits", "of that"):
        table.add_column(column, justify="left" if column == "setting" else "right")
    missed = []
    for count in counts():
        table.add_row(*count.words)
        if count.collectives > count.most or count.searched > MOST_BYTES:
            missed.append(f"{count.name}: at most {count.most} collectives and {MOST_BYTES} bytes a row expected")
    number = print_counts(table, missed, TABLE_WIDTH)
    Console(width=TABLE_WIDTH).print(own_part())
    return number


def milliseconds(setting: Setting) -> float:
    """Of the processor, for a rank's own part: the least of some calls."""
    taken = []
    for _ in range(CALLS):
        start = time.process_time()
        setting.call(Counted())
        taken.append((time.process_time() - start) * 1000)
    return min(taken)


def own_part() -> Table:
    """By the kernels and in torch, of the settings that have kernels."""
    table = Table(title="a rank's own part, on one thread of the CPU", title_justify="left")
    for column in ("setting", "ms by kernels", "ms in torch"):
        table.add_column(column, justify="left" if column == "setting" else "right")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    for setting in settings():
        if setting.name in OWN_PARTS:
            by_kernels = milliseconds(setting)
            with patch.object(local, "operator_for", lambda *_: None):
                table.add_row(setting.name, f"{by_kernels:.1f}", f"{milliseconds(setting):.1f}")
    torch.set_num_threads(threads)
    return table


if __name__ == "__main__":
    sys.exit(min(main(), 1))
