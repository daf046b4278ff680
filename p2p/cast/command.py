"""``shoal push``, ``pull``, ``serve`` and ``inspect``: command lines."""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any, Final

import trio
from blake3 import blake3

from p2p.cast.delivery import deliver
from p2p.cast.swarm import CastNode, open_cast
from p2p.cast.ticket import (
    MAX_ADDRS,
    PREFIX,
    SECRET_BYTES,
    Ticket,
    decode_ticket_untrusted,
    is_name,
)
from p2p.cast.view import CastState, Teller
from p2p.concurrency import leaves
from p2p.errors import BadMessage, ConfigError, LocalProtocolError, ShoalError
from p2p.identity import PeerId
from p2p.limits import LOOPBACK, reach_of
from p2p.machine import RealWorld, open_world, raise_descriptor_limit
from p2p.multiaddr import Multiaddr
from p2p.node.process import check_platform, locked_folder, until_told_to_end
from p2p.node.usage import FAILED, WRONG_USAGE, complain, interruptible, whole_number
from p2p.policy import NO_POLICY, PolicyVersion
from p2p.shardcast import Shardcast, ShardcastConfig
from p2p.shardcast.publisher import Digester
from p2p.swarm import open_host

SOURCE: Final = "source"
"""What a pusher's files are called below its state: where they lie is a mount of its disk."""
STATE: Final = ".shoal"
"""Where a puller keeps what it needs to go on: its key, and one link to each file."""
LISTEN: Final = "/ip4/0.0.0.0/tcp/0"
SEED: Final = 5.0
"""Seconds that a puller goes on giving by default: others may wait for what it was to pass on,
and its next heartbeat, which tells the pusher that one more machine has it, takes two."""
_MAX_WAITED: Final = 100_000


def push(argv: Sequence[str]) -> int:
    """See `p2p.cast.push`."""
    parser = argparse.ArgumentParser(
        prog="shoal push",
        description="Give a file or folder to many machines. It prints a ticket; on the others,"
        " shoal pull TICKET. They pass parts on to each other while they load.",
    )
    add = parser.add_argument
    add("path", type=Path, help="a file or a folder; hidden names stay out")
    add("--expect", type=whole_number(1, _MAX_WAITED), metavar="N",
        help="end when N machines have it whole (default: on Ctrl-C)")  # fmt: skip
    _add_common(parser)
    add("--data", type=Path, metavar="DIR",
        help="where its key is kept (default: one for each path)")  # fmt: skip
    return _end(partial(_push, parser.parse_args(argv)))


def pull(argv: Sequence[str]) -> int:
    """See `p2p.cast.pull`."""
    parser = argparse.ArgumentParser(
        prog="shoal pull",
        description="Get what a ticket of shoal push names. The same line goes on after an"
        " interruption; http://HOST:PORT of a shardcast server is followed too.",
    )
    add = parser.add_argument
    add("ticket", help="as shoal push prints it, or http://HOST:PORT[,http://...]")
    add("--out", type=Path, metavar="DIR", help="where its files go (default: the name it has)")
    add("--follow", action="store_true", help="stay, and take each newer version")
    add("--exec", dest="command", metavar="CMD",
        help="run after each version, with SHOAL_VERSION and SHOAL_PATH set")  # fmt: skip
    add("--seed", type=_duration, default=SEED, metavar="TIME",
        help="go on giving to others for so long, such as 10m (default: 5s)")  # fmt: skip
    _add_common(parser)
    options = parser.parse_args(argv)
    is_http = options.ticket.startswith(("http://", "https://"))
    return _end(partial(_follow_http if is_http else _pull, options))


def serve(argv: Sequence[str]) -> int:
    """See `p2p.cast.serve`."""
    parser = argparse.ArgumentParser(
        prog="shoal serve",
        description="Offer a file or folder over HTTP: curl resumes, caches keep it, and"
        " shardcast-client takes it as v1.",
    )
    parser.add_argument("path", type=Path, help="a file or a folder; hidden names stay out")
    parser.add_argument("--http", default="0.0.0.0:8000", metavar="HOST:PORT", type=_host_port,
                        help="where to listen (default: %(default)s)")  # fmt: skip
    parser.add_argument("--json", action="store_true", help="one JSON object a line")
    return _end(partial(_serve, parser.parse_args(argv)))


def inspect(argv: Sequence[str]) -> int:
    """See `p2p.cast.inspect`."""
    parser = argparse.ArgumentParser(
        prog="shoal inspect", description="Say what a ticket, a file or a folder holds."
    )
    parser.add_argument("thing", help="a ticket, or a path")
    parser.add_argument("--json", action="store_true", help="one JSON object")
    return _end(partial(_inspect, parser.parse_args(argv)))


def _add_common(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--listen", action="append", type=_addr, metavar="ADDR",
        help=f"multiaddr to listen at (default: {LISTEN})")  # fmt: skip
    add("--http", type=_host_port, metavar="HOST:PORT", help="offer it over HTTP as well")
    add("--json", action="store_true", help="one JSON object a line, instead of bars")


def _addr(text: str) -> Multiaddr:
    try:
        return Multiaddr.parse(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _host_port(text: str) -> tuple[str, int]:
    host, colon, port = text.rpartition(":")
    if not colon or not host or not port.isdecimal() or int(port) > 65535:
        raise argparse.ArgumentTypeError(f"{text!r} is not HOST:PORT, such as 0.0.0.0:8000")
    return host.strip("[]"), int(port)


def _duration(text: str) -> float:
    """Seconds of ``90``, ``90s``, ``10m``, ``2h``."""
    factor = {"s": 1.0, "m": 60.0, "h": 3600.0}.get(text[-1:])
    number = text if factor is None else text[:-1]
    if not number.isascii() or not number.replace(".", "", 1).isdigit():
        raise argparse.ArgumentTypeError(f"{text!r} is no time, such as 90, 90s, 10m or 2h")
    return float(number) * (factor or 1.0)


def _end(main: Callable[[], Coroutine[Any, Any, None]]) -> int:
    """Run a command to its end; the exit code. Errors are one sentence on standard error."""
    return interruptible(partial(_run, main))


def _run(main: Callable[[], Coroutine[Any, Any, None]]) -> int:
    failures: list[BaseException] = []
    try:
        check_platform()
        raise_descriptor_limit()
        trio.run(main)
    except* ShoalError as group:
        failures.extend(leaves(group))
    for message in dict.fromkeys(str(failure) for failure in failures):
        complain(message)
    if not failures:
        return 0
    return WRONG_USAGE if all(isinstance(f, ConfigError) for f in failures) else FAILED


# Push


async def _push(options: argparse.Namespace) -> None:
    path = _existing(options.path)
    state = options.data or _state_of(path)
    teller = Teller(path.name, as_json=options.json)
    with locked_folder(state):
        async with (
            until_told_to_end(with_parent=False),
            _mounted(state, path) as (world, source),
            _pushing(world, options, await _secret(world)) as (node, secret),
        ):
            version = await _publish(node, source)
            manifest = node.shardcast.manifest(version)
            ticket = Ticket(
                pusher=node.host.peer_id,
                addrs=tuple(addr.transport for addr in node.host.addrs[:MAX_ADDRS]),
                secret=secret, name=path.name, is_folder=source == SOURCE,
                version=version, manifest=manifest.digest,
            )  # fmt: skip
            teller.event(
                "ticket", _how_to_pull(ticket, manifest.size), ticket=str(ticket),
                version=version, bytes=manifest.size, addrs=[str(a) for a in ticket.addrs],
            )  # fmt: skip
            async with _edge_beside(node, options.http, teller):
                with teller.bars():
                    await _wait_given(node, version, options.expect or 0, teller)


def _existing(path: Path) -> Path:
    path = path.expanduser().absolute()
    if not path.exists():
        raise ConfigError(f"there is nothing at {path}")
    if not is_name(path.name):
        raise ConfigError(f"{path.name!r} cannot be a name elsewhere; give it another")
    return path


def _state_of(path: Path) -> Path:
    """Where a pusher keeps its key: one place for each path, so that the same line makes the
    same ticket."""
    base = os.environ.get("XDG_STATE_HOME") or str(Path.home() / ".local/state")
    return Path(base) / "shoal" / "push" / blake3(os.fsencode(path)).hexdigest()[:16]


@asynccontextmanager
async def _mounted(state: Path, path: Path) -> AsyncIterator[tuple[RealWorld, str]]:
    """A world over ``state`` that sees what is at ``path``, and the name by which."""
    is_folder = path.is_dir()  # noqa: ASYNC240 - once, before anything else runs
    folder, source = (path, SOURCE) if is_folder else (path.parent, f"{SOURCE}/{path.name}")
    async with open_world(state, mounts={SOURCE: folder}) as world:
        yield world, source


async def _secret(world: RealWorld) -> bytes:
    """The join secret of this pusher; made once."""
    try:
        secret = await world.disk.read("secret")
    except FileNotFoundError:
        secret = b""
    if len(secret) != SECRET_BYTES:
        secret = world.entropy(SECRET_BYTES)
        await world.disk.replace("secret", secret)
    return secret


@asynccontextmanager
async def _pushing(
    world: RealWorld, options: argparse.Namespace, secret: bytes
) -> AsyncIterator[tuple[CastNode, bytes]]:
    config = ShardcastConfig(keep_versions=1)
    async with (
        open_host(world=world, listen=options.listen or [LISTEN]) as host,
        open_cast(world, host, config, pusher=host.peer_id, secret=secret) as node,
    ):
        yield node, secret


async def _publish(node: CastNode, source: str) -> PolicyVersion:
    """Publish what is there: as the version that it was before, or as the next one if it has
    changed."""
    last = node.shardcast.signed
    if last != NO_POLICY:
        try:
            return (await node.shardcast.publish(last, source)).version
        except LocalProtocolError:
            pass  # it has changed since
    return (await node.shardcast.publish(PolicyVersion(last + 1), source)).version


def _how_to_pull(ticket: Ticket, size: int) -> str:
    lines = [
        f"version  {ticket.version}, {size / 1e6:,.1f} MB",
        *(f"address  {addr}" for addr in ticket.addrs),
    ]
    if all(reach_of(addr) == LOOPBACK for addr in ticket.addrs):
        lines.append("         (only this machine can dial that: give --listen)")
    return "\n".join([*lines, "", f"shoal pull {ticket}", ""])


async def _wait_given(
    node: CastNode, version: PolicyVersion, expected: int, teller: Teller
) -> None:
    """Tell how many have it until ``expected`` do; for ever if that is 0."""
    size = node.shardcast.manifest(version).size
    meter, due = _Meter(node), node.world.now()
    whole: set[PeerId] = set()
    while not expected or len(whole) < expected:
        whole |= node.whole(version)  # also those that have left since
        given = node.shardcast.stats.uploaded_as_origin
        teller.state(
            CastState(
                total=size, here=size, rate=meter.rate(given), given=given,
                members=node.others(), whole=len(whole), asked=expected,
            )
        )  # fmt: skip
        due += teller.interval
        await node.world.sleep_until(due)
    teller.event("given", f"given    {expected} machines have it", machines=expected)


class _Meter:
    """The rate at which a count of bytes grows, smoothed over some seconds."""

    def __init__(self, node: CastNode) -> None:
        self._now = node.world.now
        self._at, self._count, self._rate = self._now(), 0, 0.0

    def rate(self, count: int) -> float:
        """Bytes per second, now that there are ``count``."""
        now = self._now()
        passed = now - self._at
        if passed > 0:
            weight = min(1.0, passed / 2)
            self._rate += weight * ((count - self._count) / passed - self._rate)
            self._at, self._count = now, count
        return self._rate


# Pull


async def _pull(options: argparse.Namespace) -> None:
    try:
        ticket = decode_ticket_untrusted(options.ticket)
    except BadMessage as error:
        raise ConfigError(str(error)) from None
    out = (options.out or Path(ticket.name if ticket.is_folder else ".")).absolute()
    state = out / (STATE if ticket.is_folder else f"{STATE}-{ticket.name}")
    teller = Teller(ticket.name, as_json=options.json)
    config = ShardcastConfig(keep_versions=2 if options.follow else 1)
    bootstrap = [addr.with_peer(ticket.pusher) for addr in ticket.addrs]
    with locked_folder(state):
        async with (
            until_told_to_end(with_parent=False),
            open_world(state) as world,
            open_host(world=world, listen=options.listen or [LISTEN]) as host,
            open_cast(
                world, host, config,
                pusher=ticket.pusher, secret=ticket.secret, bootstrap=bootstrap,
            ) as node,
            _edge_beside(node, options.http, teller),
        ):  # fmt: skip
            wanted = ticket.version
            while True:
                version = await _wait_whole(node, wanted, teller)
                await _hand_over(node, version, ticket, out, teller)
                if options.command:
                    await _execute(options.command, version, out, teller)
                if not options.follow:
                    break
                wanted = PolicyVersion(version + 1)
            await world.sleep(options.seed)


async def _wait_whole(node: CastNode, wanted: PolicyVersion, teller: Teller) -> PolicyVersion:
    """Return the version that is whole here once it is ``wanted`` or newer."""
    with teller.bars():
        async with trio.open_nursery() as nursery:
            nursery.start_soon(_tell_coming, node, teller)
            version = await node.shardcast.wait_policy(wanted)
            nursery.cancel_scope.cancel()
    return version


async def _tell_coming(node: CastNode, teller: Teller) -> None:
    meter, due = _Meter(node), node.world.now()
    while True:
        stats = node.shardcast.stats
        came = stats.from_origin + stats.from_peers
        version, total, here = _coming(node.shardcast)
        teller.state(
            CastState(
                total=total, here=here, rate=meter.rate(came), given=stats.uploaded_as_relay,
                members=node.others(), whole=len(node.whole(version)),
            )
        )  # fmt: skip
        due += teller.interval
        await node.world.sleep_until(due)


def _coming(shardcast: Shardcast) -> tuple[PolicyVersion, int, int]:
    """The version that is on its way, its bytes, and those that are here."""
    fetching = shardcast.fetching
    if fetching is None:
        return PolicyVersion(0), 0, 0
    version, share = fetching
    size = shardcast.fetching_bytes
    return version, size, int(size * share)


async def _hand_over(
    node: CastNode, version: PolicyVersion, ticket: Ticket, out: Path, teller: Teller
) -> None:
    manifest = node.shardcast.manifest(version)
    if version == ticket.version and manifest.digest != ticket.manifest:
        raise BadMessage(
            "the pusher has signed another content under the ticket's version: ask for a new"
            " ticket"
        )
    with node.shardcast.pin(version) as weights:
        made = await trio.to_thread.run_sync(
            deliver, Path(node.world.disk.locate(weights)), node.shardcast.index(version), out,
            ticket.name,
        )  # fmt: skip
    where = out if ticket.is_folder else out / ticket.name
    stats = node.shardcast.stats
    teller.event(
        "whole", f"whole    {where}, version {version}, {manifest.size / 1e6:,.1f} MB",
        version=version, path=str(where), files=len(made), bytes=manifest.size,
        from_origin=stats.from_origin, from_peers=stats.from_peers,
    )  # fmt: skip


async def _execute(command: str, version: PolicyVersion, out: Path, teller: Teller) -> None:
    """Run what the person asked for; its failure is told, and ends nothing."""
    env = {**os.environ, "SHOAL_VERSION": str(version), "SHOAL_PATH": str(out)}
    done = await trio.run_process(command, shell=True, env=env, check=False)
    teller.event("executed", f"executed exit status {done.returncode}", status=done.returncode)


# HTTP


@asynccontextmanager
async def _edge_beside(
    node: CastNode, address: tuple[str, int] | None, teller: Teller
) -> AsyncIterator[None]:
    """Offer what the node holds over HTTP, if that was asked for."""
    if address is None:
        yield
        return
    from p2p.shardcast.http.app import HttpEdge
    from p2p.shardcast.http.library import PolicyLibrary
    from p2p.shardcast.http.server import serve_http

    edge = HttpEdge(node.world, PolicyLibrary(node.shardcast))
    async with serve_http(edge, *address) as places:
        _tell_places(places, teller)
        yield


def _tell_places(places: Sequence[tuple[str, int]], teller: Teller) -> None:
    urls = [f"http://[{h}]:{p}/" if ":" in h else f"http://{h}:{p}/" for h, p in places]
    teller.event("http", "\n".join(f"http     {url}" for url in urls), urls=urls)


async def _serve(options: argparse.Namespace) -> None:
    from p2p.shardcast.http.app import HttpEdge
    from p2p.shardcast.http.library import PolicyLibrary
    from p2p.shardcast.http.server import serve_http

    path = _existing(options.path)
    state, teller = _state_of(path), Teller(path.name, as_json=options.json)
    options.listen = ["/ip4/127.0.0.1/tcp/0"]
    with locked_folder(state):
        async with (
            until_told_to_end(with_parent=False),
            _mounted(state, path) as (world, source),
            _pushing(world, options, await _secret(world)) as (node, _),
        ):
            await _publish(node, source)
            edge = HttpEdge(world, PolicyLibrary(node.shardcast))
            async with serve_http(edge, *options.http) as places:
                _tell_places(places, teller)
                await trio.sleep_forever()


async def _follow_http(options: argparse.Namespace) -> None:
    """Take the versions of servers that speak shardcast 0.3.2, or of our own edges."""
    from p2p.shardcast.http.app import HttpEdge
    from p2p.shardcast.http.follow import Follower
    from p2p.shardcast.http.library import Shelf
    from p2p.shardcast.http.mirrors import open_mirrors
    from p2p.shardcast.http.server import serve_http

    out = (options.out or Path()).absolute()
    teller = Teller("pull", as_json=options.json)
    shelf, known = Shelf(), NO_POLICY
    with locked_folder(out / STATE):
        async with (
            until_told_to_end(with_parent=False),
            open_world(out / STATE, mounts={"out": out}) as world,
            open_mirrors(world, options.ticket.split(",")) as mirrors,
            AsyncExitStack() as stack,
        ):
            if options.http is not None:
                edge = HttpEdge(world, shelf)
                places = await stack.enter_async_context(serve_http(edge, *options.http))
                _tell_places(places, teller)
            follower = Follower(world, mirrors, "out")
            while True:
                release = await follower.wait_newer(known)
                shelf.add(release)
                known = release.version
                [(name, size)] = release.files
                teller.event(
                    "whole", f"whole    {out / name}, version {known}, {size / 1e6:,.1f} MB"
                    " (no trainer signed it)",
                    version=known, path=str(out / name), bytes=size,
                )  # fmt: skip
                if options.command:
                    await _execute(options.command, known, out / name, teller)
                if not options.follow:
                    break
            await world.sleep(options.seed)


# Inspect


async def _inspect(options: argparse.Namespace) -> None:
    if options.thing.startswith(PREFIX):
        try:
            ticket = decode_ticket_untrusted(options.thing)
        except BadMessage as error:
            raise ConfigError(str(error)) from None
        said = {
            "pusher": str(ticket.pusher),
            "addresses": [str(addr) for addr in ticket.addrs],
            "name": ticket.name + ("/" if ticket.is_folder else ""),
            "version": ticket.version,
            "manifest": ticket.manifest.hex(),
            "run": ticket.run.hex(),
        }
    else:
        said = await _contents(_existing(Path(options.thing)))
    if options.json:
        sys.stdout.write(json.dumps(said) + "\n")
        return
    for name, value in said.items():
        lines = value if isinstance(value, list) else [value]
        for line in lines:
            sys.stdout.write(f"{name:10} {line}\n")


async def _contents(path: Path) -> dict[str, Any]:
    """What a push of ``path`` would send."""
    with tempfile.TemporaryDirectory(prefix="shoal-") as state:
        async with _mounted(Path(state), path) as (world, source):
            index = (await Digester(world, ShardcastConfig()).digest(source)).index
    return {
        "files": [f"{file.size:>14,}  {file.path or path.name}" for file in index.files],
        "bytes": index.size,
        "spans": len(index),
        "digest": index.digest.hex(),
    }
