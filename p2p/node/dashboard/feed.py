"""What viewers are told, second by second.

One look at the node a second, whoever watches: the curves need it. A picture is drawn, and what
has changed encoded, only while somebody watches, and once for all of them. Each viewer has a
queue of its own; one that does not read is dropped when `MAX_BEHIND` wait for it.
"""

from __future__ import annotations

import json
import logging
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final

from p2p.concurrency import Notifier
from p2p.errors import LimitExceeded
from p2p.node.dashboard.core.history import History
from p2p.node.dashboard.core.patch import difference
from p2p.node.dashboard.core.picture import Roll, Scene, draw, layout, note_curves
from p2p.node.panels import Panels
from p2p.wire import MIB
from p2p.world import World

logger = logging.getLogger(__name__)

LOOK: Final = 1.0
"""Seconds between looks: a person sees that it lives."""
MAX_VIEWERS: Final = 16
"""At once: a household's screens. Each costs a queue and a connection."""
MAX_BEHIND: Final = 1 * MIB
"""Bytes that wait for a viewer who does not read: minutes of changes. One that is further
behind is dropped, and comes again when it reads. Behind a first message that takes more than
half, a whole picture of up to 4 MB if 1,000 peers say all they may, half as much may wait."""


class Viewer:
    """One page that is open: what it has still to be told."""

    def __init__(self) -> None:
        self._waiting: deque[bytes] = deque()
        self._behind = 0
        self._told = Notifier()
        self.is_dropped = False

    @property
    def behind(self) -> int:
        """Bytes that wait."""
        return self._behind

    def tell(self, message: bytes) -> None:
        """Queue a message; drop the viewer if it is too far behind."""
        if self.is_dropped:
            return
        self._waiting.append(message)
        self._behind += len(message)
        if self._behind > max(MAX_BEHIND, len(self._waiting[0]) + MAX_BEHIND // 2):
            self.is_dropped = True
            self._waiting.clear()
            self._behind = 0
        self._told.notify_all()

    async def next(self) -> bytes | None:
        """What comes next; None once the viewer is dropped."""
        while not self._waiting and not self.is_dropped:
            await self._told.wait()
        if self.is_dropped:
            return None
        message = self._waiting.popleft()
        self._behind -= len(message)
        return message


class Feed:
    """Looks at a swarm through ``scene``, and tells the viewers; `run` must run beside it."""

    def __init__(self, world: World, panels: Panels, scene: Callable[[], Scene]) -> None:
        self._world = world
        self._panels = panels
        self._scene = scene
        self._began = world.now()
        self._history = History()
        self._roll = Roll()
        self._drawn: dict[str, Any] = {}
        self._viewers: dict[Viewer, None] = {}
        self._is_blind = False
        """Whether the last look failed."""

    @property
    def panels(self) -> Panels:
        """What the roles show."""
        return self._panels

    @property
    def viewers(self) -> int:
        """How many watch now."""
        return len(self._viewers)

    def scene(self) -> Scene:
        """What is known now."""
        return self._scene()

    def whole(self) -> dict[str, Any]:
        """All that a page needs to begin with; also what a static page embeds."""
        return {
            "picture": draw(self._scene(), self._panels, self._roll, self._at()),
            "panels": layout(self._panels),
            "curves": self._history.curves(),
            "wall": round(self._world.wall(), 1),
            "at": self._at(),
        }

    def _at(self) -> float:
        return round(self._world.now() - self._began, 1)

    async def run(self) -> None:
        """Look, and tell, until cancelled."""
        due = self._world.now()
        while True:
            self._look_if_it_can()
            due += LOOK
            await self._world.sleep_until(due)

    def _look_if_it_can(self) -> None:
        try:
            self.look()
        except Exception:  # the border of what roles say: whoever only shows ends no work
            if not self._is_blind:
                logger.warning("dashboard.blind", exc_info=True)
            self._is_blind = True
        else:
            self._is_blind = False

    def look(self) -> None:
        """Once: note the curves, and tell the viewers what is new."""
        scene = self._scene()
        points = note_curves(scene, self._panels, self._history)
        self._roll.see((*scene.known, *scene.members), self._at())
        if not self._viewers:
            return
        picture = draw(scene, self._panels, self._roll, self._at())
        change = {"patch": difference(self._drawn, picture), "at": self._at()}
        self._drawn = picture
        message = encode_event("change", {**change, **({"points": points} if points else {})})
        for viewer in list(self._viewers):
            viewer.tell(message)

    @contextmanager
    def viewing(self) -> Iterator[Viewer]:
        """A new viewer, who is told everything first. Raises `LimitExceeded` when all seats
        are taken."""
        if len(self._viewers) >= MAX_VIEWERS:
            raise LimitExceeded(f"{MAX_VIEWERS} pages are open already: close one")
        viewer = Viewer()
        # Whoever came before has been told of the last picture: they go on from the same.
        if not self._viewers:
            self._drawn = self.whole()["picture"]
        viewer.tell(encode_event("whole", {**self.whole(), "picture": self._drawn}))
        self._viewers[viewer] = None
        try:
            yield viewer
        finally:
            del self._viewers[viewer]


def encode_event(name: str, value: object) -> bytes:
    """A server-sent event. JSON has no raw line ends, so it is one line of data."""
    return b"event: %s\ndata: %s\n\n" % (name.encode(), as_json(value))


def as_json(value: object) -> bytes:
    """As small as it gets."""
    return json.dumps(value, separators=(",", ":")).encode()
