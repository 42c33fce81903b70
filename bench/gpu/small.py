"""Every kernel once, at small sizes, for sanitizers: `compute-sanitizer python -m bench.gpu.small`."""

from __future__ import annotations

import torch

from specens_kernels import Contrastive, Mixture, Sampling, sample, target_logprobs, tree_mask, uniforms, verify_chain

BATCH, DRAFT_LEN, VOCAB = 3, 2, 1500


def main(device: torch.device) -> None:
    """Call the operations that have GPU kernels."""
    generator = torch.Generator(device).manual_seed(0)
    shape = (BATCH, DRAFT_LEN + 1, VOCAB)
    members = [torch.randn(shape, generator=generator, device=device, dtype=torch.bfloat16) for _ in range(2)]
    tokens = torch.randint(VOCAB, (BATCH, DRAFT_LEN), generator=generator, device=device)
    seeds = torch.arange(BATCH, device=device)
    coins = {"seeds": seeds, "positions": seeds + 7, "logprobs": True}
    filtered = Sampling(temperature=0.7, top_k=50, top_p=0.95, min_p=0.01)
    outside = members[1][:, :DRAFT_LEN]
    mixture = Mixture((0.5, 0.5))
    verify_chain(members[0], tokens, draft_logits=outside, **coins)
    verify_chain(members, tokens, ensemble=mixture, drafter=0, sampling=filtered, **coins)
    verify_chain(members, tokens, ensemble=Contrastive(0.5, plausibility=0.1), drafter=1, **coins)
    temperatures = torch.tensor([0.0, 0.7, 1.0], device=device)
    verify_chain(members, tokens, ensemble=mixture, sampling=Sampling(temperature=temperatures), **coins)
    for rule in ("block", "typical", "replacement"):
        verify_chain(members[0], tokens, draft_logits=outside, rule=rule, sampling=filtered, **coins)
    sample(members[0][:, 0], sampling=filtered, **coins)
    target_logprobs(members, ensemble=mixture)
    uniforms(seeds, seeds)
    tree_mask(torch.tensor([[-1, -1, 0, 1]] * BATCH, device=device), seeds, layout="packed")
    if device.type == "cuda":
        torch.cuda.synchronize()


if __name__ == "__main__":
    main(torch.device("cuda" if torch.cuda.is_available() else "cpu"))
