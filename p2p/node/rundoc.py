"""The run document of this node: where it comes from, what may replace it, who gets it.

Theory of operation
-------------------
A node has at most one run. It gets the document from its command line, from its disk, or from
the peers it was told to bootstrap from, and pins it: from then on only a document of the same
owner and name with a higher epoch replaces it. A pinned document that has expired still says
which run this is, and nothing more: the node asks for the next edition as a newcomer asks for
its first. One that expires while the node runs keeps the members together, so that they can
hand each other the next one, and allows no work (`RunBook.in_force`).

A peer that asks (``/shoal/run/1.0.0``: one frame ``[run id or empty, epoch]``, one frame back)
gets the document if it is newer than what the asker has, or of another run (the asker learns
that it asks the wrong peer), else an empty frame. The document is signed, so it does not matter
who hands it over; by choosing whom to bootstrap from one chooses the owner. Who has nothing
newer is asked for another edition of the same epoch, which no honest owner signs. An asker that
has a newer one is asked in return (`RunBook.hint`), so a node that takes an edition up tells
its neighbours of it by asking them.

What a peer hands over is a stranger's word until it is judged. A node that is pinned has it
compared with its run before more than a signature of it is judged (`RunReader`), and takes
whatever the reader raises for a refusal. The peer pays for a void document, unless it could not
know (`UnusableEdition`). A node gets a document only where it asks, and it asks seldom.

Two editions of one epoch
-------------------------
Of one epoch there is one edition: nodes that hold different ones have other validators, limits
or members, and refuse each other's honest work without a word. No node can say which of the two
is right. So each works on under the one that it holds, its *own*, and keeps the other, its
*rival*. The two signatures are a proof that only the owner's key can make: what is
compared is what was signed, so another signature, or another encoding, of the same terms is no
rival.

A node asks for a rival where it asks for news (``/shoal/run-rival/1.0.0``: one frame ``[run id,
epoch, digest of what the owner signed]``, one frame back). A peer whose edition of that epoch
is another answers with that; one that has the same, and knows a rival, with the rival; else the
frame is empty. A peer that is asked with a digest that is not its own asks back
(`p2p.node.rundoc.RunBook.hint`). So of two nodes that meet both know, and in each round of
asking about twice as many as before.

Bounded: the first rival of an epoch is proof enough. It is kept beside the pin, and no other is
kept, asked for, or told of. An edition with a higher epoch, which both camps take, ends it.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Final

import trio

from p2p.bounded import BoundedDict
from p2p.concurrency import Notifier
from p2p.dht.stamp import stamp_cost
from p2p.equivocation import conflict
from p2p.errors import BadMessage, ConfigError, ProtocolNotSupported, StorageError
from p2p.host import PEER_TROUBLE, Host, request, serve_requests
from p2p.identity import PeerId, ProtocolId
from p2p.meter import StrangerMeter
from p2p.multiaddr import Multiaddr
from p2p.node.admission import (
    EXPIRY_TOLERANCE,
    Capability,
    Credential,
    OtherRun as OtherRun,
    RunReader,
    SignedRun,
    UnusableEdition,
    check_same_run,
    decode_credential_untrusted,
    work_bits,
)
from p2p.node.guests import GuestBook
from p2p.node.trouble import likely_cause
from p2p.offence import Offence
from p2p.wire import KI, fields_untrusted, pack, unpack_untrusted
from p2p.world import World, decode_off_loop

PROTOCOL_ID: Final = ProtocolId("/shoal/run/1.0.0")
PATH: Final = "run.shoal"
"""File in the node's folder where the document is pinned."""
HELD: Final = "run.id"
"""File with the id of the run that the folder belongs to, even after `PATH` was removed. What
roles keep (a checkpoint, unpaid work) is of use in that run only."""
RIVAL_PROTOCOL: Final = ProtocolId("/shoal/run-rival/1.0.0")
RIVAL_PATH: Final = "run.rival"
"""File in the node's folder with the other run document of the pinned epoch."""
MAX_DOCUMENT: Final = 256 * KI
"""Maximum bytes of a document, as in `roles.contract.core.file`."""
MAX_HINTS: Final = 64
"""Maximum number of peers remembered as asked, or to be asked, for that reason: the trainers
and validators of a large run."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunConfig:
    """How a node finds its run and the run's members."""

    ask_interval: float = 2.0
    """Seconds until the bootstrap peers are asked again if none has answered (`next_pause`)."""

    ask_timeout: float = 10.0
    """Seconds that one peer may take to send the run document. 256 KiB take 2 s at 1 Mbit/s,
    and the peer may be busy."""

    invite: str = ""
    """Invite to the run, as printed by its owner's ``shoal run invite``, and read at the first
    start. ``--invite`` is the same."""

    refresh: float = 60.0
    """Seconds between searches in the DHT for members, and between questions to one member for
    a newer run document."""

    def __post_init__(self) -> None:
        if min(self.ask_interval, self.ask_timeout, self.refresh) <= 0:
            raise ValueError("intervals and timeouts are positive")

    def next_pause(self, pause: float) -> float:
        """Return the seconds between the next two rounds of asking the bootstrap peers after
        ``pause``: twice as long, up to 30. A peer that starts within the first seconds is met
        at once, and one that is gone costs two dials a minute."""
        return min(2 * pause, max(30.0, self.ask_interval))


def are_rivals(one: SignedRun, other: SignedRun) -> bool:
    """Return True if the same owner signed both documents for one epoch of one run, with
    different contents."""
    return one.id == other.id and (
        conflict({one.epoch: one.digest}, {other.epoch: other.digest}) is not None
    )


class RunBook:
    """Newest document of this node's run, and what follows from it."""

    def __init__(self, world: World, reader: RunReader) -> None:
        self._world = world
        self._reader = reader
        self._run: SignedRun | None = None
        self._pin: SignedRun | None = None
        """Newest document ever seen, expired or not. No older one, and no other run's, is
        accepted."""
        self._held: bytes | None = None
        """Id of the run that the folder belongs to by `HELD`; None if the folder is new."""
        self.rival: SignedRun | None = None
        """Other document of the pinned epoch, signed by the same owner; None if there is none.
        Only a higher epoch settles which of them holds."""
        self._unkept: dict[str, tuple[bytes | None]] = {}
        """Maps files of the node's folder to contents that the disk has not taken yet; None
        stands for no file."""
        self._turn = trio.Lock()
        self._changed = Notifier()
        self._told: tuple[int, int, bool] = (0, 0, True)
        """State at the last look: epoch, number of warnings given of its expiry, and whether it
        was in force."""
        self._was_guest = False
        """True if an invite admitted this node at the last look. That can end without a new
        document."""
        self._hints: dict[PeerId, None] = {}
        """Peers that seem to have another document, and have not been asked yet."""
        self._hinted_at: BoundedDict[PeerId, float] = BoundedDict(MAX_HINTS)
        """Maps each peer that was asked for that reason to the time."""
        self._hinted = Notifier()
        self.guests = GuestBook(world)
        """Guests of the run."""
        self.own_pass = b""
        """Pass of this node, if it was invited."""
        self._stamp_grace: tuple[int, float] = (0, -math.inf)
        """Stamp bits of the previous document, and the time until which they suffice."""
        self.own_work = b""
        """Nonce of this node's work stamp, if it has made one."""

    @property
    def run(self) -> SignedRun | None:
        """Newest document, if there is one. It may have expired since it came (`in_force`)."""
        return self._run

    @property
    def in_force(self) -> bool:
        """True if there is a document that has not expired."""
        return self._run is not None and not self._has_expired(self._run)

    @property
    def expired(self) -> SignedRun | None:
        """Pinned document, if it has expired and there is no newer one."""
        return self._pin if self._run is None else None

    def may(self, peer: PeerId, capability: Capability) -> bool:
        """Return True if ``peer`` has ``capability`` by the newest document or an invite.

        An expired document still permits gossip, so that members stay together and can give
        each other the next one.
        """
        run = self._run
        if run is None or not (
            run.may(peer, capability) or self.guests.may(run, peer, capability)
        ):
            return False
        return capability is Capability.GOSSIP or not self._has_expired(run)

    def needs_stamp(self, peer: PeerId) -> bool:
        """Return True if ``peer`` must show a stamp by the newest document. Guests are
        exempt."""
        run = self._run
        return run is not None and run.needs_stamp(peer) and not self.guests.is_guest(run, peer)

    def see(self, peer: PeerId, shown: bytes) -> None:
        """Process a peer's credential.

        Raises:
            Uninvited: Its pass does not admit; the message has the remedy.
            BadMessage: The bytes are not a credential.
        """
        if self._run is None:
            return
        credential = decode_credential_untrusted(shown)
        if credential.invite:
            self.guests.admit(self._run, peer, credential.invite)
        if shown and peer == self._world.signer.peer_id:
            self._changed.notify_all()

    def why_not(self, peer: PeerId, capability: Capability) -> str:
        """Return why ``peer`` lacks ``capability``, with the remedy; empty if it has it."""
        run = self._run
        if run is None or self.may(peer, capability):
            return ""
        if run.may(peer, capability):
            return f"the run file of {run.name!r} has expired; ask its owner for a newer one"
        return self.guests.why_not(run, peer, capability)

    def lacks_work(self, peer: PeerId, shown: bytes, *, at_once: bool = True) -> bool:
        """Return True if ``peer`` needs a work stamp to submit work, and the credential
        ``shown`` has none that suffices. With ``at_once`` there is no grace period after a new
        document.

        Nothing is remembered, because peers go on showing their stamps. An invite for another
        role does not exempt a peer.
        """
        run = self._run
        bits = 0 if run is None else run.guest_rules.stamp_bits
        if run is None or not bits or not run.needs_stamp(peer):
            return False
        if self.guests.may(run, peer, Capability.GENERATE):
            return False
        before, until = self._stamp_grace
        if not at_once and self._world.now() < until:
            bits = min(bits, before)
        try:
            work = decode_credential_untrusted(shown).work
        except BadMessage:
            return True
        return work_bits(run.id, peer, work) < bits

    def show_work(self, nonce: bytes) -> None:
        """Show this node's own work stamp from now on."""
        self.own_work = nonce
        self.see(self._world.signer.peer_id, Credential(work=nonce).to_bytes())

    async def wait_edition(self, after: int) -> SignedRun:
        """Wait for a document with an epoch higher than ``after``, and return the newest
        one."""
        while self._run is None or self._run.epoch <= after:
            await self._changed.wait()
        return self._run

    async def wait_change(self) -> None:
        """Wait until a document comes, expires, or is in force again because a clock was
        set."""
        await self._changed.wait()

    def tell_change(self) -> None:
        """Wake all callers of `wait_change`, because the node's permissions have changed for
        another reason."""
        self._changed.notify_all()

    async def watch(self) -> None:
        """Warn of the document's expiry, and wake callers of `wait_change` when it comes. Works
        until cancelled."""
        while True:
            with trio.move_on_after(self._look_at_the_clock()):
                await self._changed.wait()

    def _look_at_the_clock(self) -> float:
        """Warn of an expiry that comes, and tell of changes that the clock brings. Return the
        seconds until the next look, which meets the next warning or the expiry exactly."""
        run, look = self._run, 300.0  # the wall clock may be set meanwhile
        if run is None:
            return look
        warnings = (86_400.0, 3_600.0, 0.0)  # seconds before the expiry
        left = run.expiry + EXPIRY_TOLERANCE - self._world.wall()
        due = sum(left < warning for warning in warnings)
        epoch, told, was_in_force = self._told
        self._told = (run.epoch, due, self.in_force)
        if due > (told if epoch == run.epoch else 0):
            seconds, unit = (3600, "h") if left > 3600 else (60, "min")
            what = f"expires within {math.ceil(left / seconds)} {unit}"
            if due == len(warnings):
                what = "has expired: no role works until a newer edition comes"
                self._world.trace("run.expired", epoch=run.epoch)
            logger.warning(
                "the run file of %r (epoch %d) %s; ask its owner for a newer edition, and start"
                " one node with it: --run FILE",
                *(run.name, run.epoch, what),
            )
        was_guest = self._was_guest
        self._was_guest = self.guests.is_guest(run, self._world.signer.peer_id)
        if was_in_force is not self.in_force or was_guest is not self._was_guest:
            self._changed.notify_all()
        coming = [left - warning for warning in warnings if left - warning >= 0]
        return min([look, *(one + 0.001 for one in coming)])

    def hint(self, peer: PeerId) -> bool:
        """Note that ``peer`` seems to have another document. Return True if it will be asked
        soon.

        Trainers and validators change with a document, and work must not be lost between two
        nodes with different ones. Strangers can cause no more than one question every ten
        seconds, and none before those to trainers and validators.
        """
        asked_at = self._hinted_at.get(peer, -math.inf)
        # The same peer is asked once a minute at most, as often as a random member is.
        if peer not in self._hints and self._world.now() < asked_at + 60.0:
            return False
        if peer not in self._hints and len(self._hints) >= MAX_HINTS:
            others = (known for known in self._hints if not self._is_officer(known))
            old = next(others, None) if self._is_officer(peer) else None
            if old is None:
                return False
            del self._hints[old]
        self._hints[peer] = None
        self._hinted.notify_all()
        return True

    def _is_officer(self, peer: PeerId) -> bool:
        return self._pin is not None and any(
            self._pin.may(peer, duty) for duty in (Capability.PUBLISH, Capability.VALIDATE)
        )

    async def follow_hints(self, host: Host, timeout: float) -> None:
        """Ask the peers noted by `hint` one after the other, until cancelled."""
        while True:
            if not self._hints:
                await self._hinted.wait()
            peer = next(filter(self._is_officer, self._hints), next(iter(self._hints)))
            del self._hints[peer]
            await self.ask_quietly(host, peer, timeout)
            self._hinted_at.renew(peer, self._world.now())
            await self._world.sleep_until(self._world.now() + 10.0)

    async def load(self, document: bytes | None = None) -> None:
        """Load the pinned document, then ``document`` (from the command line) if it is newer.

        If the pinned document has expired, there is no `run` until a newer one comes. If it is
        void, no peer's document replaces it, since that could be another owner's run. Only the
        operator may choose anew.

        Raises:
            ConfigError: A document is void, the two are of different runs, or the folder
                belongs to another run.
        """
        if await self._world.disk.size(HELD) is not None:
            with suppress(ValueError):  # damaged: written again
                # Twice the bytes of a run's id.
                held = await self._world.disk.read(HELD, 0, 64)
                self._held = bytes.fromhex(held.decode())
        self._pin = await self._read_pin(has_other=document is not None)
        if self._pin is not None and not self._has_expired(self._pin):
            self._run = self._pin
        if self._pin is not None:
            await self._load_rival(self._pin)
            await self._hold(self._pin)
        if document is not None:
            try:
                await self.offer(document)
            except BadMessage as error:
                raise ConfigError(f"the run file cannot be used: {error}") from error

    async def _hold(self, run: SignedRun) -> None:
        """Note on disk which run the folder belongs to."""
        if self._held != run.id:
            self._held = run.id
            await self._put(HELD, run.id.hex().encode())

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
                    f"the pinned run file cannot be used: {error}; start with --run and a sound"
                    f" copy, or remove {path} to ask a member for it again"
                ) from error
            logger.warning(
                "run.pin_damaged %s is replaced by the run file given: %s", path, error
            )
            return None

    async def _load_rival(self, pin: SignedRun) -> None:
        """Load the proof from disk, and remove it if it does not contradict ``pin``."""
        if await self._world.disk.size(RIVAL_PATH) is None:
            return
        try:
            rival = self._read(await self._world.disk.read(RIVAL_PATH), pin)
        except BadMessage as error:
            path = self._world.disk.locate(RIVAL_PATH)
            logger.warning("run.rival_damaged %s is removed: %s", path, error)
        else:
            if are_rivals(pin, rival):
                self._take_rival(rival)
                return
        await self._put(RIVAL_PATH, None)

    def _take_rival(self, rival: SignedRun) -> None:
        self.rival = rival
        logger.warning(
            "the owner of run %r has signed two run files of epoch %d that say different"
            " things: this node works on under the one it holds, others hold the other; ask the"
            " owner for one with a higher epoch, and start one node with it: --run FILE",
            rival.name,
            rival.epoch,
        )
        self._world.trace("run.rival", epoch=rival.epoch)

    async def offer(self, document: bytes) -> bool:
        """Judge a document. If it is newer than ours, pin it and return True.

        It is used even if the disk refuses it; writing is repeated later.

        Raises:
            BadMessage: The document is void or of another run.
        """
        if len(document) > MAX_DOCUMENT:
            raise BadMessage(
                f"a run file of {len(document)} bytes is too long (at most {MAX_DOCUMENT})"
            )
        async with self._turn:
            run = await self._judge(document)
            if run is None:
                return False
            self._note_stamps(run)
            self._run = self._pin = run
            self._told = (0, 0, True)
            # before anything is awaited: what a role does after this, it does knowing it
            self._changed.notify_all()
            await self._hold(run)
            await self._put(PATH, run.document)
            if self.rival is not None and self.rival.epoch < run.epoch:
                logger.info("run.rival_settled epoch=%d", run.epoch)
                self.rival = None
                await self._put(RIVAL_PATH, None)
        logger.info("run.pinned id=%s owner=%s epoch=%d", run.id.hex(), run.owner, run.epoch)
        self._world.trace("run.pinned", epoch=run.epoch)
        return True

    def _note_stamps(self, newer: SignedRun) -> None:
        """Begin a grace period for the stamps of the previous document if a new one requires
        more bits, so that work in progress is not lost."""
        if self._run is None:
            return
        before, asked = self._run.guest_rules.stamp_bits, newer.guest_rules.stamp_bits
        if asked > before:
            # Ten times what a work stamp takes on average, for a slow core that is out of luck.
            time = min(max(600.0, 10.0 * stamp_cost(asked)), 3_600.0)
            self._stamp_grace = before, self._world.now() + time

    async def _put(self, path: str, content: bytes | None) -> None:
        self._unkept[path] = (content,)
        await self.keep()

    async def keep(self) -> None:
        """Write what the disk has refused before. If it refuses again, that is only logged."""
        for path, (content,) in [*self._unkept.items()]:
            try:
                if content is None:
                    await self._world.disk.remove(path)
                else:
                    await self._world.disk.replace(path, content)
            except StorageError as error:
                logger.warning("run.not_kept path=%s reason=%s", path, error)
            else:
                if self._unkept.get(path) == (content,):
                    del self._unkept[path]

    async def _judge(self, document: bytes) -> SignedRun | None:
        """Return the run of ``document`` if it is newer than ours; else None.

        Raises:
            BadMessage: The document is void or of another run.
        """
        if self._pin is not None and document == self._pin.document and self._run is not None:
            return None
        # Bytes of a document read per second on one core, to model the cost of a long one.
        run = await decode_off_loop(self._world, self._read, document, self._pin, rate=4e6)
        if self._pin is None or not are_rivals(self._pin, run):
            return run if self._is_news(run) else None
        if self.rival is None:  # a proof, even if its time is over
            self._take_rival(run)
            await self._put(RIVAL_PATH, run.document)
        return None

    def _read(self, document: bytes, pin: SignedRun | None) -> SignedRun:
        try:
            return self._reader(document, self._world.verify, pin)
        except BadMessage:
            raise
        except ConfigError as error:  # no reader is installed
            raise UnusableEdition(str(error)) from error
        except Exception as error:
            # Readers are other packages', the bytes any stranger's, and what comes of the two
            # must not end a node that serves others. No blame: the bearer may have a reader
            # that reads it.
            logger.exception("the reader of run files crashed")
            raise UnusableEdition(
                f"its reader crashed at it ({type(error).__name__})"
            ) from error

    def _is_news(self, run: SignedRun) -> bool:
        check_same_run(self._pin, run.id, run.owner, run.name)
        if self._pin is None and self._held not in (None, run.id):
            raise OtherRun(
                f"it is of run {run.name!r:.80} ({run.id.hex()[:12]}), and"
                f" {self._world.disk.locate(HELD)} says that this folder is of run"
                f" {self._held.hex()[:12]}, whose work is in it: use another --data"
            )
        if self._has_expired(run):
            raise UnusableEdition(
                f"the run file of {run.name!r} has expired; ask its owner for a newer one"
            )
        if self._pin is None or run.epoch > self._pin.epoch:
            return True
        # a clock has been set right
        return self._run is None and run.document == self._pin.document

    def _has_expired(self, run: SignedRun) -> bool:
        return self._world.wall() > run.expiry + EXPIRY_TOLERANCE

    def serve(self, host: Host, meter: StrangerMeter | None = None) -> None:
        """Serve the document and proofs of equivocation, within the budget ``meter`` for
        strangers."""
        meter = meter or StrangerMeter(self._world)
        # Maximum bytes of ``[run id, epoch]``: 32, 9 and framing.
        for protocol, answer, most in (
            (PROTOCOL_ID, self._answer, 64),
            (RIVAL_PROTOCOL, self._answer_rival, 96),
        ):
            handler = serve_requests(answer, max_request=most, may_have=meter.allows_at_door)
            host.set_handler(protocol, handler)

    async def _answer(self, peer: PeerId, payload: bytes) -> bytes:
        run_id, epoch = fields_untrusted(
            unpack_untrusted(payload), bytes, int, what="run request"
        )
        if self._run is None or (run_id == self._run.id and epoch >= self._run.epoch):
            if self._pin is not None and run_id == self._pin.id and epoch > self._pin.epoch:
                self.hint(peer)
            return b""
        return self._run.document

    async def _answer_rival(self, peer: PeerId, payload: bytes) -> bytes:
        run_id, epoch, digest = fields_untrusted(
            unpack_untrusted(payload), bytes, int, bytes, what="rival request"
        )
        own = self._pin
        if own is None or (run_id, epoch) != (own.id, own.epoch):
            return b""
        if digest != own.digest and self.rival is None:
            self.hint(peer)
        if digest != own.digest:
            return own.document
        return b"" if self.rival is None else self.rival.document

    async def ask(self, host: Host, peer: PeerId) -> bool:
        """Ask one peer for a newer document and return True if it had one. The caller sets the
        deadline. Raises what `p2p.host.request` raises.

        Raises:
            BadMessage: The document is void or of another run.
        """
        await self.keep()
        known = pack([self._pin.id, self._pin.epoch] if self._pin else [b"", 0])
        document = await request(host, peer, PROTOCOL_ID, known, max_reply=MAX_DOCUMENT)
        if document:
            return await self._take(host, peer, document)
        if self._pin is not None and self.rival is None:
            own = pack([self._pin.id, self._pin.epoch, self._pin.digest])
            with suppress(ProtocolNotSupported):  # a node of an older version: it cannot know
                document = await request(
                    host, peer, RIVAL_PROTOCOL, own, max_reply=MAX_DOCUMENT
                )
            if document:
                await self._take(host, peer, document)
        return False

    async def _take(self, host: Host, peer: PeerId, document: bytes) -> bool:
        """Judge a document from a peer, which is penalised for a void one."""
        try:
            return await self.offer(document)
        except UnusableEdition:
            raise
        except BadMessage as error:
            host.penalise(peer, Offence.VIOLATION.points, f"a void run file: {error}")
            raise

    async def ask_quietly(self, host: Host, peer: PeerId, timeout: float) -> None:
        """Ask one peer for a newer document, and only log a failure."""
        try:
            with trio.fail_after(timeout):
                await self.ask(host, peer)
        except PEER_TROUBLE as error:
            logger.info("run.no_news peer=%s reason=%s", peer, error or type(error).__name__)

    async def ask_around(
        self, host: Host, addrs: Sequence[Multiaddr], timeout: float
    ) -> tuple[list[PeerId], dict[Multiaddr, str]]:
        """Ask peers one after the other for a newer document. Return those of this node's run,
        and for each other address the reason why there is none.

        Raises:
            ConfigError: None belongs to this node's run, and one belongs to another.
        """
        members, why_not, stranger = list[PeerId](), dict[Multiaddr, str](), None
        for addr in addrs:
            try:
                with trio.fail_after(timeout):
                    peer = await host.connect_addr(addr)
                    await self.ask(host, peer)
                if self._run is None:
                    why_not[addr] = "it answers and has no run file yet"
                else:
                    members.append(peer)
            except PEER_TROUBLE as error:
                why = error or type(error).__name__
                logger.info("run.no_answer addr=%s reason=%s", addr, why)
                why_not[addr] = likely_cause(error)
                if isinstance(error, OtherRun):
                    stranger = f"the run file of {addr} cannot be used: {error}"
        if stranger is not None and not members:
            raise ConfigError(stranger)
        return members, why_not

    async def wait_for_document(
        self,
        host: Host,
        bootstrap: Sequence[Multiaddr],
        config: RunConfig,
        nearby: Callable[[], Sequence[Multiaddr]] = tuple,
    ) -> SignedRun:
        """Wait until there is a document, by asking the bootstrap peers and those of ``nearby``
        in rounds with growing pauses.

        The log has one line for each peer, and another when its problem has changed.

        Raises:
            ConfigError: The peers that answer belong to another run than this folder.
        """
        # Maximum number of peers whose last answer is remembered.
        pause, said = config.ask_interval, BoundedDict[Multiaddr, str](256)
        while self._run is None:
            addrs = (*bootstrap, *nearby())
            _, why_not = await self.ask_around(host, addrs, config.ask_timeout)
            for addr, cause in why_not.items():
                if cause != said.get(addr):
                    said[addr] = cause
                    logger.warning(
                        "no run from %s: %s; it is asked again, less and less often",
                        addr,
                        cause,
                    )
            if self._run is None:
                with trio.move_on_after(pause):
                    await self._changed.wait()
            pause = config.next_pause(pause)
        return self._run
