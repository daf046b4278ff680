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
    """Collects effects in order."""

    def __init__(self) -> None:
        self._effects: list[Effect] = []

    def put(self, effect: Effect) -> None:
        self._effects.append(effect)

    def send(self, peer: PeerId, message: Message) -> None:
        """Add a message to one peer."""
        self._effects.append(Send(peer, encode_message(message)))

    def send_all(self, peers: list[PeerId], message: Message) -> None:
        """Add the same message to several peers, encoded once."""
        if peers:
            data = encode_message(message)
            self._effects += [Send(peer, data) for peer in peers]

    def tell(self, change: Change, member: Member) -> None:
        """Add a membership change for the node to hear."""
        self._effects.append(MemberEvent(change, member))

    def take(self) -> list[Effect]:
        """Return and clear the collected effects."""
        effects, self._effects = self._effects, []
        return effects


@dataclass(frozen=True, slots=True)
class Member:
    """Living peer as described by its newest heartbeat."""

    peer: PeerId
    profile: Profile
    """Profile of the author, shared by all its heartbeats with the same content."""
    seen: float
    """Time at which we first saw its newest heartbeat (as of `World.now`)."""

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
        """Number of peers for which it would relay; 0 unless others can dial it."""
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
    """Reports that our wall clock differs from that of other peers."""

    seconds: float
    """Median lead of our clock over theirs; negative if it is behind."""
    peers: int
    """Number of peers whose clocks differ from ours."""

    def __str__(self) -> str:
        return (
            "the clock of this machine differs by about "
            f"{abs(self.seconds):.0f} s from that of {self.peers} peers, whose heartbeats it "
            "therefore refuses, as they refuse its own: set it by NTP"
        )


class Change(Enum):
    """Kind of change in a member's state."""

    JOINED = "joined"
    """The peer is new, or alive again."""
    CHANGED = "changed"
    """The addresses, roles, run, policy, version or ledger head of the peer changed."""
    LEFT = "left"
    """The peer sent a good-bye."""
    DIED = "died"
    """The peer fell silent."""
    FORGOTTEN = "forgotten"
    """The peer may live, but there is no room for it, no news of it, or no admission."""


@dataclass(slots=True)
class MemberEvent:
    """Tells the node of a change in who is a member."""

    change: Change
    member: Member


# Events: what the core is told.


@dataclass(frozen=True, slots=True)
class Bootstrap:
    """Join through these addresses, each of which ends in ``/p2p/``."""

    addrs: tuple[Multiaddr, ...]
    anchors: tuple[Multiaddr, ...] = ()
    """Addresses of neighbours from before a restart, which are asked first."""


@dataclass(frozen=True, slots=True)
class Interest:
    """Send heartbeats to these peers too, replacing the previous set."""

    peers: tuple[PeerId, ...]
    has_audience: bool = True
    """True if peers that are no neighbours will send us heartbeats and all of them are kept,
    because this node is a trainer or validator."""


@dataclass(frozen=True, slots=True)
class Seek:
    """Ask the peers ``among`` for the heartbeat of ``peer``."""

    peer: PeerId
    among: tuple[PeerId, ...]


@dataclass(frozen=True, slots=True)
class UpdateProfile:
    """Replace the profile in our heartbeats."""

    profile: Profile


@dataclass(frozen=True, slots=True)
class Leave:
    """Leave the swarm and say good-bye."""


Event = HostEvent | Bootstrap | Interest | Seek | UpdateProfile | Leave


# Effects: what the driver is to do, beside those of `p2p.events`.


@dataclass(frozen=True, slots=True)
class SaveAnchors:
    """Write the addresses of our longest-standing neighbours to disk for the next start."""

    addrs: tuple[Multiaddr, ...]


@dataclass(frozen=True, slots=True)
class NeighboursChanged:
    """Protect the connections to these neighbours, which replace the previous ones."""

    neighbours: tuple[PeerId, ...]


OwnEffect = SaveAnchors | NeighboursChanged | MemberEvent
Effect = HostEffect | OwnEffect
