"""The run document of this node: where it comes from, what may replace it, who gets it.

Theory of operation
-------------------
A node has at most one run. It gets the document from its command line, from its disk, or from the peers it
was told to bootstrap from, and pins it: from then on only a document of the same owner and name with a
higher epoch replaces it. A pinned document that has expired still says which run this is, and nothing more:
the node asks for the next edition as a newcomer asks for its first.

Whoever asks (``/shoal/run/1.0.0``: one frame ``[run id or empty, epoch]``, one frame back) gets the document
if it is newer than what the asker has, or of another run (the asker learns that it asks the wrong peer),
else an empty frame. The document is signed, so it does not matter who hands it over; by choosing whom to
bootstrap from one chooses the owner.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import trio

from p2p.errors import (
    BadMessage,
    ConfigError,
    LimitExceeded,
    PeerUnreachable,
    ProtocolNotSupported,
    RemoteProtocolError,
    StorageError,
    WrongPeer,
)
from p2p.host import Host, request, serve_requests
from p2p.identity import PeerId, ProtocolId
from p2p.multiaddr import Multiaddr
from p2p.node.admission import Capability, SignedRun
from p2p.node.plugins import RunReader, open_run_untrusted
from p2p.wire import KI, fields_untrusted, pack, unpack_untrusted
from p2p.world import World, decode_off_loop

PROTOCOL_ID: Final = ProtocolId("/shoal/run/1.0.0")
PATH: Final = "run.shoal"
"""Where the document is pinned, in the node's folder."""
MAX_DOCUMENT: Final = 256 * KI
"""Bytes; what `roles.run.file` allows."""
MAX_REQUEST: Final = 64
"""Bytes of ``[run id, epoch]``: 32, 9 and framing."""
READ_RATE: Final = 4e6
"""Bytes of a document that are read in a second, one core: the modelled cost of a long one."""
EXPIRY_TOLERANCE: Final = 300.0
"""Seconds that an honest clock may be ahead of the owner's (design: wall clocks lie)."""

MAX_PAUSE: Final = 30.0
"""Seconds between rounds of asking the bootstrap peers at most. The pause doubles from ``ask_interval`` on: a
peer that starts within the first seconds is met at once, and one that is gone costs two dials a minute."""

PEER_TROUBLE: Final = (
    PeerUnreachable,
    ProtocolNotSupported,
    RemoteProtocolError,
    LimitExceeded,
    trio.BrokenResourceError,
    trio.ClosedResourceError,
    trio.TooSlowError,
)
"""What asking one peer may raise without anything being wrong here."""

logger = logging.getLogger(__name__)


class OtherRun(BadMessage):
    """The peer is in another run than the one this node is pinned to."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunConfig:
    """How a node finds its run and its fellows."""

    ask_interval: float = 2.0
    """Seconds before the bootstrap peers are asked again, while none has answered; then twice as long, and so
    on up to `MAX_PAUSE`."""

    ask_timeout: float = 10.0
    """Seconds that one peer may take to hand over the run document."""

    refresh: float = 60.0
    """Seconds between looks into the DHT for members, and at one member for a newer run document."""

    def __post_init__(self) -> None:
        if min(self.ask_interval, self.ask_timeout, self.refresh) <= 0:
            raise ValueError("intervals and timeouts are positive")


class RunBook:
    """The newest document of this node's one run. An `Admission`: its answers follow the document."""

    def __init__(self, world: World, reader: RunReader = open_run_untrusted) -> None:
        self._world = world
        self._reader = reader
        self._run: SignedRun | None = None
        self._pin: SignedRun | None = None
        """The newest edition ever seen, expired or not: nothing older, and no other run, is taken."""
        self._is_pinned = True
        """Whether the disk has taken the newest edition; it is offered again until it has."""
        self._turn = trio.Lock()
        self._found = trio.Event()
        self._replaced = trio.Event()

    @property
    def run(self) -> SignedRun | None:
        """The newest edition, if there is one yet."""
        return self._run

    @property
    def expired(self) -> SignedRun | None:
        """The pinned edition, if it has expired and there is no newer one."""
        return self._pin if self._run is None else None

    def may(self, peer: PeerId, capability: Capability) -> bool:
        """As the newest edition says; nobody may anything before there is one."""
        return self._run is not None and self._run.may(peer, capability)

    def needs_stamp(self, peer: PeerId) -> bool:
        """As the newest edition says."""
        return self._run is not None and self._run.needs_stamp(peer)

    async def wait_edition(self, after: int) -> SignedRun:
        """Return the newest edition once its epoch is higher than ``after``."""
        while self._run is None or self._run.epoch <= after:
            await self._replaced.wait()
        return self._run

    async def load(self, document: bytes | None = None) -> None:
        """Take what is pinned on disk, then ``document`` (from the command line) if it is newer.

        Raises `ConfigError` if either is void, or if they are of different runs. What is pinned may have
        expired: then there is no `run` until a newer edition comes. A void pin is not replaced by what some
        peer says, which could be another owner's run: only the person who runs the node may choose anew.
        """
        self._pin = await self._read_pin(has_other=document is not None)
        if self._pin is not None and not self._has_expired(self._pin):
            self._run = self._pin
            self._found.set()
        if document is not None:
            try:
                await self.offer(document)
            except BadMessage as error:
                raise ConfigError(f"the run file cannot be used: {error}") from error

    async def _read_pin(self, *, has_other: bool) -> SignedRun | None:
        if await self._world.disk.size(PATH) is None:
            return None
        pinned = await self._world.disk.read(PATH, 0, MAX_DOCUMENT + 1)
        try:
            return self._reader(pinned, self._world.verify)
        except BadMessage as error:
            path = self._world.disk.locate(PATH)
            if not has_other:
                raise ConfigError(
                    f"the pinned run file cannot be used: {error}; start with --run and a sound copy, or "
                    f"remove {path} to ask a member for it again"
                ) from error
            logger.warning("run.pin_damaged %s is replaced by the run file given: %s", path, error)
            return None

    async def offer(self, document: bytes) -> bool:
        """Judge a document; pin it and return True if it is newer than ours.

        Raises `BadMessage` if it is void or another run's, `ConfigError` without a reader. A disk that
        refuses it does not keep it from being used: it is signed, and pinned when the disk takes it.
        """
        if len(document) > MAX_DOCUMENT:
            raise BadMessage(f"a run file of {len(document)} bytes is too long (at most {MAX_DOCUMENT})")
        async with self._turn:
            run = await decode_off_loop(
                self._world, self._reader, document, self._world.verify, rate=READ_RATE
            )
            if not self._is_news(run):
                return False
            self._run = self._pin = run
            self._is_pinned = False
            await self._keep()
            self._found.set()
            self._replaced.set()
            self._replaced = trio.Event()
        logger.info("run.pinned id=%s owner=%s epoch=%d", run.id.hex(), run.owner, run.epoch)
        self._world.trace("run.pinned", epoch=run.epoch)
        return True

    async def _keep(self) -> None:
        """Write the newest edition down, unless it is."""
        if self._is_pinned or self._run is None:
            return
        try:
            await self._world.disk.replace(PATH, self._run.document)
            self._is_pinned = True
        except StorageError as error:
            logger.warning("run.not_pinned epoch=%d reason=%s", self._run.epoch, error)

    def _is_news(self, run: SignedRun) -> bool:
        pin = self._pin
        if self._has_expired(run):
            raise BadMessage(f"the run file of {run.name!r} has expired; ask its owner for a newer one")
        if pin is None:
            return True
        if run.id != pin.id:
            raise OtherRun(
                f"it is of run {run.name!r} ({run.id.hex()[:12]}) by {run.owner}; this node is pinned to "
                f"{pin.name!r} ({pin.id.hex()[:12]}) by {pin.owner}: use another --data"
            )
        return run.epoch > pin.epoch

    def _has_expired(self, run: SignedRun) -> bool:
        return self._world.wall() > run.expiry + EXPIRY_TOLERANCE

    def serve(self, host: Host) -> None:
        """Answer those who ask for the document."""
        host.set_handler(PROTOCOL_ID, serve_requests(self._answer, max_request=MAX_REQUEST))

    async def _answer(self, peer: PeerId, payload: bytes) -> bytes:
        run_id, epoch = fields_untrusted(unpack_untrusted(payload), bytes, int, what="run request")
        if self._run is None or (run_id == self._run.id and epoch >= self._run.epoch):
            return b""
        return self._run.document

    async def ask(self, host: Host, peer: PeerId) -> bool:
        """Ask one peer for a newer document; True if it had one. The caller sets the deadline.

        Raises what `p2p.host.request` raises, and `BadMessage` if the document is void or another run's.
        """
        await self._keep()
        known = pack([self._pin.id, self._pin.epoch] if self._pin else [b"", 0])
        document = await request(host, peer, PROTOCOL_ID, known, max_reply=MAX_DOCUMENT)
        return bool(document) and await self.offer(document)

    async def wait_for_document(
        self, host: Host, bootstrap: Sequence[Multiaddr], config: RunConfig
    ) -> SignedRun:
        """Ask the bootstrap peers, in rounds further and further apart, until there is a document.

        Of each peer a person reads one line, and another only when what is wrong has changed.
        """
        pause, said = config.ask_interval, dict.fromkeys(bootstrap, "")
        while self._run is None:
            for addr in bootstrap:
                cause = await self._ask_addr(host, addr, config.ask_timeout)
                if cause and cause != said[addr]:
                    said[addr] = cause
                    logger.warning("no run from %s: %s; it is asked again, less and less often", addr, cause)
            with trio.move_on_after(pause):
                await self._found.wait()
            pause = min(2 * pause, max(MAX_PAUSE, config.ask_interval))
        return self._run

    async def _ask_addr(self, host: Host, addr: Multiaddr, timeout: float) -> str:
        """Ask one peer; why there is no document, in words, or nothing if there is."""
        try:
            with trio.fail_after(timeout):
                if await self.ask(host, await host.connect_addr(addr)):
                    return ""
                return "it answers and has no run file yet"
        except PEER_TROUBLE as error:
            logger.info("run.no_answer addr=%s reason=%s", addr, error or type(error).__name__)
            return _likely_cause(error)


def _likely_cause(error: Exception) -> str:
    """What a person can look into."""
    match error:
        case WrongPeer():
            return "another node answers there: is the id in the address out of date?"
        case PeerUnreachable():
            return "nothing answers there: does that node run, is the address right, is there a firewall?"
        case trio.TooSlowError():
            return "no answer in time: is there a firewall, or is that node very busy?"
        case ProtocolNotSupported():
            return "what answers there is no node of Shoal"
        case BadMessage():
            return f"its run file cannot be used: {error}"
    return str(error) or type(error).__name__
