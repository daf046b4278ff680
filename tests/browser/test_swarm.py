"""The demo's page in a browser, while a swarm of real processes learns: who is there, what
flows, who is caught, and who was killed."""

from __future__ import annotations

from pathlib import Path

import trio

from roles.demo.command import prepare
from roles.demo.shows import SORTING
from roles.own.layout import RunFolder
from roles.own.nodes import LocalNodes
from roles.own.stage import open_page, write_page
from tests.browser.access import check_accessible
from tests.browser.looking import looking_at

KILLED = "inference-2"
STEP = ".tile:has(span:text-is('step'))"


async def test_a_swarm_is_seen_to_learn_to_catch_and_to_lose_a_worker(tmp_path: Path) -> None:
    def look(url: str, nodes: LocalNodes) -> None:
        with looking_at(url) as look:
            look.wait("#rows tr >> nth=5")
            look.wait("#first canvas")
            look.wait(".flow.now")
            look.wait("#counts .bars li")  # why the cheat is rejected
            look.wait("#panels tr:has-text('cheat-1')")
            trio.from_thread.run_sync(nodes.children[KILLED].kill)
            look.page.wait_for_selector("#rows tr.gone", timeout=20_000)
            assert KILLED in look.text("#rows tr.gone")
            trio.from_thread.run(nodes.start_child, KILLED)
            look.page.wait_for_selector("#rows tr.gone", state="detached")
            assert look.page.locator("#rows tr").count() == 6
            step = int(look.text(f"{STEP} b").split()[0])
            look.wait(f"{STEP}:has(bdi:text-is('{step + 2} of {SORTING.steps}'))")
            look.keep("demo")
            look.check_quiet()
            check_accessible(look.page)

    folder = RunFolder(tmp_path)
    async with trio.open_nursery() as nursery:
        nodes = LocalNodes(folder, prepare(SORTING, 0, folder), SORTING.cast, nursery)
        try:
            async with open_page(nodes, ("127.0.0.1", 0), "a test") as (url, feed):
                await nodes.start()
                await trio.to_thread.run_sync(look, url, nodes)
                page = write_page(feed, tmp_path / "report.html")
        finally:
            with trio.CancelScope(shield=True):
                await nodes.stop()
        nursery.cancel_scope.cancel()
    assert "<script" in page.read_text(encoding="utf-8")
