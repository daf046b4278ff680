"""The learner: it begins at a model's folder, writes folders like it, and goes on exactly."""

import hashlib
from dataclasses import replace
from pathlib import Path
from random import Random

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from p2p.errors import ConfigError
from roles.engines.base import Completion, EngineError, GroupTask, Sampling, TrainingGroup
from roles.engines.config import EngineConfig
from roles.engines.evaluation import questions
from roles.engines.torch import sampler
from roles.engines.torch.checkpoint import write_checkpoint
from roles.engines.torch.engine import TorchEngine
from roles.engines.torch.learner import TorchLearner
from roles.engines.vllm.weights import OpenWeights
from roles.envs.sort import END, SortEnvironment
from roles.models.bundle import EMBEDDING, HEAD, check_weights, read_config, read_floats
from roles.models.safetensors import RawTensor
from roles.rl.algorithms.base import has_spread
from roles.rl.learner import LearnerConfig
from roles.rl.recipes import SORTER
from tests.model_folders import LLAMA, make_folder, random_weights, write_weights
from tests.support.toys import QUICK, sorting_engine, sorting_learner, sorting_sampling

LEARNER = LearnerConfig(rate=1e-3, ramp=1)
CONFIG = EngineConfig(shape=LLAMA, learner=LEARNER)


def some_groups(seed: int = 0) -> list[TrainingGroup]:
    rng = Random(seed)

    def tokens() -> tuple[int, ...]:
        return tuple(rng.randrange(320) for _ in range(rng.randint(1, 9)))

    drawn = [[tokens() for _ in range(4)] for _ in range(6)]
    return [
        TrainingGroup(
            tokens(), tuple(Completion(one, (-5.0,) * len(one)) for one in some), (1, 0, 0, 1)
        )
        for some in drawn
    ]


def opened(tmp_path: Path, base: Path) -> TorchLearner:
    learner = TorchLearner(CONFIG)
    learner.open(tmp_path / "checkpoint", base)
    return learner


@pytest.mark.parametrize("shards", [1, 3])
def test_the_first_policy_is_the_base_and_the_next_are_like_it(
    tmp_path: Path, shards: int
) -> None:
    base = make_folder(tmp_path / "base", shards=shards)
    learner = opened(tmp_path, base)
    learner.save(None, tmp_path / "0")
    files = {path.name: path.read_bytes() for path in base.iterdir()}
    assert {path.name: path.read_bytes() for path in (tmp_path / "0").iterdir()} == files
    report = learner.step(some_groups())
    assert 0 < report.changed < 1
    learner.save(None, tmp_path / "1")
    after = {path.name: path.read_bytes() for path in (tmp_path / "1").iterdir()}
    assert after.keys() == files.keys()
    different = total = 0
    masters = dict(learner.model.named_parameters())
    for name, data in after.items():
        if not name.endswith(".safetensors"):
            assert data == files[name]
            continue
        size = int.from_bytes(data[:8], "little") + 8
        assert data[:size] == files[name][:size]  # in place, so that patches are small
        was = load_file(base / name)
        for tensor, value in load_file(tmp_path / "1" / name).items():
            assert torch.equal(value, masters[tensor].bfloat16())
            different += int((value != was[tensor]).sum())
            total += value.numel()
    assert report.changed == different / total


def test_a_policy_has_the_files_of_the_model_and_no_other(tmp_path: Path) -> None:
    """LICENSE and README.md were served with each policy, and what a crash had left stayed."""
    learner = opened(tmp_path, base := make_folder(tmp_path / "base"))
    expected = {path.name for path in base.iterdir()}
    (base / "README.md").write_text("about it")
    (base / "onnx").mkdir()
    learner.save(None, tmp_path / "0")
    learner.step(some_groups())
    (tmp_path / "1.partial").mkdir()
    (tmp_path / "1.partial/config.json").write_text("half")
    for _ in range(2):
        learner.save(None, tmp_path / "1")
    assert not (tmp_path / "1.partial").exists()
    config = (base / "config.json").read_bytes()
    for policy in (tmp_path / "0", tmp_path / "1"):
        assert {path.name for path in policy.iterdir()} == expected
        assert (policy / "config.json").read_bytes() == config


@pytest.mark.parametrize("shards", [1, 3])
def test_a_base_whose_weights_were_removed_still_makes_folders(
    tmp_path: Path, shards: int
) -> None:
    learner = opened(tmp_path, base := make_folder(tmp_path / "base", shards=shards))
    learner.step(some_groups())
    for path in base.glob("*.safetensors"):
        path.unlink()
    learner.save(None, tmp_path / "1")
    other = TorchLearner(CONFIG)
    other.adopt(tmp_path / "1", 1)
    pairs = zip(learner.model.parameters(), other.model.parameters(), strict=True)
    assert all(torch.equal(one.bfloat16(), another) for one, another in pairs)


@pytest.mark.parametrize("dtype", ["BF16", "F32"])
@pytest.mark.parametrize("shards", [1, 3])
def test_the_head_that_is_there_is_the_models(tmp_path: Path, shards: int, dtype: str) -> None:
    """It was dropped without a word. A copy of the embedding is none."""
    base = make_folder(tmp_path / "base", shards=shards)
    weights = random_weights(LLAMA)
    copy = read_floats("BF16", bytes(weights[EMBEDDING].data))
    trained = copy.copy()
    trained[-1] = 1
    for path in base.glob("*.safetensors"):
        path.unlink()
    for head, is_own in ((copy, False), (trained, True)):
        data = head if dtype == "F32" else (head.view("<u4") >> 16).astype("<u2")
        numbers = RawTensor(dtype, weights[EMBEDDING].shape, data.tobytes())
        write_weights(base, {**weights, HEAD: numbers}, shards)
        config = read_config(base)
        assert config.shape == replace(LLAMA, tied=not is_own)
        assert len(config.notes) == is_own
        check_weights(base, config)
        learner = TorchLearner(replace(CONFIG, shape=config.shape))
        learner.open(tmp_path / f"checkpoint{is_own}", base)
        assert torch.equal(learner.model.lm_head.weight.flatten(), torch.from_numpy(head))
        with OpenWeights(base, config.shape) as opened_weights:
            assert torch.equal(opened_weights.head().float().flatten(), torch.from_numpy(head))
        learner.step(some_groups())
        policy = tmp_path / f"policy{is_own}"
        learner.save(None, policy)
        assert read_config(policy).shape == config.shape
        stored = {
            k: v for path in policy.glob("*.safetensors") for k, v in load_file(path).items()
        }
        assert torch.equal(stored[HEAD], learner.model.lm_head.weight.bfloat16())
    with pytest.raises(EngineError, match="has a head of its own, and by the run"):
        opened(tmp_path, base)
    with pytest.raises(EngineError, match="has a head of its own"), OpenWeights(base, LLAMA):
        pass


def test_the_distance_to_the_base_is_learnt_from_and_told(tmp_path: Path) -> None:
    """A frozen copy of the base stays beside the policy, also after a restart."""
    base = make_folder(tmp_path / "base")
    pulled = replace(LEARNER, options={"kl_reference": 10.0})
    config = replace(CONFIG, learner=pulled)
    learner = TorchLearner(config)
    learner.open(tmp_path / "checkpoint", base)
    assert learner.step(some_groups()).metrics["k3_reference"] == pytest.approx(0.0, abs=1e-6)
    away = learner.step(some_groups()).metrics["k3_reference"]
    assert away > 0
    learner.save(tmp_path / "checkpoint", None)
    again = TorchLearner(config)
    assert again.open(tmp_path / "checkpoint", base) == 2
    assert again.step(some_groups()).metrics == learner.step(some_groups()).metrics
    free = TorchLearner(CONFIG)
    free.open(tmp_path / "none", base)
    assert all(free.step(some_groups()).metrics == {} for _ in range(3))
    with pytest.raises(ConfigError, match="set kl_reference = 0, or begin with a model"):
        TorchLearner(config).open(tmp_path / "none")


# Steps and checkpoints of the network that sorts


# A sixteenth of the recipe's work: enough to see it learn something.
FAST = sorting_learner(groups=4, minibatches=2, warm_up=QUICK)
SORTER_CONFIG = sorting_engine(sorting_sampling(steps=10), FAST, seed=3)
SORT = SortEnvironment()


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
        TrainingGroup(task.prompt, one.completions, rewards)
        for task, one in zip(tasks, drawn, strict=True)
        if has_spread(rewards := tuple(float(len(c.tokens) < 6) for c in one.completions))
    ]
    return groups


def test_continuing_from_a_checkpoint_is_bit_identical(tmp_path: Path) -> None:
    learner = TorchLearner(SORTER_CONFIG)
    assert learner.open(tmp_path / "checkpoint") == 0
    groups = make_groups(learner, 12)
    assert len(groups) > 3
    learner.step(groups)
    learner.save(tmp_path / "checkpoint", tmp_path / "weights.safetensors")
    expected = learner.step(groups)
    other = TorchLearner(SORTER_CONFIG)
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
    learner = TorchLearner(SORTER_CONFIG)
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
    rewards = [[r for group in groups for r in group.rewards] for groups in (before, after)]
    assert np.mean(rewards[1]) > np.mean(rewards[0])


def test_what_cannot_be_learned_from_is_refused(tmp_path: Path) -> None:
    learner = TorchLearner(SORTER_CONFIG)
    learner.start()
    with pytest.raises(EngineError, match="at least one group"):
        learner.step([])
    with pytest.raises(EngineError, match="was not opened"):
        TorchEngine(SORTER_CONFIG).answer([], Sampling(1.0, 12, 1))
    small = sorting_engine(shape=replace(SORTER, vocabulary=10))
    with pytest.raises(ConfigError, match="50 tokens, the model 10"):
        TorchLearner(small).open(tmp_path / "none")
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
    learner = TorchLearner(SORTER_CONFIG)
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
        assert TorchLearner(SORTER_CONFIG).open(path) == 1
    for damaged in (sound[:-1], b"", None):
        path.unlink() if damaged is None else path.write_bytes(damaged)
        assert TorchLearner(SORTER_CONFIG).open(path) == 1
    path.write_bytes(sound)
    assert TorchLearner(SORTER_CONFIG).open(path) == 2
    (tmp_path / "checkpoint.previous").write_bytes(b"rot")
    path.write_bytes(sound[:100])
    with pytest.raises(
        EngineError, match=r"checkpoint is damaged.*checkpoint\.previous is damaged.*remove"
    ):
        TorchLearner(SORTER_CONFIG).open(path)
