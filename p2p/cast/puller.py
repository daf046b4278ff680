"""``shoal pull``: fetch the content of a ticket, put it where a person wants it, pass it on.

Files are linked, not copied: one copy on the disk is both served and used. Each is linked under
a temporary name first and renamed over the old file, so a program that reads
``model.safetensors`` meanwhile sees the old one or the new one, whole. On a disk without hard
links (exFAT, some network folders) files are copied.
"""

from __future__ import annotations

import argparse
import errno
import filecmp
import json
import shutil
import sys
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from contextlib import AsyncExitStack, ExitStack
from functools import partial
from pathlib import Path
from typing import TypeVar

import trio

from p2p.cast.commandline import (
    LISTEN,
    OUT,
    STATE,
    Meter,
    add_common,
    duration,
    execute,
    pass_on,
    run_command,
    serving,
    telling_changes,
    ticket_of,
)
from p2p.cast.modes import restore
from p2p.cast.swarm import CastNode, open_cast
from p2p.cast.ticket import Ticket
from p2p.cast.view import CastState, Teller
from p2p.cast.weight_v import WEIGHT_V, folder_of, link, note_of, write_version
from p2p.concurrency import leaves
from p2p.errors import BadMessage, ConfigError, NoRoom, StorageError, Unnameable
from p2p.host import PEER_TROUBLE, Host
from p2p.identity import PeerId
from p2p.machine import open_world
from p2p.multiaddr import Multiaddr
from p2p.naming import derived, printable_lines, unencodable
from p2p.node.process import Ending, locked_folder, until_told_to_end
from p2p.node.trouble import likely_cause
from p2p.node.usage import SOON, CommandParser, expanded
from p2p.policy import NO_POLICY, PolicyVersion
from p2p.reach.mapping import ReachConfig
from p2p.reach.nat import Nat, NatConfig, open_nat
from p2p.shardcast import Manifest, ShardcastConfig
from p2p.shardcast.chunkset import Selection
from p2p.shardcast.http.library import PolicyLibrary
from p2p.shardcast.index import Index
from p2p.swarm.core.limits import LOOPBACK, reach_of
from p2p.swarm.swarm import SwarmConfig, open_host


def deliver(
    weights: Path, index: Index, out: Path, name: str, chosen: Sequence[int] | None = None
) -> list[Path]:
    """Link the files of a version at ``weights`` into ``out``, all or those ``chosen`` by
    number; files that exist already stay. Returns their paths.

    A policy that is one file is called ``name``. A file that cannot be written does not keep
    the others away. Raises `NoRoom`, and `StorageError` for what time does not mend.
    """
    made: list[Path] = []
    failed: list[tuple[Path, Exception]] = []
    chosen = range(len(index.files)) if chosen is None else chosen
    for file in (index.files[number] for number in chosen):
        source, target = weights / file.path, out / (file.path or name)
        try:
            _put(source, target, out)
        except (OSError, UnicodeEncodeError, StorageError) as error:
            failed.append((target, error))
        else:
            made.append(target)
    if not failed:
        return made
    where, first = failed[0]
    more = f" ({len(failed)} of {len(chosen)} files; the others are there)"
    if isinstance(first, UnicodeEncodeError):
        raise Unnameable(unencodable(first) + more)
    if not isinstance(first, OSError):
        raise first
    kind = NoRoom if first.errno in (errno.ENOSPC, errno.EDQUOT) else StorageError
    raise kind(f"{where} cannot be written: {first.strerror}{more}")


class Replaces(ConfigError):
    """The version's files would replace ``others``, which no pull has put there."""

    def __init__(self, others: Sequence[Path]) -> None:
        more = f" and {len(others) - 1} other files" if len(others) > 1 else ""
        super().__init__(f"{others[0]}{more} would be replaced by another file of this name")
        self.others = others


def inodes(files: Iterable[Path]) -> set[int]:
    return {one.stat().st_ino for one in files if one.is_file()}


def check_replaced(
    index: Index,
    out: Path,
    name: str,
    ours: Collection[int],
    weights: Path | None = None,
    chosen: Sequence[int] | None = None,
) -> None:
    """Raise `Replaces` if files in ``out`` are others than those of a version.

    Args:
        index: Index of the version.
        out: Folder or file to write to.
        name: Name of the file, for a version of one file.
        ours: Inodes of files that earlier pulls have put there.
        weights: Path of the version; None if it has not arrived and only sizes are known.
        chosen: Numbers of the files that are written; None if all are.
    """
    others = []
    chosen = range(len(index.files)) if chosen is None else chosen
    for file in (index.files[number] for number in chosen):
        target = out / (file.path or name)
        if not target.is_file() or target.stat().st_ino in ours:
            continue
        if weights is None:
            is_same = target.stat().st_size == file.size
        else:
            source = weights / file.path
            is_same = target.samefile(source) or filecmp.cmp(target, source, shallow=False)
        if not is_same:
            others.append(target)
    if others:
        raise Replaces(others)


async def _ask(trouble: Replaces, options: argparse.Namespace) -> None:
    """Ask a person whether to go on. Raises `ConfigError` if not, or if nobody can be asked."""
    if sys.stdin.isatty() and sys.stdout.isatty() and not options.json:
        question = printable_lines(f"{trouble}. Go on? [y/N] ")
        answer = await trio.to_thread.run_sync(input, question, abandon_on_cancel=True)
        if answer.strip().lower() in ("y", "yes"):
            return
        raise ConfigError("nothing was replaced; --out DIR puts it elsewhere")
    raise ConfigError(f"{trouble}: give another --out, or --replace if you mean it") from None


def _put(source: Path, target: Path, out: Path) -> None:
    if target.exists() and target.samefile(source):
        return
    if not target.parent.resolve().is_relative_to(out.resolve()):
        raise StorageError(
            f"{target.parent} is a link that leads out of {out}: remove it, or give another"
            " --out"
        )
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = target.with_name(derived(target.name, after=".shoal-part"))
    temporary.unlink(missing_ok=True)
    link(source, temporary)
    temporary.replace(target)


async def tell_unreachable(
    node: CastNode, addrs: Sequence[Multiaddr], teller: Teller, said: dict[Multiaddr, str]
) -> None:
    """Report for each address why it does not answer, until this node has a neighbour, and keep
    the reasons in ``said``. A person reads one line for each, and another only when the reason
    has changed."""

    async def look(addr: Multiaddr) -> None:
        cause = await _cause(node.host, addr)
        if cause and cause != said.get(addr):
            said[addr] = cause
            teller.event(
                "unreachable", f"no way to {addr.transport}: {cause}",
                addr=str(addr.transport), cause=cause,
            )  # fmt: skip

    while not node.membership.neighbours:
        # All at the same time: the last of eight silent ones was named after 80 seconds.
        async with trio.open_nursery() as nursery:
            for addr in addrs:
                nursery.start_soon(look, addr)
        # Seconds between two reports to the person. Membership dials the same addresses by
        # itself.
        with trio.move_on_after(15.0):
            await node.membership.wait_neighbour()
    said.clear()


async def _cause(host: Host, addr: Multiaddr) -> str:
    """Return why ``addr`` cannot be dialled; empty if it can."""
    try:
        with trio.fail_after(10.0):  # a firewall that swallows packets never answers
            await host.connect_addr(addr)
    except PEER_TROUBLE as error:
        if reach_of(addr) == LOOPBACK:
            return "that is the pusher's own machine: on another, it takes --listen of the push"
        return likely_cause(error)
    return ""


_T = TypeVar("_T")


def pull(argv: Sequence[str]) -> int:
    """See `p2p.cast.puller`."""
    return run_command(partial(_options, argv), _pull)


def _options(argv: Sequence[str]) -> argparse.Namespace:
    parser = CommandParser(
        prog="shoal pull",
        description="Get what a ticket of shoal push names. The same line goes on after an"
        " interruption; http://HOST:PORT of a shardcast server is followed too.",
    )
    add = parser.add_argument
    add("ticket", help="as shoal push prints it, or http://HOST:PORT[,http://...]")
    add("--out", type=Path, metavar="DIR", help="where its files go (default: the name it has)")
    add("--only", metavar="GLOB", help="fetch only files that match, such as '*.json'")
    add("--follow", action="store_true", help="stay, and take each newer version")
    add("--replace", action="store_true", help="replace what is there without a question")
    add("--as", dest="format", choices=[WEIGHT_V],
        help="write each version as a folder weight_v000001 ... of --out, whole or as a delta,"
        " as SGLang's, vime's and ModelExpress's receivers read it")  # fmt: skip
    add("--exec", dest="command", metavar="CMD",
        help="run after each version, with SHOAL_VERSION and SHOAL_PATH set")  # fmt: skip
    add("--seed", type=duration, default=5.0, metavar="TIME",  # others may wait for its chunks
        help="go on giving to others for so long, such as 10m (default: 5s)")  # fmt: skip
    add_common(parser)
    options = parser.parse_args(argv)
    if options.only is not None and options.follow:
        parser.error("--only goes without --follow")
    if options.format is not None and options.only is not None:
        parser.error("--only goes without --as")
    options.is_http = options.ticket.startswith(("http://", "https://"))
    if options.format is not None and options.is_http:
        parser.error("--as goes with a ticket: HTTP servers' versions are signed by nobody")
    if options.only is not None and options.is_http:
        parser.error("--only goes with a ticket: HTTP servers list whole versions")
    options.out = None if options.out is None else expanded(options.out)
    return options


async def _pull(options: argparse.Namespace) -> int:
    if options.is_http:
        from p2p.cast.pull_http import pull_http  # aiohttp takes 0.3 s to import

        return await pull_http(options, (options.out or Path()).absolute())
    ticket = ticket_of(options.ticket)
    if options.only is not None and not ticket.is_folder:
        raise ConfigError(f"--only chooses files of a folder, and {ticket.name} is a file")
    selection = Selection(options.only) if options.only is not None else None
    out = (options.out or Path(ticket.name if ticket.is_folder else ".")).absolute()
    state = out / (STATE if ticket.is_folder else derived(ticket.name, before=f"{STATE}-"))
    teller = Teller(ticket.name, as_json=options.json)
    config = ShardcastConfig(keep_versions=2 if options.follow else 1)
    bootstrap = [addr.with_peer(ticket.pusher) for addr in ticket.addrs]
    here, given = CastState(), 0
    with locked_folder(state, "shoal pull", OUT):
        async with AsyncExitStack() as stack:
            enter = stack.enter_async_context
            ending = await enter(until_told_to_end(is_done=False))
            ours = inodes(state.rglob("*"))
            world = await enter(open_world(state))
            listen = options.listen or [LISTEN]
            host = await enter(
                open_host(world=world, listen=listen, config=SwarmConfig(punch=True))
            )
            # A pull is short: it opens no port of the router.
            quiet = NatConfig(reach=ReachConfig(map_port=False))
            nat = await enter(open_nat(host, world.signer, quiet))
            with teller.patience(world, "checking", f"checking {out}"):
                node = await enter(
                    open_cast(
                        world, host, config,
                        pusher=ticket.pusher, secret=ticket.secret, bootstrap=bootstrap,
                        selection=selection,
                    )
                )  # fmt: skip
            changes = telling_changes(
                "run pull again", teller, "" if ticket.is_folder else ticket.name
            )
            library = PolicyLibrary(node.shardcast)
            await enter(serving(world, library, options.http, teller, changes))
            nursery = await enter(trio.open_nursery())
            stack.callback(nursery.cancel_scope.cancel)
            unreachable: dict[Multiaddr, str] = {}
            nursery.start_soon(tell_unreachable, node, bootstrap, teller, unreachable)
            nursery.start_soon(tell_path, nat, ticket.pusher, teller)
            pull = Pull(node, ticket, options, out, teller, unreachable, ours, selection)
            here = pull.last
            await pull.run(ending)
            ending.is_done = True
            await pass_on(world, options.seed, teller)
            given = node.shardcast.stats.uploaded_as_relay
    if not ending.signal:
        teller.event("ended", f"ended    gave {given / 1e6:,.1f} MB to others", given=given)
    else:
        what = f"{here.here / 1e6:,.1f} of {here.total / 1e6:,.1f} MB"
        what = "all of it" if ending.is_done else what if here.total else "nothing"
        teller.event(
            "ended", f"ended    {what} is here, gave {here.given / 1e6:,.1f} MB; the same"
            " command line goes on",
            here=here.here, total=here.total, given=here.given,
        )  # fmt: skip
    return ending.code


async def tell_path(nat: Nat, pusher: PeerId, teller: Teller) -> None:
    """Report that the pusher is reached through a relay, and later that it is reached
    directly."""
    told = "direct"
    while True:
        path = nat.path(pusher)
        if path not in ("", told):
            told = path
            words = {"relay": "through a relay, which is slow", "direct": "direct"}[path]
            teller.event("path", f"path     {words}", path=path)
        await nat.news.wait()


def _check_content(manifest: Manifest, index: Index, ticket: Ticket) -> None:
    """Check that the version is what the ticket names. Raise `BadMessage` otherwise."""
    is_other = manifest.version == ticket.version and manifest.digest != ticket.manifest
    if is_other or index.is_folder != ticket.is_folder:
        raise BadMessage(
            "the pusher has signed another content than its ticket names: ask for a new ticket"
        )


class Pull:
    """One pull under way: fetches, shows what it waits for, and puts files where they go."""

    def __init__(
        self, node: CastNode, ticket: Ticket, options: argparse.Namespace, out: Path,
        teller: Teller, unreachable: Mapping[Multiaddr, str], ours: set[int],
        selection: Selection | None,
    ) -> None:  # fmt: skip
        """``unreachable`` maps addresses that do not answer to the reasons; ``ours`` has the
        inodes of the files that earlier pulls have written: they need no question."""
        self.last = CastState()
        """Progress that was shown last; it is updated in place."""
        self._asks = not (options.replace or options.format)
        self._node, self._ticket, self._options = node, ticket, options
        self._out, self._teller, self._selection = out, teller, selection
        self._unreachable, self._ours = unreachable, ours

    async def run(self, ending: Ending) -> None:
        """Fetch the ticket's version, and with ``--follow`` each newer one."""
        node, options, wanted = self._node, self._options, self._ticket.version
        if self._selection is not None:
            found = await self._wait(partial(node.shardcast.wait_selected, wanted))
            await self._hand_over(*found)
            return
        while True:
            version = await self._wait(partial(node.shardcast.wait_policy, wanted))
            manifest, index = node.shardcast.manifest(version), node.shardcast.index(version)
            with node.shardcast.pin(version) as weights:
                if options.format is None:
                    await self._hand_over(manifest, index, weights)
                else:
                    place = Path(node.world.disk.locate(weights))
                    await self._hand_over_weights(manifest, index, place)
            node.announce(version)
            ending.is_done = True
            if options.command:
                await execute(options.command, version, self._out, self._teller)
            if not options.follow:
                return
            wanted = PolicyVersion(version + 1)

    def _check_replaced(self, index: Index, weights: Path | None = None) -> None:
        if self._asks:
            chosen = self._selection.files(index) if self._selection is not None else None
            check_replaced(index, self._out, self._ticket.name, self._ours, weights, chosen)

    async def _ask(self, trouble: Replaces) -> None:
        await _ask(trouble, self._options)
        self._ours |= inodes(trouble.others)

    async def _wait(self, wait: Callable[[], Awaitable[_T]]) -> _T:
        """Show progress until ``wait`` returns; ask before files are replaced."""
        while True:
            trouble: list[Replaces] = []
            try:
                return await self._show(wait)
            except* Replaces as group:
                trouble += [one for one in leaves(group) if isinstance(one, Replaces)]
            await self._ask(trouble[0])

    async def _show(self, wait: Callable[[], Awaitable[_T]]) -> _T:
        """Show progress until ``wait`` returns, and return its result. Raises `Unnameable`
        and `BadMessage`, where waiting does not help."""
        with self._teller.bars():
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._tell)
                found = await wait()
                nursery.cancel_scope.cancel()
        return found

    async def _tell(self) -> None:
        node, meter, due = self._node, Meter(self._node.world), self._node.world.now()
        moved, moved_at = -1, due
        while True:
            stats = node.shardcast.stats
            came = stats.from_origin + stats.from_peers + node.shardcast.arriving
            if came != moved:
                moved, moved_at = came, node.world.now()
            coming = node.shardcast.fetching
            if coming is not None and coming.index is not None:
                self._check_replaced(coming.index)
            total, share, version = 0, 0.0, PolicyVersion(0)
            if coming is not None:
                total, share, version = coming.size, coming.share, coming.manifest.version
            node.membership.me.update(load=share)  # the share that is here
            self.last.update(
                total=total, here=int(total * share), rate=meter.rate(came),
                given=stats.uploaded_as_relay, members=len(node.others()),
                whole=len(node.whole(version)),
                waits_for=self._cause(node.world.now() - moved_at),
            )  # fmt: skip
            self._teller.state(self.last)
            due += self._teller.interval
            await node.world.sleep_until(due)

    def _cause(self, seconds: float) -> str:
        """Return the event that a stalled download waits for, in words. Nothing has arrived for
        some ``seconds``."""
        if self._ticket.pusher in self._node.shardcast.halted:
            raise BadMessage(
                "the pusher has signed two contents as one version: ask it for a new ticket"
            )
        trouble = self._node.shardcast.trouble
        if isinstance(trouble, Unnameable):
            raise trouble
        if isinstance(trouble, NoRoom):
            free = shutil.disk_usage(self._out).free
            return (
                f"waits for room in {self._out}: it needs {trouble.needed / 1e6:,.1f} MB, and"
                f" {free / 1e6:,.1f} MB are free ({trouble.__cause__ or trouble})"
            )
        if trouble is not None:
            return f"waits for the disk of {self._out}, which takes nothing: {trouble}"
        stats = self._node.shardcast.stats
        is_still = seconds >= SOON
        is_new = not (stats.from_origin or stats.from_peers)
        if not self._node.membership.neighbours and (is_still or is_new):
            return "waits for the pusher" + "".join(
                f"; {addr.transport}: {cause}" for addr, cause in self._unreachable.items()
            )
        if not is_still:
            return ""
        if self._node.shardcast.fetching is None:
            is_first = self._node.shardcast.newest == NO_POLICY
            return f"waits for {'the list of files' if is_first else 'a newer version'}"
        missing = f"{(self.last.total - self.last.here) / 1e6:,.1f} MB that no machine sends"
        if self._ticket.pusher not in self._node.host.connected:
            return f"waits for the pusher, which is away: {missing}"
        # A busy pusher may take half a minute to give parts to machines that came at once.
        if is_new and seconds < 30.0:
            return "waits for the first part, while the pusher gives each machine its own"
        return f"waits for {missing}: has a file changed there? then push it again"

    async def _hand_over(self, manifest: Manifest, index: Index, weights: str) -> None:
        """Put the files of a version, or the selected ones, where they go."""
        _check_content(manifest, index, self._ticket)
        node, name = self._node, self._ticket.name
        chosen: Sequence[int] = range(len(index.files))
        if self._selection is not None:
            chosen = self._selection.files(index)
            if not chosen:
                raise ConfigError(f"no file of {name} matches {self._selection.pattern!r}")
        place, made = Path(node.world.disk.locate(weights)), None
        try:
            self._check_replaced(index, place)
        except Replaces as trouble:
            await self._ask(trouble)
        while made is None:
            try:
                put = partial(deliver, place, index, self._out, name, chosen)
                made = await trio.to_thread.run_sync(put)
            except NoRoom as error:
                words = f"waits for room: {error}"
                self._teller.event("waiting", words, waits_for=words)
                await node.world.sleep_until(node.world.now() + 5.0)
        self._ours = inodes(made)
        if manifest.note:  # files have modes, or folders are empty
            modes = await node.tables.fetch(self._ticket.pusher, manifest.note)
            if modes is None:
                words = "nobody here knows them; pull again later"
                self._teller.event("modes", f"modes    of files and empty folders: {words}")
            else:
                await trio.to_thread.run_sync(restore, modes, index, self._out, name, chosen)
        size, stats = sum(index.files[one].size for one in chosen), node.shardcast.stats
        where = self._out if self._ticket.is_folder else self._out / name
        what = "whole"
        if self._selection is not None:
            what = f"{len(made)} of {len(index.files)} files"
        self._teller.event(
            "whole", f"{what}    {where}, version {manifest.version}, {size / 1e6:,.1f} MB",
            version=manifest.version, path=str(where), files=len(made), bytes=size,
            from_origin=stats.from_origin, from_peers=stats.from_peers,
        )  # fmt: skip

    async def _hand_over_weights(self, manifest: Manifest, index: Index, new: Path) -> None:
        """Write a version in the form of `p2p.cast.weight_v`."""
        number, node, out = int(manifest.version) + 1, self._node, self._out
        _check_content(manifest, index, self._ticket)
        if number > 999_999:  # six digits
            raise ConfigError(f"a folder of --as {WEIGHT_V} has at most version 999,999")
        before = PolicyVersion(manifest.version - 1)
        with ExitStack() as pins:
            old = None
            if manifest.version and node.shardcast.holds(before):
                old = Path(
                    node.world.disk.locate(pins.enter_context(node.shardcast.pin(before)))
                )
            try:
                what = await trio.to_thread.run_sync(
                    write_version, out, number, new, old, self._ticket.name
                )
                note = {
                    "version": f"{number:06d}",
                    "state": manifest.weights_digest.hex(),
                    "publisher": str(manifest.author),
                    "manifest": manifest.encode().hex(),
                }
                note_of(out, number).write_text(json.dumps(note))
            except OSError as error:
                raise StorageError(f"{out} cannot be written: {error.strerror}") from error
        path = folder_of(out, number)
        self._teller.event(
            "whole", f"whole    {path}, a {what}", version=manifest.version, path=str(path),
            form=what, bytes=manifest.size,
        )  # fmt: skip
