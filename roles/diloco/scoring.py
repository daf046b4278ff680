"""Trials of others' updates: fetched while this member trains, judged while it waits.

The pieces of an update lie at the owners that summed them, so a trial asks each owner for its
part, and the contributor for what an owner does not give. So an update that all members try
costs its author no more than any other, and it cannot keep it from them. What `gauntlet` makes
of the gains is told to the core.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import trio

from p2p.errors import BadMessage
from p2p.identity import PeerId
from p2p.node.trouble import PEER_TROUBLE
from roles.diloco.core.fragments import Fragments
from roles.diloco.core.messages import Ready
from roles.diloco.core.pieces import PieceGrid, root_of
from roles.diloco.core.quant import Values
from roles.diloco.core.round import owners_of, shares_of
from roles.diloco.exchange import PieceClient, PieceServer, PiecesUnavailable
from roles.diloco.inner import InnerEngine
from roles.diloco.reduction import span_of
from roles.engines.base import EngineError

logger = logging.getLogger(__name__)

ENOUGH: Final = 0.5
"""Share of an update that a trial needs: what is missing counts as no change."""


@dataclass(slots=True)
class Trial:
    """The trial of the updates of one step; made for it."""

    grid: PieceGrid
    server: PieceServer
    client: PieceClient
    step: int
    fragments: Fragments
    before: Values
    """The weights that the updates were computed from."""
    readys: Sequence[Ready]
    """Of all contributors of the step."""
    wanted: Sequence[Ready]
    """Of those that are tried, this member's own among them."""
    updates: dict[PeerId, Values]
    """Those that are here, as much as they counted in the mean."""

    async def collect(self) -> None:
        """Fetch what is tried; what does not come is not tried."""
        async with trio.open_nursery() as nursery:
            for ready in self.wanted:
                nursery.start_soon(self._fetch, ready)

    async def _fetch(self, ready: Ready) -> None:
        owner_of = owners_of(self.grid, self.readys)
        update, found = np.zeros(self.grid.count, np.float32), 0
        for owner in dict.fromkeys(owner_of):
            span = span_of(owner_of, owner)
            for source in dict.fromkeys((owner, ready.author)):
                try:
                    pieces = await self._pieces(source, ready, span)
                    values = self.grid.decode_span(span, pieces)
                except (PiecesUnavailable, BadMessage, *PEER_TROUBLE) as error:
                    logger.debug("diloco_trial step=%d: %r", self.step, error)
                    continue
                update[self.grid.span(span.start).start :][: values.size] = values
                found += values.size
                break
        if found >= ENOUGH * self.grid.count:
            self.updates[ready.author] = update * shares_of(self.readys)[ready.author]

    async def _pieces(self, source: PeerId, ready: Ready, span: range) -> Sequence[bytes]:
        """From here, or from a peer. Raises `PiecesUnavailable`, `PEER_TROUBLE`."""
        root = root_of(ready.digests)
        held = self.server.held_pieces(root, span)
        if held is not None:
            return held
        wanted = ready.digests[span.start : span.stop]
        pieces = list[bytes]()
        await self.client.pieces(source, root, span.start, wanted, pieces.append)
        return pieces

    async def judge(self, engine: InnerEngine) -> dict[PeerId, list[float]]:
        """How much each update lowers the loss, on parts of what is held out."""
        peers = list(self.updates)
        if len(peers) < 2:
            return {}
        try:
            gains = await engine.gains(
                self.before,
                [self.fragments.whole(self.step, self.updates[peer]) for peer in peers],
            )
        except EngineError as error:
            logger.warning("diloco_not_scored step=%d: %s", self.step, error)
            return {}
        return dict(zip(peers, gains, strict=True))
