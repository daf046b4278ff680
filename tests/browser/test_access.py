"""What people look at, wide and narrow, light and dark: nothing keeps anybody from reading it.

Each page is kept as a picture in build/screens.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import trio

from p2p.machine import open_world
from p2p.node.dashboard.core.picture import NodeView
from p2p.node.dashboard.page import write_report
from p2p.node.dashboard.server import Dashboard
from p2p.node.dashboard.snapshots import Snapshots
from sim.cli import main
from tests.browser.access import check_accessible
from tests.browser.looking import Look, looking_at
from tests.unit.test_dashboard import OWN, ROLES, Clockwork, scene, trainer_health

VIEWS = pytest.mark.parametrize(
    ("width", "scheme"), [(1200, "light"), (1200, "dark"), (390, "light"), (390, "dark")]
)


def test_what_nobody_can_read_is_found() -> None:
    """A checker that says nothing would let all pages pass."""
    page = "<html lang=en><title>x</title><main><h1>x</h1><img src='data:,'>"
    page += "<p style='color:%23ddd'>pale"
    with looking_at("data:text/html," + page) as look, pytest.raises(AssertionError) as told:
        check_accessible(look.page)
    assert "image-alt" in str(told.value)
    assert "color-contrast" in str(told.value)


def check(look: Look, name: str) -> None:
    look.keep(name)
    look.check_quiet()
    check_accessible(look.page)


@VIEWS
async def test_a_nodes_page(width: int, scheme: str) -> None:
    swarm = Clockwork()
    health = trainer_health(20)
    judged = {"accepted": 1234, "rejected": 2, "reasons": {"mantissas differ": 2}}
    health["roles"]["validator"] = {"accepted": 1234, "nodes": {"peer-1": judged}}
    swarm.now = replace(
        swarm.now, known={OWN: NodeView(health=health, says="learning: step 21")}
    )

    def look(url: str) -> None:
        with looking_at(url, width=width, scheme=scheme) as page:
            page.wait("canvas >> nth=1")
            check(page, f"node-{width}-{scheme}")
            page.page.click("#rows a >> nth=0")
            assert OWN in page.text("#peer")
            assert "learning: step 21" in page.text("#peer")
            assert "known since" in page.text("#peer")
            check(page, f"peer-{width}-{scheme}")
            page.page.click("#rows a:has-text('peer-1')")
            said = page.text("#peer")
            for words in ("linked to this node", "0.1.0", "1,234", "2 × mantissas differ"):
                assert words in said

    async with open_world() as world, trio.open_nursery() as nursery:
        snapshots = Snapshots(world, ROLES, swarm.scene)
        nursery.start_soon(snapshots.run)
        async with Dashboard(world, snapshots).at_address("127.0.0.1", 0) as url:
            await trio.to_thread.run_sync(look, url)
        nursery.cancel_scope.cancel()


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Pages that need no node: of a run, of a simulation, of two sweeps."""
    folder = tmp_path_factory.mktemp("pages")
    found = {name: folder / f"{name}.html" for name in ("report", "run", "seeds", "sweep")}
    small = ("churn", "--nodes", "8", "--duration", "60", "--report")
    seeds = ("--jobs", "1", "--seeds", "1-3")
    assert main(["run", *small, str(found["run"])]) == 0
    assert main(["sweep", *small, str(found["seeds"]), *seeds]) == 0
    varied = ("--set", "latency=0.01,0.05,0.1", "--set", "link.loss=0,0.02")
    assert main(["sweep", *small, str(found["sweep"]), *seeds, *varied]) == 0
    found["report"].write_text(trio.run(written), encoding="utf-8")
    return found


async def written() -> str:
    async with open_world() as world:
        snapshots = Snapshots(world, ROLES, scene)
        snapshots.look()
        return write_report(snapshots.whole())


@VIEWS
@pytest.mark.parametrize("name", ["report", "run", "seeds", "sweep"])
def test_a_page_as_a_file(files: dict[str, Path], name: str, width: int, scheme: str) -> None:
    with looking_at(files[name].as_uri(), width=width, scheme=scheme) as page:
        page.wait("canvas")
        check(page, f"{name}-{width}-{scheme}")
        page.page.hover(".u-over >> nth=0")
        told = page.text(".tip >> nth=0")
        assert {"run": "of 8 nodes live", "report": "greedy"}.get(name, "") in told
