"""Which side of the acceptance ratio a uniform lies on decides, however near it lies and whatever the rows hold."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from specens_kernels import LogitMixture, Mixture, Sampling, Status, verify_chain

NEAR = (1e-4, 0.02, 0.05, 0.07, 0.3)  # relative distances from the ratio, on either side
ENSEMBLES = {"none": None, "mixture": Mixture((0.4, 0.6)), "logit mixture": LogitMixture((1.5, -0.5))}


def rows(batch: int, vocab: int, seed: int) -> Tensor:
    return 3 * torch.randn(batch, 1, vocab, generator=torch.Generator().manual_seed(seed))


def probabilities(members: list[Tensor], ensemble: str, temperature: float) -> Tensor:
    members = [member[:, 0].double() for member in members]
    if ensemble == "mixture":
        parts = [torch.softmax(member / temperature, -1) for member in members]
        return 0.4 * parts[0] + 0.6 * parts[1]
    mixed = members[0] if ensemble == "none" else 1.5 * members[0] - 0.5 * members[1]
    return torch.softmax(mixed / temperature, -1)


def accepted(members, drafts, draft_logits, uniforms, ensemble, temperature, device, backend):
    verdict = verify_chain(
        [member.to(device) for member in members],
        drafts.to(device),
        draft_logits=draft_logits.to(device),
        ensemble=ENSEMBLES[ensemble],
        sampling=Sampling(temperature=temperature),
        uniforms=uniforms.to(device),
        backend=backend,
    )
    assert (verdict.status == 0).all()
    return verdict.num_accepted.cpu().bool()


@pytest.mark.parametrize("ensemble", list(ENSEMBLES))
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_uniforms_beside_the_acceptance_ratio(backend, device, ensemble, temperature):
    batch, vocab = (40, 2500) if backend == "cpp" else (3, 60)
    members = [rows(batch, vocab, seed) for seed in range(1 if ensemble == "none" else 2)]
    target = probabilities(members, ensemble, temperature)
    draft_logits = (target.log() + 0.8 * rows(batch, vocab, 5)[:, 0].double() / 3).float()[:, None]
    draft = torch.softmax(draft_logits[:, 0].double() / temperature, -1)
    drafts = torch.multinomial(draft, 1, generator=torch.Generator().manual_seed(3))
    ratio = (target.gather(1, drafts) / draft.gather(1, drafts))[:, 0]
    tested = 0
    for distance in NEAR if backend == "cpp" else NEAR[1:2]:
        for side in (1 - distance, 1 + distance):
            uniform = ratio * side
            possible = uniform < 1
            uniforms = torch.stack([uniform.clamp(max=0.5), torch.full_like(uniform, 0.5)], 1)
            uniforms[possible, 0] = uniform[possible]
            result = accepted(members, drafts, draft_logits, uniforms, ensemble, temperature, device, backend)
            assert (result[possible] == (side < 1)).all(), (distance, side)
            tested += int(possible.sum())
    assert tested > batch


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("source", ["target", "draft"])
@pytest.mark.parametrize("index", [0, 2400])
def test_numbers_that_cannot_be_used_are_told_of_rows_that_accept(bad, source, index):
    target = rows(1, 2500, 0)
    draft = target.clone()
    (target if source == "target" else draft)[0, 0, index] = bad
    uniforms = torch.tensor([[0.0, 0.5]])
    drafts = target[0].nan_to_num(-9, -9).argmax(-1, keepdim=True)
    verdicts = [
        verify_chain(target, drafts, draft_logits=draft, uniforms=uniforms, backend=backend)
        for backend in ("cpp", "reference")
    ]
    assert verdicts[0].status.item() == verdicts[1].status.item() != Status.OK
    assert verdicts[0].num_accepted.item() == verdicts[1].num_accepted.item()


@pytest.mark.parametrize("offset", [0.0, 3000.0, -3000.0, 1e5])
@pytest.mark.parametrize("scale", [1e-3, 1.0, 30.0])
def test_rows_far_from_zero_and_of_any_spread(offset, scale):
    target, draft = (rows(64, 2500, seed) * scale + offset for seed in (0, 1))
    drafts = torch.randint(2500, (64, 1), generator=torch.Generator().manual_seed(2))
    uniforms = torch.rand(64, 2, generator=torch.Generator().manual_seed(4))
    verdicts = [
        verify_chain(target, drafts, draft_logits=draft, uniforms=uniforms, backend=backend)
        for backend in ("cpp", "reference")
    ]
    assert torch.equal(verdicts[0].num_accepted, verdicts[1].num_accepted)
    assert torch.equal(verdicts[0].tokens, verdicts[1].tokens)
