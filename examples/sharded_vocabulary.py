"""Verification where each process has a slice of the vocabulary: under torchrun, or alone with all of it."""

import os

import torch
import torch.distributed as dist

from specens_kernels import Sampling, distributed

VOCAB, HIDDEN, BATCH, DRAFT_LEN = 32_001, 64, 4, 5


def slice_of_vocabulary(rank, ranks):
    """The tokens of a rank: even slices, whose last one is padded."""
    width = -(-VOCAB // ranks)
    return rank * width, width


def main():
    alone = "RANK" not in os.environ
    if not alone:
        dist.init_process_group("gloo")
    rank, ranks = (0, 1) if alone else (dist.get_rank(), dist.get_world_size())
    start, width = slice_of_vocabulary(rank, ranks)

    numbers = torch.Generator().manual_seed(0)  # the same model on every rank, of which each keeps its slice
    head = torch.nn.functional.pad(torch.randn(HIDDEN, VOCAB, generator=numbers), (0, width))[:, start : start + width]
    hidden = torch.randn(BATCH, DRAFT_LEN + 1, HIDDEN, generator=numbers)
    drafts = torch.randint(VOCAB, (BATCH, DRAFT_LEN), generator=numbers)
    verdict = distributed.verify_chain(
        hidden @ head,  # [batch, draft_len + 1, width]
        drafts,
        vocab_start=start,
        vocab_size=VOCAB,
        rule="gumbel",
        sampling=Sampling(temperature=0.8),
        seeds=torch.arange(BATCH),
        positions=torch.full((BATCH,), 100),
        group=Alone() if alone else None,
    )
    print(f"rank {rank} of {ranks}: {verdict.next_token.tolist()}", flush=True)
    if not alone:
        dist.destroy_process_group()


class Alone:
    """A group of one, as an engine would hand over its own."""

    def all_gather(self, tensor):
        return tensor[None]


if __name__ == "__main__":
    main()
