"""The learner: warm-up, steps, and checkpoints that continue bit for bit."""

import hashlib
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
    """A weight of 3.2e37 was loaded without a word. The generation before stands in."""
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
