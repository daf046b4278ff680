"""SHARDCAST as one state machine: a node is origin, relay and leaf, at different moments.

Theory of operation
-------------------
The *origin* signs a roster and a manifest, and gives each chunk once, to a root of the forest
that has credit (`handout`). A *relay* that gets a chunk along a stripe checks its digest and
queues it for its children before it is on disk; news that explain the chunk go ahead of it on
the same stream (`upload`). Credit is honest: a root confirms every chunk, and asks for more
only while at most half of its children have two chunks waiting.

What the forest loses is *pulled* (`repair`): neighbours tell each other what they have
(`upload`), and a chunk that others have had for longer than it usually takes to get here
(`download`) is asked for, from the holder that would bring it first (`repair`). No node asks
for more than its line has lately carried.

At most two versions are fetched at a time: the newest, and the one before it while it may still
come first. An origin starts to hand out a version when the one before has left, and passes over
those in between (`handout`): a run that publishes faster than its links carry still delivers.

The core owns which versions there are. The record of each (`download.Download`) says what is
here, asked for, held by others and owed to others; one class writes each of its parts.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from random import Random
from typing import assert_never

from p2p.bounded import BoundedDict
from p2p.equivocation import Equivocation
from p2p.errors import BadMessage
from p2p.identity import PeerId
from p2p.offence import Offence
from p2p.own_time import OwnTime
from p2p.shardcast import messages as msg
from p2p.shardcast.chunkset import ChunkSet, Selection
from p2p.shardcast.config import ShardcastConfig, ShardcastStats
from p2p.shardcast.core import events as ev
from p2p.shardcast.core.download import Download
from p2p.shardcast.core.handout import Origin
from p2p.shardcast.core.peers import Peers
from p2p.shardcast.core.receipts import note_pushed, receipt_of
from p2p.shardcast.core.repair import Repair
from p2p.shardcast.core.statements import Statements
from p2p.shardcast.core.upload import Upload
from p2p.shardcast.core.versions import Versions
from p2p.shardcast.forest import OtherForestRule, Roster, RosterEntry
from p2p.shardcast.index import Index, Span
from p2p.shardcast.manifest import NO_POLICY, Manifest


class ShardcastCore:
    """A node's part in distributing policies: events and time in, effects out."""

    def __init__(
        self,
        local: PeerId,
        config: ShardcastConfig,
        statements: Statements,
        rng: Random,
        selection: Selection | None = None,
    ) -> None:
        self.stats = ShardcastStats()
        self._local = local
        self.statements = statements
        """Signed statements of publishers, as far as known."""
        self._versions = Versions(local, statements, config.stall, selection)
        self._downloads = self._versions.downloads
        self._peers = Peers()
        self._upload = Upload(local, statements, self._downloads, self._peers)
        self._repair = Repair(local, statements, self._peers, self._upload, rng, config.stall)
        self._origin = Origin(local, statements, self._peers.is_gone, config)
        # Peers remembered in each direction, for display: more than a node feeds, or is fed by.
        # The one that moved nothing for longest goes first.
        self.came: BoundedDict[PeerId, int] = BoundedDict(64)
        """Maps peers to the bytes of chunks that they sent."""
        self.sent: BoundedDict[PeerId, int] = BoundedDict(64)
        """Maps peers to the bytes of chunks that they were sent."""
        self._has_refused = False
        """True if this node has received a roster for another version of Shoal."""
        self._out: list[ev.Effect] = []
        self._now = -math.inf
        self._own_time = OwnTime()

    def __repr__(self) -> str:
        return (
            f"ShardcastCore({self._local!r}, newest {self.newest!r}, {len(self._downloads)}"
            " held)"
        )

    @property
    def newest(self) -> Manifest | None:
        """Manifest of the newest policy that is complete on this node."""
        return self._versions.newest

    @property
    def downloads(self) -> tuple[Download, ...]:
        """Versions that are held or being fetched."""
        return tuple(self._downloads.values())

    @property
    def uplink_rate(self) -> float:
        """Bytes per second that this node's uplink carries; 0 until it is measured."""
        return self._upload.uplink.rate

    @property
    def next_deadline(self) -> float:
        """Time at which the driver delivers the next `Tick`; infinite if nothing waits."""
        return self._own_time.deadline(self._soonest_deadline())

    def _soonest_deadline(self) -> float:
        due = [one.next_deadline for one in self._downloads.values()]
        return min([self._origin.next_deadline, *due])

    def handle(self, event: ev.Event, now: float) -> list[ev.Effect]:
        """Advance by one event and return the effects. `BadMessage` means that the peer broke
        the protocol."""
        self._now = self._own_time.at(now, self._soonest_deadline())
        self._out = []
        match event:
            case ev.Heard(peer, message, gossip):
                self._heard(peer, message, gossip)
            case ev.ChunkCame():
                self._chunk_came(event)
            case ev.ChunkSent(peer, size):
                self._chunk_sent(peer, size)
            case ev.PeerUp(peer):
                self._peer_up(peer)
            case ev.PeerDown(peer):
                self._peer_lost(peer)
            case ev.Tick():
                self._tick()
            case ev.Regrouped(roster):
                self._regroup(roster)
            case ev.Publish():
                self._publish(event)
            case ev.Resumed():
                self._resume(event)
            case ev.Stored(policy):
                self._stored(policy)
            case ev.Patched():
                self._patched(event)
            case ev.Unusable(policy, until_room):
                # Its bringers need not try.
                download = self._downloads.get(policy)
                if download is not None and not download.is_whole:
                    self._out += self._repair.decline(download)
                if until_room and download is not None:
                    self._versions.postpone(download.manifest)
                    self._drop(policy)
                else:
                    self._close(policy)
            case ev.Unwritable():
                # Stop fetching, and remember what to begin with when the disk takes data.
                self._versions.is_disk_full = True
                for download in [d for d in self._downloads.values() if not d.is_whole]:
                    self._out += self._repair.decline(download)
                    self._out.append(ev.Abandon(download.name))
                    self._versions.postpone(download.manifest)
                    self._drop(download.name)
            case ev.Writable():
                for manifest in self._versions.take_postponed():
                    for download in self._adopt(manifest):  # what was pushed is past
                        download.pull_only = True
                        self._out += self._repair.inquire(download, self._now)
            case _:
                assert_never(event)
        if self._origin.is_roster_due(self._now):
            self._out.append(ev.Regroup())
        self._out += self._origin.start(self._now)
        for peer, header in self._origin.give(self._upload.has_room, self._now):
            self._upload.push(peer, header)
        self._out += self._upload.start(self._now)
        self._out += self._upload.confirm()
        return self._out

    # What comes in: news

    def _heard(self, peer: PeerId, message: msg.Message, gossip: bool) -> None:
        if not gossip and not self._peers.admit(peer):
            return
        if gossip and not isinstance(message, msg.PolicyNews | msg.RosterNews | msg.Evidence):
            # Its author is not connected, and need not even have sent it: no node may answer
            # it.
            raise BadMessage("an announcement is a policy, a roster or evidence")
        match message:
            case msg.PolicyNews():
                self._policy_news(message, gossip)
            case msg.RosterNews(data):
                self._roster_news(data, gossip)
            case msg.Evidence():
                evidence = self.statements.evidence_untrusted(message)
                if evidence is not None:
                    self._halt(evidence)
                    self._out += [ev.PassOn()] if gossip else []
            case msg.Hello():
                self._answer_hello(peer, message)
            case msg.Credit() | msg.Blame() | msg.Receipt():
                if not self._origin.hear(peer, message, self._now):
                    self._ban(peer, "confirmed chunks that it was never given")
            case msg.Ask() | msg.Have() | msg.Taken() | msg.Skipped() | msg.Want():
                download = self._downloads.get(message.policy)
                if download is not None:
                    self._holders_say(peer, message, download)
                elif isinstance(message, msg.Have) and self._versions.hear_name(
                    message.policy, self._now
                ):
                    self._out.append(ev.Send(peer, msg.Ask(message.policy, True)))
            case _:
                assert_never(message)

    def _holders_say(self, peer: PeerId, message: msg.ChunkMessage, download: Download) -> None:
        if isinstance(message, msg.Have | msg.Taken | msg.Skipped):
            chunks = ChunkSet.of_ranges(message.ranges)
            if chunks.end > download.count:
                self._ban(peer, "names chunks that do not exist")
            elif isinstance(message, msg.Taken):
                download.availability.note_taken(peer, chunks)
                return
            elif isinstance(message, msg.Have):
                if download.note_held(peer, chunks, self._now):
                    self._pull(download)
            else:
                self._upload.take_over(peer, download, message, self._now)
                self._pull(download)
            return
        if download.manifest.publisher == self._local:
            # Who is in the next roster may be known later than that it is connected.
            self._origin.meet(peer, self._now)
        if isinstance(message, msg.Ask):
            self._out += self._upload.answer(peer, download, wants_index=message.index)
            return
        for chunk in message.chunks:
            if chunk >= download.count:
                self._ban(peer, "wants a chunk that does not exist")
                return
            if not self._origin.ask(download.name, chunk, peer, self._now):
                self._upload.serve(peer, download, chunk)

    def _policy_news(self, news: msg.PolicyNews, gossip: bool) -> None:
        manifest = self.statements.manifest_untrusted(news.manifest)
        if manifest is None:
            return
        evidence = self.statements.record(manifest)
        if evidence is not None:
            self._halt(evidence)
            return
        fetches = self._versions.of(manifest)
        if not fetches and self._versions.is_over(manifest):
            return
        index = None
        if news.index and (not fetches or any(d.index is None for d in fetches)):
            # Judged first: a wrong index must not make old news of a manifest.
            index = manifest.index_untrusted(news.index)
        if not fetches:
            fetches = self._adopt(manifest)
            if gossip and (fetches or self._versions.is_postponed(manifest.digest)):
                self._out.append(ev.PassOn())
        for download in fetches:
            if (
                index is not None
                and download.index is None
                and manifest.encoding_of(index) == download.encoding
                and download.manifest == manifest
            ):
                download.index = index
                self._versions.restrict(download)
                self._out.append(ev.Begin(manifest, index))
            if (download.pull_only and not download.inquiries) or download.index is None:
                self._out += self._repair.inquire(download, self._now)

    def _roster_news(self, data: bytes, gossip: bool) -> None:
        try:
            roster = self.statements.roster_untrusted(data)
        except OtherForestRule as refusal:
            # Its sender may only be newer than this node. The operator hears of it once.
            self._out += [] if self._has_refused else [ev.RefuseRoster(str(refusal))]
            self._has_refused = True
            return
        if roster is None:
            return
        self._out += [ev.PassOn()] if gossip else []
        if self._local not in roster.positions:
            return
        for download in self._downloads.values():
            manifest = download.manifest
            is_handed_out = download.name == manifest.name_of(manifest.handed_out)
            if manifest.publisher == roster.origin and is_handed_out:
                # From now on what the origin gives is pushed. What it gave before is passed
                # over by the first chunk that comes, and pulled then.
                download.pull_only = False
                if not download.is_whole:
                    self._out += self._upload.connect(download)
                elif download.manifest == self.newest:
                    self._out += self._upload.connect(download, ahead=1)

    def _adopt(self, manifest: Manifest) -> list[Download]:
        """Start to fetch a version if it is worth fetching; return the downloads that this
        starts."""
        begun, given_up = self._versions.fetch(manifest, self._now)
        for download in begun:
            if not download.pull_only:
                self._out += self._upload.connect(download)
        for download in given_up:
            self._abandon(download)
        return begun

    def _halt(self, evidence: Equivocation[Manifest]) -> None:
        publisher = evidence.author
        self.statements.halt(evidence)
        message = _message_of(evidence)
        for download in self.downloads:
            if download.manifest.publisher == publisher and not download.is_whole:
                self._abandon(download)
        self._out += [ev.Halt(evidence), ev.Gossip(message)]
        self._out += [ev.Send(peer, message) for peer in self._peers.connected]

    def _answer_hello(self, peer: PeerId, hello: msg.Hello) -> None:
        """Send a newcomer the convictions and the newest version that it lacks."""
        halted = self.statements.halted
        lacking = [e for publisher, e in halted.items() if publisher not in hello.convicted]
        messages: list[msg.Message] = [_message_of(one) for one in lacking[: msg.MAX_CONVICTED]]
        name, best = b"", self._versions.best
        if (
            best is not None
            and best.manifest.version > hello.newest
            and self.statements.is_trusted(best.manifest.publisher)
        ):
            name, roster = best.manifest.digest, self.statements.roster(best.manifest.publisher)
            messages += [msg.RosterNews(roster.encode())] if roster is not None else []
            for news in (*self._versions.patches_since(hello.newest, best.manifest), best):
                messages.append(msg.news_of(news.manifest, news.index, msg.INLINE_INDEX))
        if messages and self._peers.greet(peer, name, len(halted)):
            self._out += [ev.Send(peer, message) for message in messages]

    # What comes in: chunks

    def offer(self, peer: PeerId, header: msg.ChunkHeader) -> ev.Accept | None:
        """Return how to read an offered chunk, given its header; None to discard it."""
        download = self._downloads.get(header.policy)
        if self._peers.is_banned(peer) or download is None or download.index is None:
            return None
        if header.index >= download.count:
            return ev.Accept(Span(b"", 0), False)  # it cannot exist, as `handle` will say
        if header.index in download.verified:
            return None
        request = download.requests.get(header.index)
        roster = self.statements.roster(download.manifest.publisher)
        is_expected = (
            peer == download.manifest.publisher
            or (roster is not None and peer in roster.positions)
            or (request is not None and request.peer == peer)
        )
        return ev.Accept(download.index.spans[header.index], is_expected)

    def _chunk_came(self, event: ev.ChunkCame) -> None:
        peer, header, size = event.peer, event.header, event.size
        download = self._downloads.get(header.policy)
        if not self._peers.admit(peer) or download is None or download.index is None:
            return  # of a version that was given up, or of a banned peer
        if header.index >= download.count:
            self._ban(peer, "sent a chunk that does not exist")
            return
        if header.index in download.verified:
            self.stats.duplicates += size
            if peer == download.manifest.publisher:
                # Given again, since its first root failed.
                self._upload.forward(download, header, peer, self._now)
            return
        if event.is_right is None:
            return
        request = self._repair.arrived(download, header.index, peer, self._now)
        if not event.is_right:
            download.reject(header.index)
            self.stats.chunks_bad += 1
            self._ban(peer, "sent a chunk with a wrong digest")
            self._out.append(
                ev.Send(download.manifest.publisher, msg.Blame(header.policy, peer))
            )
            return
        is_answer = request is not None and request.peer == peer
        if request is not None and not is_answer:
            self._out += self._repair.cancel(download, {header.index: request.peer})
        pushed = request is None and header.stripe != msg.NO_STRIPE
        download.accept(header.index, peer, self._now, pushed=pushed)
        self.stats.chunks_repaired += is_answer
        self.came.renew(peer, self.came.get(peer, 0) + size)
        if peer == download.manifest.publisher:
            self.stats.from_origin += size
        else:
            self.stats.from_peers += size
        note_pushed(download, header)
        self._out.append(ev.Keep(header.policy, header.index))
        self._upload.relay(download, header, peer, self._now)
        self._upload.note_new(download, header.index, self._now)
        if download.is_whole:
            self._out += self._upload.tell(download)
            self._out.append(ev.Finish(header.policy))
            # The receipt says what each stripe has brought.
            origin = download.manifest.publisher
            roster = self.statements.roster(origin)
            receipt = receipt_of(download, self._local, roster, self._now)
            if receipt is not None and not self._peers.is_gone(origin):
                self._out.append(ev.Send(origin, receipt))
            for waiting in [d for d in self.downloads if d.is_patch and d.pull_only]:
                self._pull(waiting)
        elif is_answer or download.pull_only or download.lateness.urgent:
            self._pull(download)

    def _chunk_sent(self, peer: PeerId, size: int) -> None:
        header = self._upload.note_left(peer, size, self._now)
        download = None
        if header is not None:
            self._origin.note_left(peer, header, self._now)
            download = self._downloads.get(header.policy)
        self.sent.renew(peer, self.sent.get(peer, 0) + size)
        if download is not None and download.manifest.publisher == self._local:
            self.stats.uploaded_as_origin += size
        else:
            self.stats.uploaded_as_relay += size

    def _stored(self, name: bytes) -> None:
        download = self._downloads.get(name)
        if download is None:
            return
        download.stored = True
        if not download.is_patch:
            self.stats.versions_completed += 1
            self._advance_newest(download.manifest)
            self._out += self._upload.connect(download, ahead=1)
        self._patch()

    def _patch(self) -> None:
        """Ask the driver to apply every patch that is complete and has its base here."""
        self._out += [ev.Patch(patch.name) for patch in self._versions.next_patches()]

    def _patched(self, event: ev.Patched) -> None:
        """Take the result of a patch. Spans that came out wrong are pulled from the anchor."""
        policy = self._versions.end_patch(event.patch, made=event.index is not None)
        if event.index is None:
            self._go_round(event.patch)
            return
        patch = self._downloads.get(event.patch)
        made = self._downloads.get(policy) if policy is not None else None
        if policy is None or (made is not None and made.is_whole):
            return  # its chunks came meanwhile
        if patch is None or self._versions.is_old(patch.manifest):
            if made is None:
                self._out.append(ev.Abandon(policy))
            return
        download = self._hold(patch.manifest, event.index, event.verified, stored=False)
        if download.is_whole:
            self._out.append(ev.Finish(download.name))
        else:
            self.stats.chunks_bad += 1
            self._out += self._repair.inquire(download, self._now)

    def _advance_newest(self, manifest: Manifest) -> None:
        for download in self._versions.advance(manifest):
            self._abandon(download)

    def _abandon(self, download: Download) -> None:
        self.stats.versions_skipped += 1
        self._close(download.name)
        self._out.append(ev.Abandon(download.name))

    def _close(self, name: bytes) -> None:
        """Drop a version and never fetch it again."""
        self._drop(name)
        self._versions.close(name)

    def _drop(self, name: bytes) -> None:
        download = self._downloads.pop(name, None)
        if download is not None:
            self._repair.forget(download)
        self._origin.forget(name)
        self._upload.forget(name)

    # Our own policies

    def _publish(self, event: ev.Publish) -> None:
        self.statements.record(event.manifest)
        if event.roster is not None and self.statements.add_roster(event.roster):
            self._out.append(ev.Gossip(msg.RosterNews(event.roster.encode())))
        for index in (event.index, event.patch):
            if index is not None:
                self._hold(event.manifest, index, ChunkSet.below(len(index)), stored=True)
        self._advance_newest(event.manifest)
        self._hand_out(event.manifest, resumed=False)

    def _hand_out(self, manifest: Manifest, *, resumed: bool) -> None:
        """Start to hand out one of this node's own versions."""
        download = self._downloads.get(manifest.name_of(manifest.handed_out))
        if download is None:  # an earlier life made the patch, and it is gone
            download = self._downloads[manifest.digest]
        self._origin.publish(download, resumed=resumed)
        if not resumed:  # else peers are asked what they hold, each as it connects
            self._out += self._upload.connect(download, ahead=1)

    def believe(self, entries: Sequence[RosterEntry]) -> list[RosterEntry]:
        """Return the entries of the next roster with the upload that this node believes of each
        peer."""
        return self._origin.believe(entries)

    def _regroup(self, roster: Roster) -> None:
        if self.statements.add_roster(roster):
            self._out.append(ev.Gossip(msg.RosterNews(roster.encode())))
            self._origin.regroup(roster, self._now)
            newest = self._versions.best
            if newest is not None and newest.manifest.publisher == self._local:
                self._out += self._upload.connect(newest, ahead=1)

    def _resume(self, event: ev.Resumed) -> None:
        """Take up a version that the disk holds. This node's own newest version is announced
        again."""
        self.statements.record(event.manifest)
        download = self._hold(event.manifest, event.index, event.verified, stored=event.stored)
        if download.is_whole and not event.stored:
            self._out.append(ev.Finish(download.name))
        if download.is_patch:
            return
        if event.stored:
            self._advance_newest(event.manifest)
        if event.manifest.publisher == self._local and event.stored:
            self._hand_out(event.manifest, resumed=True)

    def _hold(
        self, manifest: Manifest, index: Index, verified: ChunkSet, *, stored: bool
    ) -> Download:
        before = self._downloads.get(manifest.name_of(manifest.encoding_of(index)))
        if before is not None:
            self._repair.forget(before)
        return self._versions.hold(manifest, index, verified, self._now, stored=stored)

    # Peers

    def _peer_up(self, peer: PeerId) -> None:
        self._peers.note_connected(peer)
        self._origin.meet(peer, self._now)
        for download in self._downloads.values():
            if download.manifest.publisher == peer and not download.is_whole:
                # it may be back, and have what no other peer has
                download.inquire_at = self._now
            if self._origin.is_resumed(download.name):
                self._out.append(ev.Send(peer, msg.Ask(download.name, False)))
        best = self._versions.best
        newest = best.manifest.version if best is not None else NO_POLICY
        convicted = tuple(self.statements.halted)[: msg.MAX_CONVICTED]
        self._out.append(ev.Send(peer, msg.Hello(newest, convicted)))

    def _peer_lost(self, peer: PeerId) -> None:
        self._peers.lose(peer)
        self._repair.lose(peer)
        self._origin.lose(peer)
        self._upload.lose(peer, self._now)
        for download in self._downloads.values():
            download.lose(peer)
            self._pull(download)

    def _ban(self, peer: PeerId, reason: str) -> None:
        """Refuse all further dealings with ``peer``."""
        self._peers.ban(peer)
        self._peer_lost(peer)
        self._out.append(ev.Penalise(peer, Offence.LIE, reason))

    # What goes out

    def _tick(self) -> None:
        self._patch()
        self._origin.expire(self._now)
        for download in self.downloads:
            if download.sharing.tell_at <= self._now:
                self._out += self._upload.tell(download)
            if download.is_done or self._downloads.get(download.name) is not download:
                continue  # `_go_round` has given it up
            download.mark_late(self._now)
            self._out += self._repair.expire(download, self._now)
            if download.is_in_vain and self._versions.is_dispensable(download):
                self._go_round(download.name)
                continue
            if download.inquire_at <= self._now:
                self._out += self._repair.inquire(download, self._now)
            self._pull(download)

    def _pull(self, download: Download) -> None:
        if self._versions.may_pull(download):
            self._out += self._repair.pull(download, self._now)

    def _go_round(self, name: bytes) -> None:
        """Give up a download that cannot be completed, and fetch the newest version another
        way."""
        lost = self._downloads.get(name)
        if lost is None:
            return
        self._abandon(lost)
        for download in self._adopt(self._versions.newest_known(lost.manifest)):
            self._out += self._repair.inquire(download, self._now)


def _message_of(evidence: Equivocation[Manifest]) -> msg.Evidence:
    return msg.Evidence(evidence.first.encode(), evidence.second.encode())
