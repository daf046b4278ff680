"""What goes into the membership core and what comes out of it; its configuration; what a member is."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from p2p.identity import PeerId
from p2p.membership.heartbeat import MAX_INTERVAL, MIN_INTERVAL, Profile
from p2p.membership.messages import MAX_HOPS
from p2p.multiaddr import Multiaddr


@dataclass(frozen=True, slots=True, kw_only=True)
class MembershipConfig:
    """Timing and sizes of membership. The defaults keep a node of 1,000 under 5 KB/s."""

    interval: float = 5.0
    """Seconds between our own heartbeats."""
    active: int = 5
    """Neighbours aimed at. Two fewer are borne, two more accepted."""
    passive: int = 200
    """Other peers whose heartbeats are kept."""
    direct: int = 4096
    """Peers that may beat to us without being neighbours: a trainer hears its whole run."""
    sample: int = 15
    """Digests of random members that go with each heartbeat to a neighbour: in all, a hundred an interval."""
    hops: int = 3
    """Steps of the walk that finds a newcomer its neighbours."""
    refresh: int = 16
    """Heartbeats asked for in an interval to keep old entries fresh; unknown peers may take 16 times more."""
    expiry: float = 3.0
    """Intervals of silence after which a peer that beats to us is dead."""
    stale: float = 120.0
    """Intervals without a newer heartbeat after which a peer known only through others is forgotten."""
    pace: float = 2.0
    """A peer's own interval counts for at most so many of ours, and for no less than ours divided by it. A
    peer that says 120 s would stay listed for four hours after its death, one that says 0.05 s would be
    accused, and would refute, twenty times a second."""
    lifetime: float = 1800.0
    """Seconds for which a heartbeat is worth anything on paper. Wall clocks that differ by up to this
    much, less a few minutes, do no harm."""

    def paced(self, interval: float) -> float:
        """What a peer's own ``interval`` counts for here."""
        return min(max(interval, self.interval / self.pace), self.interval * self.pace)

    @property
    def capacity(self) -> int:
        """Peers in a whole view, if no others beat to us."""
        return self.passive + self.active

    def __post_init__(self) -> None:
        if not MIN_INTERVAL <= self.interval <= MAX_INTERVAL:
            raise ValueError(f"interval is {MIN_INTERVAL} to {MAX_INTERVAL} s, not {self.interval}")
        if self.expiry < 3:
            raise ValueError("expiry must allow for two lost heartbeats (3 intervals)")
        if self.stale < 2 * self.expiry:
            raise ValueError("stale must be at least twice the expiry: passive entries are refreshed slowly")
        if not 3 <= self.active <= 64 or not 1 <= self.hops <= MAX_HOPS:
            raise ValueError(f"active is 3 to 64 and hops 1 to {MAX_HOPS}")
        if not 0 < self.sample <= 128 or self.passive < 1 or self.direct < 1 or self.refresh < 1:
            raise ValueError("sample is 1 to 128; passive, direct and refresh are at least 1")
        if not 1 <= self.pace <= 16:
            raise ValueError("pace is 1 to 16: how far a peer's interval may be from ours")
        if self.lifetime < 600:
            raise ValueError("lifetime must outlast clocks that are ten minutes off")


@dataclass(frozen=True, slots=True)
class Member:
    """A peer that is alive, as its newest heartbeat tells."""

    peer: PeerId
    profile: Profile
    """What it says of itself: shared by all its heartbeats that say the same."""
    seen: float
    """When we first saw its newest heartbeat (as of `World.now`)."""

    @property
    def addrs(self) -> tuple[Multiaddr, ...]:
        """Where it can be dialled; each ends in ``/p2p/``."""
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
        """How many more children or tasks it would take."""
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
    """By how much ours is ahead of theirs, at the median; negative if it is behind."""
    peers: int
    """How many say so."""

    def __str__(self) -> str:
        return (
            f"the clock of this machine differs by about {abs(self.seconds):.0f} s from that of {self.peers} "
            "peers, whose heartbeats it therefore refuses, as they refuse its own: set it by NTP"
        )


class Change(Enum):
    """What happened to a member."""

    JOINED = "joined"
    """New, or alive again."""
    CHANGED = "changed"
    """Its addresses, roles, run or policy are other ones."""
    LEFT = "left"
    """It said good-bye."""
    DIED = "died"
    """It fell silent."""
    FORGOTTEN = "forgotten"
    """It may live, but there is no room for it, no news of it, or it is not admitted any more."""


@dataclass(frozen=True, slots=True)
class MemberEvent:
    """A change in who is a member."""

    change: Change
    member: Member


# Events: what the core is told.


@dataclass(frozen=True, slots=True)
class Received:
    """A message came from an authenticated peer."""

    peer: PeerId
    data: bytes


@dataclass(frozen=True, slots=True)
class Disconnected:
    """The connection to a peer ended."""

    peer: PeerId


@dataclass(frozen=True, slots=True)
class Unreachable:
    """A peer did not answer at any of its addresses."""

    peer: PeerId


@dataclass(frozen=True, slots=True)
class Bootstrap:
    """Join through these: addresses that end in ``/p2p/``."""

    addrs: tuple[Multiaddr, ...]
    anchors: tuple[Multiaddr, ...] = ()
    """Neighbours of an earlier life: they are asked first."""


@dataclass(frozen=True, slots=True)
class Interest:
    """Beat to these too, from now on; replaces what was said before."""

    peers: tuple[PeerId, ...]
    has_audience: bool = True
    """Whether others that are no neighbours will beat to us, so that each is kept: we are an officer."""


@dataclass(frozen=True, slots=True)
class Update:
    """Say this of us from now on."""

    profile: Profile


@dataclass(frozen=True, slots=True)
class Tick:
    """`next_deadline` has come."""


@dataclass(frozen=True, slots=True)
class Leave:
    """We are going: say good-bye."""


Event = Received | Disconnected | Unreachable | Bootstrap | Interest | Update | Tick | Leave


# Effects: what the driver is to do.


@dataclass(frozen=True, slots=True)
class Send:
    """Send a message, connecting if need be."""

    peer: PeerId
    data: bytes


@dataclass(frozen=True, slots=True)
class AddAddrs:
    """Remember where a peer may be dialled."""

    peer: PeerId
    addrs: tuple[Multiaddr, ...]
    is_told: bool = False
    """Whether our operator or our own disk said so; else the peer's heartbeat did."""


@dataclass(frozen=True, slots=True)
class Anchors:
    """Write down where our neighbours of longest standing are, for our next life."""

    addrs: tuple[Multiaddr, ...]


@dataclass(frozen=True, slots=True)
class Penalise:
    """A peer did what no honest peer does."""

    peer: PeerId
    points: float
    reason: str


@dataclass(frozen=True, slots=True)
class Reserve:
    """Write down, at leisure, that sequence numbers up to ``ceiling`` may be used."""

    ceiling: int


@dataclass(frozen=True, slots=True)
class Changed:
    """Tell the node."""

    event: MemberEvent


Effect = Send | AddAddrs | Anchors | Penalise | Reserve | Changed
