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
import os
import shutil
import sys
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from contextlib import AsyncExitStack, ExitStack
from functools import partial
from pathlib import Path
from typing import Final, TypeVar

import trio

from p2p.cast.commandline import (
    LISTEN,
    OUT,
    PUNCHING,
    STATE,
    Changes,
    Meter,
    add_common,
    duration,
    execute,
    offering,
    pass_on,
    run_command,
    ticket_of,
)
from p2p.cast.modes import restore
from p2p.cast.swarm import CastNode, open_cast
from p2p.cast.ticket import Ticket
from p2p.cast.view import PIPED, CastState, Teller
from p2p.cast.weight_v import MAX_VERSION, WEIGHT_V, folder_of, note_of, write_version
from p2p.concurrency import leaves
from p2p.errors import BadMessage, ConfigError, NoRoom, StorageError, Unnameable
from p2p.host import Host
from p2p.identity import PeerId
from p2p.machine import open_world
from p2p.multiaddr import Multiaddr
from p2p.naming import derived, unencodable
from p2p.node.process import Ending, locked_folder, until_told_to_end
from p2p.node.trouble import PEER_TROUBLE, likely_cause
from p2p.node.usage import SOON, CommandParser, expanded
from p2p.policy import NO_POLICY, PolicyVersion
from p2p.reach.mapping import ReachConfig
from p2p.reach.nat import Nat, NatConfig, open_nat
from p2p.shardcast import Manifest, ShardcastConfig
from p2p.shardcast.chunkset import Selection
from p2p.shardcast.index import Index
from p2p.swarm.core.limits import LOOPBACK, reach_of
from p2p.swarm.swarm import open_host

PULLING: Final = NatConfig(reach=ReachConfig(map_port=False))
"""Reachability of a pull, which is short: it opens no port of the router."""
_TEMPORARY: Final = ".shoal-part"
_FULL: Final = frozenset({errno.ENOSPC, errno.EDQUOT})
"""Errors of a disk on which there may be room later."""
_CANNOT_LINK: Final = frozenset({errno.EXDEV, errno.EPERM, errno.EMLINK, errno.ENOTSUP})
"""Errors of a disk that knows no hard links, or that has reached its limit of links to a
file."""


def deliver(
    weights: Path, index: Index, out: Path, name: str, selection: Selection | None = None
) -> list[Path]:
    """Link the files of a version at ``weights`` into ``out``, all or those selected; files
    that exist already stay. Returns their paths.

    A policy that is one file is called ``name``. A file that cannot be written does not keep
    the others away. Raises `NoRoom`, and `StorageError` for what time does not mend.
    """
    made: list[Path] = []
    failed: list[tuple[Path, Exception]] = []
    chosen = range(len(index.files)) if selection is None else selection.files(index)
    for file in (index.files[number] for number in chosen):
        source = weights / file.path if file.path else weights
        target = out / (file.path or name)
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
    kind = NoRoom if first.errno in _FULL else StorageError
    raise kind(f"{where} cannot be written: {first.strerror}{more}")


class Replaces(ConfigError):
    """The version's files would replace files that no pull has put there."""


def check_replaced(
    index: Index, out: Path, name: str, ours: Collection[int], weights: Path | None = None
) -> None:
    """Raise `Replaces` if files in ``out`` are others than those of a version.

    Args:
        index: Index of the version.
        out: Folder or file to write to.
        name: Name of the file, for a version of one file.
        ours: Inodes of files that earlier pulls have put there.
        weights: Path of the version; None if it has not arrived and only sizes are known.
    """
    others = []
    for file in index.files:
        target = out / (file.path or name)
        if not target.is_file() or target.stat().st_ino in ours:
            continue
        if weights is None:
            is_same = target.stat().st_size == file.size
        else:
            source = weights / file.path if file.path else weights
            is_same = target.samefile(source) or filecmp.cmp(target, source, shallow=False)
        if not is_same:
            others.append(target)
    if others:
        more = f" and {len(others) - 1} other files" if len(others) > 1 else ""
        raise Replaces(f"{others[0]}{more} would be replaced by another file of this name")


async def _ask(trouble: Replaces, options: argparse.Namespace) -> None:
    """Ask a person whether to go on. Raises `ConfigError` if not, or if nobody can be asked."""
    if sys.stdin.isatty() and sys.stdout.isatty() and not options.json:
        question = f"{trouble}. Go on? [y/N] "
        answer = await trio.to_thread.run_sync(input, question, abandon_on_cancel=True)
        if answer.strip().lower() in ("y", "yes"):
            return
        raise ConfigError("nothing was replaced; --out DIR puts it elsewhere")
    raise ConfigError(f"{trouble}: give another --out, or --replace if you mean it") from None


def _put(source: Path, target: Path, out: Path) -> None:
    if target.exists() and target.samefile(source):
        return
    target.parent.mkdir(parents=True, exist_ok=True)
    if not target.parent.resolve().is_relative_to(out.resolve()):
        raise StorageError(
            f"{target.parent} is a link that leads out of {out}: remove it, or give another"
            " --out"
        )
    temporary = target.with_name(derived(target.name, after=_TEMPORARY))
    temporary.unlink(missing_ok=True)
    try:
        os.link(source, temporary)
    except OSError as error:
        if error.errno not in _CANNOT_LINK:
            raise
        shutil.copyfile(source, temporary)
    temporary.replace(target)


ROUND: Final = 15.0
"""Seconds between two reports to the person. Membership dials the same addresses by itself."""
TIMEOUT: Final = 10.0
"""Timeout of one address, in seconds: a firewall that swallows packets never answers."""


async def tell_unreachable(
    node: CastNode,
    addrs: Sequence[Multiaddr],
    teller: Teller,
    causes: dict[Multiaddr, str] | None = None,
) -> None:
    """Report for each address why it does not answer, until this node has a neighbour, and keep
    the reasons in ``causes``. A person reads one line for each, and another only when the
    reason has changed."""
    said = {} if causes is None else causes

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
        with trio.move_on_after(ROUND):
            await node.membership.wait_neighbour()
    said.clear()


async def _cause(host: Host, addr: Multiaddr) -> str:
    """Return why ``addr`` cannot be dialled; empty if it can."""
    try:
        with trio.fail_after(TIMEOUT):
            await host.connect_addr(addr)
    except PEER_TROUBLE as error:
        if reach_of(addr) == LOOPBACK:
            return "that is the pusher's own machine: on another, it takes --listen of the push"
        return likely_cause(error)
    return ""


_T = TypeVar("_T")

PLANNING: Final = 30.0
"""Seconds that a busy pusher may take to give the first parts to machines that came at once."""
SEED: Final = 5.0
"""Seconds for which a puller goes on serving by default: others may wait for its chunks."""


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
    add(
        "--replace",
        action="store_true",
        help="replace what is there without a question",
    )
    add("--as", dest="format", choices=[WEIGHT_V],
        help="write each version as a folder weight_v000001 ... of --out, whole or as a delta,"
        " as SGLang's, vime's and ModelExpress's receivers read it")  # fmt: skip
    add("--exec", dest="command", metavar="CMD",
        help="run after each version, with SHOAL_VERSION and SHOAL_PATH set")  # fmt: skip
    add("--seed", type=duration, default=SEED, metavar="TIME",
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
            ours = {one.stat().st_ino for one in state.rglob("*") if one.is_file()}
            world = await enter(open_world(state))
            listen = options.listen or [LISTEN]
            host = await enter(open_host(world=world, listen=listen, config=PUNCHING))
            nat = await enter(open_nat(host, world.signer, PULLING))
            with teller.patience(world, "checking", f"checking {out}"):
                node = await enter(
                    open_cast(
                        world, host, config,
                        pusher=ticket.pusher, secret=ticket.secret, bootstrap=bootstrap,
                        selection=selection,
                    )
                )  # fmt: skip
            changes = Changes("run pull again", teller, "" if ticket.is_folder else ticket.name)
            await enter(offering(node, options.http, teller, changes))
            nursery = await enter(trio.open_nursery())
            stack.callback(nursery.cancel_scope.cancel)
            unreachable: dict[Multiaddr, str] = {}
            nursery.start_soon(tell_unreachable, node, bootstrap, teller, unreachable)
            nursery.start_soon(tell_path, nat, ticket.pusher, teller)
            # What an earlier pull has put there may be replaced.
            asks = node.shardcast.newest == NO_POLICY and not (
                options.replace or options.format
            )
            view = PullView(node, ticket, out, teller, unreachable, asks=asks, ours=ours)
            here = view.last
            if selection is not None:
                await _pull_some(node, ticket, selection, out, view)
            else:
                await _pull_all(node, ticket, options, out, view, ending)
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


async def _pull_all(
    node: CastNode, ticket: Ticket, options: argparse.Namespace, out: Path, view: PullView,
    ending: Ending,
) -> None:  # fmt: skip
    """Fetch the ticket's version, and with ``--follow`` each newer one."""
    wanted = ticket.version
    while True:
        version = await _wait(view, options, partial(node.shardcast.wait_policy, wanted))
        if view.asks:
            place = Path(node.world.disk.locate(node.shardcast.weights(version)))
            try:
                check_replaced(
                    node.shardcast.index(version), out, ticket.name, view.ours, place
                )
            except Replaces as trouble:
                await _ask(trouble, options)
            view.asks = False
        put = _hand_over if options.format is None else _hand_over_weights
        await put(node, version, ticket, out, view)
        ending.is_done = True
        if options.command:
            await execute(options.command, version, out, view.teller)
        if not options.follow:
            return
        wanted = PolicyVersion(version + 1)


async def _wait(
    view: PullView, options: argparse.Namespace, wait: Callable[[], Awaitable[_T]]
) -> _T:
    """Show progress until ``wait`` returns; ask before files are replaced."""
    trouble: list[Replaces] = []
    try:
        return await view.show(wait)
    except* Replaces as group:
        trouble += [one for one in leaves(group) if isinstance(one, Replaces)]
    await _ask(trouble[0], options)
    view.asks = False
    return await view.show(wait)


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


class PullView:
    """Shows the progress of a pull and the reason why it waits."""

    def __init__(
        self, node: CastNode, ticket: Ticket, out: Path, teller: Teller,
        unreachable: Mapping[Multiaddr, str], *, asks: bool, ours: Collection[int],
    ) -> None:  # fmt: skip
        """``unreachable`` maps addresses that do not answer to the reasons."""
        self.teller = teller
        self.asks = asks
        """True if existing files may be replaced only after a question."""
        self.ours = ours
        """Inodes of the files that earlier pulls have written; they need no question."""
        self.last = CastState()
        """Progress that was shown last; it is updated in place."""
        self._node = node
        self._ticket = ticket
        self._out = out
        self._unreachable = unreachable

    async def show(self, wait: Callable[[], Awaitable[_T]]) -> _T:
        """Show progress until ``wait`` returns, and return its result. Raises `Unnameable`
        and `BadMessage`, where waiting does not help."""
        with self.teller.bars():
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
            if self.asks and coming is not None and coming.index is not None:
                check_replaced(coming.index, self._out, self._ticket.name, self.ours)
            total, share, version = 0, 0.0, PolicyVersion(0)
            if coming is not None:
                total, share, version = coming.size, coming.share, coming.manifest.version
            node.announce_share(share)
            self.last.update(
                total=total, here=int(total * share), rate=meter.rate(came),
                given=stats.uploaded_as_relay, members=len(node.others()),
                whole=len(node.whole(version)),
                waits_for=self._cause(node.world.now() - moved_at),
            )  # fmt: skip
            self.teller.state(self.last)
            due += self.teller.interval
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
        if is_new and seconds < PLANNING:
            return "waits for the first part, while the pusher gives each machine its own"
        return f"waits for {missing}: has a file changed there? then push it again"


async def _pull_some(
    node: CastNode, ticket: Ticket, selection: Selection, out: Path, view: PullView
) -> None:
    """Fetch the selected files of the ticket's version."""
    manifest, index, weights = await view.show(
        partial(node.shardcast.wait_selected, ticket.version)
    )
    _check_content(manifest, ticket)
    if not selection.files(index):
        raise ConfigError(f"no file of {ticket.name} matches {selection.pattern!r}")
    made = await _deliver(node, weights, index, out, ticket.name, view.teller, selection)
    await _restore(node, manifest, index, out, ticket, view.teller, selection)
    size = sum(index.files[number].size for number in selection.files(index))
    stats = node.shardcast.stats
    view.teller.event(
        "whole", f"{len(made)} of {len(index.files)} files    {out}, version {ticket.version},"
        f" {size / 1e6:,.1f} MB",
        version=ticket.version, path=str(out), files=len(made), bytes=size,
        from_origin=stats.from_origin, from_peers=stats.from_peers,
    )  # fmt: skip


async def _deliver(
    node: CastNode,
    weights: str,
    index: Index,
    out: Path,
    name: str,
    teller: Teller,
    selection: Selection | None = None,
) -> list[Path]:
    """Run `deliver` again for as long as there is no room."""
    place = Path(node.world.disk.locate(weights))
    while True:
        try:
            return await trio.to_thread.run_sync(deliver, place, index, out, name, selection)
        except NoRoom as error:
            words = f"waits for room: {error}"
            teller.event("waiting", words, waits_for=words)
            await node.world.sleep_until(node.world.now() + PIPED)


async def _restore(
    node: CastNode, manifest: Manifest, index: Index, out: Path, ticket: Ticket,
    teller: Teller, selection: Selection | None = None,
) -> None:  # fmt: skip
    """Set the files' modes as at the pusher, and make empty folders."""
    if not manifest.body.note:
        return
    modes = await node.tables.fetch(ticket.pusher, manifest.body.note)
    if modes is None:
        words = "modes    of files and empty folders: nobody here knows them; pull again later"
        teller.event("modes", words)
        return
    chosen = range(len(index.files)) if selection is None else selection.files(index)
    await trio.to_thread.run_sync(restore, modes, index, out, ticket.name, chosen)


def _check_content(manifest: Manifest, ticket: Ticket) -> None:
    """Check that the version is the one that the ticket names. Raise `BadMessage` otherwise."""
    if manifest.version == ticket.version and manifest.digest != ticket.manifest:
        raise BadMessage(
            "the pusher has signed another content under the ticket's version: ask for a new"
            " ticket"
        )


async def _hand_over_weights(
    node: CastNode, version: PolicyVersion, ticket: Ticket, out: Path, view: PullView
) -> None:
    """Write a version in the form of `p2p.cast.weight_v`."""
    manifest, number = node.shardcast.manifest(version), int(version) + 1
    _check_content(manifest, ticket)
    if number > MAX_VERSION:
        raise ConfigError(f"a folder of --as {WEIGHT_V} has at most version {MAX_VERSION:,}")
    with ExitStack() as pins:
        locate, pin = node.world.disk.locate, node.shardcast.pin
        new, old = Path(locate(pins.enter_context(pin(version)))), None
        if version and node.shardcast.holds(PolicyVersion(version - 1)):
            old = Path(locate(pins.enter_context(pin(PolicyVersion(version - 1)))))
        try:
            what = await trio.to_thread.run_sync(
                write_version, out, number, new, old, ticket.name
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
    node.announce(version)
    path = folder_of(out, number)
    view.teller.event(
        "whole", f"whole    {path}, a {what}", version=version, path=str(path), form=what,
        bytes=manifest.size,
    )  # fmt: skip


async def _hand_over(
    node: CastNode, version: PolicyVersion, ticket: Ticket, out: Path, view: PullView
) -> None:
    manifest = node.shardcast.manifest(version)
    _check_content(manifest, ticket)
    index = node.shardcast.index(version)
    with node.shardcast.pin(version) as weights:
        made = await _deliver(node, weights, index, out, ticket.name, view.teller)
    await _restore(node, manifest, index, out, ticket, view.teller)
    node.announce(version)
    where = out if ticket.is_folder else out / ticket.name
    stats = node.shardcast.stats
    view.teller.event(
        "whole", f"whole    {where}, version {version}, {manifest.size / 1e6:,.1f} MB",
        version=version, path=str(where), files=len(made), bytes=manifest.size,
        from_origin=stats.from_origin, from_peers=stats.from_peers,
    )  # fmt: skip
