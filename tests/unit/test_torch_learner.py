"""The learner: warm-up, steps, and checkpoints that continue bit for bit."""

import hashlib
import itertools
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest
import torch

from bench.alone import DRAW, Alone
from roles.engines.base import EngineError, GroupTask, Sampling, TrainingGroup
from roles.engines.evaluation import questions
from roles.engines.torch import sampler
from roles.engines.torch.checkpoint import write_checkpoint
from roles.engines.torch.learner import TorchLearner
from roles.envs.sort import END, SortEnvironment
from roles.rl.algorithms.base import has_spread
from tests.support.toys import QUICK, sorting_engine, sorting_learner, sorting_sampling

# A sixteenth of the recipe's work: enough to see it learn something.
FAST = sorting_learner(groups=4, minibatches=2, warm_up=QUICK)
CONFIG = sorting_engine(sorting_sampling(steps=10), FAST, seed=3)
FAST_START = replace(CONFIG, learner=replace(FAST, warm_up=None))
SORT = SortEnvironment()


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> None:
    torch.set_num_threads(1)


def make_groups(learner: TorchLearner, count: int, size: int = 8) -> list[TrainingGroup]:
    """Groups with rewards for short completions: any policy has some spread in that."""
    tasks = [
        GroupTask(
            group,
            SORT.task(hashlib.sha256(b"%d" % group).digest()).prompt,
            tuple(hashlib.sha256(b"%d %d" % (group, slot)).digest() for slot in range(size)),
        )
        for group in range(count)
    ]
    drawn = sampler.draw(learner.model, tasks, Sampling(1.0, 12, size), frozenset({END}))
    groups = [
        TrainingGroup(
            task.prompt,
            one.completions,
            tuple(float(len(c.tokens) < 6) for c in one.completions),
        )
        for task, one in zip(tasks, drawn, strict=True)
    ]
    return [group for group in groups if has_spread(group.rewards)]


def test_continuing_from_a_checkpoint_is_bit_identical(tmp_path: Path) -> None:
    learner = TorchLearner(CONFIG)
    assert learner.open(tmp_path / "checkpoint") == 0
    groups = make_groups(learner, 12)
    assert len(groups) > 3
    learner.step(groups)
    learner.save(tmp_path / "checkpoint", tmp_path / "weights.safetensors")
    expected = learner.step(groups)
    other = TorchLearner(CONFIG)
    assert other.open(tmp_path / "checkpoint") == 1
    other.answer(questions(SORT.evaluation()[:8], 9), Sampling(1.0, 12, 1))  # changes nothing
    assert other.step(groups) == expected
    pairs = zip(learner.model.parameters(), other.model.parameters(), strict=True)
    assert all(torch.equal(one, another) for one, another in pairs)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "checkpoint",
        "weights.safetensors",
    ]


def test_a_step_makes_what_was_rewarded_likelier() -> None:
    learner = TorchLearner(CONFIG)
    learner.start()
    before = make_groups(learner, 16)
    for _ in range(6):
        report = learner.step(before)
    after = make_groups(learner, 16)
    assert report.step == 6
    assert report.tokens == sum(
        len(one.tokens) for group in before for one in group.completions
    )
    assert report.k3 > 0
    assert _mean(after) > _mean(before)


def test_on_policy_there_is_no_drift() -> None:
    learner = TorchLearner(CONFIG)
    learner.start()
    report = learner.step(make_groups(learner, 8))
    assert abs(report.k3) < 1e-6
    assert report.gradient_norm > 0
    assert 0 < report.entropy < 4


def test_what_cannot_be_learned_from_is_refused(tmp_path: Path) -> None:
    learner = TorchLearner(CONFIG)
    learner.start()
    with pytest.raises(EngineError, match="at least one group"):
        learner.step([])
    path = tmp_path / "checkpoint"
    write_checkpoint(path, tmp_path / "old", {"numbers": torch.tensor([1, 1])})
    with pytest.raises(EngineError, match="no checkpoint of this model"):
        learner.open(path)
    for damage in (b"", b"nonsense", b"PK\x03\x04 half a file"):
        (tmp_path / "checkpoint").write_bytes(damage)
        with pytest.raises(EngineError, match="damaged"):
            learner.open(tmp_path / "checkpoint")


def test_one_flipped_bit_in_a_checkpoint_is_noticed(tmp_path: Path) -> None:
    """A weight of 3.2e37 was loaded without a word. The generation before stands
    in.
    """
    path = tmp_path / "checkpoint"
    learner = TorchLearner(CONFIG)
    learner.start()
    groups = make_groups(learner, 12)
    for step in (1, 2):
        learner.step(groups)
        learner.save(path, tmp_path / f"{step}.safetensors")
    sound = path.read_bytes()
    rng = Random(6)
    for place in [rng.randrange(8 * len(sound)) for _ in range(40)]:
        rotten = bytearray(sound)
        rotten[place // 8] ^= 1 << place % 8
        path.write_bytes(rotten)
        assert TorchLearner(CONFIG).open(path) == 1
    path.write_bytes(sound[:-1])
    assert TorchLearner(CONFIG).open(path) == 1
    path.unlink()
    assert TorchLearner(CONFIG).open(path) == 1
    path.write_bytes(sound)
    assert TorchLearner(CONFIG).open(path) == 2
    (tmp_path / "checkpoint.previous").write_bytes(b"rot")
    path.write_bytes(sound[:100])
    with pytest.raises(
        EngineError, match=r"checkpoint is damaged.*checkpoint\.previous is damaged.*remove"
    ):
        TorchLearner(CONFIG).open(path)


@pytest.mark.parametrize("call", range(3))
def test_a_checkpoint_that_is_cut_off_leaves_the_one_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: int
) -> None:
    """Its data, its name, the name of the one before: whichever the crash comes before."""
    path = tmp_path / "checkpoint"
    learner = TorchLearner(FAST_START)
    learner.start()
    groups = make_groups(learner, 12)
    learner.step(groups)
    learner.save(path, None)
    weights = [one.detach().clone() for one in learner.model.parameters()]
    learner.step(groups)
    calls = itertools.count()

    def stop(plain: Callable[..., object]) -> Callable[..., object]:
        def stopped(*args: object) -> object:
            if next(calls) == call:
                raise OSError("the power is cut")
            return plain(*args)

        return stopped

    with monkeypatch.context() as crash:
        crash.setattr(Path, "replace", stop(Path.replace))
        crash.setattr(hashlib, "sha256", stop(hashlib.sha256))
        with pytest.raises(OSError, match="power"):
            learner.save(path, None)
    other = TorchLearner(FAST_START)
    assert other.open(path) == 1
    pairs = zip(other.model.parameters(), weights, strict=True)
    assert all(torch.equal(one, another) for one, another in pairs)


def test_a_published_policy_is_adopted(tmp_path: Path) -> None:
    """Without a checkpoint the learner goes on from weights that are out."""
    learner = TorchLearner(CONFIG)
    learner.start()
    groups = make_groups(learner, 12)
    learner.step(groups)
    learner.save(tmp_path / "checkpoint", tmp_path / "1.safetensors")
    other = TorchLearner(CONFIG)
    other.adopt(tmp_path / "1.safetensors", 1)
    pairs = zip(learner.model.parameters(), other.model.parameters(), strict=True)
    assert all(torch.equal(one, another) for one, another in pairs)
    assert other.step(groups).step == 2


def test_evaluation_repeats() -> None:
    learner = TorchLearner(CONFIG)
    learner.start()
    asked = questions(SORT.evaluation()[:64], 9)
    once, again = (learner.answer(asked, Sampling(1.0, 12, 1)) for _ in range(2))
    assert once == again


def test_the_sampler_lags_by_exactly_two() -> None:
    alone = Alone(CONFIG)
    alone.warm_up()
    versions = [alone.learner.model.lm_head.weight.detach().clone()]
    for step in range(1, 5):
        alone.step()
        sampled = alone.sampler.lm_head.weight
        assert torch.equal(sampled, versions[max(0, step - 1 - CONFIG.sampling.lag)])
        versions.append(alone.learner.model.lm_head.weight.detach().clone())
    assert alone.course.tasks >= 4 * DRAW


def _mean(groups: list[TrainingGroup]) -> float:
    rewards = [reward for group in groups for reward in group.rewards]
    return sum(rewards) / len(rewards)
