"""The fake engine: everything a function of its inputs, and each cheat with its own kind of
evidence.
"""

from dataclasses import replace
from random import Random

import pytest

from proofs.checks import Limits, Reason, judge
from roles.engines.base import GroupTask, Sampling, draw_all
from roles.engines.client import open_engine
from roles.engines.config import DeviceProfile, EngineConfig
from roles.engines.fake import decode_policy, first_policy, next_policy
from roles.envs.sort import SortEnvironment
from tests.support.counting_world import make_world

SORT = SortEnvironment()
SAMPLING = Sampling(1.0, 12, 8)
CONFIG = EngineConfig(kind="fake", profile=DeviceProfile(policy_bytes=4096))


def make_tasks(count: int) -> list[GroupTask]:
    rng = Random(7)
    return [
        GroupTask(
            group,
            SORT.task(rng.randbytes(32)).prompt,
            tuple(rng.randbytes(32) for _ in range(8)),
        )
        for group in range(count)
    ]


async def reasons(
    generator: EngineConfig, steps: int, cheat: Sampling = SAMPLING
) -> set[Reason]:
    """Why groups of a policy ``steps`` old are judged as they are by a validator of
    `CONFIG`.
    """
    _, world = make_world()
    tasks = make_tasks(40)
    async with open_engine(world, CONFIG) as learner, open_engine(world, generator) as theirs:
        await learner.open("checkpoint")
        await theirs.open("theirs")
        await theirs.save("theirs", "old")
        for _ in range(steps):
            await learner.step([])
        await learner.save("checkpoint", "new")
        await theirs.load("old")
        groups = await draw_all(theirs, tasks, cheat)
        await learner.load("new")
        scored = await learner.score(tasks, groups, SAMPLING)
    return {judge(one.evidence, Limits.fp32()).reason for one in scored}


async def test_cheats_are_told_apart() -> None:
    assert await reasons(CONFIG, 1) == {Reason.MANTISSA_MEAN}
    assert await reasons(replace(CONFIG, seed=1), 0) == {Reason.EXPONENTS}
    greedy = await reasons(CONFIG, 0, replace(SAMPLING, temperature=0.0))
    assert greedy <= {Reason.DRAW_DISTANCE, Reason.WITHIN_LIMITS}
    assert Reason.DRAW_DISTANCE in greedy


async def test_a_forged_proof_and_edited_tokens_are_seen() -> None:
    _, world = make_world()
    tasks = make_tasks(1)
    async with open_engine(world, CONFIG) as engine:
        await engine.open("c")
        await engine.save("c", "w")
        await engine.load("w")
        (group,) = await draw_all(engine, tasks, SAMPLING)
        first, *others = group.completions
        edited = replace(first, tokens=(5, *first.tokens[1:]))
        unproven = replace(first, proof=b"")
        forged = [replace(group, completions=(one, *others)) for one in (unproven, edited)]
        seen = [
            judge((await engine.score(tasks, [one], SAMPLING))[0].evidence, Limits.fp32())
            for one in forged
        ]
    assert [one.reason for one in seen] == [Reason.MALFORMED_PROOF, Reason.EXPONENTS]


async def test_continuing_from_a_checkpoint_changes_nothing() -> None:
    _, world = make_world()
    async with open_engine(world, CONFIG) as one, open_engine(world, CONFIG) as other:
        await one.open("a")
        await one.step([])
        await one.save("a", "w1")
        await one.step([])
        await one.save("b", "w2")
        assert await other.open("a") == 1
        await other.step([])
        await other.save("c", "w3")
    assert await world.disk.read("w2") == await world.disk.read("w3")


async def test_time_is_spent() -> None:
    counting, world = make_world()
    async with open_engine(world, CONFIG) as engine:
        await engine.open("c")
        assert counting.spent == CONFIG.profile.open_seconds
        await engine.save("c", "w")
        await engine.load("w")
        before = counting.spent
        groups = await draw_all(engine, make_tasks(5), SAMPLING)
        tokens = sum(len(one.tokens) for group in groups for one in group.completions)
        assert counting.spent - before == pytest.approx(tokens / CONFIG.profile.generate_rate)


def test_a_step_changes_little_of_the_policy() -> None:
    before = first_policy(CONFIG)
    after = next_policy(before, 0.04, [])
    changed = sum(a != b for a, b in zip(before.noise, after.noise, strict=True))
    assert 0 < changed <= len(before.noise) // 2 // 64
    assert decode_policy(after.encode()) == after
