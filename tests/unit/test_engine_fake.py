"""The fake engine: everything a function of its inputs, and each cheat with its own kind of
evidence."""

from dataclasses import replace
from random import Random

import pytest

from proofs.checks import Limits, Reason, judge
from roles.engines.base import GroupTask, Sampling, draw_all
from roles.engines.client import open_engine
from roles.engines.config import DeviceProfile, EngineConfig
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
