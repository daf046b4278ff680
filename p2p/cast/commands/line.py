"""What the command lines share: arguments, exit codes, one rate."""

from __future__ import annotations

import argparse
import logging
import os
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any, Final

import trio

from p2p.cast.commands.source import Changes
from p2p.cast.swarm import CastNode
from p2p.cast.ticket import Ticket, decode_ticket_untrusted
from p2p.cast.view import Teller
from p2p.errors import BadMessage, ConfigError
from p2p.machine import raise_descriptor_limit
from p2p.multiaddr import Multiaddr
from p2p.node.process import check_platform
from p2p.node.usage import host_port, interruptible
from p2p.policy import PolicyVersion
from p2p.swarm.swarm import SwarmConfig
from p2p.world import World

LISTEN: Final = "/ip4/0.0.0.0/tcp/0"
"""Default listening address of push and pull: every interface, at a port that the system
chooses, since the ticket carries the port."""
_SMOOTHED: Final = 2.0
"""Seconds over which a rate is smoothed: chunks of 4 MiB come in bursts, and a person reads
the figure four times a second."""


def add_common(parser: argparse.ArgumentParser) -> None:
    """The options that push and pull have in common."""
    add = parser.add_argument
    add("--listen", action="append", type=_addr, metavar="ADDR",
        help=f"multiaddr to listen at (default: {LISTEN})")  # fmt: skip
    add("--http", type=host_port, metavar="HOST:PORT", help="offer it over HTTP as well")
    add("--json", action="store_true", help="one JSON object a line, instead of bars")


PUNCHING: Final = SwarmConfig(punch=True)


def relay_addr(text: str) -> Multiaddr:
    """The address of a relay, for argparse."""
    addr = _addr(text)
    if addr.peer_id is None or addr.relay is not None:
        raise argparse.ArgumentTypeError(f"{addr} must end in /p2p/ and the relay's id")
    return addr


def _addr(text: str) -> Multiaddr:
    try:
        return Multiaddr.parse(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def duration(text: str) -> float:
    """Seconds of ``90``, ``90s``, ``10m``, ``2h``, for argparse."""
    factor = {"s": 1.0, "m": 60.0, "h": 3600.0}.get(text[-1:])
    number = text if factor is None else text[:-1]
    if not number.isascii() or not number.replace(".", "", 1).isdigit():
        raise argparse.ArgumentTypeError(f"{text!r} is no time, such as 90, 90s, 10m or 2h")
    return float(number) * (factor or 1.0)


def ticket_of(text: str) -> Ticket:
    """The ticket that a person gave. Raises `ConfigError`."""
    try:
        return decode_ticket_untrusted(text)
    except BadMessage as error:
        raise ConfigError(str(error)) from None


def run_command(begin: Callable[[], Coroutine[Any, Any, int]]) -> int:
    """Read a command line, which ``begin`` does, and run the command; the exit code."""
    return interruptible(partial(_run, begin))


def _run(begin: Callable[[], Coroutine[Any, Any, int]]) -> int:
    command = begin()
    try:
        check_platform()
        raise_descriptor_limit()
        # What a person must know is told as an event, once, and not as lines of a log.
        logging.getLogger("p2p").addHandler(logging.NullHandler())

        async def main() -> int:
            return await command

        return trio.run(main)
    finally:
        command.close()


async def execute(command: str, version: PolicyVersion, path: Path, teller: Teller) -> None:
    """Run what the person asked for; its failure is told, and ends nothing."""
    env = {**os.environ, "SHOAL_VERSION": str(version), "SHOAL_PATH": str(path)}
    done = await trio.run_process(command, shell=True, env=env, check=False)
    teller.event("executed", f"executed exit status {done.returncode}", status=done.returncode)


@asynccontextmanager
async def offering(
    node: CastNode, address: tuple[str, int] | None, teller: Teller, changes: Changes
) -> AsyncIterator[None]:
    """Offer what a node holds over HTTP for the length of the block, if there is an address."""
    if address is None:
        yield
        return
    from p2p.cast.commands.edge import serving
    from p2p.shardcast.http.library import PolicyLibrary

    library = PolicyLibrary(node.shardcast)
    async with serving(node.world, library, address, teller, changes.tell):
        yield


async def pass_on(world: World, seconds: float, teller: Teller) -> None:
    """Serve others for a while after all is here, and say so."""
    if seconds:
        words = f"passing on for {seconds:g} s more (Ctrl-C ends it)"
        teller.event("passing_on", words, seconds=seconds)
    await world.sleep(seconds)


class Meter:
    """The rate at which a count of bytes grows, smoothed over some seconds."""

    def __init__(self, world: World) -> None:
        self._now = world.now
        self._at, self._count, self._rate = self._now(), 0, 0.0

    def rate(self, count: int) -> float:
        """Bytes per second, now that there are ``count``."""
        now = self._now()
        passed = now - self._at
        if passed > 0:
            weight = min(1.0, passed / _SMOOTHED)
            self._rate += weight * ((count - self._count) / passed - self._rate)
            self._at, self._count = now, count
        return self._rate
