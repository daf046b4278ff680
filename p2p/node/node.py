"""The composition root: one host, one run, and the swarm services, wired with callables.

Theory of operation
-------------------
Services know only `World` and `Host`; they never import each other. What one must learn from
another passes through here, and nowhere else:

* a policy that SHARDCAST publishes is announced on the gossip topic of the run; an announcement
  from gossip is judged by SHARDCAST before it is passed on;
* the head of our ledger goes into our heartbeat, those in others' heartbeats go to the exchange
  of ledgers, and a proof that an author has equivocated goes out on a topic of its own;
* the newest whole policy goes into our heartbeat; the heartbeats of members are SHARDCAST's
  roster;
* the run document says whose heartbeats are passed on and whose policies count;
* members are found by heartbeats first and through the DHT second: every node publishes under
  the run's key.

The same function opens a node in production and in the simulator; only the world and the host
differ.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from functools import partial

import trio

from p2p.dht import open_dht
from p2p.dht.stamp import check_stamp
from p2p.door import check, check_each, check_function, check_host, check_world
from p2p.errors import BadMessage, ConfigError
from p2p.gossip import open_gossip
from p2p.host import Host
from p2p.identity import PeerId
from p2p.ledger import Ledger, LedgerExchange
from p2p.membership import open_membership
from p2p.meter import StrangerMeter
from p2p.multiaddr import Multiaddr
from p2p.node.admission import Capability, RunReader, decode_credential_untrusted
from p2p.node.clock import PeerClocks, serve_clock
from p2p.node.config import NodeConfig
from p2p.node.plugins import open_run_untrusted
from p2p.node.policies import judge_announcement, policy_topic, roster
from p2p.node.role import Node, Role
from p2p.node.rundoc import RunBook
from p2p.node.share import Rest
from p2p.node.wiring import (
    Wiring,
    fellows,
    find_peer,
    run_records,
    serve_admission,
    shown_by,
    take_invite,
    tell_stories,
)
from p2p.reach.nat import Nat
from p2p.shardcast import open_shardcast
from p2p.world import World

__all__ = ["Node", "open_node", "run_roles"]


@asynccontextmanager
async def open_node(
    world: World,
    host: Host,
    config: NodeConfig,
    *,
    document: bytes | None = None,
    bootstrap: Sequence[Multiaddr] = (),
    nearby: Callable[[], Sequence[Multiaddr]] = tuple,
    reader: RunReader = open_run_untrusted,
    nat: Nat | None = None,
) -> AsyncIterator[Node]:
    """Open a node in its run for the length of the block.

    The run document is ``document``, or what is pinned on disk, or what a bootstrap peer hands
    over (this waits for one, for ever if need be: the caller sets the deadline). ``nearby``
    returns peers that were found meanwhile, to ask them as well. Raises
    `ConfigError` when there is no document and no peer to ask, or when a document is void.
    """
    check_world(world)
    check_host(host)
    check("config", config, NodeConfig)
    if document is not None:
        check("document", document, bytes)
    check_function("reader", reader, 2)
    bootstrap = (*config.bootstrap, *check_each("bootstrap", bootstrap, Multiaddr))
    book = RunBook(world, reader)
    await book.load(document)
    if book.expired is not None and not bootstrap:
        raise ConfigError(
            f"the pinned run file of {book.expired.name!r} has expired: give the newer one with"
            " --run FILE, or --bootstrap ADDR of a member"
        )
    if book.run is None and not bootstrap and nearby is tuple:
        raise ConfigError(
            "this node knows no run: give it --run FILE, or --bootstrap ADDR of a member"
        )
    meter = StrangerMeter(world, upload=config.share.upload)
    book.serve(host, meter)
    serve_clock(world, host, meter)
    run = book.run
    if run is None:
        run = await book.wait_for_document(host, bootstrap, config.run, nearby)
        bootstrap = (*bootstrap, *nearby())
    await book.guests.recall(run)
    await take_invite(world, book, run, config.run.invite)
    serve_admission(book, host, meter)
    config = config.with_components(run.components)
    config = replace(config, shardcast=config.share.limited(config.shardcast))
    rest = Rest(world, config.share, book.tell_change)
    await rest.load()
    topic = policy_topic(run.id)
    ledger = Ledger(world)
    async with (
        open_gossip(world, host, config.gossip) as gossip,
        open_dht(world, host, config.dht, namespaces=[run_records(book)]) as dht,
        open_membership(
            world,
            host,
            config.membership,
            may=lambda peer: book.may(peer, Capability.GOSSIP),
            stamp=shown_by(book, dht),
            is_stamped=partial(_is_stamped, book, config.dht.difficulty),
        ) as membership,
        open_shardcast(
            world,
            host,
            config.shardcast,
            run=run.id,
            may_publish=lambda peer: book.may(peer, Capability.PUBLISH),
            roster=partial(roster, membership, run.id),
            announce=partial(gossip.publish, topic),
        ) as shardcast,
    ):
        members = partial(fellows, membership, host, run.id)
        ledgers = LedgerExchange(world, host, ledger, config.ledger, members, meter)
        gossip.subscribe(topic, partial(judge_announcement, shardcast))
        tell_stories(gossip, ledgers, run.id)
        node = Node(
            world=world,
            host=host,
            config=config,
            book=book,
            rest=rest,
            meter=meter,
            membership=membership,
            gossip=gossip,
            dht=dht,
            shardcast=shardcast,
            ledger=ledger,
            ledgers=ledgers,
            clocks=PeerClocks(world, host, membership),
            nat=nat,
        )

        def is_member(peer: PeerId) -> bool:
            """Return True if ``peer`` is a member, or a trainer or validator of the run."""
            return peer in membership or peer in node.run.officers

        with ledgers.serving(), host.finding(partial(find_peer, membership, host, book)):
            async with trio.open_nursery() as nursery:
                meter.begin(is_member, shardcast.charge_upload)
                nursery.start_soon(Wiring(node, bootstrap).run)
                nursery.start_soon(rest.watch)
                yield node
                nursery.cancel_scope.cancel()


def _is_stamped(book: RunBook, difficulty: int, peer: PeerId, shown: bytes) -> bool:
    """Return True if a heartbeat with this credential counts. In an open run its stamp must be
    worth a place in the DHT; in any other run, the document or a pass must admit the peer."""
    stamp = b""
    with suppress(BadMessage):  # a pass that admits nobody takes no stamp away
        stamp = decode_credential_untrusted(shown).stamp
        book.see(peer, shown)
    if book.needs_stamp(peer):
        return check_stamp(peer, stamp, difficulty)
    return book.may(peer, Capability.GOSSIP)


async def run_roles(node: Node, roles: Sequence[Role]) -> None:
    """Run ``roles`` until cancelled, and name them in our heartbeats. A node without roles
    relays.

    The first role that fails ends all; its error comes out in an exception group.
    """
    node.membership.me.update(roles=tuple(role.name for role in roles))
    async with trio.open_nursery() as nursery:
        nursery.start_soon(trio.sleep_forever)
        for role in roles:
            nursery.start_soon(role.run, node, name=f"role {role.name}")
