"""Engines compute on the device that they are given, and on each the same."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from random import Random

import numpy as np
import pytest
import torch

from proofs import draws, toploc
from proofs.sampling import DrawRule, draw_words, noise_bits
from roles.engines.base import Group, GroupTask, Sampling, TrainingGroup
from roles.engines.config import Dtype, EngineConfig, LearnerOptions, ModelShape
from roles.engines.torch import sampler, scorer
from roles.engines.torch.device import CPU, find_device
from roles.engines.torch.device_draws import draw_on_device, noise_bits_on, replay_on_device
from roles.engines.torch.files import load_weights
from roles.engines.torch.instruments import (
    DeviceInstruments,
    DeviceTopValues,
    HostInstruments,
    rank_chunks,
)
from roles.engines.torch.learner import TorchLearner
from roles.engines.torch.model import TransformerModel
from roles.rl.recipe import Recipe, WarmUp
from tests.pretended_device import NamedDevices, PretendedDevice

SHAPE = ModelShape(vocabulary=60, qk_norm=False, qkv_bias=True, tied=True)
SAMPLING = Sampling(temperature=0.9, max_new_tokens=40, group_size=4)
ENDS = frozenset({0})
CONFIG = EngineConfig(
    shape=SHAPE, recipe=Recipe(minibatches=2, groups=8, warm_up=WarmUp(steps=2, batch=4))
)


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


def make_tasks(count: int, *, longest: int = 20) -> list[GroupTask]:
    rng = Random(count)
    return [
        GroupTask(
            group,
            tuple(rng.randrange(1, 60) for _ in range(rng.randrange(2, longest))),
            tuple(hashlib.sha256(f"{group} {slot}".encode()).digest() for slot in range(4)),
        )
        for group in range(count)
    ]


def training(tasks: Sequence[GroupTask], groups: Sequence[Group]) -> list[TrainingGroup]:
    return [
        TrainingGroup(task.prompt, group.completions, (0.0, 1.0, 0.5, 1.0))
        for task, group in zip(tasks, groups, strict=True)
    ]


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
    tasks = make_tasks(7)
    # beyond a packed row, and beyond what is read beside another
    tasks.append(
        replace(tasks[0], group=7, prompt=tasks[0].prompt * (1200 // len(tasks[0].prompt)))
    )
    groups = sampler.generate(model, tasks, SAMPLING, ENDS, rule)
    scored = scorer.score(model, tasks, groups, SAMPLING, ENDS, rule)
    reports = [learner.step(training(tasks, groups)) for _ in range(2)]
    learner.save(folder / "checkpoint", folder / "policy")
    again = TorchLearner(CONFIG, device)
    assert again.open(folder / "checkpoint") == 2
    reports.append(again.step(training(tasks, groups)))
    answers = again.answer(tasks, SAMPLING)
    return [groups, scored, reports, answers]


@pytest.mark.parametrize("dtype", Dtype)
def test_nothing_makes_a_tensor_without_saying_where(tmp_path: Path, dtype: Dtype) -> None:
    """Before, 28 calls in this package made their tensors on the CPU, whatever the weights
    were on."""
    with NamedDevices() as calls:
        whole_pass(tmp_path, CPU, DrawRule.GUMBEL, dtype)
    assert calls.made > 300


def test_a_call_that_does_not_say_where_is_found() -> None:
    source = compile("import torch\ntorch.arange(3)", f"{NamedDevices.__module__}.py", "exec")
    with NamedDevices():
        exec(source, {})  # not a file of the engines
    ours = "import torch\ntorch.arange(3)"
    source = compile(ours, str(Path(sampler.__file__).parent / "more.py"), "exec")
    with NamedDevices(), pytest.raises(AssertionError, match="arange has no device"):
        exec(source, {})


@pytest.mark.parametrize("rule", DrawRule)
def test_a_whole_pass_stays_on_its_device(tmp_path: Path, rule: DrawRule) -> None:
    """No tensor of the host meets one of the device; and the device's own draws and proofs
    give what the CPU's give."""
    on_host = whole_pass(tmp_path / "host", CPU, rule, Dtype.FLOAT32)
    with PretendedDevice() as pretended:
        there = whole_pass(tmp_path / "there", pretended.DEVICE, rule, Dtype.FLOAT32)
    assert pretended.operations > 10_000
    for mine, theirs in zip(on_host[0], there[0], strict=True):  # type: ignore[call-overload]
        for one, other in zip(mine.completions, theirs.completions, strict=True):
            assert (one.tokens, one.proof) == (other.tokens, other.proof)
            assert one.logprobs == pytest.approx(other.logprobs, abs=1e-5)
    for mine, theirs in zip(on_host[1], there[1], strict=True):  # type: ignore[call-overload]
        assert mine.evidence.draw_mismatches == theirs.evidence.draw_mismatches == 0
        assert mine.evidence.surprise == pytest.approx(theirs.evidence.surprise, abs=1e-4)
        assert mine.evidence.mantissa_mean == pytest.approx(theirs.evidence.mantissa_mean)
    losses = [[report.loss for report in each[2]] for each in (on_host, there)]  # type: ignore[attr-defined]
    assert losses[0] == pytest.approx(losses[1], abs=1e-6)
    assert on_host[3] == there[3]


def test_a_tensor_of_the_host_among_those_of_the_device_is_found() -> None:
    with PretendedDevice() as pretended:
        there = torch.ones(3, device=pretended.DEVICE)
        assert (there.device, (there * 2)[1:].device) == (pretended.DEVICE, pretended.DEVICE)
        assert there.cpu().device == CPU
        with pytest.raises(AssertionError, match="the device's tensors and the host's"):
            there + torch.ones(3, device=CPU)
        with pytest.raises(AssertionError, match="has no array"):
            there.numpy()


VECTORS = {
    0x0000_0000_0000_0000: (0x0000_0000, 0x86D2_FA73, 0xEBEC_197C, 0xC9C2_5EB4),
    0x0000_0000_0000_0001: (0x86D2_FA73, 0x0000_0000, 0x1119_B199, 0xD5F6_3815),
    0xFFFF_FFFF_FFFF_FFFF: (0xF2F1_199E, 0x8C38_23D1, 0xA0FF_2300, 0x08BB_0852),
    0x0123_4567_89AB_CDEF: (0x9E79_AC80, 0xC8F8_AD77, 0xC711_E852, 0x7110_C34C),
    0x8000_0000_0000_0000: (0x8001_0000, 0x06D3_FA73, 0x6BED_197C, 0x49C3_5EB4),
}
"""By draw word: the noise of tokens 0, 1, 49,151 and 151,935."""


@pytest.mark.parametrize("word", VECTORS)
def test_noise_has_the_bits_of_the_vectors(word: int) -> None:
    words, tokens = np.array([word], np.uint64), np.array([0, 1, 49_151, 151_935], np.uint32)
    assert tuple(noise_bits(words, tokens)[0].tolist()) == VECTORS[word]
    found = noise_bits_on(words, 151_936, CPU)[0].numpy().view(np.uint32)
    assert tuple(found[tokens].tolist()) == VECTORS[word]


def test_noise_is_the_same_bits_in_int32_and_in_numpy() -> None:
    words = np.array([0, 1, 0xFFFF_FFFF_FFFF_FFFF, 0x0123_4567_89AB_CDEF, 1 << 63], np.uint64)
    words = np.concatenate([words, draw_words([bytes(32)], 0, 64)[0]])
    expected = noise_bits(words, np.arange(50_000, dtype=np.uint32))
    found = noise_bits_on(words, 50_000, CPU)
    assert found.dtype is torch.int32
    assert (found.numpy().view(np.uint32) == expected).all()
