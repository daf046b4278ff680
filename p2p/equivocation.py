"""Equivocation: two signed statements that bind their author to two digests of one number.

An entry of a ledger binds its author to its own digest and to that of the entry before it; so
does a manifest, by version; an edition of a run file binds the run's owner to the digest of one
epoch. Two statements that disagree about a number convict their author before any peer that
verifies both signatures, without further context.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from p2p.errors import BadMessage
from p2p.identity import PeerId
from p2p.wire import pack


class Binding(Protocol):
    """A signed statement that binds its author to digests."""

    @property
    def author(self) -> PeerId: ...

    @property
    def bound(self) -> Mapping[int, bytes]:
        """Maps numbers to the digests to which the statement binds its author."""

    def encode(self) -> bytes: ...


def conflict(one: Mapping[int, bytes], other: Mapping[int, bytes]) -> int | None:
    """Return the highest number that the two bind to different digests.

    One of the two must be about that number. Two manifests may name different predecessors with
    one number: the predecessor of a publisher can be another publisher's.
    """
    about = {max(one), max(other)}
    return max((n for n in about if n in one and other.get(n, one[n]) != one[n]), default=None)


_S = TypeVar("_S", bound=Binding)


@dataclass(frozen=True, slots=True)
class Equivocation(Generic[_S]):
    """Two statements that contradict each other; their signatures are judged elsewhere.

    Raises:
        BadMessage: They are by two authors, or agree.
    """

    first: _S
    second: _S

    def __post_init__(self) -> None:
        if self.first.author != self.second.author or self._conflict is None:
            raise BadMessage("two statements that prove no equivocation")

    @property
    def _conflict(self) -> int | None:
        return conflict(self.first.bound, self.second.bound)

    @property
    def author(self) -> PeerId:
        """The peer that both statements convict."""
        return self.first.author

    @property
    def number(self) -> int:
        """The number for which there are two digests."""
        number = self._conflict
        assert number is not None
        return number

    def encode(self) -> bytes:
        """Return the bytes that prove the equivocation to another peer."""
        return pack([self.first.encode(), self.second.encode()])
