"""A run with a base: the learner begins at a model's folder and writes folders like it."""

from dataclasses import replace
from pathlib import Path
from random import Random

import pytest
import torch
from safetensors.torch import load_file

from p2p.errors import ConfigError
from roles.engines.base import Completion, EngineError, TrainingGroup
from roles.engines.config import EngineConfig
from roles.engines.torch.learner import TorchLearner
from roles.engines.vllm.weights import OpenWeights
from roles.models.bundle import EMBEDDING, HEAD, check_weights, read_config, read_floats
from roles.models.safetensors import RawTensor
from roles.rl.learner import LearnerConfig
from tests.model_folders import LLAMA, make_folder, random_weights, write_weights

LEARNER = LearnerConfig(rate=1e-3, ramp=1)
CONFIG = EngineConfig(shape=LLAMA, learner=LEARNER)


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


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
    """`shoal models fetch` writes a LICENSE and a README.md, which were served with each
    policy, or rather refused before that, one file a start."""
    learner = opened(tmp_path, base := make_folder(tmp_path / "base"))
    expected = {path.name for path in base.iterdir()}
    (base / "README.md").write_text("about it")
    (base / "onnx").mkdir()
    learner.save(None, tmp_path / "0")
    learner.step(some_groups())
    learner.save(None, tmp_path / "1")
    for policy in ("0", "1"):
        assert {path.name for path in (tmp_path / policy).iterdir()} == expected


def test_a_policy_is_written_over_what_a_crash_has_left(tmp_path: Path) -> None:
    learner = opened(tmp_path, make_folder(tmp_path / "base"))
    learner.step(some_groups())
    unfinished = tmp_path / "1.partial"
    unfinished.mkdir()
    (unfinished / "config.json").write_text("half")
    for _ in range(2):
        learner.save(None, tmp_path / "1")
    assert (tmp_path / "1/config.json").read_bytes() == (
        tmp_path / "base/config.json"
    ).read_bytes()
    assert not unfinished.exists()


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
    """`tie_word_embeddings` beside a trained head: it was dropped without a word, and the run
    trained another model. A copy of the embedding is none."""
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
    """With `kl_reference` a frozen copy of the base stays beside the policy, also after a
    restart."""
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
