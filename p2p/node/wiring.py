"""Connections between a node's services, and how it finds members.

Theory of operation
-------------------
Heartbeats find the members that are near in the overlay; the DHT finds the rest. Every node
publishes a record under the name of its run; a node that has no neighbours, or misses a trainer
or a validator, looks it up. The two ways are tried side by side: a swarm whose heartbeats were
cut in two heals through the DHT.

Proofs that a trainer or validator of the run has equivocated travel by gossip.

The text of an invite is read once: what is kept in the node's folder is the pass made of it,
which is no secret and admits no other identity. A node whose invite is void ends with a
sentence before it joins; one that others do not admit (all uses are taken) learns why from
those it asks (``/shoal/admission/1.0.0``: one frame with what its heartbeats show, one frame
back with a sentence, or an empty one).
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Final

import trio

from p2p.concurrency import AutoResetEvent
from p2p.dht import Dht, Namespace, PublisherKind, Record
from p2p.dht.record import decode_addrs_untrusted, encode_addrs
from p2p.equivocation import Equivocation
from p2p.errors import BadMessage, ConfigError, StorageError
from p2p.gossip import Gossip, Validity
from p2p.gossip.messages import MAX_DATA
from p2p.host import PEER_TROUBLE, AddrSource, Host, request, serve_requests
from p2p.identity import PeerId, ProtocolId
from p2p.ledger import LedgerExchange, Statement
from p2p.membership import Change, MemberEvent, Membership
from p2p.meter import StrangerMeter
from p2p.multiaddr import Multiaddr
from p2p.naming import printable
from p2p.node.admission import (
    MAX_PASS,
    MAX_SHOWN,
    Capability,
    Credential,
    SignedRun,
    check_grant,
    decode_invite_untrusted,
)
from p2p.node.guests import why_not_by
from p2p.node.role import Node
from p2p.node.rundoc import RunBook
from p2p.policy import PolicyVersion
from p2p.reach.nat import Nat
from p2p.world import World

logger = logging.getLogger(__name__)

ADMISSION_PROTOCOL: Final = ProtocolId("/shoal/admission/1.0.0")
PASS_PATH: Final = "pass"
"""File in the node's folder with the pass made from its invite."""
MAX_REASON: Final = 512
"""Maximum bytes of the sentence that says why a peer is not admitted. It may contain two names
of 52."""


async def take_invite(world: World, book: RunBook, run: SignedRun, text: str) -> None:
    """Make this node's pass from the invite ``text``, or load the pass from disk if there is no
    text.

    Raises:
        ConfigError: The invite does not admit to this run, or the pass cannot be kept.
    """
    if text:
        try:
            invite = decode_invite_untrusted(text)
            if invite.run != run.id:
                raise BadMessage(
                    f"it is to run {invite.run.hex()[:12]}, and this node is in {run.name!r}"
                    f" ({run.id.hex()[:12]}): take --bootstrap of a member of the run that you"
                    " were invited to, and another --data"
                )
            if why_not := why_not_by(invite.grant, run, world.wall()):
                raise BadMessage(why_not)
            check_grant(invite.grant, run.id, world.verify)
            made = invite.pass_for(world.signer.peer_id).to_bytes()
            await world.disk.replace(PASS_PATH, made)
        except BadMessage as error:
            raise ConfigError(f"the invite cannot be used: {error}") from error
        except StorageError as error:
            raise ConfigError(f"the pass made of the invite cannot be kept: {error}") from error
    if await world.disk.size(PASS_PATH) is None:
        return
    book.own_pass = await world.disk.read(PASS_PATH, 0, MAX_PASS)
    try:
        book.see(world.signer.peer_id, Credential(invite=book.own_pass).to_bytes())
    except BadMessage as error:  # the run may be open, or its next edition name this node
        logger.warning("the invite that this node joined with does not admit it now: %s", error)


def shown_by(book: RunBook, dht: Dht) -> bytes:
    """Return the credential for our heartbeats. It is empty if the run document admits us
    without a stamp. In an open run it has both stamp and invite, since other nodes may have
    counted all uses of the invite."""
    own, run = dht.contact.peer, book.run
    if run is None or (run.may(own, Capability.GOSSIP) and not run.needs_stamp(own)):
        return b""
    stamp = dht.contact.nonce if run.needs_stamp(own) else b""
    return Credential(stamp, book.own_pass, book.own_work).to_bytes()


def serve_admission(book: RunBook, host: Host, meter: StrangerMeter) -> None:
    """Tell peers on request why they are not admitted, within the budget ``meter`` for
    strangers."""

    async def answer(peer: PeerId, payload: bytes) -> bytes:
        try:
            book.see(peer, payload)
            why_not = book.why_not(peer, Capability.GOSSIP)
        except BadMessage as error:
            why_not = str(error)
        return why_not.encode()[:MAX_REASON]

    host.set_handler(
        ADMISSION_PROTOCOL,
        serve_requests(answer, max_request=MAX_SHOWN, may_have=meter.allows_at_door),
    )


async def ask_admission(book: RunBook, dht: Dht, host: Host, peer: PeerId, wait: float) -> str:
    """Ask ``peer`` why it does not admit this node. Return an empty text if it does, or gives
    no answer."""
    try:
        with trio.fail_after(wait):
            said = await request(
                host, peer, ADMISSION_PROTOCOL, shown_by(book, dht), max_reply=MAX_REASON
            )
    except PEER_TROUBLE as error:
        logger.debug("admission.no_answer peer=%s reason=%r", peer, error)
        return ""
    return printable(said.decode(errors="replace"))


def fellows(membership: Membership, host: Host, run_id: bytes) -> list[PeerId]:
    """Return the connected members of the run."""
    connected = dict.fromkeys(host.connected)
    return [
        one.peer for one in membership.members() if one.run == run_id and one.peer in connected
    ]


def tell_stories(gossip: Gossip, ledgers: LedgerExchange, run_id: bytes) -> None:
    """Publish and receive proofs of equivocation on the run's topic, if the run exchanges
    ledgers."""
    topic = f"/shoal/run/{run_id.hex()}/stories"

    def judge(_: PeerId, data: bytes) -> Validity:
        return Validity.ACCEPT if ledgers.hear_fork_untrusted(data) else Validity.IGNORE

    def tell(fork: Equivocation[Statement]) -> None:
        # One that is too long for gossip spreads by the exchange of ledgers.
        if len(data := fork.encode()) <= MAX_DATA:
            gossip.publish(topic, data)

    if ledgers.is_on:
        gossip.subscribe(topic, judge)
        ledgers.on_found(tell)


def is_member(nodes: Sequence[Node], peer: PeerId) -> bool:
    """Return True if ``peer`` may take part in the run of one of ``nodes``."""
    return any(node.book.may(peer, Capability.GOSSIP) for node in nodes)


def relay_offers(nodes: Sequence[Node]) -> Iterable[tuple[PeerId, int]]:
    """Yield the members that offer to relay, with the number of places that each has left."""
    for node in nodes:
        for member in node.membership.members():
            if member.slots and member.run == node.run.id:
                yield member.peer, member.slots


async def seek_relays(nodes: Sequence[Node]) -> None:
    """Connect to some peers that the DHT lists for our run, so that identify tells which of
    them relay. Returns when all have answered, or after a while."""
    for node in nodes:
        records = await node.dht.get(RUN_RECORDS.name, node.run.id)
        others = [one for one in records if one.publisher not in node.host.connected]
        chosen = node.world.rng("relays/seeds")
        async with trio.open_nursery() as nursery:
            for record in chosen.sample(others, min(4, len(others))):
                addrs = places_untrusted(record)
                node.host.add_addrs(record.publisher, addrs, AddrSource.SIGNED)
                nursery.start_soon(_meet, node.host, record.publisher)


async def _meet(host: Host, peer: PeerId) -> None:
    # Seconds for a peer that may relay to answer.
    with trio.move_on_after(5.0), suppress(*PEER_TROUBLE):
        await host.connect(peer)


async def find_peer(membership: Membership, host: Host, book: RunBook, peer: PeerId) -> None:
    """Ask connected trainers for the addresses of ``peer``. Workers send their heartbeats to
    trainers, and a trainer's roster names peers that know few of one another."""
    trainers = (one for one in host.connected if book.may(one, Capability.PUBLISH))
    await membership.locate(peer, trainers)


def places_untrusted(record: Record) -> tuple[Multiaddr, ...]:
    """Return the addresses that the publisher of a run record claims.

    Raises:
        BadMessage: The value is malformed. Nothing else is raised.
    """
    addrs = decode_addrs_untrusted(record.value)
    return tuple(addr.with_peer(record.publisher) for addr in addrs)


def _is_run_record(record: Record) -> bool:
    try:
        places_untrusted(record)
    except BadMessage:
        return False
    # A run's id is a SHA-256 digest.
    return len(record.name) == 32


RUN_RECORDS: Final = Namespace(
    "run",
    _is_run_record,
    max_lifetime=3600.0,
    places=lambda record: decode_addrs_untrusted(record.value),
)
"""Rules for DHT records that say that their publisher is in a run, with its addresses. Whoever
takes places under a run's key must renew them every hour."""


def run_records(book: RunBook) -> Namespace:
    """Return `RUN_RECORDS` for a node in one run. Of that run it accepts only records of
    members, and reserves a place for each trainer and validator."""

    def kind_of(record: Record) -> PublisherKind:
        run = book.run
        if run is None or record.name != run.id:
            return PublisherKind.UNKNOWN
        if record.publisher in run.officers:
            return PublisherKind.OFFICER
        may = book.may(record.publisher, Capability.GOSSIP)
        return PublisherKind.MEMBER if may else PublisherKind.STRANGER

    return replace(RUN_RECORDS, kind_of=kind_of)


class Wiring:
    """Tasks that connect the services of one node."""

    def __init__(self, node: Node, bootstrap: Sequence[Multiaddr]) -> None:
        self._node = node
        self._bootstrap = tuple(bootstrap)
        self._wanted = AutoResetEvent()
        self._told = ""
        """Last reported reason of a peer for not admitting this node."""
        node.membership.on_change(self._on_change)

    async def run(self) -> None:
        """Run all tasks until cancelled."""
        node = self._node
        node.membership.me.update(run=node.run.id)
        run = node.run
        self._mind_officers()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._follow_run, run)
            nursery.start_soon(node.book.watch)
            nursery.start_soon(node.book.follow_hints, node.host, node.config.run.ask_timeout)
            nursery.start_soon(node.book.guests.keep_forever)
            nursery.start_soon(self._tell_policy)
            if node.nat is not None:
                nursery.start_soon(self._tell_places, node.nat)
            nursery.start_soon(
                node.ledgers.run, lambda head: node.membership.me.update(ledger=head)
            )
            nursery.start_soon(self._join)
            nursery.start_soon(self._find)
            named = [addr.peer_id for addr in self._bootstrap]
            others = [peer for peer in named if peer not in (None, node.peer_id)]
            nursery.start_soon(node.clocks.ask_while_alone, others)

    async def _follow_run(self, run: SignedRun) -> None:
        """Apply each later edition of the run document, which may name other officers, or no
        longer name this node. Tell neighbours of it at once: random questions alone, one a
        minute, took up to six minutes among eight nodes."""
        node, began_with = self._node, run.components
        while True:
            run = await node.book.wait_edition(run.epoch)
            self._mind_officers()
            node.membership.me.update(stamp=shown_by(node.book, node.dht))
            if run.components != began_with:
                logger.warning(
                    "epoch %d of run %r changes settings that are read at a node's start; start"
                    " it again",
                    run.epoch,
                    run.name,
                )
            async with trio.open_nursery() as nursery:  # who is behind asks in return
                for peer in node.membership.neighbours:
                    wait = node.config.run.ask_timeout
                    nursery.start_soon(node.book.ask_quietly, node.host, peer, wait)

    def _mind_officers(self) -> None:
        """Send our heartbeats to the run's trainers and validators, and follow their ledgers.
        If this node is one of them, keep all peers that send it heartbeats."""
        node = self._node
        officers = [peer for peer in node.run.officers if peer != node.peer_id]
        node.membership.interest(officers, has_audience=node.peer_id in node.run.officers)
        node.host.protect("officers", officers)
        node.ledgers.follow(node.run.officers)

    async def _tell_policy(self) -> None:
        """Keep our heartbeat's newest complete policy, and the upload, up to date."""
        newest = self._node.shardcast.newest
        while True:
            self._node.membership.me.update(policy=int(newest))
            if upload := self._upload():
                self._node.membership.me.update(upload=upload)
            newest = await self._node.shardcast.wait_policy(PolicyVersion(newest + 1))

    async def _tell_places(self, nat: Nat) -> None:
        """Keep our heartbeat's relay places up to date, and the upload when this node becomes
        a leaf, or is none any more."""
        me, was_leaf = self._node.membership.me, False
        while True:
            me.update(slots=nat.places)
            if nat.needs_open_peers is not was_leaf:
                was_leaf = not was_leaf
                me.update(upload=self._upload())
            await nat.news.wait()

    def _upload(self) -> int:
        """Return the upload for our heartbeat in bytes per second: what was measured or is
        allowed, 0 if unknown. While few peers could fetch policies from us it is 1, less than
        that of any class, which makes this node a leaf of SHARDCAST's forest."""
        rate, lent = self._node.shardcast.uplink_rate, self._node.config.share.upload
        if self._node.nat is not None and self._node.nat.needs_open_peers:
            return 1
        # Share of its uplink that a node offers to policies: a line filled to the brim
        # starves its own acknowledgements.
        return int(min(0.9 * rate, lent or math.inf) if rate else lent)

    async def _join(self) -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._node.membership.join, self._bootstrap)
            nursery.start_soon(self._join_dht)
            nursery.start_soon(self._check_run)

    async def _check_run(self) -> None:
        """Get a newer run document from the bootstrap peers. End the node if those that answer
        belong to another run.

        One that is away is asked again until this node has met a member of its run: a node that
        was started before it must not work for another run without a word.
        """
        node, config = self._node, self._node.config.run
        addrs = [addr for addr in self._bootstrap if addr.peer_id != node.peer_id]
        pause = config.ask_interval
        members, run = node.membership.members, node.run.id
        while addrs:
            found, _ = await node.book.ask_around(node.host, addrs, config.ask_timeout)
            for peer in found[:1]:
                await self._ask_admission(peer)
            if found or any(member.run == run for member in members()):
                return
            await node.world.sleep_until(node.world.now() + pause)
            pause = config.next_pause(pause)

    async def _ask_admission(self, peer: PeerId) -> None:
        """Warn the operator, once for each reason, if a peer of the run does not admit this
        node."""
        node, wait = self._node, self._node.config.run.ask_timeout
        if not node.book.own_pass:
            return
        said = await ask_admission(node.book, node.dht, node.host, peer, wait)
        if said and said != self._told:
            logger.warning("peer %s does not admit this node: %s", peer.short, said)
        self._told = said

    async def _join_dht(self) -> None:
        await self._node.dht.bootstrap(
            [a for a in self._bootstrap if a.peer_id != self._node.peer_id]
        )
        addrs = encode_addrs(self._node.host.addrs)
        # Lifetime of such a record in seconds; the DHT renews it while we live.
        await self._node.dht.put(RUN_RECORDS.name, self._node.run.id, addrs, 1800.0)

    def _on_change(self, event: MemberEvent) -> None:
        """Process the ledger head in a member's heartbeat. Search the DHT at once if the last
        neighbour was lost."""
        if event.member.profile.ledger:
            self._node.ledgers.hear_head(event.member.peer, event.member.profile.ledger)
        if event.change in (Change.DIED, Change.LEFT) and not self._node.membership.neighbours:
            self._wanted.set()

    async def _find(self) -> None:
        """Look for members and a newer run document at regular intervals, and at once when
        alone."""
        while True:
            with trio.move_on_after(self._node.config.run.refresh):
                await self._wanted.wait()
            await self._look_up_members()
            await self._ask_for_news()

    async def _look_up_members(self) -> None:
        node = self._node
        known = {member.peer: member for member in node.membership.members()}
        missing = [
            peer for peer in node.run.officers if peer not in known and peer != node.peer_id
        ]
        if node.membership.neighbours and not missing:
            return
        seeds: list[Multiaddr] = []
        for record in await node.dht.get(RUN_RECORDS.name, node.run.id):
            if record.publisher != node.peer_id:
                addrs = places_untrusted(record)
                node.host.add_addrs(record.publisher, addrs, AddrSource.SIGNED)
                seeds.extend(addrs[:1])
        if seeds and not node.membership.neighbours:
            # Maximum number of members, drawn at random from the DHT, through which a node
            # without neighbours joins again. Two would suffice.
            sample = node.world.rng("seeds").sample(seeds, min(16, len(seeds)))
            with trio.move_on_after(node.config.run.refresh):
                await node.membership.join(sample)
        for peer in missing:
            await node.locate(peer)

    async def _ask_for_news(self) -> None:
        node = self._node
        members = [
            member.peer for member in node.membership.members() if member.run == node.run.id
        ]
        if not members:
            return
        peer = node.world.rng("news").choice(members)
        await node.book.ask_quietly(node.host, peer, node.config.run.ask_timeout)
        await self._ask_admission(peer)
