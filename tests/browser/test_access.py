"""What people look at, wide and narrow, light and dark: nothing keeps anybody from reading it.

Each page is kept as a picture in build/screens.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import trio

from p2p.machine import open_world
from p2p.node.dashboard.core.picture import Health, NodeView, SwarmView
from p2p.node.dashboard.page import write_report
from p2p.node.dashboard.server import Dashboard
from p2p.node.dashboard.snapshots import Snapshots
from sim.cli import main
from tests.browser.access import check_accessible
from tests.browser.looking import Look, looking_at
from tests.e2e.cast_process import cast, folder_at
from tests.unit.test_dashboard import OWN, ROLES, Clockwork, scene, trainer_health

VIEWS = pytest.mark.parametrize(
    ("width", "scheme"), [(1200, "light"), (1200, "dark"), (390, "light"), (390, "dark")]
)

PAGES = ("report", "diloco", "volunteer", "run", "seeds", "sweep")
SHOWN = {
    "diloco": ("0.125", "24 of 24", "3 GB", "aaaaaaaa", "run(self):", "gone"),
    "volunteer": ("0.410", "37 of 60", "25 %", "your share of the work"),
}


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


def of(role: Health, *names: str) -> SwarmView:
    """A page of nodes that have the same health."""
    known = {
        name: NodeView(health={"roles": role}, name=name, is_gone=name == "trainer-2")
        for name in names
    }
    terms = [("learns", "A network learns"), ("recipe", "as ever")]
    return SwarmView(title="mine", says="It learns.", known=known, terms=terms, own=names[0])


def trainers() -> SwarmView:
    """Three sites of a run of DiLoCo, one of which was killed."""
    rounds = [
        {"step": step, "loss": 3 / step, "members": 3, "summed": 3} for step in range(1, 25)
    ]
    role = {"round": 24, "steps": 24, "digest": "a" * 16, "tokens": 10**6, "sent": 2 * 10**6,
            "parallel": 10**9, "rounds": rounds,
            "written": [["round 24: def", "run(self):", 1.781]]}  # fmt: skip
    return of({"trainer": role}, "trainer-1", "trainer-2", "trainer-3")


def volunteer() -> SwarmView:
    """A worker, who knows of the run what its trainer tells."""
    role = {"step": 37, "steps": 60, "run_curve": [[0, 0.16], [30, 0.41]],
            "life": {"share": 0.25, "made": 900, "accepted": 800}}  # fmt: skip
    return of({"inference": role}, "me")


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Pages that need no node: of a run, of a simulation, of two sweeps."""
    folder = tmp_path_factory.mktemp("pages")
    found = {name: folder / f"{name}.html" for name in PAGES}
    small = ("churn", "--nodes", "8", "--duration", "60", "--report")
    seeds = ("--jobs", "1", "--seeds", "1-3")
    assert main(["run", *small, str(found["run"])]) == 0
    assert main(["sweep", *small, str(found["seeds"]), *seeds]) == 0
    varied = ("--set", "latency=0.01,0.05,0.1", "--set", "link.loss=0,0.02")
    assert main(["sweep", *small, str(found["sweep"]), *seeds, *varied]) == 0
    for name, view in (("report", scene), ("diloco", trainers), ("volunteer", volunteer)):
        found[name].write_text(trio.run(written, view), encoding="utf-8")
    return found


async def written(view: Callable[[], SwarmView]) -> str:
    async with open_world() as world:
        snapshots = Snapshots(world, ROLES, view)
        snapshots.look()
        return write_report(snapshots.whole())


WIDTHS = """[...document.querySelectorAll("canvas")].map(
    (one) => [one.width / devicePixelRatio, one.getBoundingClientRect().width])"""
"""Of each curve: what it was drawn for, and what it has."""


@VIEWS
@pytest.mark.parametrize("name", PAGES)
def test_a_page_as_a_file(files: dict[str, Path], name: str, width: int, scheme: str) -> None:
    with looking_at(files[name].as_uri(), width=width, scheme=scheme) as page:
        page.wait("canvas")
        check(page, f"{name}-{width}-{scheme}")
        drawn = page.page.evaluate(WIDTHS)
        assert all(abs(canvas - shown) < 2 for canvas, shown in drawn), "a squeezed curve"
        page.page.hover(".u-over >> nth=0")
        told = page.text(".tip >> nth=0")
        assert {"run": "of 8 nodes live", "report": "greedy"}.get(name, "") in told
        for words in SHOWN.get(name, ()):
            assert words in page.text("main")


@VIEWS
def test_the_file_page_of_the_http_edge(width: int, scheme: str, tmp_path: Path) -> None:
    with (
        cast("serve", folder_at(tmp_path / "m"), "--http", "127.0.0.1:0", "--json") as serve,
        looking_at(serve.said("http")["urls"][0], width=width, scheme=scheme) as page,
    ):
        page.wait("td a")
        check(page, f"edge-{width}-{scheme}")
