"""``shoal push``: give a file or folder to many machines; ``shoal serve``: offer it over HTTP,
without a swarm; ``shoal inspect``: describe the content of a ticket or of a push.
"""

from __future__ import annotations

import argparse
import json
import math
import shutil
import tempfile
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path
from typing import Any

import trio

from p2p.cast.commandline import (
    LISTEN,
    SOURCE,
    Meter,
    add_common,
    existing,
    join_secret,
    listen_again,
    mounted,
    name_of,
    relay_addr,
    run_command,
    serving,
    state_of,
    telling_changes,
    ticket_of,
)
from p2p.cast.modes import look
from p2p.cast.swarm import CastNode, open_cast
from p2p.cast.ticket import MAX_ADDRS, PREFIX, Ticket, run_of
from p2p.cast.view import CastState, Teller
from p2p.cast.weight_v import WEIGHT_V, build, folder_of, is_delta, stamp_of, versions
from p2p.errors import ConfigError, LocalProtocolError
from p2p.identity import PeerId
from p2p.membership import Member
from p2p.multiaddr import Multiaddr
from p2p.node.process import locked_folder, until_told_to_end
from p2p.node.usage import CommandParser, expanded, host_port, say, whole_number
from p2p.policy import PolicyVersion
from p2p.reach.nat import open_nat
from p2p.shardcast import ShardcastConfig, ShardcastStats
from p2p.shardcast.http.library import PolicyLibrary, Shelf, release_of
from p2p.shardcast.publisher import Digester, publish_alone, publish_next
from p2p.shardcast.store import Cores
from p2p.swarm.core.limits import LOOPBACK, reach_of
from p2p.swarm.swarm import SwarmConfig, open_host


def push(argv: Sequence[str]) -> int:
    """See `p2p.cast.pusher`."""
    return run_command(partial(_push_options, argv), _push)


def _push_options(argv: Sequence[str]) -> argparse.Namespace:
    parser = CommandParser(
        prog="shoal push",
        description="Give a file or folder to many machines. It prints a ticket; on the others,"
        " shoal pull TICKET. They pass parts on to each other while they load.",
    )
    add = parser.add_argument
    add("path", type=Path, help="a file or a folder; hidden names stay out")
    # Most machines that a push may wait for: more than a roster names (4,096), so a larger
    # number is a typing mistake.
    add("--expect", type=whole_number(1, 100_000), metavar="N",
        help="end when N machines have it whole (default: on Ctrl-C)")  # fmt: skip
    add_common(parser)
    add("--from", dest="format", choices=[WEIGHT_V],
        help="the path has folders weight_v000001 ..., of which each is a version")  # fmt: skip
    add("--base", type=Path, metavar="DIR", help="the checkpoint that weight_v000001 follows")
    add("--relay", action="append", default=[], type=relay_addr, metavar="ADDR",
        help="node through which pullers come past a router; it ends in /p2p/ID")  # fmt: skip
    add("--data", type=Path, metavar="DIR",
        help="where its key is kept (default: one for each path)")  # fmt: skip
    options = parser.parse_args(argv)
    if options.base is not None and options.format is None:
        parser.error("--base goes with --from weight_v")
    return options


async def _push(options: argparse.Namespace) -> int:
    path = existing(options.path)
    state = state_of(path) if options.data is None else expanded(options.data)
    teller = Teller(name_of(path), as_json=options.json)
    changes = telling_changes("run push again", teller, path.name if path.is_file() else "")
    config = ShardcastConfig(keep_versions=2 if options.format else 1)
    whole: set[PeerId] = set()  # machines that have the version whole, or had when they left
    stats = ShardcastStats()
    with locked_folder(state, "shoal push or serve"):
        async with AsyncExitStack() as stack:
            enter = stack.enter_async_context
            ending = await enter(until_told_to_end(is_done=options.expect is None))
            world, source = await enter(mounted(state, path))
            secret = await join_secret(world)
            host = await enter(
                open_host(world=world, listen=[], config=SwarmConfig(punch=True))
            )
            listen = options.listen or [Multiaddr.parse(LISTEN)]
            for port in await listen_again(world, host, listen):
                words = f"port     another program has {port}, which tickets until now name:"
                teller.event("taken", f"{words} give your pullers the one below", port=port)
            for relay in options.relay:
                await host.listen(relay.through)
            nat = await enter(open_nat(host, world.signer, named=options.relay))
            node = await enter(
                open_cast(world, host, config, pusher=host.peer_id, secret=secret)
            )
            weights = Weights(path, state, options.base) if options.format else None
            with teller.patience(world, "reading", f"reading  {path}"):
                if weights is not None:
                    version = await weights.publish_newest(node)
                else:
                    note = node.tables.keep(await trio.to_thread.run_sync(look, path))

                    async def publish(version: PolicyVersion) -> PolicyVersion:
                        made = await node.shardcast.publish(version, source, note)
                        if made.note != note:
                            raise LocalProtocolError("the modes of its files have changed")
                        return made.version

                    version = await publish_next(publish, node.shardcast.signed)
            node.announce(version)
            # Timeout of the router's answer, in seconds; one that maps ports answers within a
            # tenth of that.
            with trio.move_on_after(1.0):
                await nat.router_answered.wait()
            stats = node.shardcast.stats
            manifest = node.shardcast.manifest(version)
            ticket = Ticket(
                pusher=node.host.peer_id,
                addrs=tuple(addr.transport for addr in node.host.addrs[:MAX_ADDRS]),
                secret=secret, name=name_of(path), is_folder=source == SOURCE,
                version=version, manifest=manifest.digest,
            )  # fmt: skip
            _tell_ticket(ticket, manifest.size, teller)
            library = PolicyLibrary(node.shardcast)
            await enter(serving(world, library, options.http, teller, changes))
            if weights is not None:
                nursery = await enter(trio.open_nursery())
                stack.callback(nursery.cancel_scope.cancel)
                nursery.start_soon(weights.publish_newer, node, teller)
            with teller.bars():
                await _wait_given(node, version, options.expect or 0, whole, teller, changes)
            ending.is_done = True
    if ending.signal:
        given = stats.uploaded_as_origin
        teller.event(
            "ended", f"ended    {_machines(len(whole))} it whole, gave {given / 1e6:,.1f} MB;"
            " the same command line goes on", machines=len(whole), given=given,
        )  # fmt: skip
    return ending.code


def _tell_ticket(ticket: Ticket, size: int, teller: Teller) -> None:
    lines = [
        f"version  {ticket.version}, {size / 1e6:,.1f} MB",
        *(f"address  {addr}" for addr in ticket.addrs),
    ]
    if all(reach_of(addr) == LOOPBACK for addr in ticket.addrs):
        lines.append("         (only this machine can dial that: give --listen)")
    teller.event(
        "ticket", "\n".join([*lines, "", f"shoal pull {ticket}", ""]),
        ticket=str(ticket), version=ticket.version, bytes=size,
        addrs=[str(addr) for addr in ticket.addrs],
    )  # fmt: skip


async def _wait_given(
    node: CastNode,
    version: PolicyVersion,
    expected: int,
    whole: set[PeerId],
    teller: Teller,
    changes: Callable[..., None],
) -> None:
    """Add to ``whole`` the machines that have the version whole, and show how far the others
    are, until there are ``expected``; for ever if that is 0."""
    world, stats = node.world, node.shardcast.stats
    size = node.shardcast.manifest(version).size
    meter, told = Meter(world), -math.inf
    while not expected or len(whole) < expected:
        whole |= node.whole(version)
        for damaged, what in node.shardcast.damaged.items():
            place = Path(damaged).relative_to(world.disk.locate(SOURCE))
            changes(str(place), what)
        now, given = world.now(), stats.uploaded_as_origin
        if now >= told + teller.interval:
            told = now
            teller.state(
                CastState(
                    total=size, here=size, given=given,
                    rate=meter.rate(given), members=len(node.others()),
                    whole=len(whole), asked=expected,
                    machines={
                        _machine(one): one.load
                        for one in node.others() if one.peer not in whole
                    },
                )
            )  # fmt: skip
        await world.sleep_until(now + 0.25)
    given = stats.uploaded_as_origin
    teller.event(
        "given", f"given    {_machines(expected)} it, gave {given / 1e6:,.1f} MB",
        machines=expected, given=given,
    )  # fmt: skip


class Weights:
    """Versions of a folder in the form of `p2p.cast.weight_v`, built in a push's state."""

    def __init__(self, root: Path, state: Path, base: Path | None) -> None:
        self._root, self._built = root, state / "weights"
        self._base = None if base is None else existing(base)
        self._is_here: dict[int, None] = {}
        self._stamps: dict[int, object] = {}

    async def publish_newest(self, node: CastNode) -> PolicyVersion:
        """Publish the newest version. Raises `ConfigError` if there is no version, or if it is
        invalid."""
        await trio.to_thread.run_sync(partial(shutil.rmtree, self._built, ignore_errors=True))
        found = [one for one in versions(self._root) if one]
        if not found:
            raise ConfigError(f"{self._root} has no folder {folder_of(self._root, 1).name} yet")
        return await self._publish(node, found[-1])

    async def publish_newer(self, node: CastNode, teller: Teller) -> None:
        """Publish each newer version once it has not changed between two looks."""
        while True:
            # Seconds between two looks at a folder of weights, which its trainer may still be
            # writing.
            await node.world.sleep_until(node.world.now() + 1.0)
            number = max(self._is_here) + 1
            if not folder_of(self._root, number).is_dir():
                newer = [one for one in versions(self._root) if one > number]
                if not newer:
                    continue
                number = newer[-1]
            stamp = await trio.to_thread.run_sync(stamp_of, folder_of(self._root, number))
            if stamp != self._stamps.get(number):
                self._stamps = {number: stamp}
                continue
            version = await self._publish(node, number)
            node.announce(version)
            words = f"version  {version}, {folder_of(self._root, number)}"
            teller.event("version", words, version=version)

    async def _publish(self, node: CastNode, number: int) -> PolicyVersion:
        version = PolicyVersion(number - 1)
        if node.shardcast.signed > version:
            raise ConfigError(
                f"version {node.shardcast.signed + 1} of {self._root} was published before, and"
                f" it has {number} now: a trainer that begins anew takes another --data"
            )
        await trio.to_thread.run_sync(self._build, number)
        try:
            await node.shardcast.publish(version, f"{self._built.name}/{number:06d}")
        except LocalProtocolError as error:
            raise ConfigError(f"{folder_of(self._root, number)}: {error}") from error
        self._is_here[number] = None
        for old in [one for one in self._is_here if one < number - 1]:
            del self._is_here[old]
            await node.world.disk.remove(f"{self._built.name}/{old:06d}")
        return version

    def _build(self, number: int) -> None:
        """Build a version from the last full or built version and the deltas after it."""
        chain = [number]
        while is_delta(folder_of(self._root, chain[-1])) and chain[-1] - 1 not in self._is_here:
            if not folder_of(self._root, chain[-1] - 1).is_dir():
                break
            chain.append(chain[-1] - 1)
        made = {one: self._built / f"{one:06d}" for one in (*self._is_here, *chain)}
        before = made.get(chain[-1] - 1, made.get(max(self._is_here, default=0), self._base))
        for one in reversed(chain):
            build(folder_of(self._root, one), one, before, made[one])
            if one - 1 in chain:
                shutil.rmtree(made[one - 1])
            before = made[one]


def _machine(member: Member) -> str:
    where = member.addrs[0].parts[0][1] if member.addrs else ""
    # A puller chooses its host's name: 250 characters would take the place of all bars.
    return f"{where:.24} …{member.peer.short}"


def _machines(count: int) -> str:
    return "1 machine has" if count == 1 else f"{count or 'no'} machines have"


def serve(argv: Sequence[str]) -> int:
    """See `p2p.cast.serve`."""
    return run_command(partial(_serve_options, argv), _serve)


def _serve_options(argv: Sequence[str]) -> argparse.Namespace:
    parser = CommandParser(
        prog="shoal serve",
        description="Offer a file or folder over HTTP: curl resumes, caches keep it, and"
        " shardcast-client takes it as v1.",
    )
    parser.add_argument("path", type=Path, help="a file or a folder; hidden names stay out")
    parser.add_argument("--http", default="0.0.0.0:8000", metavar="HOST:PORT", type=host_port,
                        help="where to listen (default: %(default)s)")  # fmt: skip
    parser.add_argument("--json", action="store_true", help="one JSON object a line")
    return parser.parse_args(argv)


async def _serve(options: argparse.Namespace) -> int:
    path = existing(options.path)
    state, teller = state_of(path), Teller(path.name, as_json=options.json)
    changes = telling_changes("run serve again", teller, path.name if path.is_file() else "")
    with locked_folder(state, "shoal push or serve", "end that one: push --http does both"):
        async with until_told_to_end() as ending, mounted(state, path) as (world, source):
            run = run_of(world.signer.peer_id, await join_secret(world))
            config = ShardcastConfig(keep_versions=1)
            async with AsyncExitStack() as stack:
                enter = stack.enter_async_context
                with teller.patience(world, "reading", f"reading  {path}"):
                    entry = await enter(publish_alone(world, config, run, source))
                shelf = Shelf()
                shelf.add(release_of(entry.manifest, entry.index, entry.weights))
                await enter(serving(world, shelf, options.http, teller, changes))
                await trio.sleep_forever()
    teller.event("ended", "ended    the same command line goes on")
    return ending.code


def inspect(argv: Sequence[str]) -> int:
    """See `p2p.cast.inspect`."""
    return run_command(partial(_inspect_options, argv), _inspect)


def _inspect_options(argv: Sequence[str]) -> argparse.Namespace:
    parser = CommandParser(
        prog="shoal inspect", description="Say what a ticket, a file or a folder holds."
    )
    parser.add_argument("thing", help="a ticket, or a path")
    parser.add_argument("--json", action="store_true", help="one JSON object")
    return parser.parse_args(argv)


async def _inspect(options: argparse.Namespace) -> int:
    if options.thing.startswith(PREFIX):
        said = _named(options.thing)
    else:
        said = await _contents(existing(Path(options.thing)))
    if options.json:
        say(json.dumps(said))
        return 0
    for name, value in said.items():
        lines = value if isinstance(value, list) else [value]
        for line in lines:
            say(f"{name:10} {line}")
    return 0


def _named(text: str) -> dict[str, Any]:
    ticket = ticket_of(text)
    return {
        "pusher": str(ticket.pusher),
        "addresses": [str(addr) for addr in ticket.addrs],
        "name": ticket.name + ("/" if ticket.is_folder else ""),
        "version": ticket.version,
        "manifest": ticket.manifest.hex(),
        "run": ticket.run.hex(),
    }


async def _contents(path: Path) -> dict[str, Any]:
    """Describe what a push of ``path`` would send."""
    with tempfile.TemporaryDirectory(prefix="shoal-") as state:
        async with mounted(Path(state), path) as (world, source):
            digester = Digester(world, ShardcastConfig(), Cores(world))
            index = (await digester.digest(source)).index
    return {
        "files": [f"{file.size:>14,}  {file.path or path.name}" for file in index.files],
        "bytes": index.size,
        "spans": len(index),
        "digest": index.digest.hex(),
    }
