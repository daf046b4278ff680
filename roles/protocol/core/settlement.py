"""What the trainer is told of a window, and what it answers.

A witness tells of the window alone, a worker brings the verdicts on its drawn places as well,
and a judge one that rejects. The trainer answers with which places it wants the content of, and
with a note of the worker's standing, for the witness of its next window.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from p2p.errors import BadMessage
from p2p.identity import Verify
from p2p.wire import KI, fields_untrusted, pack, unpack_untrusted
from roles.protocol.core.lots import (
    MAX_WINDOW,
    MAX_WITNESSED,
    WitnessedWindow,
    decode_witnessed_untrusted,
)
from roles.protocol.core.messages import (
    MAX_INDEX,
    MAX_REASON,
    Receipt,
    SignedVerdict,
    decode_verdict_untrusted,
)

MAX_VERDICTS: Final = MAX_WINDOW * 16
"""Of all places of a window by as many validators as a run may ask (`TrustTerms`)."""
MAX_REPLY: Final = 2 * KI
"""Bytes of an answer: two dozen numbers, a sentence, a note."""


@dataclass(frozen=True, slots=True)
class Settlement:
    """A window, and verdicts on drawn places of it."""

    witnessed: WitnessedWindow
    verdicts: tuple[SignedVerdict, ...] = ()

    def to_bytes(self) -> bytes:
        """The wire form."""
        verdicts = [verdict.to_bytes() for verdict in self.verdicts]
        return pack([self.witnessed.to_bytes(), verdicts])


def max_settlement(rewards: int, validators: int) -> int:
    """Bytes of the longest of a run: each verdict has 1 KiB and its ``rewards``."""
    return MAX_WITNESSED + KI + MAX_WINDOW * validators * (KI + 4 * rewards)


def decode_settlement_untrusted(data: bytes, verify: Verify) -> Settlement:
    """Raise `BadMessage` unless all signatures in it are right, and all verdicts are about
    places of the window."""
    table = unpack_untrusted(data, max_items=MAX_VERDICTS + 4, max_list=MAX_VERDICTS)
    raw, listed = fields_untrusted(table, bytes, list, what="settlement")
    if len(listed) > MAX_VERDICTS or not all(isinstance(one, bytes) for one in listed):
        raise BadMessage(f"a settlement has at most {MAX_VERDICTS} verdicts")
    witnessed = decode_witnessed_untrusted(raw, verify)
    verdicts = tuple(decode_verdict_untrusted(one, verify) for one in listed)
    if not all(witnessed.window.holds(verdict.commitment) for verdict in verdicts):
        raise BadMessage("a verdict of a settlement is about another window")
    return Settlement(witnessed, verdicts)


@dataclass(frozen=True, slots=True)
class SettlementReply:
    """What the trainer makes of it."""

    receipt: Receipt
    """`TAKEN`: it is settled, or noted; `UNWANTED`: nothing is learnt from the window;
    `LATER`: something is missing."""
    reason: str
    wanted: tuple[int, ...] = ()
    """Places whose content is to be offered."""
    note: bytes = b""
    """`StandingNote`; empty if there is none."""

    def to_bytes(self) -> bytes:
        """The wire form."""
        reason = self.reason[:MAX_REASON]
        return pack([self.receipt.value, reason, list(self.wanted), self.note])


def decode_settlement_reply_untrusted(data: bytes) -> SettlementReply:
    """Raise `BadMessage`, and nothing else, whatever the bytes."""
    value, reason, wanted, note = fields_untrusted(
        unpack_untrusted(data), str, str, list, bytes, what="answer to a settlement"
    )
    places = fields_untrusted(wanted, *[int] * len(wanted), what="list of places")
    if len(places) > MAX_WINDOW or not all(0 <= place <= MAX_INDEX for place in places):
        raise BadMessage("an answer wants places that no window has")
    try:
        return SettlementReply(Receipt(value), reason[:MAX_REASON], tuple(places), note)
    except ValueError:
        raise BadMessage(f"{value[:20]!r} is no answer to a settlement") from None


def verdicts_by_place(verdicts: Sequence[SignedVerdict]) -> dict[int, list[SignedVerdict]]:
    """The same, by the place that each is about."""
    found: dict[int, list[SignedVerdict]] = {}
    for verdict in verdicts:
        found.setdefault(verdict.commitment.index, []).append(verdict)
    return found
