"""What an owner lends of the machine, and when: rates, hours, a pause."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import trio
import trio.testing

from p2p.errors import ConfigError
from p2p.identity import KeyPair
from p2p.machine import open_world
from p2p.node.dashboard.snapshots import OwnView, in_words
from p2p.node.share import PAUSED, Rest, ShareConfig
from p2p.policy import PolicyVersion
from p2p.shardcast.bulk import Throttle
from p2p.transport.memory import MemoryNetwork
from p2p.wire import KI
from roles.contract.core.file import sign_run
from roles.protocol.standing import RoleStanding
from tests.support.nodes import CONFIG, WEIGHTS, member, swarm
from tests.support.runs import OWNER, RUN, TRAINER


@pytest.fixture
def east() -> Iterator[None]:
    """A machine eleven hours east of Greenwich."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TZ", "XXX-11")
        time.tzset()
        yield
    time.tzset()


@pytest.mark.usefixtures("east")
@pytest.mark.parametrize(
    ("hours", "wall", "is_open"),
    [
        ("", 0, True),
        ("10:00-12:00", 0, True),  # 1970 begins at eleven there
        ("11:01-12:00", 0, False),
        ("11:01-12:00", 60, True),
        ("10:00-11:00", 0, False),
        ("20:00-07:00", 0, False),
        ("20:00-07:00", 9 * 3600, True),
        ("20:00-07:00", 19 * 3600 + 59 * 60, True),
        ("20:00-07:00", 20 * 3600, False),
    ],
)
def test_hours_are_this_machines_and_may_pass_midnight(
    hours: str, wall: float, is_open: bool
) -> None:
    assert ShareConfig(hours=hours).is_open(wall) is is_open


async def test_a_paused_role_begins_nothing_finishes_its_work_and_says_so(
    tmp_path: Path,
) -> None:
    """The heartbeat, the status and the page say so; a restart changes nothing of it."""
    config = replace(CONFIG, share=ShareConfig(upload=64 * KI))
    opening = (MemoryNetwork(), tmp_path, TRAINER)
    async with member(*opening, document=RUN.document, config=config) as node:
        own = OwnView(node.host, [])
        with pytest.raises(ConfigError, match="no run yet"):
            await own.pause()
        own.node = node
        standing = RoleStanding(node, RUN, "trainer")
        node.membership.me.update(roles=("trainer",))
        await standing.wait()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(standing.watch)
            assert "paused" in await own.pause()
            await trio.testing.wait_all_tasks_blocked()
            assert "shoal resume" in standing.why_not
            standing.check()  # what it has begun it may sign
            await standing.wait_run()
            assert node.membership.me.profile.roles == ()
            assert node.membership.me.profile.upload == 64 * KI
            assert "paused (its owner has paused it" in in_words(node.health())
            assert ("lends", "upload at most 64 KiB/s") in own.view().facts
            with trio.move_on_after(0.05) as waited:
                await standing.wait()
            assert waited.cancelled_caught
            nursery.cancel_scope.cancel()
    assert (tmp_path / PAUSED).exists()
    async with member(*opening, config=config) as node:
        standing = RoleStanding(node, RUN, "trainer")
        assert "shoal resume" in standing.why_not
        async with trio.open_nursery() as nursery:
            nursery.start_soon(standing.wait)
            await trio.testing.wait_all_tasks_blocked()
            await node.rest.resume()  # the one who waits goes on
        assert not standing.why_not


async def test_an_edition_that_comes_while_the_engine_opens_lets_the_role_rest(
    tmp_path: Path,
) -> None:
    """A worker drew at the old temperature, signed under the new one, and was banned."""
    sampling = replace(RUN.terms.sampling, temperature=0.5)
    before = sign_run(replace(RUN.terms, sampling=sampling), OWNER)
    async with member(MemoryNetwork(), tmp_path, TRAINER, document=RUN.document) as node:
        assert "changes its" in RoleStanding(node, before, "trainer").why_not
        assert not RoleStanding(node, RUN, "trainer").why_not


async def test_a_role_rests_outside_its_hours(autojump_clock) -> None:
    told: list[float] = []
    async with open_world() as world:
        wall, began = 12 * 3600.0, world.now()  # noon in Greenwich
        world.wall = lambda: wall + world.now() - began  # type: ignore[method-assign]
        local = time.localtime(wall + 600)
        hours = f"{local.tm_hour:02}:{local.tm_min:02}-{(local.tm_hour + 1) % 24:02}:00"
        rest = Rest(world, ShareConfig(hours=hours), lambda: told.append(world.wall()))
        assert rest.why_not == f"it works from {hours} only"
        with trio.move_on_after(3 * 3600):
            await rest.watch()
    assert told == [pytest.approx(wall + 600, abs=60), pytest.approx(wall + 3600, abs=60)]


async def test_chunks_are_charged_where_they_leave_and_where_they_come(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    charged: dict[float, int] = {}

    async def charge(throttle: Throttle, size: int) -> None:
        charged[throttle._rate] = charged.get(throttle._rate, 0) + size
        await trio.lowlevel.checkpoint()

    monkeypatch.setattr(Throttle, "charge", charge)
    config = replace(CONFIG, share=ShareConfig(upload=1e9, download=2e9))
    async with swarm(tmp_path, KeyPair(b"w" * 32), config=config) as (trainer, worker):
        await trainer.world.disk.write("weights", WEIGHTS)
        await trainer.shardcast.publish(PolicyVersion(0), "weights")
        with trio.fail_after(30):
            await worker.shardcast.wait_policy(PolicyVersion(0))
        assert charged[1e9] == trainer.shardcast.stats.uploaded_as_origin > 0
        assert charged[2e9] == worker.shardcast.stats.from_origin
