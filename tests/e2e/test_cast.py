"""``shoal push`` and ``pull`` as processes: what arrives, after interruptions too."""

from __future__ import annotations

import os
import urllib.request
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from random import Random

import pytest
import trio

from p2p import open_host
from p2p.cast.puller import deliver
from p2p.cast.ticket import decode_ticket_untrusted
from p2p.circuit.core.book import RelayConfig
from p2p.circuit.relay import relaying
from p2p.identity import KeyPair
from p2p.multiaddr import Multiaddr
from p2p.shardcast.index import Index, PolicyFile
from tests.e2e.cast_process import FILES, LOCAL, cast, contents, folder_at, push_of, wait_until
from tests.e2e.forked import Forks, Surroundings


def test_a_folder_reaches_two_machines_and_the_push_ends(tmp_path: Path) -> None:
    source = folder_at(tmp_path / "model")
    modes = {"config.json": 0o444, "sub/model-00002.bin": 0o4755}
    for name, mode in modes.items():
        (source / name).chmod(mode)
    (source / "results" / "of today").mkdir(parents=True)
    with push_of(source, tmp_path / "p", "--expect", 2) as (push, ticket):
        outs = [tmp_path / "one", tmp_path / "two"]
        with (
            cast("pull", ticket, "--out", outs[0], *LOCAL) as first,
            cast("pull", ticket, "--out", outs[1], "--seed", 0, *LOCAL) as second,
        ):
            assert [first.end(), second.end(), push.end()] == [0, 0, 0]
            sources = [one.said("whole") for one in (first, second)]
            # a finished pull was silent for five seconds
            assert first.said("passing_on")["seconds"] == 5
        assert all(contents(out) == FILES for out in outs)
        assert all(one["files"] == len(FILES) for one in sources)
        for out in outs:
            assert (out / "results" / "of today").is_dir()
            assert [(out / name).stat().st_mode & 0o7777 for name in modes] == [0o444, 0o755]
    # one copy on the disk: what is served is what is used
    assert os.stat(outs[0] / "model-00001.bin").st_nlink == 2
    assert not list(source.glob("**/.*"))


@pytest.mark.deep
def test_a_killed_pull_goes_on_and_equal_files_are_not_fetched_again(tmp_path: Path) -> None:
    source = tmp_path / "weights.bin"
    source.write_bytes(Random(0).randbytes(12_000_000))
    out = tmp_path / "out"
    with push_of(source, tmp_path / "p") as (_, ticket):
        with cast("pull", ticket, "--out", out, *LOCAL) as killed:
            part = out / ".shoal-weights.bin"
            wait_until(lambda: bool(list(part.glob("policies/*/*.part"))))
            killed.process.kill()
            killed.process.wait()
        assert not (out / "weights.bin").exists()
        with cast("pull", ticket, "--out", out, "--seed", 0, *LOCAL) as again:
            assert again.end() == 0
        assert (out / "weights.bin").read_bytes() == source.read_bytes()
        with cast("pull", ticket, "--out", out, "--seed", 0, *LOCAL) as once_more:
            assert once_more.end() == 0
            whole = once_more.said("whole")
        assert whole["from_origin"] + whole["from_peers"] == 0


@pytest.mark.deep
def test_a_killed_push_is_found_again_by_those_who_pull(tmp_path: Path) -> None:
    """It came back at another port: who pulled looked for it where it had been, for ever."""
    source = tmp_path / "weights.bin"
    source.write_bytes(Random(0).randbytes(96_000_000))
    outs = [tmp_path / "one", tmp_path / "two"]
    with ExitStack() as stack:
        push = partial(cast, "push", source, "--data", tmp_path / "p", *LOCAL)
        killed = stack.enter_context(push())
        ticket = killed.said("ticket")["ticket"]
        pulls = [
            stack.enter_context(cast("pull", ticket, "--out", out, "--seed", 0, *LOCAL))
            for out in outs
        ]
        for out in outs:
            part = out / ".shoal-weights.bin"
            wait_until(lambda part=part: bool(list(part.glob("policies/*/*.part"))))
        killed.process.kill()
        killed.process.wait()
        again = stack.enter_context(push())
        assert again.said("ticket")["ticket"] == ticket
        assert [one.end() for one in pulls] == [0, 0]
        assert all((out / "weights.bin").read_bytes() == source.read_bytes() for out in outs)


@pytest.mark.deep
def test_a_part_of_a_folder_costs_only_its_bytes_and_the_rest_comes_later(
    tmp_path: Path,
) -> None:
    source = folder_at(tmp_path / "model")
    out = tmp_path / "out"
    with push_of(source, tmp_path / "p") as (_, ticket):
        part = ("pull", ticket, "--out", out, "--seed", 0, *LOCAL)
        with cast(*part, "--only", "*-00002.bin") as pull:
            assert pull.end() == 0
            whole = pull.said("whole")
            assert (whole["files"], whole["bytes"]) == (1, len(FILES["sub/model-00002.bin"]))
            assert whole["from_origin"] + whole["from_peers"] <= 1.01 * whole["bytes"]
        name = "sub/model-00002.bin"
        assert contents(out) == {name: FILES[name]}
        with cast(*part, "--only", "em*") as pull:
            assert pull.end() == 0, "a file without bytes"
        assert contents(out) == {name: FILES[name], "empty": b""}
        with cast(*part, "--only", "*.gguf") as pull:
            assert pull.end() == 2
            assert "no file of model matches '*.gguf'" in pull.errors()
        with cast(*part) as rest:
            assert rest.end() == 0
            came = rest.said("whole")["from_origin"] + rest.said("whole")["from_peers"]
        assert contents(out) == FILES
        assert came <= sum(map(len, FILES.values())) - len(FILES[name])


@pytest.mark.deep
def test_a_puller_that_follows_gets_the_next_version_and_runs_a_command(tmp_path: Path) -> None:
    source = tmp_path / "weights.bin"
    source.write_bytes(b"old" * 100_000)
    out, log = tmp_path / "out", tmp_path / "log"
    run = f"echo $SHOAL_VERSION >> {log}"
    with push_of(source, tmp_path / "p") as (push, ticket):
        addr = push.said("ticket")["addrs"][0]
        with cast("pull", ticket, "--out", out, "--follow", "--exec", run, *LOCAL) as pull:
            pull.said("executed")
            push.close()
            source.write_bytes(b"new" * 100_000)
            where = ("--listen", addr, "--json")
            with cast("push", source, "--data", tmp_path / "p", *where) as second:
                assert second.said("ticket")["version"] == 1
                wait_until(lambda: log.read_text() == "0\n1\n")
        assert log.read_text() == "0\n1\n"
        assert (out / "weights.bin").read_bytes() == source.read_bytes()


@pytest.mark.deep
def test_a_puller_without_the_secret_gets_nothing(tmp_path: Path) -> None:
    from p2p.cast.ticket import decode_ticket_untrusted

    source = folder_at(tmp_path / "model")
    with cast("push", source, "--data", tmp_path / "p", *LOCAL) as push:
        ticket = decode_ticket_untrusted(push.said("ticket")["ticket"])
        object.__setattr__(ticket, "secret", b"another secret!!")
        with cast("pull", ticket, "--out", tmp_path / "out", *LOCAL) as pull:
            pull.said("progress")
            with pytest.raises(AssertionError):
                pull.said("whole", timeout=3)
    assert contents(tmp_path / "out") == {}


@pytest.mark.deep
def test_a_served_folder_is_read_by_any_http_client(tmp_path: Path) -> None:
    source = folder_at(tmp_path / "model")
    os.environ["XDG_STATE_HOME"] = str(tmp_path / "state")
    try:
        with cast("serve", source, "--http", "127.0.0.1:0", "--json") as serve:
            url = serve.said("http")["urls"][0]
            with urllib.request.urlopen(f"{url}latest/files/model-00001.bin") as answer:
                assert answer.read() == FILES["model-00001.bin"]
            with cast("pull", url, "--out", tmp_path / "out", "--seed", 0, "--json") as pull:
                assert pull.end() == 0
    finally:
        del os.environ["XDG_STATE_HOME"]
    assert (tmp_path / "out" / "v0.bin").stat().st_size > sum(map(len, FILES.values()))


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("push", "nowhere"), "there is nothing at"),
        (("pull", "shoal1zzz"), "not copied whole"),
        (("pull", "ftp://x"), "begins with shoal1"),
        (("pull", "http://"), "no http"),
        (("inspect", "shoal1"), "not copied whole"),
        (("serve", "nowhere"), "there is nothing at"),
        (("push", ".", "--listen", "x"), "--listen"),
        (("push", ".", "--http", "x"), "HOST:PORT"),
        (("pull", "x", "--seed", "soon"), "--seed"),
        (("pull", "x", "--only", "*", "--follow"), "without --follow"),
        (("pull", "http://x", "--only", "*"), "with a ticket"),
    ],
)
def test_a_wrong_command_line_gets_one_sentence(
    tmp_path: Path, shells: Forks, arguments: tuple[str, ...], sentence: str
) -> None:
    code, _, said = shells.run(arguments, tmp_path / "here", Surroundings())
    assert code == 2
    assert sentence in said
    assert "Traceback" not in said


def test_a_delivery_replaces_what_was_there_and_leaves_the_rest(tmp_path: Path) -> None:
    index = Index.of([PolicyFile("a", 3), PolicyFile("b/c", 3)], [])
    weights, out = tmp_path / "store", tmp_path / "out"
    for name in ("a", "b/c"):
        (weights / name).parent.mkdir(parents=True, exist_ok=True)
        (weights / name).write_bytes(b"new")
    out.mkdir()
    (out / "a").write_bytes(b"old")
    (out / "mine").write_bytes(b"mine")
    (out / "a.shoal-part").write_bytes(b"left by a kill")
    for _ in range(2):
        deliver(weights, index, out, "x")
    assert contents(out) == {"a": b"new", "b/c": b"new", "mine": b"mine"}


def test_a_pusher_that_nobody_can_dial_is_reached_through_a_relay(tmp_path: Path) -> None:
    """The ticket that is pulled names no place of the pusher's own."""
    source, out, key = folder_at(tmp_path / "model"), tmp_path / "out", KeyPair(b"\x01" * 32)

    def push_and_pull(relay: Multiaddr) -> None:
        with cast("push", source, "--relay", relay, "--data", tmp_path / "p", *LOCAL) as push:
            ticket = decode_ticket_untrusted(push.said("ticket")["ticket"])
            assert ticket.addrs[-1] == relay.through
            ticket = replace(ticket, addrs=ticket.addrs[-1:])
            with cast("pull", ticket, "--out", out, *LOCAL) as pull:
                assert pull.end() == 0
        assert contents(out) == FILES

    async def main() -> None:
        async with open_host(key=key) as host:
            with relaying(host.world, host, key, RelayConfig(strangers=True)):
                await trio.to_thread.run_sync(push_and_pull, host.addrs[0])

    trio.run(main)


def test_links_are_followed_within_the_folder_and_from_a_snapshot_to_its_blobs(
    tmp_path: Path, shells: Forks
) -> None:
    """A model in Hugging Face's cache is links, and could not be pushed."""
    blobs, snapshot = tmp_path / "model/blobs", tmp_path / "model/snapshots/main"
    for folder in (blobs, snapshot / "sub"):
        folder.mkdir(parents=True)
    (blobs / "abc").write_bytes(b"weights")
    (snapshot / "model.bin").symlink_to("../../blobs/abc")
    (snapshot / "sub/twice.bin").symlink_to("../model.bin")
    code, said, _ = shells.run(("inspect", str(snapshot)), tmp_path, Surroundings())
    assert (code, said.count("  7  "), "sub/twice.bin" in said) == (0, 2, True)
    (tmp_path / "private").write_bytes(b"key")
    (snapshot / ".hidden").write_bytes(b"key")
    for target in ("../../../private", "../../blobs", ".hidden", "nowhere", "sub"):
        (snapshot / "out").unlink(missing_ok=True)
        (snapshot / "out").symlink_to(target)
        code, _, said = shells.run(("inspect", str(snapshot)), tmp_path, Surroundings())
        assert (code, "is a link to a folder or out of this one" in said) == (1, True), target


def test_what_no_pull_has_put_there_is_not_replaced_without_a_word(tmp_path: Path) -> None:
    """Whoever pulled a model into the wrong folder lost the one that was there."""
    source, out = folder_at(tmp_path / "model"), tmp_path / "out"
    out.mkdir()
    equal, *_ = FILES
    (out / equal).parent.mkdir(parents=True, exist_ok=True)
    (out / equal).write_bytes(FILES[equal])
    (out / "model-00001.bin").write_bytes(b"mine")
    with push_of(source, tmp_path / "p") as (_, ticket):
        with cast("pull", ticket, "--out", out, *LOCAL) as pull:
            assert pull.end() == 2
        assert (out / "model-00001.bin").read_bytes() == b"mine"
        with cast("pull", ticket, "--out", out, "--replace", *LOCAL) as pull:
            assert pull.end() == 0
            assert pull.said("ended")["given"] == 0
        (out / "model-00001.bin").write_bytes(b"mine")
        with cast("pull", ticket, "--out", out, *LOCAL) as pull:  # an earlier pull was here
            assert pull.end() == 0
    assert contents(out) == FILES
