"""The page in a real browser: what strangers said is text in it, and it goes on by itself."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import trio

from p2p.machine import open_world
from p2p.node.dashboard.page import write_report
from p2p.node.dashboard.server import Dashboard
from p2p.node.dashboard.snapshots import Snapshots
from p2p.wire import MIB
from tests.browser.looking import Look, looking_at
from tests.counting import calls_at_most
from tests.sweeps import DEEP
from tests.unit.test_dashboard import HOSTILE, OWN, ROLES, Clockwork, scene

CHANGES = 300 if DEEP else 8
"""Seconds for which a swarm of 1,000 changes."""
CALLS_OF_A_CHANGE = 400_000
"""What 0.03 CPU seconds are enough for, which it never took."""
MARKUP = "<img src=x onerror=\"document.title='owned'\"><b>bold</b>" + HOSTILE


def check_is_text(look: Look) -> None:
    look.wait("canvas >> nth=1")
    assert look.page.title() != "owned"
    assert look.page.locator("main img, main b b").count() == 0
    assert "<img src=x onerror=" in look.text("#says")
    assert "\u202e" not in look.page.content().partition("<script")[0]
    assert "peer-1" in look.text("#rows")
    assert "3 inference nodes, 1 trainer node. 4 hold policy 20." in look.text("#census")
    look.check_quiet()


@pytest.mark.parametrize(("width", "scheme"), [(1200, "light"), (390, "dark")])
async def test_strangers_words_are_text_and_what_changes_is_seen(
    width: int, scheme: str
) -> None:
    swarm = Clockwork()
    swarm.now = scene(said=MARKUP)

    def look(url: str) -> None:
        with looking_at(url, width=width, scheme=scheme) as page:
            check_is_text(page)
            swarm.now = scene(peers=2, step=21, said=MARKUP)
            page.wait("#rows .gone")
            page.wait("#tiles bdi:text('21 of 60')")
            page.page.click("#rows a >> nth=0")
            assert OWN in page.text("#peer")
            page.check_quiet()

    async with open_world() as world, trio.open_nursery() as nursery:
        snapshots = Snapshots(world, ROLES, swarm.scene)
        nursery.start_soon(snapshots.run)
        async with Dashboard(world, snapshots).at_address("127.0.0.1", 0) as url:
            await trio.to_thread.run_sync(look, url)
        nursery.cancel_scope.cancel()


async def test_a_report_is_the_page_without_a_node(tmp_path: Path) -> None:
    async with open_world() as world:
        snapshots = Snapshots(world, ROLES, partial(scene, said=MARKUP))
        snapshots.look()
        report = tmp_path / "report.html"
        report.write_text(write_report(snapshots.whole()), encoding="utf-8")

    def look() -> None:
        with looking_at(report.as_uri()) as page:
            check_is_text(page)
            assert "as of" in page.text("#pulse")
            page.page.evaluate("location.hash = 'peer=constructor'; redraw()")
            page.wait("#peer[hidden]")
            page.check_quiet()

    await trio.to_thread.run_sync(look)


async def test_a_thousand_peers_that_change_each_second_cost_little() -> None:
    """What the page's heap grows by, and how many calls the node makes for a viewer. In a deep
    run it is five minutes."""
    swarm = Clockwork()
    swarm.now = scene(peers=1000)
    seen = trio.Event()

    def look(url: str) -> float:
        with looking_at(url) as page:
            page.page.set_default_timeout(3000 * CHANGES + 60_000)
            page.wait("#rows tr >> nth=50")
            before = page.heap()
            trio.from_thread.run_sync(seen.set)
            page.wait(f"#tiles bdi:text-is('{20 + CHANGES} of 60')")
            grown = page.heap() - before
            page.check_quiet()
            return grown

    async with open_world() as world, trio.open_nursery() as nursery:
        snapshots = Snapshots(world, ROLES, swarm.scene)

        async def change() -> None:
            await seen.wait()
            for step in range(21, 21 + CHANGES):
                swarm.now = scene(peers=1000, step=step)
                with calls_at_most(CALLS_OF_A_CHANGE):
                    snapshots.look()
                    await world.sleep(1.0)  # in which the server writes

        nursery.start_soon(change)
        async with Dashboard(world, snapshots).at_address("127.0.0.1", 0) as url:
            grown = await trio.to_thread.run_sync(look, url)
        nursery.cancel_scope.cancel()
    assert grown <= 10 * MIB
