"""Chance that nobody can predict or choose, and that everybody can check afterwards.

Theory of operation
-------------------
The trainer draws a secret and hashes it `LINKS` times. It *pledges* the last hash, the end of
the chain, before anything depends on it, and then *reveals* one link every few seconds,
backwards: link 1 is what hashes to the end, link 2 what hashes to link 1. So nobody knows the
next link before the trainer says it, and the trainer cannot choose it either. A link proves
itself by hashing to one that is known. Who has missed some, or has just come, hashes as often
as it missed links: `LINKS` times at most, 30 ms.

A chain is known by the second at which it began. The pledge binds run, trainer and that second;
two pledges of one trainer for one second, with different ends, are an equivocation: the lot
falls differently for those who heard one and those who heard the other, so none of that
trainer's links counts any more (`HeardLinks.forked`). The pair is a proof (`TwoPledges`), which
a validator that has both states in its ledger, for those who heard one.

When links stop coming, `HeardLinks.is_live` says so, and everything is checked as if there were
no lots. No I/O: the caller knows the time.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace
from typing import Final

from p2p.bounded import BoundedDict
from p2p.errors import BadMessage
from p2p.identity import (
    SIGNATURE_BYTES,
    PeerId,
    ProtocolId,
    Signer,
    Verify,
    decode_peer_id_untrusted,
)
from p2p.wire import fields_untrusted, pack, unpack_untrusted

DOMAIN: Final = ProtocolId("/shoal/beacon/1.0.0")
"""Of pledges' signatures, and of the hash of the chain."""
LINKS: Final = 1 << 16
"""Links of one chain: three days at one in four seconds. No more may be hashed for one message;
a number beyond is refused unhashed."""
LINK_BYTES: Final = 32
MAX_CHAIN: Final = 2**40
"""The latest second at which a chain may begin: the year 36812."""
KEPT: Final = 4
"""Chains that are remembered: the one before may still decide windows of its last links."""
STRIDE: Final = 256
"""Every how manyeth link its trainer keeps: 8 KiB, and as many hashes a reveal at most."""
SILENT_PERIODS: Final = 10
"""Periods without a link after which lots are not waited for. A trainer that publishes a large
policy misses a few, one that is started again more."""


def beacon_topic(run: bytes) -> str:
    """The gossip topic on which a run's trainer reveals links."""
    return f"/shoal/run/{run.hex()}/beacon"


def hash_back(link: bytes, times: int = 1) -> bytes:
    """The link ``times`` before ``link``."""
    prefix = DOMAIN.encode()
    for _ in range(times):
        link = hashlib.sha256(prefix + link).digest()
    return link


@dataclass(frozen=True, slots=True)
class Pledge:
    """The end of a chain, bound to its run and trainer."""

    run: bytes
    trainer: PeerId
    chain: int
    """The second since 1970 at which the chain began."""
    end: bytes
    signature: bytes = b""

    def body(self) -> bytes:
        """What is signed."""
        return pack([self.run, self.trainer.digest, self.chain, self.end])

    def parts(self) -> tuple[bytes, bytes]:
        """Body and signature, as they travel."""
        return self.body(), self.signature

    def signed(self, signer: Signer) -> Pledge:
        """The same, in the trainer's name."""
        return replace(self, signature=signer.sign(DOMAIN, self.body()))


@dataclass(frozen=True, slots=True)
class Reveal:
    """A link, and the pledge that it answers to: a late joiner needs nothing else."""

    pledge: Pledge
    number: int
    link: bytes

    def to_bytes(self) -> bytes:
        """The wire form."""
        return pack([*self.pledge.parts(), self.number, self.link])


def decode_pledge_untrusted(body: bytes, signature: bytes, verify: Verify) -> Pledge:
    """Raise `BadMessage` unless it is whole and its trainer's."""
    run, trainer, chain, end = fields_untrusted(
        unpack_untrusted(body), bytes, bytes, int, bytes, what="pledge"
    )
    if len(run) != 32 or len(end) != LINK_BYTES or not 0 <= chain <= MAX_CHAIN:
        raise BadMessage("a pledge's run, chain or end is malformed")
    author = decode_peer_id_untrusted(trainer)
    if len(signature) != SIGNATURE_BYTES or not verify(author, DOMAIN, body, signature):
        raise BadMessage("a pledge's signature is not its trainer's")
    return Pledge(run, author, chain, end, signature)


def decode_reveal_untrusted(data: bytes, verify: Verify) -> Reveal:
    """Raise `BadMessage`, and nothing else, whatever the bytes. Nothing is hashed yet."""
    body, signature, number, link = fields_untrusted(
        unpack_untrusted(data), bytes, bytes, int, bytes, what="link"
    )
    if not 0 < number <= LINKS or len(link) != LINK_BYTES:
        raise BadMessage(f"a chain has links 1 to {LINKS}, of {LINK_BYTES} bytes")
    return Reveal(decode_pledge_untrusted(body, signature, verify), number, link)


@dataclass(frozen=True, slots=True)
class TwoPledges:
    """Two ends that one trainer pledged for one chain: proof, for whoever holds it."""

    first: Pledge
    second: Pledge

    def __post_init__(self) -> None:
        one, other = self.first, self.second
        same = (one.run, one.trainer, one.chain) == (other.run, other.trainer, other.chain)
        if not same or one.end == other.end:
            raise ValueError("two pledges are of one trainer and chain, and of different ends")

    def is_of(self, other: TwoPledges) -> bool:
        """Whether the other proves the same of the same trainer."""
        one, two = self.first, other.first
        return (one.run, one.trainer) == (two.run, two.trainer)

    def to_bytes(self) -> bytes:
        """The ledger form."""
        return pack([part for one in (self.first, self.second) for part in one.parts()])


def decode_two_pledges_untrusted(data: bytes, verify: Verify) -> TwoPledges:
    """Raise `BadMessage` unless it proves that a trainer pledged twice."""
    kinds = (bytes, bytes, bytes, bytes)
    first, mark, second, other = fields_untrusted(
        unpack_untrusted(data), *kinds, what="pair of pledges"
    )
    pledges = (
        decode_pledge_untrusted(first, mark, verify),
        decode_pledge_untrusted(second, other, verify),
    )
    try:
        return TwoPledges(*pledges)
    except ValueError as error:
        raise BadMessage(str(error)) from None


class Chain:
    """A trainer's own chain: the secret, and what follows from it."""

    def __init__(self, secret: bytes) -> None:
        self._kept = [secret]
        for _ in range(LINKS // STRIDE):
            self._kept.append(hash_back(self._kept[-1], STRIDE))

    @property
    def end(self) -> bytes:
        """What is pledged."""
        return self._kept[-1]

    def link(self, number: int) -> bytes:
        """The link with this number, from 1; the secret is the last."""
        stride, times = divmod(LINKS - number, STRIDE)
        return hash_back(self._kept[stride], times)


@dataclass(slots=True)
class _Known:
    pledge: Pledge
    number: int
    link: bytes


class HeardLinks:
    """What a node knows of the chains of its run's trainer."""

    def __init__(self, run: bytes, trainer: PeerId, period: float) -> None:
        """``period``: seconds between two links."""
        self._run = run
        self._trainer = trainer
        self._period = period
        self._chains: BoundedDict[int, _Known] = BoundedDict(KEPT)
        self._chain = -1
        """The newest of them."""
        self._heard_at = 0.0
        self.forked: TwoPledges | None = None
        """Two pledges for one chain, if the trainer has signed such: proof, for bystanders."""

    def hear(self, reveal: Reveal, now: float) -> bool:
        """Whether it is news. Raises `BadMessage` on a link that answers to no pledge."""
        pledge = reveal.pledge
        if pledge.run != self._run or pledge.trainer != self._trainer:
            raise BadMessage("a link of another run or trainer")
        known = self._chains.get(pledge.chain)
        if known is not None and known.pledge.end != pledge.end:
            self.forked = self.forked or TwoPledges(known.pledge, pledge)
            return False
        if pledge.chain < self._chain or (known is not None and reveal.number <= known.number):
            return False
        before, number = (pledge.end, 0) if known is None else (known.link, known.number)
        if hash_back(reveal.link, reveal.number - number) != before:
            raise BadMessage("a link does not hash to the one before it")
        self._chains[pledge.chain] = _Known(pledge, reveal.number, reveal.link)
        self._chain, self._heard_at = pledge.chain, now
        return True

    def convict(self, proof: TwoPledges) -> bool:
        """Take up what another has found; whether it is news about this trainer."""
        about = proof.first.run, proof.first.trainer
        if self.forked is not None or about != (self._run, self._trainer):
            return False
        self.forked = proof
        return True

    @property
    def newest(self) -> tuple[int, int]:
        """Chain and number of the newest link; (-1, 0) before the first."""
        return (self._chain, self._chains[self._chain].number) if self._chains else (-1, 0)

    def is_live(self, now: float) -> bool:
        """Whether links come."""
        return (
            self.forked is None
            and bool(self._chains)
            and now < self._heard_at + SILENT_PERIODS * self._period
        )

    def link(self, chain: int, number: int) -> bytes | None:
        """That link; None if it is not out, as far as is known here."""
        known = self._chains.get(chain)
        if known is None or not 0 < number <= known.number:
            return None
        return hash_back(known.link, known.number - number)

    def may_be_out(self, chain: int, number: int, now: float) -> bool:
        """Whether anybody may know that link by now: it was heard here, or is due by this
        node's clock. Of another chain than the newest it may, and beyond its end."""
        newest_chain, newest = self.newest
        due = self._heard_at + (number - newest) * self._period
        return chain != newest_chain or not newest < number <= LINKS or now >= due
