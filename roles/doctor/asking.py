"""The bootstrap peers' answers: their ids, their run, the address at which they see us, and the
difference of clocks.

The doctor asks for seconds, with a fresh identity: a node that runs on this machine is not
disturbed.
"""

from __future__ import annotations

import socket
from collections.abc import Sequence
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass, replace
from typing import Final

import trio

from p2p.errors import ConfigError, WrongPeer
from p2p.host import PEER_TROUBLE, request
from p2p.identity import PeerId
from p2p.machine import open_world
from p2p.multiaddr import Multiaddr
from p2p.node.clock import clock_ahead
from p2p.node.config import ANY_PORT
from p2p.node.rundoc import MAX_DOCUMENT, PROTOCOL_ID
from p2p.node.trouble import likely_cause
from p2p.reach.autonat import Autonat, AutonatConfig
from p2p.reach.mapping import PortMapping
from p2p.reach.messages import DIAL_BACK_ID, DIAL_REQUEST_ID
from p2p.swarm import identify
from p2p.swarm.swarm import SwarmHost, open_host
from p2p.wire import pack
from p2p.world import World
from roles.contract import Run, decode_run_untrusted

ASK_SECONDS: Final = 10.0
"""Seconds for one peer to answer: ten times what a node on the other side of the world
takes.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """The answer of one bootstrap peer."""

    addr: str
    trouble: str = ""
    """Why it is of no use, in words; empty if it answers."""
    is_another: bool = False
    """True if a peer of another id answers there."""
    run: Run | None = None
    """The run that the peer belongs to, if it said so."""
    skew: float | None = None
    """Seconds by which our clock is ahead of its; None if it does not say."""
    observed: str = ""
    """The IP address from which it sees us come."""
    local: str = ""
    """The address of this machine from which one goes there."""


def ask(addrs: Sequence[Multiaddr]) -> tuple[Answer, ...]:
    """Return the answer of each peer, in order."""
    return trio.run(_ask_all, addrs) if addrs else ()


async def _ask_all(addrs: Sequence[Multiaddr]) -> tuple[Answer, ...]:
    found: dict[int, Answer] = {}

    async def note(number: int, addr: Multiaddr) -> None:
        found[number] = await _ask_one(addr)

    async with trio.open_nursery() as nursery:
        for number, addr in enumerate(addrs):
            nursery.start_soon(note, number, addr)
    return tuple(found[number] for number in range(len(addrs)))


async def _ask_one(addr: Multiaddr) -> Answer:
    answer = Answer(addr=str(addr))
    async with open_world() as world, open_host(world=world, listen=()) as host:
        try:
            with trio.fail_after(ASK_SECONDS):
                peer = await host.connect_addr(addr)
                document = await request(
                    host, peer, PROTOCOL_ID, pack([b"", 0]), max_reply=MAX_DOCUMENT
                )
                run = decode_run_untrusted(document) if document else None
        except PEER_TROUBLE as error:
            is_another = isinstance(error, WrongPeer)
            return replace(answer, trouble=likely_cause(error), is_another=is_another)
        if run is None:
            return replace(answer, trouble="it answers, and has no run file yet")
        skew = await _skew(world, host, peer)
        observed = await _observed(host, peer)
        local = local_address(observed) if observed else ""
        return replace(answer, run=run, skew=skew, observed=observed, local=local)


async def _skew(world: World, host: SwarmHost, peer: PeerId) -> float | None:
    """Return the seconds by which our clock is ahead of the peer's; None if the peer does not
    tell its time."""
    try:
        with trio.fail_after(ASK_SECONDS):
            return await clock_ahead(world, host, peer)
    except PEER_TROUBLE:
        return None


async def _observed(host: SwarmHost, peer: PeerId) -> str:
    """Return the IP address from which ``peer`` sees us, by identify, if it names one. Host
    names are ignored: to look one up would send a query to wherever the peer likes."""
    try:
        with trio.fail_after(ASK_SECONDS):
            async with await host.open_stream(peer, identify.PROTOCOL_ID) as stream:
                seen = (await identify.receive_info(stream)).observed_addr
    except PEER_TROUBLE:
        return ""
    kind, place = ("", "") if seen is None else seen.parts[0]
    return place if kind in ("ip4", "ip6") else ""


@dataclass(frozen=True, slots=True, kw_only=True)
class DialIn:
    """The result of letting bootstrap peers dial this machine."""

    addr: str = ""
    """Address that they dialled; empty if none did."""
    yes: int = 0
    no: int = 0
    router: str = ""
    """The home router's answer to a request for a port; empty if none stands between."""
    is_mapped: bool = False
    """True if the router forwards the port."""


async def dial_in(
    addrs: Sequence[Multiaddr], port: int, *, is_behind: bool, private: bool = False
) -> DialIn:
    """Listen for a moment at ``port``, or at a free one while another program has that, and let
    the peers at ``addrs`` dial it; first ask the router for the port if this machine
    ``is_behind`` one. ``private`` asks about private addresses, too."""
    async with open_world() as world, AsyncExitStack() as stack:
        try:
            place = Multiaddr.tcp("0.0.0.0", port)
            host = await stack.enter_async_context(open_host(world=world, listen=[place]))
        except ConfigError:
            host = await stack.enter_async_context(open_host(world=world, listen=[ANY_PORT]))
        inside = host.port_to_map if is_behind else None
        mapped = None if inside is None else PortMapping(world, inside)
        if mapped is not None:
            await mapped.renew()
            host.set_mapped(mapped.addr)
        autonat = Autonat(host, AutonatConfig(private=private), None)
        with host.serving(DIAL_BACK_ID, autonat.serve_dial_back):
            servers = await _meet_all(host, addrs)
            found = await autonat.survey(autonat.candidates(), servers)
        said = [
            DialIn(addr=str(addr), yes=answers.count(True), no=answers.count(False))
            for addr, answers in found.items()
        ]
        best = max(said, key=lambda one: (one.yes - one.no, one.no), default=DialIn())
        if best.yes + best.no == 0:
            best = DialIn()
        if mapped is not None:
            best = replace(best, router=mapped.said, is_mapped=mapped.addr is not None)
            await mapped.release()
        return best


async def _meet_all(host: SwarmHost, addrs: Sequence[Multiaddr]) -> list[PeerId]:
    """Connect to the peers, and return those that have told their protocols."""

    async def meet(addr: Multiaddr) -> None:
        with trio.move_on_after(ASK_SECONDS), suppress(*PEER_TROUBLE):
            peer = await host.connect_addr(addr)
            while host.info(peer) is None and peer in host.connected:
                await host.news.wait()

    async with trio.open_nursery() as nursery:
        for addr in addrs:
            nursery.start_soon(meet, addr)
    infos = ((peer, host.info(peer)) for peer in host.connected)
    return [peer for peer, info in infos if info and DIAL_REQUEST_ID in info.protocols]


def local_address(host: str) -> str:
    """Return this machine's address on the way to ``host``; empty if there is no way."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((host, 9))  # the discard port: a datagram's connection sends nothing
        except OSError:
            return ""
        return str(probe.getsockname()[0])
