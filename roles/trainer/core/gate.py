"""Who may teach: the standing of names, the windows they committed to, and the validators.

One `Gate` judges all that comes to a trainer, by the rules of docs/trust.md. It is sans-I/O:
time, the newest version and the run's terms come with each call (`Situation`), nothing of them
is kept. Dice are BLAKE3 under a secret, over a window's digest: neither a restart nor a
repetition throws twice.

A driver calls a method, then writes what `take_changed` gives, each row a file that is replaced
atomically and in the order given, and only then answers its peer. Whatever row a crash leaves
unwritten, peers repeat their request and the outcome is the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Final, Protocol

from p2p.identity import PeerId
from p2p.shardcast.manifest import PolicyVersion
from roles.protocol.core.answer import Refused
from roles.protocol.core.findings import Finding, Weight
from roles.protocol.core.verdict import SignedVerdict
from roles.protocol.core.window import Commitment, SignedWindow, Window

MAX_IN_STANDING: Final = 16_384
MAX_NEWCOMERS: Final = 4_096


class TrustNumbers(Protocol):
    """What the gate reads of the run's ``[trust]``."""

    @property
    def share(self) -> float:
        """Chance that a place which teaches nothing is wanted none the less."""

    @property
    def probation(self) -> int:
        """Places that have to stand before a name is in standing."""

    @property
    def window(self) -> int:
        """Places of a window at most."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Situation:
    """What holds at the moment of a call."""

    served: float
    """Seconds in which the desk served and had room, over all lives of the trainer. Deadlines
    count these only."""
    wall: float
    """Seconds since the epoch, for bans."""
    newest: PolicyVersion
    terms: bytes
    """Digest of the newest edition's terms (`roles.protocol.core.terms`)."""
    validators: tuple[PeerId, ...]
    """Those of the newest edition."""
    trust: TrustNumbers
    lag: int
    newcomers_load: float = 0.0
    """Share of the last minutes' served time that the trainer's own scorer spent on
    newcomers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Assignment:
    """What a window is answered: the same for the same window, always."""

    window: bytes
    """Digest of the window."""
    wanted: tuple[int, ...]
    """Indices of the places whose content is to come."""
    scorer: PeerId
    """To whom."""
    is_newcomer: bool
    """Nothing of the window is learnt from."""
    stood: int
    """Places of the name that stood so far."""
    owed: int
    """Places that have to stand before the name is in standing; 0: it is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    """What is known of a name; for answers, pages and the driver's own checks."""

    stood: int = 0
    owed: int = 0
    is_in_standing: bool = False
    banned_until: float = 0.0
    """Wall time; 0 where it is not banned."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Consequence:
    """What follows for a worker."""

    node: PeerId
    reason: str
    drop: tuple[Commitment, ...] = ()
    """Nothing may be learnt from these any more."""
    is_newcomer_again: bool = False
    is_forgiven: bool = False
    banned_until: float | None = None
    """Wall time."""


class Wish(Enum):
    """What the trainer wants after a verdict or a contest."""

    IGNORE = "ignore"
    """It changes nothing: not the scorer, not wanted, too late. The sender may forget it."""
    TAKE = "take"
    """It counts, or counted before."""
    SEND = "send"
    """It counts, and is to be repeated: window and content are to follow."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Audited:
    """What follows of a verdict that the trainer has repeated."""

    worker: Consequence | None
    weight: Weight
    """What it says of the validator."""
    is_convicted: bool = False
    """By this audit, now."""
    strikes: tuple[bytes, ...] = ()
    """Digests of the commitments whose audits convict together, oldest first; one if it is a
    lie beyond doubt. Strikes for silence are among them and have no evidence."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """The record of one name or validator, to be written or deleted."""

    kind: str
    """``name`` or ``validator``."""
    peer: PeerId
    data: bytes | None
    """None: delete the file."""


class Gate:
    """Standing, windows, dice and validators of a run, as its trainer sees them."""

    def __init__(
        self,
        me: PeerId,
        secret: bytes,
        *,
        most_in_standing: int = MAX_IN_STANDING,
        most_newcomers: int = MAX_NEWCOMERS,
    ) -> None:
        """Make a gate that knows nobody.

        Args:
            me: The trainer.
            secret: 32 bytes from the trainer's disk that key all dice.
            most_in_standing: Names in standing that are remembered.
            most_newcomers: Newcomers that are remembered.
        """

    # -- records ---------------------------------------------------------------------------

    def take_changed(self) -> list[Row]:
        """Return the rows that changed since the last call, in the order to write them."""
        raise NotImplementedError

    def restore_untrusted(self, kind: str, peer: PeerId, data: bytes) -> None:
        """Take up a row of an earlier life.

        Raises:
            BadMessage: It is none.
        """
        raise NotImplementedError

    def standing(self, name: PeerId, now: Situation, *, is_listed: bool) -> Standing:
        """Return what is known of ``name``."""
        raise NotImplementedError

    # -- windows ---------------------------------------------------------------------------

    def commit(
        self, signed: SignedWindow, now: Situation, *, is_listed: bool
    ) -> Assignment | Refused:
        """Commit to a window whose signature, run and policy digest the driver has checked.

        A window without places changes nothing: it asks how much is wanted. A refusal for lack
        of room has ``retry`` and blames nobody. ``is_listed``: the run file names the worker,
        or it holds the owner's invite.
        """
        raise NotImplementedError

    def expects(self, commitment: Commitment, now: Situation) -> Refused | None:
        """Return None if the trainer's own scorer waits for this content."""
        raise NotImplementedError

    def came(self, commitment: Commitment) -> None:
        """Note that the content is on the trainer's disk: it is not overdue any more. Told
        again for each content in the inbox after a restart."""
        raise NotImplementedError

    def groups_to_replay(
        self, window: Window, index: int, spreads: Sequence[bool], now: Situation
    ) -> tuple[int, ...]:
        """Return the groups of a wanted place that the trainer's scorer replays.

        ``spreads`` tells for each group if the rewards that the scorer computed have spread.
        Those groups are replayed, and each other with chance ``share``. Places of newcomers,
        and places that only the dice want (all claims are ``alike``), are replayed whole: else
        junk there would be seen with a fraction of ``share``.
        """
        raise NotImplementedError

    # -- what the trainer's own scorer finds -----------------------------------------------

    def stood(self, commitment: Commitment, now: Situation) -> bool:
        """The place is what it claims to be. Return True if it may be learnt from."""
        raise NotImplementedError

    def lied(self, commitment: Commitment, weight: Weight, now: Situation) -> Consequence:
        """The trainer's replay rejects the place; `Weight.LIE` bans the name."""
        raise NotImplementedError

    def wrong_claim(self, commitment: Commitment, now: Situation) -> Consequence:
        """A claim about a group is wrong, and no limit was touched on either side."""
        raise NotImplementedError

    def inconclusive(self, commitment: Commitment, now: Situation) -> Consequence:
        """The scorer cannot tell. Forgiven once in 32 windows."""
        raise NotImplementedError

    def expire(self, now: Situation) -> list[Consequence]:
        """Close what is overdue: wanted places that did not come to the trainer within ``lag``
        versions and `DUE` served seconds, windows of other terms, windows whose validator is
        silent or convicted, audits whose content did not come. Call it every few seconds."""
        raise NotImplementedError

    # -- validators ------------------------------------------------------------------------

    def verdict(self, verdict: SignedVerdict, now: Situation, *, network: str) -> Wish:
        """Take a validator's verdict, whose signature the driver has checked.

        ``network`` is that of the *worker* as far as known, else of the validator. `Wish.SEND`
        opens an audit: content follows, and the trainer's replay goes to `audited`. The same
        verdict gets the same answer until then, `Wish.TAKE` afterwards.
        """
        raise NotImplementedError

    def contest(self, verdict: SignedVerdict, now: Situation, *, network: str) -> Wish:
        """A worker says that a validator's signed rejection is wrong.

        `Wish.SEND`: the budget takes it, content follows. `Wish.TAKE`: noted, the worker may
        ask again in a minute; of those that ask, the network served longest ago is next.
        """
        raise NotImplementedError

    def audited(
        self, verdict: SignedVerdict, finding: Finding | None, now: Situation
    ) -> Audited:
        """Say what the trainer's replay of an audited place found: the worst `Finding`, or None
        if everything is within limits. Told twice, it counts once."""
        raise NotImplementedError

    def audit_inconclusive(self, commitment: Commitment, now: Situation) -> None:
        """The trainer could not repeat an audited place: the place does not count, nobody is
        blamed."""
        raise NotImplementedError

    def passed_over(self, now: Situation) -> dict[PeerId, str]:
        """Return the validators of the run that are drawn for nobody now, and why."""
        raise NotImplementedError
