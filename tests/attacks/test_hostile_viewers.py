"""Who asks a node's page for more than to be shown something, and peers who lie to be shown."""

from __future__ import annotations

import json
import logging
import math
import re
from contextlib import suppress
from dataclasses import replace
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import h11
import pytest
import trio

from p2p.errors import ConfigError
from p2p.machine import open_world
from p2p.membership.heartbeat import MAX_NAME
from p2p.node.dashboard import server
from p2p.node.dashboard.commands import describe, following, read
from p2p.node.dashboard.core.picture import SwarmView
from p2p.node.dashboard.snapshots import Snapshots
from p2p.node.process import logging_to
from p2p.policy import MAX_POLICY
from roles.inference.status import InferenceCounts, life_of
from roles.own.status import Doorbell, SwarmStatus
from roles.protocol.core.account import (
    MAX_COUNT,
    Account,
    Fates,
    TrainerDoing,
    decode_account_untrusted,
)
from tests.unit.test_dashboard import ROLES, get, scene, serving


@pytest.mark.parametrize(
    "rest",
    [
        "Host: 127.0.0.1\r\nConnection: close\r\n\r\n",
        "Host: 127.0.0.1\r\n\r\n",
        "Host: evil.example\r\n\r\n",
        "Host: 127.0.0.1\r\nContent-Length: 9\r\n\r\n",
        "Host: 127.0.0.1\r\n\r\nGET",
    ],
)
async def test_whoever_has_had_an_answer_and_says_no_more_gives_the_seat_back(
    monkeypatch: pytest.MonkeyPatch, rest: str
) -> None:
    """Each request left its connection open for ever, also one that was refused: a page of
    another site needed 64 to lock the node's owner out."""

    def limits(http: Any) -> Any:
        return http.EdgeConfig(connections=1, idle=0.05)

    monkeypatch.setattr(server, "_limits", limits)
    async with serving() as (url, _, __):
        port = int(re.findall(r":(\d+)/", url)[0])
        with trio.fail_after(10):
            async with await trio.open_tcp_stream("127.0.0.1", port) as stream:
                await stream.send_all(b"GET /healthz HTTP/1.1\r\n" + rest.encode())
                while await stream.receive_some(65536):
                    pass
            assert (await get(url, "/healthz"))[0] == 200


@pytest.mark.parametrize(
    "said",
    ["", "GET", "GET /healthz HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n",
     "POST / HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 9\r\n\r\n"],
)  # fmt: skip
async def test_whoever_has_gone_gives_the_seat_back_at_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, said: str
) -> None:
    """hypercorn kept it for the idle time: 64 commands in half a minute, or a page that was
    loaded eleven times, found no seat; of the public edge, 16 of one address."""
    monkeypatch.setattr(server, "_limits", lambda http: http.EdgeConfig(connections=1))
    async with serving() as (url, _, __):
        port = int(re.findall(r":(\d+)/", url)[0])
        with trio.fail_after(10):
            async with await trio.open_tcp_stream("127.0.0.1", port) as stream:
                await stream.send_all(said.encode())
            status = 0
            while status != 200:
                with suppress(trio.BrokenResourceError, h11.RemoteProtocolError):
                    status = (await get(url, "/healthz"))[0]
    assert not caplog.records


@pytest.mark.parametrize(
    "said", [b"", b"\x00\xff\r\n\r\n", b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\n{"]
)
async def test_a_node_that_breaks_off_is_said_in_a_sentence(
    tmp_path: Path, said: bytes
) -> None:
    """One that was killed, or had no seat left, ended ``shoal status`` and a whole report with
    a traceback."""
    listener = trio.socket.socket(trio.socket.AF_UNIX)

    async def answer() -> None:
        stream, _ = await listener.accept()
        await stream.recv(1000)
        await stream.send(said)
        stream.close()

    with listener:
        await listener.bind(str(tmp_path / server.SOCKET))
        listener.listen()
        with trio.fail_after(10):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(answer)
                with pytest.raises(ConfigError, match="broke off"):
                    await trio.to_thread.run_sync(read, tmp_path, "/api/picture")


async def test_a_node_works_where_nothing_can_be_asked(tmp_path: Path) -> None:
    """What no socket can replace, or a disk that has no sockets, ended the node."""
    (tmp_path / server.SOCKET / "x").mkdir(parents=True)
    async with open_world() as world:
        dashboard = server.Dashboard(world, Snapshots(world, {}, scene))
        async with dashboard.at_folder(tmp_path):
            await trio.lowlevel.checkpoint()
        assert (tmp_path / server.SOCKET / "x").is_dir()
        with pytest.raises(ConfigError, match="no name"):
            async with dashboard.at_address("a" * 64, 0):
                pass


async def test_a_role_whose_health_raises_ends_no_node(autojump_clock: Any) -> None:
    """The page is looked for each second, also where nobody has asked for one."""
    looks = list[int]()

    def raising() -> SwarmView:
        looks.append(1)
        raise ValueError("a bug of a role, or a lie that found one")

    async with open_world() as world:
        with trio.move_on_after(3.5):
            await Snapshots(world, {}, raising).run()
    assert len(looks) > 3


async def test_a_crowd_that_says_all_it_may_shuts_no_page(tmp_path: Path) -> None:
    """300 peers with long names of roles made the first message larger than what may wait for
    a viewer: every page was closed before it began."""
    wide = "\U0001f41f" * MAX_NAME
    said = {"roles": [wide] * 8, "policy": MAX_POLICY, "load": 0.999,
            "upload": 2**53 - 1, "version": wide}  # fmt: skip
    crowd = replace(scene(), members={f"{number:052d}": said for number in range(1024)})
    async with open_world() as world:
        snapshots = Snapshots(world, ROLES, lambda: crowd)
        for series, x in product(range(128), range(512)):
            snapshots._history.note(f"trainer 2 0 {series}", [(x + 0.123456, 0.123456)])
        async with server.Dashboard(world, snapshots).at_folder(tmp_path):
            heard = following(tmp_path)
            assert (await trio.to_thread.run_sync(next, heard))["curves"]
            heard.close()


# What is shown of what others say


def test_no_answer_of_a_trainer_ends_a_worker() -> None:
    """One count near the largest that the wire has, times the group's size, raised an error
    where the screen and the page look each second: every worker of the run ended."""
    most, book = Fates(learnt=MAX_COUNT, stale=MAX_COUNT, waiting=MAX_COUNT), SimpleNamespace()
    book.verdicts, book.made, book.tokens = (
        {"accepted": 3, "rejected": 0, "inconclusive": 0},
        3,
        1,
    )
    counts: Any = InferenceCounts(rollouts=8, group_size=4)
    for total in (most, Fates(learnt=1)):
        told = Account(doing=TrainerDoing.WAITS, own=most, total=total).to_bytes()
        shown: Any = book
        life = life_of(counts, shown, decode_account_untrusted(told))
        assert (life.learnt, life.stale, life.waiting) == (24, 24, 24)
        assert life.share == 1.0


def test_no_word_of_a_peer_makes_a_line_of_a_log_or_a_command_of_a_terminal(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A JSON line was none for NaN, several for many readers, and nothing for half a
    character; in text a peer wrote lines of its own, and into the window's title."""
    # pytest's own handlers cannot hand half a character from process to process
    monkeypatch.setattr(logging.getLogger(), "handlers", [])
    said = "x\n2026 ERROR p2p gone\x1b]0;owned\x07\x9b2J\x85\u2028\u2029\u202e\udc80"
    for form in ("json", "text"):
        with logging_to(tmp_path / form, "info", form=form):
            log = logging.getLogger("p2p.test")
            log.warning("run.asked reason=%s load=%f rate=%f", said, math.nan, math.inf)
            try:
                raise ValueError(said)
            except ValueError:
                log.warning("run.failed", exc_info=True)
    asked, failed = (tmp_path / "json").read_text("utf-8").splitlines()
    fields = json.loads(asked, parse_constant=pytest.fail)["fields"]
    assert fields == {"reason": said, "load": "nan", "rate": "inf"}
    assert said in json.loads(failed)["traceback"]
    first, *rest = (tmp_path / "text").read_text("utf-8").split("\n")
    assert r"x\n2026 ERROR p2p gone\x1b]0;owned" in first
    assert rest[0].endswith("run.failed")
    told = capfd.readouterr().err
    assert all(sign.isprintable() for sign in (told + first + "".join(rest)).replace("\n", ""))


def test_guests_and_values_move_no_cursor_and_few_are_greeted() -> None:
    """A guest's roles went to the terminal of the demo as they came."""
    said, bell, lines = "x\x1b]0;owned\x07\x9b2J", Doorbell(), list[str]()
    for number in range(1000):
        guest = {"peer": f"peer-{number}", "roles": [said], "policy": 1}
        status = SwarmStatus({"a": {"peer": "own", "roles": {}, "known": [guest]}}, 1)
        lines += bell.news(status)
    assert 8 < len(lines) < 100
    assert all(map(str.isprintable, lines))
    value = {
        "kind": "figures",
        "role": "x",
        "number": "0",
        "title": "t",
        "values": [{"label": "", "unit": "", "of": ""}],
        "lead": False,
    }
    roles = {"x": {"own": {"0": [said]}}}
    picture = {"title": "", "says": "", "facts": [], "own": "own", "roles": roles, "terms": []}
    text = describe({"picture": picture, "panels": [value], "curves": {}})
    assert text.replace("\n", "").isprintable()
