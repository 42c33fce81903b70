"""Processes of a torch.distributed group, each with a shard of the same problems."""

from __future__ import annotations

import datetime
import os
import random
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

LARGEST_GROUP = 4
LOST = LARGEST_GROUP - 1  # the rank that ends at last, without a word
TIMEOUT = datetime.timedelta(seconds=20)
SEEDS = range(3)


def arguments_of(seed: int) -> dict[str, Any]:
    """A chain of a lone model or of two, under each kind of rule."""
    from specens_kernels import Mixture, Sampling

    numbers = torch.Generator().manual_seed(seed)
    member_logits = [torch.randn(3, 4, 301, generator=numbers) * 5 for _ in range(1 + seed % 2)]
    random_numbers = {"seeds": torch.arange(3) + seed, "positions": torch.arange(3) + 7}
    rule: dict[str, Any] = [{"rule": "gumbel"}, {"rule": "token", "drafter": 0}, {"rule": "block", "drafter": 0}][seed]
    return {
        "member_logits": member_logits,
        "draft_tokens": member_logits[0][:, :3].argmax(-1),
        "ensemble": Mixture((0.5, 0.5)) if seed % 2 else None,
        "sampling": Sampling(temperature=0.9, top_p=0.95 if seed else None),
        "logprobs": True,
        **random_numbers,
        **rule,
    }


def verify_shard(seed: int, ranks: int, rank: int, group: Any) -> Any:
    """The shards are dealt to ranks in an order of their own."""
    from specens_kernels import distributed

    arguments = arguments_of(seed)
    index = random.Random(seed).sample(range(ranks), ranks)[rank]
    begin, end = 301 * index // ranks, 301 * (index + 1) // ranks
    logits = [values[..., begin:end] for values in arguments.pop("member_logits")]
    return distributed.verify_chain(logits, vocab_start=begin, vocab_size=301, group=group, **arguments)


def work(rank: int, folder: str) -> None:
    """Verify in groups of every size, then in one that loses a rank; leave what came of it in the folder."""
    torch.set_num_threads(1)
    store = f"file://{folder}/store"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=LARGEST_GROUP, timeout=TIMEOUT)
    groups = [dist.new_group(list(range(size)), timeout=TIMEOUT) for size in range(1, LARGEST_GROUP + 1)]
    for size, group in enumerate(groups, 1):
        if rank < size:
            verdicts = [verify_shard(seed, size, rank, group) for seed in SEEDS]
            torch.save([list(verdict) for verdict in verdicts], Path(folder, f"{size}-{rank}.pt"))
    dist.barrier()
    if rank == LOST:
        os._exit(0)
    try:
        verify_shard(1, LARGEST_GROUP, rank, None)
    except (RuntimeError, ValueError) as error:
        Path(folder, f"lost-{rank}").write_text(f"{type(error).__name__}: {error}")
    os._exit(0)  # a group that has lost a rank is not ended in order
