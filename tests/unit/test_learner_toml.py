"""``learner.toml``: what it may say, which of its mistakes are one sentence, and that a change
of it is an edit and a restart of the trainer."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from p2p.errors import ConfigError
from p2p.identity import KeyPair
from p2p.machine import RealWorld
from p2p.node.tables import parse_toml
from p2p.policy import NO_POLICY
from roles.contract.core.file import sign_run
from roles.contract.core.pin import FilePin
from roles.contract.core.sampling import SamplingTerms
from roles.engines.base import Completion, TrainingGroup
from roles.engines.config import EngineConfig
from roles.engines.torch.learner import TorchLearner
from roles.own.draft import read_draft
from roles.own.status import SwarmStatus
from roles.rl.learner import FILE, LearnerConfig, write_learner
from roles.rl.recipes import KINDS, SMALL_MODEL, SORTING, read_learner, read_own_learner
from tests.support.runs import DRAFT, OWNER, TERMS
from tests.support.swarm import Lingering, perform
from tests.support.toys import sorting_engine, sorting_learner

BASE = replace(
    SORTING,
    base=(
        FilePin(name="config.json", size=1, digest=bytes(32)),
        FilePin(name="tokenizer.json", size=1, digest=bytes(32)),
    ),
)


def read(text: str) -> LearnerConfig:
    return read_learner(parse_toml(text.encode(), FILE), FILE, "mine", SORTING)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_what_is_written_is_what_is_read(kind: object) -> None:
    learner = replace(kind.learner, run="mine")  # type: ignore[attr-defined]
    assert read(write_learner(learner)) == learner


@pytest.mark.parametrize("algorithm", ["dapo", "dr_grpo", "cispo", "gspo"])
def test_another_algorithm_takes_the_file_that_was_written(algorithm: str) -> None:
    written = write_learner(KINDS[0].learner)
    assert "# clip_negative = 4.0 " in written
    learner = read(written.replace('algorithm = "grpo"', f'algorithm = "{algorithm}"'))
    assert (learner.algorithm, learner.options) == (algorithm, {})


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('run = "other"\nrate = 1e-3\n', "is for the run 'other', and this is 'mine'"),
        ("rate = 1e-3\ngroup_size = 8\n", "group_size is signed, .* draft.toml, and sign"),
        ("rate = 1e-3\nlag = 1\n", "lag is signed"),
        ("rate = 1e-3\n[limits]\n", "limits is signed"),
        ("rate = 1e-3\nrat = 2\n", "there is no key 'rat'; did you mean 'rate'"),
        ("groups = 3\n", "the key 'rate' is missing"),
        ("rate = -1\n", "rate must be from 0 to 10"),
        ("rate = nan\n", "rate must be from 0 to 10|is not a number"),
        ("rate = 1e-3\nramp = 0\n", "ramp must be from 1"),
        ('rate = "fast"\n', "rate must be a number"),
        ('rate = 1e-3\nschedule = "step"\n', "one of linear, cosine, wsd"),
        ("rate = 9e-3\n", "rate = 0.009 in learner.toml would ruin"),
        ("rate = 9e-2\n[lora]\nrank = 1\nalpha = 1.0\n", "rate = 0.09 in learner.toml would"),
        ("rate 1e-3\n", "learner.toml is not TOML"),
        (f"rate = {'9' * 5000}\n", "learner.toml is not TOML"),
        (f"sinks = {'[' * 5000}\n", "learner.toml is not TOML"),
        (f"rate = 1e-3\n[options]\nclip = {'9' * 60}\n", "too large for a number"),
        (f"rate = 1e-3\n[options]\nclip_negative = {'9' * 60}\n", "too large for a number"),
    ],
)
def test_a_mistake_is_one_sentence(text: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said) as raised:
        read(text)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"rate": 1e-3}, "draft: rate belongs in learner.toml"),
        ({"sampling": {"steps": 3, "minibatches": 2}}, "minibatches belongs in learner.toml"),
        ({"sinks": ["jsonl"]}, "sinks belongs in learner.toml"),
        ({"algorithm": "dapo"}, "one of grpo, diloco; .* is named in its learner.toml"),
        ({"recipe": {"steps": 3}}, r"\[recipe\] is of an older Shoal: .* \[sampling\]"),
    ],
)
def test_what_only_the_trainer_decides_is_signed_by_nobody(
    change: dict[str, object], said: str
) -> None:
    with pytest.raises(ConfigError, match=said):
        read_draft({**DRAFT, **change}, "draft", 0.0)


async def test_a_missing_file_is_the_usual_numbers_of_a_model_with_a_base(
    tmp_path: Path,
) -> None:
    disk = RealWorld(KeyPair(bytes(32)), tmp_path).disk
    based = sign_run(replace(TERMS, model=BASE), OWNER)
    assert await read_own_learner(disk, based) == SMALL_MODEL.learner
    with pytest.raises(ConfigError, match="take that of shoal run init"):
        await read_own_learner(disk, sign_run(TERMS, OWNER))
    (tmp_path / FILE).write_text("rate = 1e-5\n")
    assert (await read_own_learner(disk, based)).rate == 1e-5
    (tmp_path / FILE).write_text("rate = [")
    with pytest.raises(ConfigError, match=f"{tmp_path / FILE} is not TOML"):
        await read_own_learner(disk, based)


# The trainer's engine


def groups() -> list[TrainingGroup]:
    answers = (Completion((3, 4, 0), (-1.0, -1.0, -1.0)), Completion((5, 0), (-1.0, -1.0)))
    return [TrainingGroup((1, 2), answers, (1.0, 0.0))] * 4


def engine(rate: float) -> EngineConfig:
    return sorting_engine(learner=sorting_learner(rate=rate, groups=4))


def learn(folder: Path, rate: float, steps: int) -> bytes:
    """Return the policy of a trainer that is started in ``folder`` and learns so long."""
    learner = TorchLearner(engine(rate))
    learner.open(folder / "checkpoint")
    for _ in range(steps):
        learner.step(groups())
    learner.save(folder / "checkpoint", folder / "policy")
    return (folder / "policy").read_bytes()


def test_a_trainer_goes_on_bit_for_bit_or_with_the_rate_that_was_edited(tmp_path: Path) -> None:
    for name in ("whole", "same", "other"):
        (tmp_path / name).mkdir()
    whole = learn(tmp_path / "whole", 1e-3, 4)
    learn(tmp_path / "same", 1e-3, 2)
    assert learn(tmp_path / "same", 1e-3, 2) == whole
    halfway = learn(tmp_path / "other", 1e-3, 2)
    assert learn(tmp_path / "other", 0.0, 2) == halfway


def test_the_digest_names_the_numbers_and_not_the_text() -> None:
    plain, spelled = read("rate = 1e-3\n"), read("rate = 0.001  # why\ngroups = 64\n")
    assert plain.digest == spelled.digest
    assert plain.digest == read("rate = 1e-3\n[options]\nclip = 0.2\nentropy = 0.0\n").digest
    assert plain.digest != read("rate = 1e-3\n[options]\nclip = 0.3\n").digest
    assert plain.digest != read("rate = 2e-3\n").digest


def test_each_manifest_names_the_numbers_that_its_policy_was_learnt_by() -> None:
    """Whoever has a policy of a run can tell by which ``learner.toml`` it was made."""
    noted: list[bytes] = []

    class Asked(Lingering):
        def _status(self, sampling: SamplingTerms) -> SwarmStatus:
            for node, _ in self._open.values():
                newest = node.shardcast.newest
                if newest != NO_POLICY:
                    noted.append(node.shardcast.manifest(newest).note)
            return super()._status(sampling)

    perform(Asked())
    told = LearnerConfig(groups=8, rate=8e-4, evaluate_every=0).digest
    assert set(noted) == {bytes.fromhex(told)}
