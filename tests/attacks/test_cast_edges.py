"""Pushing, pulling and the HTTP edge among hostile folders, origins, clients and web pages."""

from __future__ import annotations

import contextlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock, patch

import pytest
import trio
from hypothesis import given, strategies as st

from p2p.cast.modes import Modes, decode_modes_untrusted, restore
from p2p.cast.puller import Pull, Replaces, check_replaced, deliver
from p2p.cast.view import Teller
from p2p.errors import BadMessage, ConfigError, StorageError
from p2p.node.process import locked_folder
from p2p.node.usage import interruptible
from p2p.policy import NO_POLICY, PolicyVersion
from p2p.shardcast.chunkset import Selection
from p2p.shardcast.http.library import FileChanged, Reader
from p2p.shardcast.http.server import EdgeConfig
from p2p.shardcast.index import Index, PolicyFile
from tests.e2e.http_world import edge_of, get, shelf_of, world_at
from tests.e2e.test_pull_http import DATA, ORIGIN, following
from tests.support.foreign import BOMBS
from tests.support.tickets import ticket

WEIGHTS = bytes(range(256)) * 4000


def stored(folder: Path, *paths: str) -> Index:
    """A version whole in ``folder``."""
    for path in paths:
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_bytes(b"new")
    return Index.of([PolicyFile(path, 3) for path in paths], [])


# What lies in the folder that a person named


@pytest.mark.parametrize("path", ["sub/x", "sub/deep/x"])
def test_a_folder_that_is_a_link_out_of_the_folder_is_not_written_through(
    tmp_path: Path, path: str
) -> None:
    """Folders of the second path were made behind the link before it was looked at."""
    index, out, elsewhere = stored(tmp_path / "w", path), tmp_path / "out", tmp_path / "e"
    for folder in (out, elsewhere):
        folder.mkdir()
    (out / "sub").symlink_to(elsewhere)
    with pytest.raises(StorageError, match="leads out of"):
        deliver(tmp_path / "w", index, out, "x")
    assert list(elsewhere.iterdir()) == []


def test_a_link_within_the_folder_is_followed_and_one_in_a_files_place_replaced(
    tmp_path: Path,
) -> None:
    index, out, mine = stored(tmp_path / "w", "a", "sub/x"), tmp_path / "out", tmp_path / "mine"
    mine.write_bytes(b"mine")
    (out / "real").mkdir(parents=True)
    (out / "sub").symlink_to(out / "real")
    (out / "a").symlink_to(mine)
    (out / "a.shoal-part").symlink_to(mine)
    deliver(tmp_path / "w", index, out, "x")
    assert mine.read_bytes() == b"mine"
    assert (out / "a").read_bytes() == (out / "real" / "x").read_bytes() == b"new"
    assert not (out / "a").is_symlink()


@pytest.mark.parametrize(
    "folders",
    [["../e/x"], ["/tmp/x"], [".ssh"], ["a/.git"], ["b", "B"], ["a"], ["a/in"], ["w" * 600]],
)
def test_empty_folders_of_a_hostile_pusher_are_made_nowhere(
    tmp_path: Path, folders: list[str]
) -> None:
    index, out = stored(tmp_path / "w", "a"), tmp_path / "out"
    deliver(tmp_path / "w", index, out, "x")
    table = Modes(("a", "../w/a", "/etc/passwd"), (), tuple(folders)).encode()
    with pytest.raises(BadMessage):
        restore(decode_modes_untrusted(table), index, out, "x", [0])
    assert sorted(one.name for one in tmp_path.rglob("*")) == ["a", "a", "out", "w"]
    assert (out / "a").stat().st_mode & 0o7022 == 0


def test_an_empty_folder_is_not_made_behind_a_link(tmp_path: Path) -> None:
    index, out = stored(tmp_path / "w", "a"), tmp_path / "out"
    deliver(tmp_path / "w", index, out, "x")
    (out / "link").symlink_to(tmp_path)
    with pytest.raises(StorageError, match="leads out of"):
        restore(Modes(folders=("link/in",)), index, out, "x", [0])
    assert not (tmp_path / "in").exists()


@given(st.one_of(st.binary(max_size=64), st.sampled_from([*BOMBS.values()])))
def test_a_table_of_modes_is_one_or_is_refused(data: bytes) -> None:
    with contextlib.suppress(BadMessage):
        assert decode_modes_untrusted(data).encode() == data


def test_two_pulls_into_one_folder_the_second_is_told(tmp_path: Path) -> None:
    state = tmp_path / ".shoal"
    with (
        locked_folder(state),
        pytest.raises(ConfigError, match=r"\.shoal"),
        locked_folder(state),
    ):
        pass


@pytest.mark.parametrize(("digest", "path"), [(bytes(32), "a"), (ticket().manifest, "")])
def test_a_ticket_for_another_content_is_told_from_ours(digest: bytes, path: str) -> None:
    """The ticket of a file put a folder's files where the pull began, a Makefile among them."""
    from p2p.cast.puller import _check_content

    class Signed:
        version = ticket().version

    signed: Any = Signed()
    signed.digest, other = digest, Index.of([PolicyFile(path, 3)], [])
    with pytest.raises(BadMessage, match="another content"):
        _check_content(signed, other, ticket())
    signed.digest = ticket().manifest
    _check_content(signed, Index.of([PolicyFile("a", 3)], []), ticket())


@pytest.mark.parametrize("name", ["a\x9b2Jb", "safe\u202etxt.exe", "a\u2028b"])
def test_a_name_that_a_terminal_would_obey_is_not_printed(
    tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    index, out = stored(tmp_path / "w", name), tmp_path / "out"
    out.mkdir()
    (out / name).write_bytes(b"of another size")

    def pull() -> int:
        check_replaced(index, out, "x", set())
        return 0

    assert interruptible(pull) == 2
    Teller("x", as_json=False).event("changed", f"{name} changed")
    said = capsys.readouterr()
    assert said.err
    assert said.out
    assert all(line.isprintable() for line in f"{said.err}{said.out}".split("\n"))


def pull_of(folder: Path, indexes: list[Index], newest: int, only: str | None = None) -> Pull:
    """A pull that follows versions that are here already, below ``folder``."""

    async def wait_policy(at_least: int) -> int:
        await trio.lowlevel.checkpoint()
        return at_least

    def manifest(version: int) -> Any:
        return SimpleNamespace(version=version, digest=b"", note=b"")

    async def wait_selected(version: int) -> tuple[Any, Index, str]:
        await trio.lowlevel.checkpoint()
        return manifest(version), indexes[version], f"v{version}"

    node: Any = SimpleNamespace(
        announce=lambda version: None,
        shardcast=SimpleNamespace(
            newest=newest,
            wait_policy=wait_policy,
            wait_selected=wait_selected,
            manifest=manifest,
            index=indexes.__getitem__,
            pin=lambda version: contextlib.nullcontext(f"v{version}"),
            stats=SimpleNamespace(from_origin=0, from_peers=0),
        ),
        world=SimpleNamespace(disk=SimpleNamespace(locate=folder.joinpath)),
    )
    options: Any = SimpleNamespace(
        replace=False, format=None, follow=True, command=None, json=True
    )
    named = ticket(version=PolicyVersion(0))
    selection = None if only is None else Selection(only)
    pull = Pull(node, named, options, folder / "out", Mock(), {}, set(), selection)

    async def wait_shown(wait: Any) -> Any:
        return await wait()

    pull._wait = wait_shown  # type: ignore[method-assign]
    return pull


@pytest.mark.parametrize("newest", [NO_POLICY, 0])
async def test_no_later_version_replaces_what_no_pull_has_put_there(
    tmp_path: Path, newest: int
) -> None:
    """Only the first version was compared with what was there."""
    out, versions = tmp_path / "out", (("a",), ("a", "train.py"))
    indexes = [stored(tmp_path / f"v{n}", *paths) for n, paths in enumerate(versions)]
    out.mkdir()
    (out / "train.py").write_bytes(b"mine")
    pull = pull_of(tmp_path, indexes, newest)
    with (
        patch("p2p.cast.puller._check_content"),
        pytest.raises(ConfigError, match=r"train\.py would be replaced"),
    ):
        await pull.run(Mock())
    assert (out / "a").read_bytes() == b"new"
    assert (out / "train.py").read_bytes() == b"mine"


@pytest.mark.parametrize("mine", [b"old", b"mine"])
async def test_a_chosen_file_replaces_nothing_without_a_question_and_the_others_need_none(
    tmp_path: Path, mine: bytes
) -> None:
    """Sizes were compared while it came, and nothing when it was here: a file of the same size,
    or one that came at once, replaced ours."""
    indexes = [stored(tmp_path / "v0", "a", "b")]
    (tmp_path / "out").mkdir()
    (tmp_path / "out/a").write_bytes(mine)
    (tmp_path / "v0/a").unlink()  # not chosen, so not fetched
    with patch("p2p.cast.puller._check_content"):
        await pull_of(tmp_path, indexes, NO_POLICY, "b").run(Mock())
        (tmp_path / "v0/a").write_bytes(b"new")
        with pytest.raises(ConfigError, match="a would be replaced"):
            await pull_of(tmp_path, indexes, NO_POLICY, "a").run(Mock())
    assert (tmp_path / "out/a").read_bytes() == mine


async def test_each_question_is_asked_however_many_come_while_one_waits(tmp_path: Path) -> None:
    """The second one ended the pull with a trace of the program."""
    pull = Pull(Mock(), ticket(), Mock(), tmp_path, Mock(), {}, set(), None)
    asked = list[str]()
    troubles = [Replaces([tmp_path / name]) for name in "ab"]

    async def show(_: Any) -> int:
        await trio.lowlevel.checkpoint()
        if troubles:
            raise ExceptionGroup("", [troubles.pop(0)])
        return 7

    async def ask(trouble: Replaces, _: Any) -> None:
        await trio.lowlevel.checkpoint()
        asked.append(trouble.others[0].name)

    with patch.object(pull, "_show", show), patch("p2p.cast.puller._ask", ask):
        assert await pull._wait(Mock()) == 7
    assert asked == ["a", "b"]


async def test_files_are_looked_at_once_in_five_seconds_however_often_they_are_asked_for(
    tmp_path: Path,
) -> None:
    """Each HEAD of the archive of 4,096 files, 60 bytes, looked at all of them again."""
    shelf, world = shelf_of(tmp_path, {"a": b"1", "b": b"2"}), world_at(tmp_path)
    with shelf.borrow(PolicyVersion(1)) as release:
        reader = Reader(world, release)
    pieces, walk, looks, now = list(reader.cut(release.raw(), 0, 2)), world.disk.walk, 0, 0.0

    async def counted(path: str, most: int) -> Any:
        nonlocal looks
        looks += 1
        return await walk(path, most)

    with patch.object(world.disk, "walk", counted), patch.object(world, "now", lambda: now):
        async with trio.open_nursery() as nursery:
            for _ in range(100):
                nursery.start_soon(reader.check, pieces)
        assert looks == 2
        (tmp_path / "1" / "a").write_bytes(b"longer")
        now = 5.0
        with pytest.raises(FileChanged):
            await reader.check(pieces)


# Origins that are followed


async def test_what_lies_where_a_version_is_put_together_is_no_part_of_it(
    tmp_path: Path,
) -> None:
    """Bytes of a killed pull behind its end once stayed; a link was written through."""
    folder, mine = tmp_path / "followed", tmp_path / "mine"
    folder.mkdir()
    mine.write_bytes(b"mine")
    for prepare in (
        lambda: (folder / "v3.part").write_bytes(bytes(len(DATA) + 1000)),
        lambda: (folder / "v3.part").symlink_to(mine),
        lambda: (folder / "v3.bin").symlink_to(mine),
    ):
        (folder / "v3.bin").unlink(missing_ok=True)
        prepare()
        async with following(tmp_path, ORIGIN) as (origins, _):
            [entry] = await origins.listed()
            await origins.fetch(entry)
        assert (folder / "v3.bin").read_bytes() == DATA
        assert not (folder / "v3.bin").is_symlink()
        assert mine.read_bytes() == b"mine"


# Clients and web pages


OWN_HOSTS = "localhost", "localhost:8000", "127.0.0.1:1", "[::1]:80"
OTHER_HOSTS = (
    "evil.example", "evil.example:80", "127.0.0.1.evil.example", "[::2]", "0.0.0.0", "a b",
    "localhost.evil.example", "][", "[::1", "127.0.0.1:80:90", "127.0.0.1@evil.example",
)  # fmt: skip


async def test_a_web_page_cannot_read_what_is_served_to_its_own_machine(tmp_path: Path) -> None:
    """Its server lets its name lead to 127.0.0.1, and the browser asks for that name."""
    async with edge_of(tmp_path, shelf_of(tmp_path, {"w": b"secret"})) as port:
        for host in (*OWN_HOSTS, *OTHER_HOSTS):
            async with await trio.open_tcp_stream("127.0.0.1", port) as stream:
                request = f"GET /v/1/raw HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n"
                await stream.send_all(request.encode())
                answer = b"".join([bytes(data) async for data in stream])
            is_own = host in OWN_HOSTS
            assert (b"secret" in answer) is is_own, host
            assert answer.split()[1] in ({b"200"} if is_own else {b"421", b"400"}), host


async def test_no_other_origin_may_read_an_answer(tmp_path: Path) -> None:
    async with edge_of(tmp_path, shelf_of(tmp_path, {"w": b"w"})) as port:
        for path in ("/", "/v/1/raw", "/distribution.txt", "/nothing"):
            _, headers, _ = await get(port, path, "Origin: http://evil.example")
            assert "access-control-allow-origin" not in headers


async def test_ranges_by_the_thousand_cost_one_body_at_most(tmp_path: Path) -> None:
    many = "Range: bytes=" + ",".join(f"{n}-{n + 9}" for n in range(0, 15_000, 10))
    nested = "Range: bytes=" + ",".join(["0-"] * 1300)
    async with edge_of(tmp_path, shelf_of(tmp_path, {"w": WEIGHTS})) as port:
        for header in (many, nested, "Range: bytes=" + "9" * 9000 + "-"):
            status, _, body = await get(port, "/v/1/raw", header)
            assert (status, len(body)) == (200, len(WEIGHTS))


async def test_a_head_that_drips_is_given_up_like_a_silent_one(tmp_path: Path) -> None:
    async def finish(stream: trio.SocketStream) -> None:
        await stream.send_all(b"GET / HTTP/1.1\r\nHost: localhost\r\n")
        while True:
            await stream.send_all(b"X: y\r\n")
            with trio.move_on_after(0.05):
                if not await stream.receive_some():
                    raise trio.BrokenResourceError

    config = EdgeConfig(idle=0.3)
    async with edge_of(tmp_path, shelf_of(tmp_path, {"w": b"w"}), config) as port:
        stream = await trio.open_tcp_stream("127.0.0.1", port)
        with trio.fail_after(60), pytest.raises(trio.BrokenResourceError):
            await finish(stream)
        await stream.aclose()
