"""A learner in two processes is the learner in one, and its processes live and die together."""

from __future__ import annotations

import os
import select
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch

from p2p.errors import ConfigError
from roles.engines import codec
from roles.engines.base import (
    Answers,
    Completion,
    EngineError,
    GroupTask,
    Sampling,
    StepReport,
    TrainingGroup,
)
from roles.engines.config import GpuOptions
from roles.engines.torch import sampler
from roles.engines.torch.learner import TorchLearner
from roles.engines.torch.rank import rank_device
from roles.engines.torch.sharding import local, put, whole
from roles.rl.learner import WarmUp
from tests.conformance.engine_process import EngineProcess, open_engine_process
from tests.support.processes import children
from tests.support.tasks import make_tasks, taught
from tests.support.toys import sorting_engine, sorting_learner, sorting_sampling

PATIENCE = 60.0
"""Seconds; reached only by a test that fails."""
SAMPLING = Sampling(1.0, 12, 4)
ALONE = sorting_engine(
    sampling=sorting_sampling(group_size=4),
    learner=sorting_learner(groups=11, minibatches=2, warm_up=WarmUp(steps=3, rate=4e-3)),
)
"""11 groups: minibatches of six and five, of which the last batch has no partner."""
TOGETHER = replace(ALONE, gpus=GpuOptions(ranks=2, recompute=True))

NO_NUMBER = TrainingGroup((1,), (Completion((2, 0), (float("nan"), -1.0)),) * 2, (0.0, 1.0))
"""Its log-probs make a loss that is none, and so a gradient."""


@pytest.fixture(scope="module")
def together() -> Iterator[EngineProcess]:
    with open_engine_process(sys.executable, TOGETHER) as process:
        yield process


def mixed_tasks(salt: int) -> list[GroupTask]:
    return make_tasks(11, tokens=range(1, 50), lengths=(3, 9, 30, 250), salt=salt)


def make_groups(learner: TorchLearner, salt: int) -> list[TrainingGroup]:
    tasks = mixed_tasks(salt)
    drawn = sampler.draw(learner.model, tasks, SAMPLING, frozenset({0}))
    return taught(tasks, drawn, (0.0, 1.0, 0.0, 1.0))


def step(process: EngineProcess, groups: Sequence[TrainingGroup]) -> StepReport:
    file = process.written("groups", map(codec.encode_training, groups))
    return StepReport(*process.call("step", file))


def answer(process: EngineProcess, tasks: Sequence[GroupTask]) -> list[Answers]:
    return process.ask("answer", codec.decode_answers, SAMPLING, process.tasks(tasks))


def assert_same(mine: StepReport, theirs: StepReport) -> None:
    numbers, wanted = asdict(mine), asdict(theirs)
    assert numbers.pop("metrics") == wanted.pop("metrics") == {}
    assert numbers == pytest.approx(wanted, rel=1e-4, abs=1e-5)


def test_two_ranks_learn_what_one_does_and_their_checkpoints_are_the_same_file(
    together: EngineProcess, tmp_path: Path
) -> None:
    one = TorchLearner(ALONE)
    assert one.open(tmp_path / "none") == 0
    assert together.call("open", str(tmp_path / "none"), "") == 0
    for number in range(5):
        groups = make_groups(one, number)
        assert_same(step(together, groups), one.step(groups))
    tasks = mixed_tasks(99)
    assert answer(together, tasks) == one.answer(tasks, SAMPLING)

    together.call("save", str(tmp_path / "shared"), str(tmp_path / "policy"))
    one.save(tmp_path / "alone", None)
    groups = make_groups(one, 6)
    expected = one.step(groups)
    again = TorchLearner(ALONE)
    assert again.open(tmp_path / "shared") == 5
    assert_same(again.step(groups), expected)
    assert (tmp_path / "shared").stat().st_size == (tmp_path / "alone").stat().st_size
    assert together.call("open", str(tmp_path / "alone"), "") == 5
    assert_same(step(together, groups), expected)

    adopted = TorchLearner(ALONE)
    adopted.adopt(tmp_path / "policy", 5)
    together.call("adopt", str(tmp_path / "policy"), 5, "")
    assert_same(step(together, groups), adopted.step(groups))


@pytest.mark.deep
def test_two_ranks_keep_the_same_distance_to_a_frozen_reference(tmp_path: Path) -> None:
    options = {"kl_reference": 0.1}
    alone = replace(ALONE, learner=sorting_learner(groups=11, minibatches=2, options=options))
    first = TorchLearner(ALONE)
    first.open(tmp_path / "none")
    first.save(None, tmp_path / "model.safetensors")
    one = TorchLearner(alone)
    one.open(tmp_path / "none", tmp_path)
    with open_engine_process(
        sys.executable, replace(alone, gpus=GpuOptions(ranks=2, recompute=True))
    ) as process:
        process.call("open", str(tmp_path / "none"), str(tmp_path))
        for number in range(3):
            groups = make_groups(one, number)
            mine, theirs = step(process, groups), one.step(groups)
            assert mine.metrics == pytest.approx(theirs.metrics, rel=1e-4, abs=1e-6)
            assert mine.metrics["k3_reference"] >= 0.0
            assert mine.loss == pytest.approx(theirs.loss, rel=1e-4, abs=1e-5)
        assert mine.metrics["k3_reference"] > 0.0


def test_what_a_caller_causes_ends_no_process(together: EngineProcess, tmp_path: Path) -> None:
    damaged = tmp_path / "damaged"
    damaged.write_bytes(b"no checkpoint")
    with pytest.raises(EngineError, match="does not begin as a checkpoint does"):
        together.call("open", str(damaged), "")
    together.call("open", str(tmp_path / "none"), "")
    empty = [TrainingGroup((1,), (), ())]
    with pytest.raises(EngineError, match="at least two completions to compare"):
        step(together, empty)
    with pytest.raises(EngineError, match="the gradient's norm is nan"):
        step(together, [NO_NUMBER])
    folder = tmp_path / "file" / "checkpoint"
    folder.parent.write_bytes(b"")
    with pytest.raises(EngineError, match=r"FileExistsError|NotADirectoryError"):
        together.call("save", str(folder), "")
    assert len(answer(together, mixed_tasks(1))) == 11


@pytest.mark.deep
def test_the_processes_of_a_learner_end_with_the_engine(tmp_path: Path) -> None:
    with open_engine_process(sys.executable, TOGETHER) as process:
        process.call("open", str(tmp_path / "none"), "")
        (other,) = children(process.pid)
        watched = os.pidfd_open(other)
        process.kill()
        ended, _, _ = select.select([watched], [], [], PATIENCE)
    os.close(watched)
    assert ended == [watched]


@pytest.mark.deep
def test_the_engine_ends_with_a_process_of_its_learner(tmp_path: Path) -> None:
    """It would wait for ever for what the other has of the weights."""
    with open_engine_process(sys.executable, TOGETHER) as process:
        process.call("open", str(tmp_path / "none"), "")
        (other,) = children(process.pid)
        os.kill(other, 9)
        assert process.wait(PATIENCE) == 1


def test_a_gradient_that_is_no_number_changes_nothing() -> None:
    learner = TorchLearner(ALONE)
    learner.start()
    before = [weight.detach().clone() for weight in learner.model.parameters()]
    with pytest.raises(EngineError, match="the gradient's norm is nan"):
        learner.step([NO_NUMBER])
    for weight, was in zip(learner.model.parameters(), before, strict=True):
        assert torch.equal(weight.detach(), was)


def test_what_the_learner_needs_and_is_not_there_is_said() -> None:
    for options, said in (
        (GpuOptions(offload=True), "computes on the CPU, take it out"),
        (GpuOptions(ranks=2, offload=True), "keeps a GPU's weights in the CPU's memory"),
    ):
        with pytest.raises(ConfigError, match=said):
            rank_device(replace(ALONE, gpus=options), 0)
    with pytest.raises(ValueError, match="the GPUs of one machine"):
        GpuOptions(ranks=0)
    target, full = torch.zeros(3, 2), torch.arange(6.0).view(3, 2)
    put(target, full)  # what is not shared is whole
    assert torch.equal(whole(target), full)
    assert local(target) is target
