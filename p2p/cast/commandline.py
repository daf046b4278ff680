"""Common parts of push, pull, serve and inspect: arguments, offered files, ports, HTTP, the
end."""

from __future__ import annotations

import argparse
import logging
import os
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from itertools import zip_longest
from pathlib import Path
from typing import Any, Final

import trio
from blake3 import blake3

from p2p.cast.ticket import SECRET_BYTES, Ticket, decode_ticket_untrusted, is_name
from p2p.cast.view import Teller
from p2p.errors import BadMessage, ConfigError
from p2p.machine import RealWorld, open_world, raise_descriptor_limit
from p2p.multiaddr import Multiaddr
from p2p.node.process import check_platform
from p2p.node.usage import expanded, host_port, interruptible, multiaddr
from p2p.policy import PolicyVersion
from p2p.shardcast.http.library import Library
from p2p.swarm.swarm import SwarmHost
from p2p.world import World

STATE: Final = ".shoal"
"""Folder of a puller's state: its key, and a link to each file."""
OUT: Final = "give this one its own --out"
SOURCE: Final = "source"
"""Name under which a pusher's files appear in its state; a mount leads to their real place."""


def existing(path: Path) -> Path:
    """Return ``path`` made absolute. Raises `ConfigError` if it does not exist, or if other
    machines cannot use its name."""
    path = expanded(path).absolute()
    if not path.exists():
        raise ConfigError(f"there is nothing at {path}")
    if not is_name(path.name):
        raise ConfigError(f"{path.name!r} cannot be a name elsewhere; give it another")
    return path


def name_of(path: Path) -> str:
    """Return the name of a path on other machines; a snapshot of Hugging Face's cache has
    its model's name, not 40 digits."""
    model = path.parent.parent.name.rpartition("--")[2]
    return model if path.parent.name == "snapshots" and is_name(model) else path.name


def state_of(path: Path) -> Path:
    """Return the folder of a pusher's key. Each path has its own, so that the same command
    makes the same ticket."""
    base = expanded(Path(os.environ.get("XDG_STATE_HOME") or "~/.local/state"))
    return base / "shoal" / "push" / blake3(os.fsencode(path)).hexdigest()[:16]


@asynccontextmanager
async def mounted(state: Path, path: Path) -> AsyncIterator[tuple[RealWorld, str]]:
    """Return a world over ``state`` in which ``path`` is mounted, and the name of that
    mount."""
    is_folder = path.is_dir()  # noqa: ASYNC240 - once, before anything else runs
    folder, source = (path, SOURCE) if is_folder else (path.parent, f"{SOURCE}/{path.name}")
    async with open_world(state, mounts={SOURCE: folder}) as world:
        yield world, source


def telling_changes(again: str, teller: Teller, lone: str = "") -> Callable[..., None]:
    """Return a function that tells a person once for each file that it differs from what is
    offered, given its path in the folder. ``lone`` is the name of the file if there is only
    one."""
    told: set[str] = set()

    def tell(name: str, what: str = "changed") -> None:
        name = lone or name
        if name not in told:
            told.add(name)
            teller.event("changed", f"{name} {what}: {again}", path=name, what=what)

    return tell


async def join_secret(world: World) -> bytes:
    """Return the join secret of this pusher; it is made once."""
    try:
        secret = await world.disk.read("secret")
    except FileNotFoundError:
        secret = b""
    if len(secret) != SECRET_BYTES:
        secret = world.entropy(SECRET_BYTES)
        await world.disk.replace("secret", secret)
    return secret


async def listen_again(world: World, host: SwarmHost, addrs: Sequence[Multiaddr]) -> list[int]:
    """Let ``host``, which listens nowhere yet, listen at ``addrs``. Where an address leaves the
    port to the system, the last life's port is taken if it is free.

    Else a push that was killed and run again would print another ticket, and its pullers would
    look for it at a port where nothing answers. Returns the last ports that another program has
    now. Raises `ConfigError` if one of ``addrs`` cannot be had.
    """
    try:
        said = (await world.disk.read("ports", 0, 256)).split()
    except FileNotFoundError:
        said = []
    is_whole = all(one.isdigit() and len(one) <= 5 and int(one) < 1 << 16 for one in said)
    last = [int(one) for one in said] if is_whole else []  # in the order of --listen
    taken = []
    for addr, port in zip_longest(addrs, last[: len(addrs)]):
        place, (kind, asked) = addr.transport.parts[:-1], addr.transport.parts[-1]
        if port is not None and kind == "tcp" and int(asked) == 0:
            try:
                await host.listen(Multiaddr((*place, (kind, str(port)))))
            except ConfigError:
                taken.append(port)
            else:
                continue
        await host.listen(addr)
    ports = [addr.host_port[1] for addr in host.addrs]
    if ports != last:
        await world.disk.replace("ports", " ".join(map(str, ports)).encode())
    return taken


LISTEN: Final = "/ip4/0.0.0.0/tcp/0"
"""Default listening address of push and pull: every interface, at a port that the system
chooses, since the ticket carries the port."""


def add_common(parser: argparse.ArgumentParser) -> None:
    """Add the options that push and pull have in common."""
    add = parser.add_argument
    add("--listen", action="append", type=multiaddr, metavar="ADDR",
        help=f"multiaddr to listen at (default: {LISTEN})")  # fmt: skip
    add("--http", type=host_port, metavar="HOST:PORT", help="offer it over HTTP as well")
    add("--json", action="store_true", help="one JSON object a line, instead of bars")


def relay_addr(text: str) -> Multiaddr:
    """Parse the address of a relay, for argparse."""
    addr = multiaddr(text)
    if addr.peer_id is None or addr.relay is not None:
        raise argparse.ArgumentTypeError(f"{addr} must end in /p2p/ and the relay's id")
    return addr


def duration(text: str) -> float:
    """Parse ``90``, ``90s``, ``10m`` or ``2h`` into seconds, for argparse."""
    factor = {"s": 1.0, "m": 60.0, "h": 3600.0}.get(text[-1:])
    number = text if factor is None else text[:-1]
    if not number.isascii() or not number.replace(".", "", 1).isdigit():
        raise argparse.ArgumentTypeError(f"{text!r} is no time, such as 90, 90s, 10m or 2h")
    return float(number) * (factor or 1.0)


def ticket_of(text: str) -> Ticket:
    """Parse a ticket. Raises `ConfigError`."""
    try:
        return decode_ticket_untrusted(text)
    except BadMessage as error:
        raise ConfigError(str(error)) from None


def run_command(
    parse: Callable[[], argparse.Namespace],
    main: Callable[[argparse.Namespace], Coroutine[Any, Any, int]],
) -> int:
    """Read a command line and run its command; return the exit code."""

    def run() -> int:
        options = parse()
        check_platform()
        raise_descriptor_limit()
        # What a person must know is told as an event, once, and not as lines of a log.
        logging.getLogger("p2p").addHandler(logging.NullHandler())
        return trio.run(main, options)

    return interruptible(run)


async def execute(command: str, version: PolicyVersion, path: Path, teller: Teller) -> None:
    """Run ``--exec``'s command. Its failure is reported and ends nothing."""
    env = {**os.environ, "SHOAL_VERSION": str(version), "SHOAL_PATH": str(path)}
    done = await trio.run_process(command, shell=True, env=env, check=False)
    teller.event("executed", f"executed exit status {done.returncode}", status=done.returncode)


@asynccontextmanager
async def serving(
    world: World,
    library: Library,
    address: tuple[str, int] | None,
    teller: Teller,
    on_changed: Callable[[str], None],
) -> AsyncIterator[None]:
    """Offer a library over HTTP for the length of the block, and say where. Do nothing if there
    is no address."""
    if address is None:
        yield
        return
    from p2p.shardcast.http.app import HttpEdge
    from p2p.shardcast.http.server import serve_http  # hypercorn takes 0.3 s to import

    async with serve_http(HttpEdge(world, library, on_changed), *address) as places:
        urls = [f"http://[{h}]:{p}/" if ":" in h else f"http://{h}:{p}/" for h, p in places]
        teller.event("http", "\n".join(f"http     {url}" for url in urls), urls=urls)
        yield


async def pass_on(world: World, seconds: float, teller: Teller) -> None:
    """Serve other pullers for some seconds after the download is complete, and report it."""
    if seconds:
        words = f"passing on for {seconds:g} s more (Ctrl-C ends it)"
        teller.event("passing_on", words, seconds=seconds)
    await world.sleep(seconds)


class Meter:
    """The rate at which a count of bytes grows, smoothed over 2 s: chunks of 4 MiB come in
    bursts, and a person reads the figure four times a second."""

    def __init__(self, world: World) -> None:
        self._now = world.now
        self._at, self._count, self._rate = self._now(), 0, 0.0

    def rate(self, count: int) -> float:
        """Bytes per second, now that there are ``count``."""
        now = self._now()
        passed = now - self._at
        if passed > 0:
            weight = min(1.0, passed / 2.0)
            self._rate += weight * ((count - self._count) / passed - self._rate)
            self._at, self._count = now, count
        return self._rate
