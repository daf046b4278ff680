"""A worker's full places and signed windows, on disk until each place is settled.

A place is on disk before anything else happens to it, and so is a signed window before it is
sent: after a restart the same windows are sent again, since another window for the same places
would be refused. A lost cursor costs work done twice, at most that of one version: what is
drawn at a place is the same again. Files whose digest or signature is wrong are removed and
named.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from p2p.concurrency import Notifier
from p2p.errors import BadMessage
from p2p.shardcast.manifest import PolicyVersion
from p2p.wire import fields_untrusted, pack, unpack_untrusted
from p2p.world import World, dawdle
from roles.protocol.core.window import (
    SignedWindow,
    Submission,
    Window,
    bind_untrusted,
    content_digest,
    decode_window_untrusted,
)
from roles.shared.checked_json import DamagedFile, discard, keep, recall

logger = logging.getLogger(__name__)

_CURSOR: Final = "cursor"
_PLACE: Final = "place-"
_WINDOW: Final = "window-"

PlaceKey = tuple[PolicyVersion, int]
"""Version and index of a place."""


@dataclass(frozen=True, slots=True)
class FullPlace:
    """A place whose completions are all drawn. The content lies on disk."""

    run: bytes
    terms: bytes
    version: PolicyVersion
    policy: bytes
    index: int
    digest: bytes
    """Digest of the content."""
    claims: bytes
    """One `Claim` for each group."""

    @property
    def key(self) -> PlaceKey:
        """Version and index of the place."""
        return self.version, self.index

    def fits_behind(self, other: FullPlace) -> bool:
        """Return True if one window can hold `other` and then this place."""
        shared = self.run, self.terms, self.version, self.policy, self.index - 1
        return shared == (other.run, other.terms, other.version, other.policy, other.index)

    def to_bytes(self, content: bytes) -> bytes:
        """Return the form on disk."""
        head = [self.run, self.terms, self.version, self.policy, self.index, self.claims]
        body = pack([*head, content])
        return pack([content_digest(body), body])


def _decode_place_untrusted(data: bytes) -> tuple[FullPlace, bytes]:
    digest, body = fields_untrusted(unpack_untrusted(data), bytes, bytes, what="place on disk")
    if content_digest(body) != digest:
        raise BadMessage("it does not have the digest that it was written with")
    run, terms, version, policy, index, claims, content = fields_untrusted(
        unpack_untrusted(body),
        bytes,
        bytes,
        int,
        bytes,
        int,
        bytes,
        bytes,
        what="place on disk",
    )
    bound = content_digest(content)
    return FullPlace(run, terms, PolicyVersion(version), policy, index, bound, claims), content


def window_of(places: Sequence[FullPlace], world: World) -> SignedWindow:
    """Sign a window of consecutive places."""
    first = places[0]
    window = Window(
        first.run,
        first.terms,
        world.signer.peer_id,
        first.version,
        first.policy,
        first.index,
        tuple(place.digest for place in places),
        b"".join(place.claims for place in places),
    )
    return SignedWindow.sign(window, world.signer)


class Outbox:
    """Places and windows below one folder of the node's disk."""

    def __init__(self, world: World, folder: str) -> None:
        self._world = world
        self._folder = folder
        self._places: dict[PlaceKey, FullPlace] = {}
        self._windows: dict[PlaceKey, SignedWindow] = {}
        """Windows by the key of their first place."""
        self._next: PlaceKey = (PolicyVersion(-1), 0)
        self._removed = Notifier()

    @classmethod
    async def open(cls, world: World, folder: str) -> Outbox:
        """Read the places and windows that an earlier process left."""
        outbox = cls(world, folder)
        for name in sorted(await world.disk.list(folder)):
            await outbox._restore(name)
        for key, signed in list(outbox._windows.items()):
            if not any(outbox.unsettled(signed)):
                await outbox._remove_window(key)
        return outbox

    async def _restore(self, name: str) -> None:
        disk, path = self._world.disk, f"{self._folder}/{name}"
        try:
            if name == _CURSOR:
                version, index = await recall(disk, path)
                self._advance((PolicyVersion(version), index))
            elif name.startswith(_PLACE):
                place, _ = _decode_place_untrusted(await disk.read(path))
                self._places[place.key] = place
                self._advance((place.version, place.index + 1))
            elif name.startswith(_WINDOW):
                await self._restore_window(path)
            else:
                raise BadMessage("an outbox has no such file")
        except (BadMessage, DamagedFile) as error:
            await discard(disk, path, error)

    async def _restore_window(self, path: str) -> None:
        data = await self._world.disk.read(path)
        signed = decode_window_untrusted(data, self._world.verify)
        window = signed.window
        if window.node != self._world.signer.peer_id:
            raise BadMessage("it was signed with another key, and nobody takes it now")
        self._windows[window.version, window.first] = signed
        self._advance((window.version, window.places.stop))

    def _advance(self, key: PlaceKey) -> None:
        self._next = max(self._next, key)

    def __len__(self) -> int:
        return len(self._places)

    def __iter__(self) -> Iterator[FullPlace]:
        return iter(tuple(self._places.values()))

    def __contains__(self, key: PlaceKey) -> bool:
        return key in self._places

    @property
    def newest(self) -> PolicyVersion:
        """Newest version under which any process worked; -1 before the first."""
        return self._next[0]

    def next_index(self, version: PolicyVersion) -> int:
        """Return the next place in the draw order under `version`."""
        return self._next[1] if self._next[0] == version else 0

    def go_on_at(self, version: PolicyVersion, index: int) -> None:
        """Move the cursor to the place that the trainer expects next under the newest version.
        The two differ only if one of them has lost its state."""
        if self._next[0] == version:
            self._next = version, index

    @property
    def windows(self) -> list[SignedWindow]:
        """Signed windows with a place that is not settled, in the order of their places."""
        return [self._windows[key] for key in sorted(self._windows)]

    def unsettled(self, signed: SignedWindow) -> Iterator[int]:
        """Yield the indices of a window's unsettled places."""
        window = signed.window
        return (index for index in window.places if (window.version, index) in self._places)

    def loose(self, most: int) -> list[list[FullPlace]]:
        """Return the places that no window holds, as runs that fit into one window of at most
        ``most`` places each."""
        held = {
            (signed.window.version, index)
            for signed in self._windows.values()
            for index in signed.window.places
        }
        runs: list[list[FullPlace]] = []
        for key in sorted(self._places.keys() - held):
            place = self._places[key]
            if runs and len(runs[-1]) < most and place.fits_behind(runs[-1][-1]):
                runs[-1].append(place)
            else:
                runs.append([place])
        return runs

    async def wait_removed(self) -> None:
        """Return when the next place is settled."""
        await self._removed.wait()

    async def add(self, place: FullPlace, content: bytes) -> None:
        """Keep a full place and move the cursor to the next one. May be repeated.

        Raises:
            StorageError: The disk refuses it.
        """
        await self._world.disk.replace(self._place_path(place.key), place.to_bytes(content))
        self._places[place.key] = place
        self._advance((place.version, place.index + 1))
        await dawdle(self._world, "outbox/slow cursor")
        await keep(self._world.disk, f"{self._folder}/{_CURSOR}", list(self._next))

    async def sign(self, places: Sequence[FullPlace]) -> SignedWindow:
        """Sign a window of consecutive places; it is on disk when this returns.

        May be repeated.

        Raises:
            StorageError: The disk refuses it.
        """
        key = places[0].key
        signed = self._windows.get(key) or window_of(places, self._world)
        await self._world.disk.replace(self._window_path(key), signed.to_bytes())
        self._windows[key] = signed
        return signed

    async def submission(self, signed: SignedWindow, index: int) -> Submission:
        """Read a place of a window back.

        Raises:
            StorageError: The disk cannot be read.
            BadMessage: The stored place is not the one that the window binds.
        """
        path = self._place_path((signed.window.version, index))
        _, content = _decode_place_untrusted(await self._world.disk.read(path))
        return bind_untrusted(signed, index, content)

    async def settle(self, signed: SignedWindow, index: int) -> None:
        """Forget a place of a window, and the window with its last place. May be repeated.

        Raises:
            StorageError: The disk refuses it.
        """
        window = signed.window
        await self._settle((window.version, index))
        if not any(self.unsettled(signed)):
            await self._remove_window((window.version, window.first))

    async def drop(self, place: FullPlace) -> None:
        """Forget a place that no window holds. May be repeated.

        Raises:
            StorageError: The disk refuses it.
        """
        await self._settle(place.key)

    async def _settle(self, key: PlaceKey) -> None:
        if self._places.pop(key, None) is not None:
            self._removed.notify_all()
            await dawdle(self._world, "outbox/slow removal")
        await self._world.disk.remove(self._place_path(key))

    async def _remove_window(self, key: PlaceKey) -> None:
        await self._world.disk.remove(self._window_path(key))
        self._windows.pop(key, None)

    def _place_path(self, key: PlaceKey) -> str:
        return f"{self._folder}/{_PLACE}{key[0]:010d}-{key[1]:010d}"

    def _window_path(self, key: PlaceKey) -> str:
        return f"{self._folder}/{_WINDOW}{key[0]:010d}-{key[1]:010d}"
