"""One account, without I/O, of the bytes that strangers hold on this node over all connections.

Theory of operation
-------------------
Three things grow by what peers do and not by what we do: bytes that came and that no
application has read, bytes that wait for a peer to take them, and promises of receive window.
Each has a limit over all connections here, since limits per connection multiply: 256 KiB of
window for each of 256 streams is 64 MiB for one peer, and nothing that a node could promise to
a thousand.

*Unread bytes.* When they are over their limit, what is given up is the hoard, not the newcomer:
an account that refuses while it is full refuses honest peers for as long as the attacker likes.
Each holder (a stream, or a connection with an unfinished record) weighs its bytes times the
seconds since its application last took some; the peer with the largest sum loses its heaviest
holders until an eighth of the account is free again. A stream that is read weighs next to
nothing, however fast it is: 4 MiB that are 10 ms old weigh less than 8 KiB that were left
unread for a minute. Bytes alone would name the fastest honest sender when a thousand identities
hoard 32 KiB each; age alone would name the slowest honest reader when one attacker pours in 32
MiB. Protected peers come last. To lose a stream costs no penalty points: the slow application
may be ours.

*Queued bytes,* sealed ones that the network does not take among them. Over the limit, each
connection may still queue a little, so that none stands still for what others queue; that is
back-pressure, and nothing is given up.

*Window.* Streams start with the 256 KiB of the specification and get more from one stock when
their application has read half a window fast. A grant that was not used for some seconds
returns to the stock: what was promised stays promised, but the account above is what bounds the
memory.

How many bytes are sealed and given to the kernel at a time, by how fast the line takes them.

What is sealed cannot be overtaken: the next heartbeat, or the credit that an origin waits for,
goes behind it. On a fast line large batches save calls; on a slow one they are most of a second
of silence. So a connection that had to wait for its line keeps what it commits to as short as
the line empties it in a tenth of a second, and one that has not is given ever more.

Example: a relay on 20 Mbit/s feeds seven children, each over a connection that carries 0.36
MB/s. With four full records a batch (256 KiB) and 128 KiB in the kernel, a message waits for
up to a second behind a chunk of a megabyte; with 36 KiB of each, for 0.2 s.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, Protocol

from p2p.identity import PeerId
from p2p.wire import KI, MIB


class Burst:
    """The number of bytes that one connection commits to at a time."""

    __slots__ = ("_longest", "size")

    def __init__(self, longest: int) -> None:
        """Start with ``longest`` bytes, since a line counts as fast until it has had to
        wait."""
        self._longest = longest
        self.size = longest
        """Bytes to commit to at a time."""

    def note_free(self) -> None:
        """Grow the burst, because a batch was taken at once."""
        # Bytes more for each batch that the kernel took at once. The 56 batches that lead from
        # 32 to 256 KiB are 8 MB, a tenth of a second of a fast line; the few that a slow line
        # takes at once after each pause change little.
        self.size = min(self._longest, self.size + (4 * KI))

    def note_slow(self, count: int, seconds: float) -> None:
        """Adapt the burst to a batch of ``count`` bytes that took ``seconds``."""
        # A tenth of a second is about as long as the queue in front of a home's line mostly is.
        # Less makes more wake-ups, which are what slow lines cost. Above 0.7 MB/s a whole
        # record of 64 KiB goes at once, above 2.6 MB/s a whole batch. The shortest burst is
        # half a chunk: the kernel wakes us two or three times for each.
        carried = int(0.1 * count / seconds) if seconds > 0 else self._longest
        self.size = max(32 * KI, min(self._longest, (self.size + carried) // 2))


MAX_OUTGOING: Final = 8 * MIB
"""Most bytes queued for peers, over all connections: 32 streams at full depth. With what
is held, the messages that wait (`p2p.swarm.outbox.MAX_WAITING`) and 4,096 served streams it
keeps a node of 60 MiB under 150, whichever of them an attacker fills."""


class Holder(Protocol):
    """An object that holds unread bytes from a peer."""

    peer: PeerId
    """Peer that sent the bytes."""
    held: int
    """Number of bytes held, changed by `HostBudget` only."""
    since: float
    """Time (by `HostBudget.time`) at which the application last took some of the bytes, or at
    which the first came."""

    def evict(self) -> None:
        """Give up all held bytes, now."""


class WideStream(Protocol):
    """A stream whose receive window was widened."""

    refilled: float
    """Time at which its application last completed reading half a window."""


class HostBudget:
    """The account of one host. Connections that are made without one, in tests, have one
    each."""

    def __init__(
        self,
        now: Callable[[], float],
        *,
        protected: Callable[[PeerId], bool] = lambda peer: False,
        max_held: int = 16 * MIB,
    ) -> None:
        """Start empty. ``now`` is `World.now`; ``protected`` returns True for peers whose bytes
        are given up last.

        ``max_held`` is the most unread bytes, which take 5/4 of it in memory: four of the
        widest windows, or 64 of the narrowest, can be unread as a whole.
        """
        self.now = now
        self.time = now()
        """Time at which any connection last read much. Reading a clock for each message would
        cost 1 % of the message."""
        self.held = 0
        """Bytes received that no application has read."""
        self.outgoing = 0
        """Bytes queued for peers. Each `MuxQueue` updates it, and each
        `p2p.transport.connection.Connection` for sealed bytes."""
        self.lingering = 0
        """Number of streams that only this side has ended. Each `p2p.transport.core.yamux.Mux`
        updates it."""
        self.evicted = 0
        """Number of holders that were given up so far."""
        self._protected = protected
        self.max_held = max_held
        self._holders: dict[Holder, None] = {}
        self._grants: dict[WideStream, tuple[object, int]] = {}

    # Unread bytes.

    def hold(self, holder: Holder, count: int) -> None:
        """Add ``count`` bytes to ``holder``. This may call `Holder.evict`, also on ``holder``
        itself."""
        if not holder.held:
            holder.since = self.time
            self._holders[holder] = None
        holder.held += count
        self.held += count
        if self.held > self.max_held:
            self._evict()

    def release(self, holder: Holder, count: int) -> None:
        """Subtract ``count`` bytes that the application took or ``holder`` gave up. A holder
        that is over must be passed to `forget` as well."""
        self.held -= count
        holder.held -= count
        holder.since = self.time

    def forget(self, holder: Holder) -> None:
        """Drop a holder that is over, and release what it still holds."""
        self.held -= holder.held
        holder.held = 0
        self._holders.pop(holder, None)

    def _evict(self) -> None:
        now = self.time = self.now()
        weights: dict[PeerId, float] = {}
        of_peer: dict[PeerId, list[tuple[float, Holder]]] = {}
        for holder in [holder for holder in self._holders if holder.held]:
            # Seconds added to every age: among holders of this moment, all of age zero, bytes
            # decide.
            weight = holder.held * (now - holder.since + 0.1)
            weights[holder.peer] = weights.get(holder.peer, 0.0) + weight
            of_peer.setdefault(holder.peer, []).append((weight, holder))
        for peer in sorted(weights, key=lambda peer: (self._protected(peer), -weights[peer])):
            for _, holder in sorted(of_peer[peer], key=lambda pair: -pair[0]):
                # Share of the limit freed beyond need, so that a flood of small pieces sorts
                # the holders only once per 2 MiB.
                if self.held <= self.max_held - self.max_held // 8:
                    return
                self.evicted += 1
                holder.evict()

    # Receive windows.

    def widen(self, owner: object, stream: WideStream, wanted: int) -> int:
        """Return by how many of the ``wanted`` bytes the window of `stream` may grow. ``owner``
        is its connection.

        The answer is at most half of what is left, so that the first streams get all that they
        want and later ones something.
        """
        # Seconds after which an unused grant no longer counts: a stream in use refills it
        # within a quarter of a second.
        expired = self.now() - 10.0
        for idle in [other for other in self._grants if other.refilled < expired]:
            del self._grants[idle]
        # The stock is what a gigabit line has in flight in 80 ms. With 24 initial windows in
        # use, 6 MiB more, honest peers alone stay within `max_held`.
        free = 10 * MIB - sum(extra for _, extra in self._grants.values())
        owned = sum(extra for whose, extra in self._grants.values() if whose is owner)
        # A connection may widen two streams to the largest window.
        extra = min(wanted, free // 2, 8 * MIB - owned)
        if extra <= 0:
            return 0
        _, before = self._grants.get(stream, (owner, 0))
        self._grants[stream] = (owner, before + extra)
        return extra

    def narrow(self, stream: WideStream) -> None:
        """Take back the extra window of a stream that is over."""
        self._grants.pop(stream, None)
