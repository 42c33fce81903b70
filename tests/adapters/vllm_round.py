"""A round of vLLM's V2 model runner, and classes of vLLM that stand in for its own."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import torch
from specens.adapters.vllm import v2

from specens_kernels import Sampling, verify_chain


class V2Round:
    """A round as the V2 model runner has it: 3 of 5 slots, packed rows, drafts after the token that was fed before."""

    VOCAB, STEPS = 67, 3
    SLOTS, LENS = [4, 0, 2], [3, 0, 2]

    def __init__(self, draft_logits: bool, rule: str = "token"):
        random = torch.Generator().manual_seed(3)
        ends = np.cumsum([length + 1 for length in self.LENS])
        self.offsets = torch.tensor([0, *ends], dtype=torch.int32)
        self.logits = torch.randn(int(ends[-1]), self.VOCAB, generator=random, dtype=torch.bfloat16)
        self.inputs = torch.randint(self.VOCAB, (int(ends[-1]),), generator=random, dtype=torch.int32)
        self.positions = torch.tensor([20, 21, 22, 23, 7, 50, 51, 52])
        self.draft_logits = torch.randn(5, self.STEPS, self.VOCAB, generator=random) if draft_logits else None
        self.slots = torch.tensor(self.SLOTS, dtype=torch.int32)
        held = {
            "temperature": torch.tensor([1.0, 9.0, 0.0, 9.0, 0.7]),
            "top_k": torch.tensor([self.VOCAB, 1, 5, 1, 9], dtype=torch.int32),
            "top_p": torch.tensor([1.0, 0.1, 1.0, 0.1, 1.0]),
            "min_p": torch.tensor([0.1, 0.9, 0.0, 0.9, 0.0]),
            "seeds": torch.tensor([-5, 1, 7, 1, 2**60]),
        }
        states = SimpleNamespace(**{name: SimpleNamespace(gpu=value, np=value.numpy()) for name, value in held.items()})
        self.sampler = SimpleNamespace(
            sampling_states=states,
            logits_processors=[],
            thinking_budget_state=ThinkingBudgetState(),
            logprobs_mode="raw_logprobs",
            return_sampling_mask=False,
        )
        self.rejection_sampler = SimpleNamespace(sampler=self.sampler, num_speculative_steps=self.STEPS, rule=rule)

    def of_rows(self):
        """The slot of each row's request, and the row's place in it."""
        owners = torch.tensor(self.SLOTS).repeat_interleave(self.offsets.diff().long())
        return owners, torch.cat([torch.arange(length + 1) for length in self.LENS])

    def draw(self):
        """Each row as a step without drafts."""
        owners, steps = self.of_rows()
        context = (owners, owners, owners.numpy(), self.positions, self.inputs, 0 * steps, self.positions.numpy())
        named = dict(zip(v2.CONTEXT, context, strict=True))
        return v2.draw_by_gumbel(self.sampler, SimpleNamespace, ("processed_logprobs",), self.logits, named)

    def verify(self, verified=None):
        owners, steps = self.of_rows()
        return v2.verify(
            self.rejection_sampler,
            SimpleNamespace,
            ("processed_logprobs",),
            self.logits,
            self.draft_logits,
            self.inputs,
            self.positions,
            self.offsets,
            self.slots,
            self.slots.numpy(),
            owners,
            steps,
            self.positions.numpy(),
            self.inputs if verified is None else verified,
        )

    def alone(self, request, logits=None):
        """The same request by itself, in plain words."""
        slot, length = self.SLOTS[request], self.LENS[request]
        first, states = int(self.offsets[request]), self.sampler.sampling_states
        of_slot = {name: getattr(states, name).gpu[slot].item() for name in vars(states)}
        top_k = of_slot["top_k"] if of_slot["top_k"] < self.VOCAB else None
        sampling = Sampling(of_slot["temperature"], top_k, None, of_slot["min_p"], filter_order="vllm")
        rule = self.rejection_sampler.rule
        draft_logits = None
        if self.draft_logits is not None and rule != "gumbel":
            draft_logits = self.draft_logits[slot, :length][None]
        return verify_chain(
            (self.logits if logits is None else logits)[first : first + length + 1][None],
            self.inputs[first + 1 : first + length + 1][None],
            sampling=sampling,
            draft_logits=draft_logits,
            draft_sampling=None if draft_logits is None else Sampling(of_slot["temperature"]),
            rule=rule,
            seeds=torch.tensor([of_slot["seeds"] if rule == "gumbel" else of_slot["seeds"] ^ v2.SEED_SALT]),
            positions=self.positions[first : first + 1] + 1,
        )


class ThinkingBudgetState:
    """Stands in for vLLM's class of this name."""

    enabled, use_thinking_budget = True, np.zeros(5, dtype=bool)

    def apply(self, logits, context):
        assert logits.shape[0] == len(context.pos)


class PenaltiesState:
    """Stands in for vLLM's class of this name: forbids a token in place, in the rows it is given."""

    def __init__(self, slots):
        self.use_penalty = np.zeros(5, dtype=bool)
        self.use_penalty[slots] = True

    def apply(self, logits, _context):
        logits[:, 0] = -torch.inf
        return logits
