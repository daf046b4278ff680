"""The dashboard: what it shows, to whom, and at what cost."""

from __future__ import annotations

import hashlib
import json
import re
import stat
import subprocess
import sys
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import h11
import pytest
import trio
from hypothesis import given, strategies as st
from prometheus_client.parser import text_string_to_metric_families

from p2p.errors import ConfigError
from p2p.machine import open_world
from p2p.node.dashboard.commands import describe, following, peer_lines, read
from p2p.node.dashboard.core.picture import (
    MAX_ROWS,
    Attendance,
    History,
    NodeView,
    SwarmView,
    draw,
)
from p2p.node.dashboard.metrics import write_metrics
from p2p.node.dashboard.page import PARTS, read_part, write_report
from p2p.node.dashboard.server import Dashboard
from p2p.node.dashboard.snapshots import KEPT, MAX_VIEWERS, Snapshots
from p2p.node.entries import installed
from p2p.node.folders import SOCKET
from p2p.node.panels import PANELS, load_panels
from roles.own.__main__ import main as run_main
from tests.support.scenarios import embedded

ROLES = load_panels(installed(PANELS))
OWN = "12D3KooWOwn"
HOSTILE = "</script><script>document.title='owned'</script>\u202egnihton\u0000\ud800"


def member(number: int) -> dict[str, Any]:
    return {"roles": ["inference"], "policy": number, "load": 0.5, "upload": 10**6,
            "version": "0.1.0"}  # fmt: skip


def trainer_health(step: int, said: str = "12") -> dict[str, Any]:
    return {
        "connected": 3,
        "members": 2,
        "shardcast": {"newest": step, "from_peers": 10 * step},
        "flows": {"from": {"other": 7}, "to": {}},
        "roles": {
            "trainer": {
                "step": step,
                "learnt_steps": step,
                "steps": 60,
                "held_out": 64,
                "train_reward": 0.5,
                "curve": [[at, 0.1, 0.2] for at in range(0, step + 1, 10)],
                "last_step": {"step": step, "loss": 0.25, "entropy": 1.5},
                "samples": [[said, said, 1.0]],
                "staleness": {"0": 5, said: 6},
            }
        },
    }


def scene(peers: int = 3, step: int = 20, said: str = "12") -> SwarmView:
    return SwarmView(
        title=said, says=said, own=OWN, run={"name": said, "epoch": 1},
        known={OWN: NodeView(health=trainer_health(step, said))},
        members={f"peer-{number}": member(step) for number in range(peers)},
    )  # fmt: skip


class Clockwork:
    """A swarm that a test changes by hand."""

    def __init__(self) -> None:
        self.now = scene()

    def scene(self) -> SwarmView:
        return self.now


@asynccontextmanager
async def serving(host: str = "127.0.0.1") -> AsyncIterator[tuple[str, Snapshots, Clockwork]]:
    """A page's URL at a real socket, its snapshots (which look when it is told to)."""
    swarm = Clockwork()
    async with open_world() as world:
        snapshots = Snapshots(world, ROLES, swarm.scene)
        snapshots.look()
        async with Dashboard(world, snapshots).at_address(host, 0) as url:
            yield url, snapshots, swarm


async def get(url: str, path: str, **headers: str) -> tuple[int, Mapping[str, str], bytes]:
    """One answer of the server at ``url``, asked on loopback."""
    port = int(re.findall(r":(\d+)/", url)[0])
    asked = {
        "host": f"127.0.0.1:{port}",
        **{k.replace("_", "-"): v for k, v in headers.items()},
    }
    http, body = h11.Connection(h11.CLIENT), b""
    with trio.fail_after(10):
        async with await trio.open_tcp_stream("127.0.0.1", port) as stream:
            head = h11.Request(method="GET", target=path, headers=list(asked.items()))
            await stream.send_all(
                (http.send(head) or b"") + (http.send(h11.EndOfMessage()) or b"")
            )
            while True:
                event = http.next_event()
                if event is h11.NEED_DATA:
                    http.receive_data(await stream.receive_some(65536))
                elif isinstance(event, h11.Response):
                    response = event
                elif isinstance(event, h11.Data):
                    body += bytes(event.data)
                else:
                    fields = {k.decode(): v.decode() for k, v in response.headers}
                    return response.status_code, fields, body


# Whom it answers


async def test_a_page_of_another_site_gets_nothing() -> None:
    """Its server may let its own name lead to 127.0.0.1, and may make the browser ask in the
    background: neither is answered, nor takes one of the seats."""
    async with serving() as (url, snapshots, _):
        assert (await get(url, "/", host="evil.example"))[0] == 421
        assert (await get(url, "/api/picture", host="evil.example:80"))[0] == 421
        assert (await get(url, "/api/events", sec_fetch_site="cross-site"))[0] == 403
        assert snapshots.viewers == 0
        for host in ("localhost", "127.0.0.1:1", "[::1]:80"):
            assert (await get(url, "/healthz", host=host))[0] == 200
        assert (await get(url, "/", sec_fetch_site="cross-site", sec_fetch_mode="navigate"))[
            0
        ] == 200


async def test_off_loopback_it_asks_for_the_token_that_was_printed() -> None:
    async with serving("0.0.0.0") as (url, _, __):
        token = url.rpartition("?token=")[2]
        assert len(token) == 24
        for path in (
            "/",
            "/metrics",
            "/api/picture",
            "/api/events",
            "/?token=wrong",
            "/page.js",
        ):
            assert (await get(url, path))[0] == 401, path
        assert (await get(url, "/healthz"))[0] == 200
        status, head, _ = await get(url, f"/?token={token}")
        assert (status, head["location"]) == (303, "/")
        assert "HttpOnly" in head["set-cookie"]
        assert "SameSite=Strict" in head["set-cookie"]
        cookie = head["set-cookie"].partition(";")[0]
        assert (await get(url, "/api/picture", cookie=cookie))[0] == 200
        assert (await get(url, "/metrics", authorization=f"Bearer {token}"))[0] == 200


async def test_every_answer_forbids_what_the_page_does_not_need() -> None:
    async with serving() as (url, _, __):
        for path in (*PARTS, "/api/picture", "/nowhere"):
            status, head, body = await get(url, path)
            assert status == (404 if path == "/nowhere" else 200)
            assert head["content-security-policy"].startswith("default-src 'none'")
            assert "unsafe" not in head["content-security-policy"]
            assert (head["x-content-type-options"], head["cache-control"]) == (
                "nosniff",
                "no-store",
            )
            assert body


async def test_the_socket_of_the_folder_is_for_its_owner(tmp_path: Path) -> None:
    """What lay there was left by a node that was killed."""
    swarm = Clockwork()
    (tmp_path / SOCKET).write_text("left behind")
    async with open_world() as world:
        snapshots = Snapshots(world, ROLES, swarm.scene)
        async with Dashboard(world, snapshots).at_folder(tmp_path):
            assert stat.S_IMODE((tmp_path / SOCKET).stat().st_mode) == 0o600
            whole = json.loads(await trio.to_thread.run_sync(read, tmp_path, "/api/picture"))
            assert "of" in describe(whole)
            assert len(peer_lines(whole["picture"]["peers"])) == 1 + 4
            heard = following(tmp_path)
            assert await trio.to_thread.run_sync(next, heard)
            swarm.now = scene(step=21)
            snapshots.look()
            told = await trio.to_thread.run_sync(next, heard)
            heard.close()
            assert told["picture"]["peers"][OWN]["policy"] == 21
    assert not (tmp_path / SOCKET).exists()
    with pytest.raises(ConfigError, match="no node"):
        read(tmp_path, "/api/picture")


# What it tells


async def test_a_viewer_is_told_all_there_is_and_the_curves_when_they_change() -> None:
    async with open_world() as world:
        swarm = Clockwork()
        swarm.now = scene(peers=1000, step=20)
        snapshots = Snapshots(world, ROLES, swarm.scene)
        snapshots.look()
        with snapshots.viewing() as viewer:
            assert _told(await viewer())["curves"]
            snapshots.look()
            assert "curves" not in _told(await viewer())
            swarm.now = scene(peers=999, step=21)
            snapshots.look()
            told = _told(await viewer())
        assert told["picture"]["peers"]["peer-999"]["state"] == "gone"
        assert told["picture"]["peers"]["peer-0"]["policy"] == 21
        assert [21, 0.25] in told["curves"][f"trainer 2 0 {OWN}"]


def _told(message: bytes) -> dict[str, Any]:
    value: dict[str, Any] = json.loads(message.removeprefix(b"data: "))
    return value


async def test_a_viewer_who_does_not_read_is_told_of_the_newest_only() -> None:
    async with open_world() as world:
        swarm = Clockwork()
        snapshots = Snapshots(world, ROLES, swarm.scene)
        with snapshots.viewing() as viewer:
            for step in range(400):
                swarm.now = scene(step=step)
                snapshots.look()
            assert _told(await viewer())["picture"]["peers"]["peer-0"]["policy"] == 399
            with trio.move_on_after(0) as waited:
                await viewer()
            assert waited.cancelled_caught


async def test_seats_are_few_and_are_given_back() -> None:
    async with serving() as (url, snapshots, _):
        taken = [snapshots.viewing() for _ in range(MAX_VIEWERS)]
        for seat in taken:
            seat.__enter__()
        status, _, body = await get(url, "/api/events")
        assert (status, b"close one" in body) == (503, True)
        for seat in taken:
            seat.__exit__(None, None, None)
        assert snapshots.viewers == 0


def test_what_strangers_say_is_bounded_and_stays_data() -> None:
    """A megabyte in each text, and markup that would end a script element."""
    loud = HOSTILE + "x" * 1_000_000
    health = trainer_health(20, loud)
    health["roles"]["validator"] = {
        "accepted": 1,
        "nodes": {f"{loud}{n}": {"accepted": n, "reasons": {loud: n}} for n in range(60)},
    }
    known = {OWN: NodeView(health=health, name=loud)}
    members = {"peer": {"roles": [loud] * 8, "version": loud}}
    loud_view = SwarmView(title=loud, says=loud, known=known, members=members)
    picture = draw(loud_view, ROLES, Attendance(), 0.0)
    assert len(json.dumps(picture)) < 600 * 2 * 3 * MAX_ROWS
    page = write_report({"picture": picture, "panels": [], "curves": {}, "wall": 0, "at": 0})
    assert "<script>document" not in page
    assert page.count("</script>") == 1 + 3  # the data, uPlot, draw, page
    assert "http://" not in re.sub(r"http://www\.w3\.org/\S+", "", page.partition("uPlot=")[0])


def test_who_has_gone_is_shown_for_a_while() -> None:
    seen = Attendance()
    alive, gone = {"state": "alive", "since": 5}, {"state": "gone", "since": 5}
    seen.see("a", 3.0)  # nobody looks at the page yet
    seen.complete({"a": {"state": "alive"}, "b": {"state": "alive"}}, 5.0)
    assert seen.complete({"a": {"state": "alive"}}, 6.0)["b"] == gone
    rows = seen.complete({"a": {}, "b": {"state": "alive"}}, 7.0)
    assert (rows["a"], rows["b"]) == ({"since": 3}, alive)
    seen.complete({"a": {}}, 8.0)
    assert "b" not in seen.complete({"a": {}}, 309.0)
    assert seen.complete({"a": {}, "b": {}}, 900.0)["b"] == {"since": 900}
    crowd = {str(number): {} for number in range(1000)}
    seen.complete(crowd, 901.0)
    assert len(seen.complete({}, 902.0)) == 32


async def _life(folder: Path, step: int) -> None:
    swarm = Clockwork()
    swarm.now = scene(step=step)
    async with open_world(folder) as world, trio.open_nursery() as nursery:
        snapshots = Snapshots(world, ROLES, swarm.scene)
        nursery.start_soon(partial(snapshots.run, keeps=True))
        await world.sleep(0.1)  # it reads what was kept, in a thread
        nursery.cancel_scope.cancel()


def test_a_node_that_has_stopped_has_left_its_page(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With the curves of its earlier lives; a page that is damaged costs no other."""
    for step in (20, 30):
        trio.run(_life, tmp_path / "trainer", step)
    broken = tmp_path / "inference-1" / KEPT
    broken.parent.mkdir()
    broken.write_text("{")
    page = tmp_path / "run.html"
    assert run_main(["report", str(tmp_path), "-o", str(page)]) == 0
    assert f"{broken}: damaged, and left out" in capsys.readouterr().err
    whole = embedded(page.read_text(encoding="utf-8"), "data")
    says = "Held-out reward 0.100 → 0.100, step 30 of 60; no node of it runs now"
    assert whole["picture"]["says"] == says
    (loss,) = [one for name, one in whole["curves"].items() if one[-1] == [30, 0.25]]
    assert loss == [[20, 0.25], [30, 0.25]]
    broken.unlink()
    own = tmp_path / "trainer" / KEPT
    for damage in ("{", "[1]", '{"panels": 1, "curves": 2}'):
        own.write_text(damage)
        trio.run(_life, own.parent, 30)
        assert json.loads(own.read_text())["curves"]
    own.unlink()
    assert run_main(["report", str(tmp_path), "-o", str(page)]) == 2
    assert "nor one that has left its page" in capsys.readouterr().err


# Laws of the core


@given(st.lists(st.integers(0, 5000), min_size=1, max_size=60), st.integers(1, 60))
def test_a_curve_is_bounded_in_order_and_ends_where_the_run_is(starts: Any, each: int) -> None:
    """Also when a run goes back, and when the same point is told again and again."""
    history = History()
    for start in starts:
        for x in range(start, start + each):
            for _ in range(2):
                history.note("s", [(float(x), 1.0)])
    points = history.curves()["s"]
    assert len(points) <= 512
    xs = [x for x, _ in points]
    assert xs == sorted(set(xs))
    assert xs[-1] <= starts[-1] + each - 1


def test_a_long_curve_keeps_its_whole_length() -> None:
    history = History()
    for x in range(100_000):
        history.note("s", [(float(x), 0.0)])
    points = history.curves()["s"]
    assert 128 <= len(points) <= 512
    assert points[0][0] == 0
    assert points[-1][0] > 99_000
    for number in range(128):
        history.note(str(number), [(0.0, 0.0)])
    assert len(history.curves()) == 64


# Numbers for Prometheus


def test_as_many_series_for_a_thousand_peers_as_for_ten() -> None:
    def series(peers: int) -> list[tuple[str, Any]]:
        text = write_metrics(scene(peers), ROLES, 0).decode()
        assert "peer-" not in text
        assert OWN not in text
        families = text_string_to_metric_families(text)
        return [
            (one.name, tuple(one.labels.items()))
            for family in families
            for one in family.samples
        ]

    assert series(10) == series(1000)
    assert len(set(series(10))) == len(series(10))
    assert all(name.startswith("shoal_") for name, _ in series(10))


def numbers(of: SwarmView) -> dict[str, float]:
    families = text_string_to_metric_families(write_metrics(of, ROLES, 0).decode())
    return {
        f"{one.name}{sorted(one.labels.items())}": one.value
        for family in families
        for one in family.samples
    }


def test_what_a_status_lacks_is_no_zero() -> None:
    def without(health: Any, path: tuple[str, ...]) -> Any:
        first, *rest = path
        kept = {key: value for key, value in health.items() if key != first}
        return kept | ({first: without(health[first], tuple(rest))} if rest else {})

    def leaves(health: Any, path: tuple[str, ...] = ()) -> list[tuple[str, ...]]:
        found = [path] if path else []
        if isinstance(health, dict):
            for key, value in health.items():
                found += leaves(value, (*path, key))
        return found

    whole = scene()
    before = numbers(whole)
    (known,) = whole.known.values()
    for path in leaves(known.health):
        lacking = replace(
            whole, known={OWN: NodeView(health={"roles": {}} | without(known.health, path))}
        )
        after = numbers(lacking)
        wrong = {name for name, value in after.items() if not value and before.get(name)}
        assert not wrong, path


def test_roles_that_strangers_invent_make_no_series() -> None:
    invented = {f"p{n}": {"roles": [f"role-{n}"]} for n in range(100)}
    text = write_metrics(SwarmView(title="", says="", members=invented), ROLES, 0).decode()
    assert 'shoal_members{role="other"} 100.0' in text
    assert "role-7" not in text


# What is shipped


def test_the_page_asks_nobody_but_its_node_and_has_all_its_parts() -> None:
    page = read_part("index.html").decode()
    assert set(re.findall(r'(?:src|href)="(/[^"]+)"', page)) == set(PARTS) - {"/"}
    for name, _ in PARTS.values():
        text = read_part(name).decode()
        assert not re.search(
            r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(", text
        ) or name.startswith("uPlot")


def test_uplot_is_what_its_authors_published() -> None:
    said = read_part("uPlot.txt").decode()
    for name in ("uPlot.iife.min.js", "uPlot.min.css"):
        assert f"{hashlib.sha256(read_part(name)).hexdigest()}  {name}" in said


def test_a_node_that_nobody_asks_imports_no_server() -> None:
    code = ("import sys, p2p.node.cli; print(sorted({'hypercorn', 'prometheus_client', 'h11',"
            " 'roles'} & set(sys.modules)))")  # fmt: skip
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[]"
