"""What people read of a node's answers: now and then, and at no cost to its work."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from roles.engines.base import Completion, Group
from roles.envs import sort
from roles.envs.client import LocalEnvironment
from roles.envs.mix import EnvironmentPart, EnvironmentSetup, open_mix
from roles.inference.glance import EVERY, KEPT, Glance

SEED = bytes(32)


class Watch:
    def __init__(self) -> None:
        self.time = 0.0

    def now(self) -> float:
        return self.time


def full_place(answer: str) -> Any:
    group = Group(7, (Completion(sort.encode(answer), ()),))
    order = SimpleNamespace(task_seeds=lambda _: [SEED, SEED])
    return SimpleNamespace(order=order, index=3, groups=lambda: (group,))


async def test_some_answers_are_read_along_with_what_they_earn() -> None:
    environment, world = LocalEnvironment(open_mix(setup())), Watch()
    task = sort.SortEnvironment().task(SEED)
    glance = Glance(world, environment)  # type: ignore[arg-type]
    right = sort.decode(task.answer)
    await glance.look(full_place(right))
    await glance.look(full_place("12$"))  # too soon
    world.time += EVERY
    await glance.look(full_place("12$"))
    question = sort.decode(task.prompt)
    assert glance.samples == [(question, "12$", 0.0), (question, right, 1.0)]
    for _ in range(2 * KEPT):
        world.time += EVERY
        await glance.look(full_place("12$"))
    assert len(glance.samples) == KEPT


async def test_an_environment_that_fails_is_looked_at_no_more() -> None:
    environment, world = LocalEnvironment(open_mix(setup())), Watch()
    glance = Glance(world, environment)  # type: ignore[arg-type]
    world.time = 100 * EVERY
    place = full_place("1$")
    place.order.task_seeds = lambda _: [{}]  # no seed: the environment raises
    await glance.look(place)
    world.time += 100 * EVERY
    await glance.look(full_place("12$"))
    assert glance.samples == []


def setup() -> EnvironmentSetup:
    return EnvironmentSetup(parts=(EnvironmentPart(name="sort"),))
