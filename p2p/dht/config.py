"""The configuration of the DHT: Kademlia's k and alpha, disjoint paths, intervals."""

from __future__ import annotations

from dataclasses import dataclass

from p2p.dht.messages import BUCKET_SIZE
from p2p.dht.record import MAX_ADDR_LIFETIME
from p2p.dht.stamp import DIFFICULTY, MAX_DIFFICULTY
from p2p.door import check_fields


@dataclass(frozen=True, slots=True, kw_only=True)
class DhtConfig:
    """Effort of lookups, number of holders of a record, and refresh intervals."""

    difficulty: int = DIFFICULTY
    """Leading zero bits of a work stamp. All nodes of a swarm must use the same number."""

    alpha: int = 3
    """Number of open requests per path of a lookup, 3 as in the paper. If one contact of three
    is dead, the lookup goes on without waiting for it."""

    paths: int = 2
    """Number of disjoint paths of a lookup (S/Kademlia's d). No contact is asked by two paths,
    so a liar on one cannot mislead the other. Each further path costs as many requests
    again."""

    replicas: int = 8
    """Number of nodes that hold a record, per key. With half of them dead or lying, one key in
    256 is lost, and an important record has three."""

    quorum: int = 2
    """Number of holders per path that must have returned records before a get stops. One holder
    may have an old record, or withhold the newest."""

    timeout: float = 10.0
    """Seconds after which a get or put ends with the results so far. A silent contact keeps a
    request open for 0.2 + 0.4 + 0.8 s at a mean round trip of 100 ms, and a lookup may wait for
    several in a row."""

    refresh_interval: float = 600.0
    """Seconds between lookups of our own id, and the age at which a bucket is refreshed."""

    republish_interval: float = 600.0
    """Maximum seconds between two publications of a record, or a third of its lifetime if that
    is less."""

    addr_lifetime: float = 3600.0
    """Seconds for which our own address record is valid. It is renewed six times in that time
    (`republish_interval`), and outlives this node by an hour at most."""

    def __post_init__(self) -> None:
        check_fields(self)
        if not 0 <= self.difficulty <= MAX_DIFFICULTY:
            raise ValueError(f"difficulty is 0 to {MAX_DIFFICULTY} bits")
        if not 1 <= self.replicas <= BUCKET_SIZE:
            raise ValueError(f"replicas is 1 to {BUCKET_SIZE}, the contacts of one reply")
        if min(self.alpha, self.paths, self.quorum) < 1:
            raise ValueError("alpha, paths and quorum are at least 1")
        intervals = (self.refresh_interval, self.republish_interval)
        if min(*intervals, self.timeout, self.addr_lifetime) <= 0:
            raise ValueError("intervals, the timeout and lifetimes are positive")
        if self.addr_lifetime > MAX_ADDR_LIFETIME:
            # No other node would hold the record, and it would be put again all the time.
            raise ValueError(
                f"addr_lifetime is at most {MAX_ADDR_LIFETIME:g} s, not {self.addr_lifetime:g}:"
                " other nodes refuse address records that are good for longer"
            )
