"""A batched speculative decoder over plain tensors: a target, a smaller drafter, one verify_chain a round."""

import torch

from specens_kernels import Sampling, sample, verify_chain

VOCAB, SLOTS = 48, 256


class ToyModel:
    """An embedding, one layer of attention over a KV cache of plain tensors, and logits."""

    def __init__(self, width, batch, seed=0):
        numbers = torch.Generator().manual_seed(seed)
        self.embedding, self.positions, self.output = torch.randn(3, SLOTS, 16, generator=numbers)[:, :, :width]
        self.query, self.key, self.value = torch.randn(3, 16, 16, generator=numbers)[:, :width, :width]
        self.cache = torch.zeros(2, batch, 1, SLOTS, width)  # keys and values, [2, batch, heads, slots, width]

    def forward(self, tokens, lengths, positions=None, mask=None):
        """Logits [batch, n, vocab] after each of the tokens [batch, n], whose keys go to the slots from lengths on."""
        slots = lengths[:, None] + torch.arange(tokens.shape[1])  # [batch, n]
        hidden = self.embedding[tokens] + 0.3 * self.positions[slots if positions is None else positions]
        request = torch.arange(len(tokens))[:, None]
        self.cache[0, request, 0, slots], self.cache[1, request, 0, slots] = hidden @ self.key, hidden @ self.value
        seen = torch.arange(SLOTS) <= slots[..., None] if mask is None else mask  # [batch, n, slots]
        scores = hidden @ self.query @ self.cache[0, :, 0].mT / 16
        weights = scores.masked_fill(~seen, -torch.inf).softmax(-1)
        return (hidden + weights @ self.cache[1, :, 0] / 4) @ self.output[:VOCAB].T / 2


def draft(drafter, text, lengths, draft_len, sampling, seeds):
    """Draw draft_len tokens; they and the logits they were drawn from: [batch, draft_len] and [..., vocab]."""
    drafts, logits = [], []
    tokens = text.gather(1, torch.stack([lengths - 2, lengths - 1], 1))  # the drafter may not have seen the first yet
    for step in range(draft_len):
        logits.append(drafter.forward(tokens, lengths - tokens.shape[1] + step)[:, -1])
        drafts.append(sample(logits[-1], sampling=sampling, seeds=seeds, positions=lengths, step=step).tokens)
        tokens = drafts[-1][:, None]
    return torch.stack(drafts, 1), torch.stack(logits, 1)


def commit(verdict, text, lengths, ends):
    """Write what was emitted after each request's text, up to its end; the new lengths."""
    emitted = torch.minimum(verdict.num_tokens, ends - lengths)  # 0 where the request has ended
    slots = lengths[:, None] + torch.arange(verdict.tokens.shape[1])
    kept = torch.arange(slots.shape[1]) < emitted[:, None]
    text.scatter_(1, slots, torch.where(kept, verdict.tokens, text.gather(1, slots)))
    return lengths + emitted


def generate(target, drafter, text, lengths, ends, sampling, seeds, draft_len=4):
    """Continue each request to ends tokens, in text [batch, slots]; the rounds it took. Prompts have 2 tokens or more.

    The slots of a cache from lengths - 1 on are free: the last token is forwarded in the next round, and overwrites
    what was rejected. So a chain is rolled back by the lengths alone.
    """
    for model in (target, drafter):
        model.forward(text[:, : lengths.max()], torch.zeros_like(lengths))  # padding is overwritten before it is seen
    rounds = 0
    while (lengths < ends).any():
        drafts, draft_logits = draft(drafter, text, lengths, draft_len, sampling, seeds)
        last = text.gather(1, lengths[:, None] - 1)
        logits = target.forward(torch.cat([last, drafts], 1), lengths - 1)  # [batch, draft_len + 1, vocab]
        verdict = verify_chain(
            logits,
            drafts,
            draft_logits=draft_logits,
            draft_lens=(ends - lengths - 1).clamp(0, draft_len),
            sampling=sampling,
            seeds=seeds,
            positions=lengths,
        )
        lengths, rounds = commit(verdict, text, lengths, ends), rounds + 1
    return rounds


if __name__ == "__main__":
    lengths, ends = torch.tensor([3, 9, 5, 2]), torch.tensor([60, 40, 80, 100])
    text = torch.randint(VOCAB, (4, SLOTS), generator=torch.Generator().manual_seed(1))
    target, drafter = ToyModel(width=16, batch=4), ToyModel(width=14, batch=4)
    rounds = generate(target, drafter, text, lengths, ends, Sampling(temperature=0.8), seeds=torch.arange(4))
    print(f"{int((ends - lengths).sum())} tokens of 4 requests in {rounds} rounds")
