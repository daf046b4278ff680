"""The driver of SHARDCAST: streams, disk and clock around the core.

Control messages go through `Host.send`. Each peer that is sent chunks has one task and one
long-lived bulk stream (`sender`), which report to the core when a chunk has really left; a
stream that is read here (`receiver`) takes its next frame only when the disk has room for the
last. One task makes policies durable, in the order in which they became whole.
"""

from __future__ import annotations

import logging
import math
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager

import trio

from p2p.concurrency import Notifier
from p2p.driver import Driver
from p2p.equivocation import Equivocation
from p2p.errors import BadMessage, NoRoom, StorageError, Unnameable
from p2p.host import Host, PeerEvent, PeerState
from p2p.identity import PeerId
from p2p.shardcast import messages as msg
from p2p.shardcast.bulk import Receiver, Sender, Throttle
from p2p.shardcast.chunkset import Selection
from p2p.shardcast.config import ShardcastConfig, ShardcastStats
from p2p.shardcast.core import events as ev
from p2p.shardcast.core.core import ShardcastCore
from p2p.shardcast.core.download import Download
from p2p.shardcast.core.statements import Statements
from p2p.shardcast.forest import RosterEntry
from p2p.shardcast.index import Index
from p2p.shardcast.manifest import NO_POLICY, PROTOCOL_ID, Manifest, PolicyVersion
from p2p.shardcast.publisher import PolicyPublisher
from p2p.shardcast.store import DiskTrial, PolicyStore, StoredPolicy
from p2p.world import World, dawdle, lateness

logger = logging.getLogger(__name__)


_Job = ev.Finish | ev.Patch | ev.Abandon | ev.Halt


class Shardcast:
    """Policies of one run: published, relayed, fetched and kept."""

    def __init__(
        self,
        world: World,
        host: Host,
        config: ShardcastConfig,
        core: ShardcastCore,
        store: PolicyStore,
        publisher: PolicyPublisher,
        nursery: trio.Nursery,
        announce: Callable[[bytes], None],
    ) -> None:
        self._world = world
        self._host = host
        self._core = core
        self._store = store
        self._publisher = publisher
        self._senders: dict[PeerId, Sender] = {}
        self._driver: Driver[ev.Event, ev.Effect] = Driver(
            world,
            core,
            self._carry_out,
            lambda: self._driver.feed(ev.Tick()),
            lambda: lateness(world, "shardcast/late tick"),
        )
        self._upload = Throttle(world, config.upload_rate)
        download = Throttle(world, config.download_rate)
        self._receiver = Receiver(
            world, core, self._driver.feed, self._wait_written, store.cores, download
        )
        self._writers: dict[bytes, Notifier] = {}
        """Maps each policy whose spans a task is writing to a notifier, which fires when some
        are written."""
        self._disk = DiskTrial(world, store.folder)
        self._mending = trio.CancelScope()
        """Cancels the task that waits for the disk."""
        self.trouble: StorageError | None = None
        """The error with which the disk refuses data; None while it works."""
        self._unfinished: list[_Job] = []
        """Complete policies that the disk would not take. They are finished, or made from
        patches, once it takes data."""
        self._nursery = nursery
        self._announce = announce
        self._whole_one = Notifier()
        """Notified when a version becomes complete."""
        self._written = Notifier()
        """Notified when spans have been written or an index has come."""
        # One job per policy that is fetched or dropped, and the core fetches two at a time.
        self._jobs, self._jobs_out = trio.open_memory_channel[_Job](math.inf)

    def __repr__(self) -> str:
        return f"Shardcast(newest {self.newest}, {self._store!r})"

    def charge_upload(self, size: int) -> None:
        """Count ``size`` bytes as upload that another service of this node has sent."""
        self._upload.take(size)

    # What roles use

    @property
    def newest(self) -> PolicyVersion:
        """The newest version that is complete here; `NO_POLICY` (-1) if there is none."""
        return self._core.newest.version if self._core.newest is not None else NO_POLICY

    @property
    def signed(self) -> PolicyVersion:
        """The newest version that this node has published, even if its files are gone here and
        peers send it back; `NO_POLICY` if there is none."""
        own = self._store.newest_own
        return own.version if own is not None else NO_POLICY

    @property
    def fetching(self) -> Download | None:
        """The download of the newest version on its way; None if there is none."""
        coming = [download for download in self._core.downloads if not download.stored]
        return max(coming, key=lambda download: download.manifest.version, default=None)

    @property
    def arriving(self) -> int:
        """Bytes of chunks that have only partly arrived."""
        return self._receiver.budget.held

    @property
    def damaged(self) -> Mapping[str, str]:
        """Maps the absolute path of each damaged file that peers asked for to ``changed`` or to
        the error that reading it gives."""
        return self._store.damaged

    @property
    def flows(self) -> dict[str, dict[str, int]]:
        """Bytes of chunks ``from`` and ``to`` peers, as plain values for display."""
        both = {"from": self._core.came, "to": self._core.sent}
        return {way: {str(peer): size for peer, size in of.items()} for way, of in both.items()}

    @property
    def stats(self) -> ShardcastStats:
        """Bytes and counts since the start."""
        return self._core.stats

    @property
    def uplink_rate(self) -> float:
        """Bytes per second that this node's uplink carries, measured while it relayed; 0 if
        unknown."""
        return self._core.uplink_rate

    @property
    def halted(self) -> dict[PeerId, Equivocation[Manifest]]:
        """Maps each publisher convicted of equivocation to the proof."""
        return dict(self._core.statements.halted)

    def _entry(self, version: PolicyVersion) -> StoredPolicy:
        entry = self._store.stored(version)
        if entry is None:
            raise KeyError(version)
        return entry

    def manifest(self, version: PolicyVersion) -> Manifest:
        """Return the manifest of a version that is complete here. Raise `KeyError` if it is
        not."""
        return self._entry(version).manifest

    def index(self, version: PolicyVersion) -> Index:
        """Return the index of a version that is complete here. Raise `KeyError` if it is
        not."""
        return self._entry(version).index

    @property
    def held(self) -> tuple[PolicyVersion, ...]:
        """Return the versions that are complete here, newest first."""
        return self._store.versions

    def holds(self, version: PolicyVersion) -> bool:
        """Return True if a version is complete here."""
        return self._store.stored(version) is not None

    def weights(self, version: PolicyVersion) -> str:
        """Return the path (for `World.disk`) of a version's file, or of the folder of its
        files. Raise `KeyError` if it is not here.

        They stay while the version is among the newest `ShardcastConfig.keep_versions`, or
        pinned.
        """
        return self._entry(version).weights

    @contextmanager
    def pin(self, version: PolicyVersion) -> Iterator[str]:
        """Keep a version on disk for the length of the block, and yield its weights' path.
        Raise `KeyError` if it is not here."""
        entry = self._entry(version)
        with entry.pin():
            yield entry.weights

    async def check_weights(self, version: PolicyVersion) -> str:
        """Read a version's weights and compare their digests before an engine uses them; return
        their path.

        A core reads 2 to 4 GB/s, which takes much less time than loading. With weights that
        have rotted on disk an honest worker's results, or a validator's verdicts, would be
        wrong. Raises `KeyError` if the version is not here, `StorageError` if it has rotted.
        """
        entry = self._entry(version)
        await self._store.check_weights(entry)
        return entry.weights

    async def wait_policy(self, at_least: PolicyVersion) -> PolicyVersion:
        """Return the newest version here, once that is ``at_least`` or newer."""
        while self.newest < at_least:
            await self._whole_one.wait()
        return self.newest

    async def wait_selected(self, version: PolicyVersion) -> tuple[Manifest, Index, str]:
        """Return the path of the selected files of ``version`` once they are durable here.
        Raise `StorageError` if the disk refuses."""
        while True:
            entry = await self._store.selected(version)
            if entry is not None:
                return entry.manifest, entry.index, entry.weights
            await self._written.wait()

    async def publish(
        self,
        version: PolicyVersion,
        weights_path: str,
        note: bytes = b"",
        adapter: tuple[str, PolicyVersion] | None = None,
    ) -> Manifest:
        """Sign and spread a version whose file, or folder of files, is at ``weights_path`` (of
        `World.disk`), with a ``note`` in its manifest: a digest, or nothing.

        Returns once the version is durable and on its way. The files are served in place: they
        must not change while the version is kept. Hidden files are left out. Publishing the
        same content again gives the same manifest. Other content under a version that is out,
        or a version older than the newest, would be equivocation and raises
        `LocalProtocolError`. Links, a safetensors file that is cut off, and files that change
        meanwhile raise it too. An ``adapter`` is a file and the version that it adds to
        (`p2p.shardcast.adapter`); peers that hold that version are sent the adapter only.
        """
        event = await self._publisher.prepare(
            version, weights_path, lambda: self._core.newest, note, adapter
        )
        if isinstance(event, Manifest):
            return event
        self._driver.feed(event)
        self._whole_one.notify_all()
        await self._prune()
        return event.manifest

    def receive_announcement(self, peer: PeerId, data: bytes) -> bool:
        """Take an announcement that ``peer`` wrote and gossip brought.

        Return True if it is valid and new, so that gossip passes it on. Return False if nothing
        is wrong with it, but it is old, or its author is not (yet) known as a publisher.

        Raise `BadMessage` if it can be valid for no node: malformed, forged, of another run, or
        no news. (The author of another kind of message would be answered, and dialled for it,
        by every node.)
        """
        if len(data) > msg.MAX_CONTROL:
            raise BadMessage(
                f"an announcement of {len(data)} bytes is over the limit of {msg.MAX_CONTROL}"
            )
        message = msg.decode_message_untrusted(data)
        effects = self._driver.ask(ev.Heard(peer, message, gossip=True))
        return any(isinstance(effect, ev.PassOn) for effect in effects)

    # What the host and the disk report

    def _carry_out(self, effect: ev.Effect) -> None:
        match effect:
            case ev.Send(peer, message):
                self._world.sometimes(
                    "shardcast/pulled what was late", isinstance(message, msg.Want)
                )
                self._host.send(peer, PROTOCOL_ID, msg.encode_message(message))
            case ev.Push(peer, item):
                self._sender(peer).push_nowait(item)
            case ev.Connect(peer):
                self._sender(peer)
            case ev.Gossip(message):
                self._announce(msg.encode_message(message))
            case ev.Begin(manifest, index):
                self._store.begin(manifest, index)
                self._written.notify_all()
            case ev.Keep(policy, chunk):
                self._store.keep_nowait(policy, chunk, *self._receiver.in_hand)
                if policy not in self._writers:
                    self._writers[policy] = Notifier()
                    self._nursery.start_soon(self._write, policy)
            case ev.Finish() | ev.Patch() | ev.Abandon():
                self._jobs.send_nowait(effect)
            case ev.Regroup():
                self._nursery.start_soon(self._regroup)
            case ev.Penalise(peer, offence, reason):
                self._world.sometimes("shardcast/convicted a liar", True)
                self._drop_sender(peer)
                self._host.penalise(peer, offence.points, reason)
            case ev.RefuseRoster(reason):
                logger.warning("roster_refused reason=%s", reason)
            case ev.Halt(evidence):
                version = evidence.first.version
                logger.warning("trainer_halted trainer=%r version=%d", evidence.author, version)
                self._jobs.send_nowait(effect)
            case ev.PassOn():
                pass  # read from the list by `receive_announcement`

    def _on_peer(self, event: PeerEvent) -> None:
        if event.state is PeerState.CONNECTED:
            self._driver.feed(ev.PeerUp(event.peer))
        else:
            self._drop_sender(event.peer)
            self._driver.feed(ev.PeerDown(event.peer))

    def _on_message(self, peer: PeerId, data: bytes) -> None:
        self._driver.feed(ev.Heard(peer, msg.decode_message_untrusted(data)))

    async def _wait_written(self, policy: bytes) -> None:
        """Return when the spans of a policy that are only in memory are no more than the
        streams being read: a kill may cost one span for each stream.

        Waiting until no span is only in memory would make all streams wait for each other: with
        six nodes on two busy cores, versions of 13 small chunks took twice as long.
        """
        while self._store.unwritten(policy) >= max(1, self._receiver.streams):
            done = self._writers.get(policy)
            if done is None:
                return  # the disk refuses
            await done.wait()

    async def _write(self, policy: bytes) -> None:
        """Write the spans that have come, and those that come meanwhile, to disk."""
        try:
            while self._store.unwritten(policy):
                await self._store.flush(policy)
                self._writers[policy].notify_all()
                self._written.notify_all()
        except (NoRoom, Unnameable) as error:
            await self._cannot_hold(policy, error)
        except StorageError as error:
            self._disk_refused(error)
        finally:
            self._writers.pop(policy).notify_all()

    async def _cannot_hold(self, policy: bytes, error: NoRoom | Unnameable) -> None:
        """Give up a version for which a working disk has no room, until it has."""
        entry = self._store.entry(policy)
        if not await self._disk.takes_data():
            self._disk_refused(error)
        elif entry is not None:
            logger.error("policy_given_up reason=%s", error)
            has_no_room = isinstance(error, NoRoom)
            self.stats.versions_too_large += has_no_room
            self._note_trouble(error)
            self._driver.feed(ev.Unusable(policy, has_no_room))
            await self._store.forget(policy)
            if has_no_room:
                self._nursery.start_soon(self._mend_disk, error)

    def _note_trouble(self, error: StorageError | None) -> None:
        self.trouble = error
        self._written.notify_all()

    def _disk_refused(self, error: StorageError) -> None:
        """Serve what this node holds, and fetch nothing until `_mend_disk` finds the disk
        working."""
        self._note_trouble(error)
        self.stats.disk_failures += 1
        if not self.stats.disk_refuses:
            self.stats.disk_refuses = True
            logger.warning(
                "disk.refuses reason=%s: policies are served, not fetched, until it takes data",
                error,
            )
            self._nursery.start_soon(self._mend_disk, error)
        self._driver.feed(ev.Unwritable())

    async def _mend_disk(self, error: StorageError) -> None:
        """Fetch again once the disk takes data and, if there was no room for a version, has
        room because files were removed or versions pruned."""
        self._mending.cancel()  # an older version need not be fetched any more
        with trio.CancelScope() as self._mending:
            await self._disk.wait(error.needed if isinstance(error, NoRoom) else 0)
            if self.stats.disk_refuses:
                logger.warning("disk.takes_data: policies are fetched again")
            self.stats.disk_refuses = False
            self._note_trouble(None)
            waiting, self._unfinished = self._unfinished, []
            for job in waiting:
                self._jobs.send_nowait(job)
            self._driver.feed(ev.Writable())

    # Tasks

    def _sender(self, peer: PeerId) -> Sender:
        sender = self._senders.get(peer)
        if sender is None:
            sender = self._senders[peer] = Sender(peer, self._store, self._upload)
            self._nursery.start_soon(self._run_sender, sender)
        return sender

    async def _run_sender(self, sender: Sender) -> None:
        await sender.run(self._host, self._driver.feed)
        if self._senders.get(sender.peer) is sender:
            del self._senders[sender.peer]
            self._driver.feed(ev.PeerDown(sender.peer))

    def _drop_sender(self, peer: PeerId) -> None:
        sender = self._senders.pop(peer, None)
        if sender is not None:
            sender.scope.cancel()

    async def _regroup(self) -> None:
        roster = await self._publisher.regroup()
        if roster is not None:
            self._driver.feed(ev.Regrouped(roster))

    async def _do_jobs(self) -> None:
        async for job in self._jobs_out:
            await dawdle(self._world, "shardcast/late chore")
            self._world.sometimes("shardcast/gave up a version", isinstance(job, ev.Abandon))
            try:
                match job:
                    case ev.Halt():
                        await self._store.keep_convictions(self.halted.values())
                    case ev.Abandon(policy):
                        await self._store.forget(policy)
                    case ev.Patch():
                        await self._do_patch(job)
                    case ev.Finish(policy):
                        await self._finish(policy)
            except StorageError as error:
                if not isinstance(job, ev.Abandon):
                    self._unfinished.append(job)  # every chunk is here: served meanwhile
                self._disk_refused(error)

    async def _finish(self, policy: bytes) -> None:
        if self._store.entry(policy) is None:
            return  # it was given up meanwhile
        if not await self._store.finish(policy):
            self._driver.feed(ev.Unusable(policy))
            await self._store.forget(policy)
            return
        self._disk.rest()
        self._note_trouble(None)
        self._driver.feed(ev.Stored(policy))
        self._whole_one.notify_all()
        await self._prune()

    async def _do_patch(self, job: ev.Patch) -> None:
        try:
            made = await self._store.patch(job.patch)
        except (NoRoom, Unnameable) as error:
            entry, made = self._store.entry(job.patch), None
            if entry is not None:
                await self._cannot_hold(entry.manifest.digest, error)
        if made is None:
            self._driver.feed(ev.Patched(job.patch))
            return
        self._world.sometimes("shardcast/patched a policy", made.is_whole)
        self._driver.feed(ev.Patched(job.patch, made.index, made.verified))

    async def _prune(self) -> None:
        try:
            for policy in await self._store.prune():
                self._driver.feed(ev.Unusable(policy))
        except StorageError as error:
            # tried again when the next version is whole
            logger.warning("prune_failed reason=%s", error)

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Take up what the disk holds, then work and listen to peers for the length of the
        block. `open_shardcast` enters it. Gossip outlives the block and goes on to bring
        announcements."""
        statements = self._core.statements
        with self._driver.running():
            roster = await self._store.load_roster()
            if roster is not None and roster.origin == self._host.peer_id:
                statements.add_roster(roster)
            for evidence in await self._store.load_convictions():
                statements.halt(evidence)
            for entry in await self._store.load():
                # What was whole when its publisher was convicted stays, as it did then.
                was_whole = entry.stored and entry.manifest.publisher in statements.halted
                if was_whole or statements.is_trusted(entry.manifest.publisher):
                    self._driver.feed(
                        ev.Resumed(entry.manifest, entry.index, entry.verified, entry.stored)
                    )
                elif not entry.stored:
                    # it will never be whole
                    self._jobs.send_nowait(ev.Abandon(entry.manifest.digest))
            self._driver.feed(ev.Tick())  # what was begun goes on: all of it is known now
            self._nursery.start_soon(self._do_jobs)
            with (
                self._host.receiving(
                    PROTOCOL_ID, self._on_message, max_message=msg.MAX_CONTROL
                ),
                self._host.serving(msg.BULK_PROTOCOL_ID, self._receiver.read_bulk),
                self._host.watching(self._on_peer),
            ):
                for peer in self._host.connected:
                    self._driver.feed(ev.PeerUp(peer))
                yield
            self._nursery.cancel_scope.cancel()


@asynccontextmanager
async def open_shardcast(
    world: World,
    host: Host,
    config: ShardcastConfig,
    *,
    run: bytes,
    may_publish: Callable[[PeerId], bool],
    roster: Callable[[], Sequence[RosterEntry]],
    announce: Callable[[bytes], None],
    selection: Selection | None = None,
) -> AsyncIterator[Shardcast]:
    """Distribute the policies of ``run`` for the length of the block.

    ``may_publish`` says who is a publisher; ``roster`` whom to feed (asked only where `publish`
    is called); ``announce`` gossips bytes that elsewhere are given to
    `Shardcast.receive_announcement`. With a ``selection`` only those files are fetched: see
    `Shardcast.wait_selected`.
    """
    statements = Statements(run, may_publish, world.verify)
    core = ShardcastCore(host.peer_id, config, statements, world.rng("shardcast"), selection)
    store = PolicyStore(world, config, run, selection)
    publisher = PolicyPublisher(world, config, run, statements, store, roster, core.believe)
    with store.holding():
        async with trio.open_nursery() as nursery:
            service = Shardcast(world, host, config, core, store, publisher, nursery, announce)
            async with service.running():
                yield service
