"""Events, effects and records of the membership core."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from p2p.events import HostEffect, HostEvent, Send
from p2p.identity import PeerId
from p2p.membership.heartbeat import Profile
from p2p.membership.messages import Message, encode_message
from p2p.multiaddr import Multiaddr


class EffectBuffer:
    """Effects, in order."""

    def __init__(self) -> None:
        self._effects: list[Effect] = []

    def put(self, effect: Effect) -> None:
        """Add any effect."""
        self._effects.append(effect)

    def send(self, peer: PeerId, message: Message) -> None:
        """A message to one peer."""
        self._effects.append(Send(peer, encode_message(message)))

    def send_all(self, peers: list[PeerId], message: Message) -> None:
        """The same message to several, encoded once."""
        if peers:
            data = encode_message(message)
            self._effects += [Send(peer, data) for peer in peers]

    def tell(self, change: Change, member: Member) -> None:
        """News for the node."""
        self._effects.append(MemberEvent(change, member))

    def take(self) -> list[Effect]:
        """Return and clear the collected effects."""
        effects, self._effects = self._effects, []
        return effects


@dataclass(frozen=True, slots=True)
class Member:
    """A peer that is alive, as its newest heartbeat tells."""

    peer: PeerId
    profile: Profile
    """Profile of the author, shared by all its heartbeats with the same content."""
    seen: float
    """When we first saw its newest heartbeat (as of `World.now`)."""

    @property
    def addrs(self) -> tuple[Multiaddr, ...]:
        """Addresses of the peer; each ends in ``/p2p/``."""
        return self.profile.addrs

    @property
    def roles(self) -> tuple[str, ...]:
        """Names of the roles it runs."""
        return self.profile.roles

    @property
    def run(self) -> bytes:
        """Id of the run it takes part in."""
        return self.profile.run

    @property
    def policy(self) -> int:
        """Newest policy version it holds; -1 if none."""
        return self.profile.policy

    @property
    def upload(self) -> int:
        """Measured upload in bytes per second."""
        return self.profile.upload

    @property
    def slots(self) -> int:
        """Peers for which it would relay: 0 unless others can dial it."""
        return self.profile.slots

    @property
    def load(self) -> float:
        """Share of its capacity in use."""
        return self.profile.load

    @property
    def version(self) -> str:
        """Software version."""
        return self.profile.version


@dataclass(frozen=True, slots=True)
class ClockOff:
    """Our wall clock is not that of the others."""

    seconds: float
    """Median lead of our clock over theirs; negative if it is behind."""
    peers: int
    """Number of peers that say so."""

    def __str__(self) -> str:
        return (
            "the clock of this machine differs by about "
            f"{abs(self.seconds):.0f} s from that of {self.peers} peers, whose heartbeats it "
            "therefore refuses, as they refuse its own: set it by NTP"
        )


class Change(Enum):
    """Change of a member."""

    JOINED = "joined"
    """New, or alive again."""
    CHANGED = "changed"
    """Its addresses, roles, run or policy changed."""
    LEFT = "left"
    """It sent a good-bye."""
    DIED = "died"
    """It fell silent."""
    FORGOTTEN = "forgotten"
    """The peer may live, but there is no room, no news, or no admission."""


@dataclass(frozen=True, slots=True)
class MemberEvent:
    """A change in who is a member: an effect of the core, for the node to hear."""

    change: Change
    member: Member


# Events: what the core is told.


@dataclass(frozen=True, slots=True)
class Bootstrap:
    """Join through these: addresses that end in ``/p2p/``."""

    addrs: tuple[Multiaddr, ...]
    anchors: tuple[Multiaddr, ...] = ()
    """Neighbours of an earlier life: they are asked first."""


@dataclass(frozen=True, slots=True)
class Interest:
    """Send heartbeats to these peers too, replacing the previous set."""

    peers: tuple[PeerId, ...]
    has_audience: bool = True
    """True if others that are no neighbours will send us heartbeats, so that each is kept: we
    are an officer."""


@dataclass(frozen=True, slots=True)
class Seek:
    """Ask ``among`` for the heartbeat of ``peer``."""

    peer: PeerId
    among: tuple[PeerId, ...]


@dataclass(frozen=True, slots=True)
class UpdateProfile:
    """Say this of us from now on."""

    profile: Profile


@dataclass(frozen=True, slots=True)
class Leave:
    """We are going: say good-bye."""


Event = HostEvent | Bootstrap | Interest | Seek | UpdateProfile | Leave


# Effects: what the driver is to do, beside those of `p2p.events`.


@dataclass(frozen=True, slots=True)
class SaveAnchors:
    """Write down where our neighbours of longest standing are, for our next life."""

    addrs: tuple[Multiaddr, ...]


@dataclass(frozen=True, slots=True)
class ReserveSeqnos:
    """Write down, at leisure, that sequence numbers up to ``ceiling`` may be used."""

    ceiling: int


@dataclass(frozen=True, slots=True)
class NeighboursChanged:
    """The active view is another one: protect these connections, and no others for it."""

    neighbours: tuple[PeerId, ...]


OwnEffect = SaveAnchors | ReserveSeqnos | NeighboursChanged | MemberEvent
Effect = HostEffect | OwnEffect
