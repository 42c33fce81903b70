"""How the plug-in for vLLM reads a batch of vLLM; runs without vLLM. The engine itself: tests/engines/vllm."""

from __future__ import annotations

import ast
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from adapters.vllm_round import PenaltiesState, V2Round
from specens.adapters import vllm as plug_in
from specens.adapters.vllm import arguments
from specens.adapters.vllm.replacements import Replacement, replace_all
from specens.adapters.vllm.versions import check_version

from specens_kernels import Sampling, verify_chain

CPU = torch.device("cpu")
DRIVER = Path(plug_in.__file__).parents[2]


def test_only_the_plug_in_imports_vllm():
    importing = set()
    for path in DRIVER.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names = [node.module or ""] if isinstance(node, ast.ImportFrom) else names
            if any(name.split(".")[0] == "vllm" for name in names):
                importing.add(path.parent.relative_to(DRIVER).as_posix())
    assert importing == {"adapters/vllm"}


@pytest.mark.parametrize("value", [None, "", "0"])
def test_it_does_nothing_unless_it_is_switched_on(monkeypatch, value):
    monkeypatch.setitem(sys.modules, "specens.adapters.vllm.install", None)  # cannot be imported
    monkeypatch.delenv("SPECENS_VLLM", raising=False)
    if value is not None:
        monkeypatch.setenv("SPECENS_VLLM", value)
    plug_in.register()
    monkeypatch.setenv("SPECENS_VLLM", "1")
    with pytest.raises(ImportError):
        plug_in.register()


def test_another_value_of_the_switch_is_refused(monkeypatch):
    monkeypatch.setenv("SPECENS_VLLM", "yes")
    with pytest.raises(ValueError, match=r"SPECENS_VLLM: expected 1 \(on\) or 0 \(off\), got 'yes'"):
        plug_in.register()


def test_another_version_is_refused():
    check_version("0.32.0")
    check_version("0.32.0+cpu")
    for version in ("0.32.1", "0.31.0", "1.0.0"):
        with pytest.raises(RuntimeError, match=rf"expected version 0.32.0 .* got {version}"):
            check_version(version)


def test_nothing_is_replaced_where_one_function_is_not_as_expected():
    class Engine:
        def known(self, logits):
            return logits

        def changed(self, logits, surprise):
            return logits, surprise

    def doubled(original):
        return lambda self, logits: 2 * original(self, logits)

    known = Replacement(Engine, "known", ("self", "logits"), doubled)
    with pytest.raises(RuntimeError, match=r"Engine\.changed with the parameters self, logits, got self, .*surprise"):
        replace_all([known, Replacement(Engine, "changed", ("self", "logits"), doubled)])
    assert Engine().known(3) == 3
    replace_all([known])
    replace_all([known])
    assert Engine().known(3) == 6


def test_sampling_parameters_keep_the_order_of_vllm_and_what_is_off():
    temperature, top_k = torch.tensor([0.0, 1e-6, 0.7]), torch.tensor([100, 5, 100], dtype=torch.int32)
    sampling = arguments.sampling(temperature, top_k, torch.tensor([1.0, 0.9, 0.5]), torch.tensor([0.0, 0.1, 0.2]), 100)
    assert sampling.temperature.tolist() == [0.0, 0.0, pytest.approx(0.7)]
    assert sampling.top_k.tolist() == [0, 5, 0]
    assert sampling.filter_order == "vllm"
    assert arguments.sampling(None, top_k, None, None, 100) == Sampling(temperature=0.0)


@pytest.mark.parametrize("vocab", [1, 31, 32, 33, 100])
def test_forbidden_tokens_become_bits_of_allowed_ones(vocab):
    forbidden = torch.rand(5, vocab) < 0.5
    bits = arguments.allowed_bits(forbidden)
    assert bits.dtype == torch.int32
    assert bits.shape == (5, -(-vocab // 32))
    for request in range(5):
        for token in range(32 * bits.shape[1]):
            expected = token < vocab and not forbidden[request, token]
            assert bool(bits[request, token // 32].item() >> (token % 32) & 1) == expected


def test_edits_are_tables_with_a_row_for_each_request():
    biases, lengths = {1: {7: -1.0, 3: 2.0}}, {2: (5, [1, 1], {9}, False), 0: (3, [], {9, 8}, False)}
    penalties = (
        torch.ones(3),
        torch.zeros(3),
        torch.ones(3),
        torch.tensor([[1, 2], [4, 99], [3, 3]]),
        [[5], [], [6, 7]],
    )
    processing = arguments.processing(penalties, biases, lengths, 3, CPU)
    tokens, values = processing.logit_bias
    assert tokens.tolist() == [[-1, -1], [7, 3], [-1, -1]]
    assert values.tolist() == [[0.0, 0.0], [-1.0, 2.0], [0.0, 0.0]]
    assert processing.min_tokens.tolist() == [3, 0, 3]
    assert [sorted(row) for row in processing.end_tokens.tolist()] == [[8, 9], [-1, -1], [-1, 9]]
    assert processing.output_tokens.tolist() == [[5, -1], [-1, -1], [6, 7]]
    assert arguments.processing(None, {}, {}, 3, CPU) is None


def test_the_uniforms_of_a_seeded_request_do_not_depend_on_the_batch():
    def generator(seed):
        return torch.Generator().manual_seed(seed)

    position = torch.tensor([40])
    alone = arguments.random_numbers({0: generator(7)}, position, 1, CPU)[0]
    used = generator(7)
    torch.rand(3, generator=used)
    seeds, positions = arguments.random_numbers({2: used, 0: generator(8)}, torch.tensor([11, 12, 40]), 3, CPU)
    assert alone.tolist() == [7] == seeds[2:].tolist()
    assert seeds[0] == 8
    assert positions.tolist() == [11, 12, 40]
    again, _ = arguments.random_numbers({}, torch.tensor([11, 12, 40]), 3, CPU)
    assert len({*seeds.tolist(), *again.tolist()}) == 6


def test_without_positions_a_seeded_request_draws_them_from_its_generator():
    first, second = torch.Generator().manual_seed(2**64 - 1), torch.Generator().manual_seed(2**64 - 1)
    rounds = [arguments.random_numbers({1: first}, None, 2, CPU) for _ in range(2)]
    assert [seeds[1].item() for seeds, _ in rounds] == [-1, -1]
    assert rounds[0][1][1] != rounds[1][1][1]
    assert arguments.random_numbers({0: second}, None, 1, CPU)[1][0] == rounds[0][1][1]


def test_a_request_without_a_possible_token_emits_one_and_says_so(caplog):
    logits = torch.full((2, 2, 9), -torch.inf)
    logits[1] = 0.0
    verdict = verify_chain(logits, torch.tensor([[3], [3]]), seeds=torch.arange(2), positions=torch.arange(2))
    tokens, num_tokens = arguments.emitted(verdict)
    assert tokens[0].tolist() == [0, -1]
    assert num_tokens.tolist() == [1, verdict.num_tokens[1]]
    assert torch.equal(tokens[1], verdict.tokens[1])
    assert "no token is possible for 1 request(s)" in caplog.text


@pytest.mark.parametrize("draft_logits", [False, True], ids=["one_hot", "draft_logits"])
def test_a_round_of_the_v2_runner_is_each_request_by_itself(draft_logits):
    packed = V2Round(draft_logits)
    report, tokens, num_tokens = packed.verify()
    assert report is packed.logits
    assert tokens.shape == (3, packed.STEPS + 1)
    assert num_tokens.dtype == torch.int32
    for request, length in enumerate(packed.LENS):
        expected = packed.alone(request)
        assert num_tokens[request] == expected.num_tokens[0]
        assert torch.equal(tokens[request, : length + 1], expected.tokens[0])
        assert (tokens[request, length + 1 :] == -1).all()


def test_a_draft_that_a_grammar_forbids_ends_the_chain_of_the_v2_runner():
    packed = V2Round(False)
    packed.sampler.sampling_states.temperature.gpu.zero_()
    for row in range(3):  # whatever was drafted, the target agrees
        packed.logits[row, packed.inputs[row + 1].item()] = 50.0
    assert packed.verify()[2][0] == 4
    verified = packed.inputs.clone()
    verified[2] = -1
    tokens, num_tokens = packed.verify(verified)[1:]
    assert num_tokens[0] == 2
    assert tokens[0].tolist() == [packed.inputs[1], packed.logits[1].float().argmax(), -1, -1]


def test_processors_of_the_v2_runner_act_on_a_copy_where_a_request_uses_them():
    packed = V2Round(False)
    before = packed.logits.clone()
    packed.sampler.logits_processors = [PenaltiesState([1, 3])]
    expected = packed.verify()[1]
    packed.sampler.logits_processors = [PenaltiesState([4])]
    tokens = packed.verify()[1]
    assert torch.equal(packed.logits, before)
    edited = before.float()
    edited[:, 0] = -torch.inf
    for request, length in enumerate(packed.LENS):
        assert torch.equal(tokens[request, : length + 1], packed.alone(request, edited).tokens[0])
        assert torch.equal(expected[request, : length + 1], packed.alone(request).tokens[0])
    packed.sampler.logits_processors = [SimpleNamespace(apply=lambda logits, _context: logits.fill_(0.0))]
    packed.verify()
    assert torch.equal(packed.logits, before)


def test_the_v2_runner_reports_processed_logits_where_they_are_asked_for():
    packed = V2Round(False)
    packed.sampler.logprobs_mode = "processed_logprobs"
    packed.sampler.apply_sampling_params = lambda logits, **context: logits + len(context)
    assert torch.equal(packed.verify()[0], packed.logits + 7)
