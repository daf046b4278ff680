"""The gate's records of names and validators, and their rows on disk.

A name's row holds its windows with the answers that they got. So one file, replaced atomically,
has all that was promised to that name and all that counts for it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Final

from p2p.bounded import BoundedDict
from p2p.errors import BadMessage
from p2p.identity import PeerId, decode_peer_id_untrusted
from p2p.wire import fields_untrusted, pack, unpack_untrusted
from roles.protocol.core.findings import Weight
from roles.protocol.core.window import (
    DIGEST_BYTES,
    MAX_PLACES,
    Commitment,
    SignedWindow,
    Window,
    decode_window_untrusted,
)

MAX_KEPT: Final = 128
"""Most windows of a name that are kept for repeated requests. They are kept until their version
is stale."""
FORGIVEN_EVERY: Final = 32
"""Number of full windows of a name between two failures that are forgiven. They are counted by
their places, so a worker that closes windows early is not forgiven more often."""
LOOKS: Final = 100
"""Number of most recent audits of a validator; three strikes among them convict it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Assignment:
    """The answer to a window. The same window always gets the same answer."""

    window: bytes
    """Digest of the window."""
    wanted: tuple[int, ...]
    """Indices of the places whose content is to come."""
    scorer: PeerId
    """Peer to which the worker sends the content."""
    is_newcomer: bool
    """True if the worker is a newcomer: nothing of the window is learnt from."""
    stood: int
    """Number of the name's places that stood so far."""
    owed: int
    """Number of places that have to stand before the name is in standing; 0 if it is."""


class PlaceState(IntEnum):
    """State of a wanted place. The values are on disk."""

    PENDING = 0
    CAME = 1
    """Its content is on the trainer's disk."""
    STOOD = 2
    FAILED = 3
    """Rejected by the trainer's own replay."""
    EXCUSED = 4
    """The place does not count and does not void its window."""
    REJECTED = 5
    """Its validator rejected the place, and the worker may contest the rejection."""
    ACCEPTED_AUDIT = 6
    """Its validator accepted the place, and the trainer repeats the verdict."""
    REJECTED_AUDIT = 7


UNDECIDED: Final = (PlaceState.PENDING, PlaceState.CAME)
AUDITED: Final = (PlaceState.ACCEPTED_AUDIT, PlaceState.REJECTED_AUDIT)


@dataclass(slots=True)
class AwaitedAudit:
    """An audit whose content has been requested."""

    asked: float
    """Served time of the request; infinite once the content is here."""
    is_validators: bool
    """True if the validator has to send the content, False if the worker has to."""


@dataclass(slots=True)
class WindowRecord:
    """A committed window, its assignment, and the states of its wanted places."""

    signed: SignedWindow
    assignment: Assignment
    since: float
    states: dict[int, PlaceState]
    audits: dict[int, AwaitedAudit] = field(default_factory=dict)
    is_counted: bool = False
    is_blamed: bool = False
    """True if a place of the window did not come or was inconclusive."""

    @property
    def window(self) -> Window:
        """The window that the worker has signed."""
        return self.signed.window

    @property
    def is_settled(self) -> bool:
        """True if no wanted place is undecided."""
        return not any(one in UNDECIDED or one in AUDITED for one in self.states.values())

    @property
    def is_void(self) -> bool:
        """True if a place was rejected and the rejection is not known to be false."""
        fatal = (PlaceState.FAILED, PlaceState.REJECTED, PlaceState.REJECTED_AUDIT)
        return any(one in fatal for one in self.states.values())

    @property
    def commitments(self) -> tuple[Commitment, ...]:
        """Commitments of the wanted places."""
        return tuple(map(self.window.commitment, self.states))

    def excuse(self, *states: PlaceState) -> None:
        """Change the state of the places in any of ``states`` to excused."""
        for index, state in self.states.items():
            if state in states:
                self.states[index] = PlaceState.EXCUSED
                self.audits.pop(index, None)

    def to_list(self) -> list[object]:
        """Return this window's part of the name's row."""
        given = self.assignment
        return [
            self.signed.to_bytes(),
            given.scorer.digest,
            *(given.is_newcomer, given.stood, given.owed),
            *(float(self.since), self.is_counted, self.is_blamed),
            [[index, int(state)] for index, state in self.states.items()],
            [
                [index, float(one.asked), one.is_validators]
                for index, one in self.audits.items()
            ],
        ]


@dataclass(slots=True)
class NameRecord:
    """The record of one name."""

    owed: int
    stood: int = 0
    has_fallen: bool = False
    """True if the name owes places because of its own work. Being listed does not help then."""
    is_listed: bool = False
    unforgiven: int = FORGIVEN_EVERY * MAX_PLACES
    """Number of places since a failure was last forgiven."""
    was_repeated: bool = False
    """True if the trainer has repeated the name's first rejection beyond doubt."""
    banned_until: float = 0.0
    active: float = 0.0
    """Served time of its last window or verdict."""
    next: dict[int, int] = field(default_factory=dict)
    """Maps each version to the place that has to be committed next."""
    windows: dict[bytes, WindowRecord] = field(default_factory=dict)

    @property
    def is_entitled(self) -> bool:
        """True if the name belongs in the table of names in standing."""
        return not self.owed or (self.is_listed and not self.has_fallen)

    @property
    def rank(self) -> tuple[bool, int]:
        """Sort key that decides which names stay in a full table."""
        return self.is_listed, self.stood

    def find(self, commitment: Commitment) -> WindowRecord | None:
        """Return the window in which this place is wanted; None if there is none."""
        for one in self.windows.values():
            window = one.window
            if window.version == commitment.version and commitment.index in one.states:
                return one if window.commitment(commitment.index) == commitment else None
        return None

    def to_bytes(self) -> bytes:
        """Return the row on disk."""
        return pack(
            [
                *(self.owed, self.stood, self.has_fallen, self.is_listed, self.unforgiven),
                *(self.was_repeated, float(self.banned_until), float(self.active)),
                [[version, index] for version, index in self.next.items()],
                [one.to_list() for one in self.windows.values()],
            ]
        )


@dataclass(slots=True)
class ValidatorRecord:
    """The record of one validator."""

    verdicts: int = 0
    is_convicted: bool = False
    looks: BoundedDict[bytes, Weight] = field(default_factory=lambda: BoundedDict(LOOKS))
    """Maps the digest of each audited commitment to the weight of the result."""
    waits_since: float = math.inf
    """Served time of the first window that it was assigned since its last verdict."""
    passed_until: float = 0.0
    passed: int = 0
    """Number of times that the validator was passed over since its last verdict."""

    def to_bytes(self) -> bytes:
        """Return the row on disk."""
        looks = [[digest, int(weight)] for digest, weight in self.looks.items()]
        silence = [float(self.waits_since), float(self.passed_until), self.passed]
        return pack([self.verdicts, self.is_convicted, looks, *silence])


def decode_name_untrusted(node: PeerId, data: bytes) -> NameRecord:
    """Decode the row of ``node``.

    Raises:
        BadMessage: The data is no row of a name, or the row of another node.
    """
    fields = fields_untrusted(
        unpack_untrusted(data, max_items=1 << 16, max_list=MAX_KEPT),
        *(int, int, bool, bool, int, bool, float, float, list, list),
        what="row of a name",
    )
    *numbers, following, windows = fields
    name = NameRecord(*numbers)
    if name.owed < 0 or name.stood < 0 or not math.isfinite(name.banned_until + name.active):
        raise BadMessage("a number of a name's row makes no sense")
    name.next = dict(fields_untrusted(one, int, int, what="place") for one in following)
    for row in windows:
        one = _decode_window_untrusted(row)
        if one.window.node != node:
            raise BadMessage("a window in the row of a name is another's")
        name.windows[one.assignment.window] = one
    return name


def _decode_window_untrusted(row: object) -> WindowRecord:
    raw, scorer, newcomer, stood, owed, since, counted, blamed, states, audits = (
        fields_untrusted(
            row,
            *(bytes, bytes, bool, int, int, float, bool, bool, list, list),
            what="row of a window",
        )
    )
    signed = decode_window_untrusted(raw, None)
    found: dict[int, PlaceState] = {}
    for pair in states:
        index, state = fields_untrusted(pair, int, int, what="state of a place")
        if index not in signed.window.places or state not in set(PlaceState):
            raise BadMessage("a state of a place makes no sense")
        found[index] = PlaceState(state)
    one = WindowRecord(
        signed,
        Assignment(
            window=signed.window.digest,
            wanted=tuple(found),
            scorer=decode_peer_id_untrusted(scorer),
            is_newcomer=newcomer,
            stood=stood,
            owed=owed,
        ),
        since,
        found,
        is_counted=counted,
        is_blamed=blamed,
    )
    for each in audits:
        index, asked, is_validators = fields_untrusted(each, int, float, bool, what="audit")
        one.audits[index] = AwaitedAudit(asked, is_validators)
    if {*one.audits} != {index for index, state in found.items() if state in AUDITED}:
        raise BadMessage("the audits of a window do not fit its places")
    return one


def decode_validator_untrusted(data: bytes) -> ValidatorRecord:
    """Decode a validator's row.

    Raises:
        BadMessage: The data is no row of a validator.
    """
    verdicts, convicted, looks, waits, until, passed = fields_untrusted(
        unpack_untrusted(data, max_items=1 << 10, max_list=LOOKS),
        *(int, bool, list, float, float, int),
        what="row of a validator",
    )
    one = ValidatorRecord(
        verdicts, convicted, waits_since=waits, passed_until=until, passed=passed
    )
    if not 0 <= passed <= 1 << 10:
        raise BadMessage("a number of a validator's row makes no sense")
    for look in looks:
        digest, weight = fields_untrusted(look, bytes, int, what="audit")
        if len(digest) != DIGEST_BYTES or weight not in set(Weight):
            raise BadMessage("an audit in the row of a validator makes no sense")
        one.looks[digest] = Weight(weight)
    return one
