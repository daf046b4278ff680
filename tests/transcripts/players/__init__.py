"""The players: for each protocol, the words of its transcripts."""

from __future__ import annotations

from collections.abc import Callable

from tests.transcripts.engine import Player
from tests.transcripts.players.dht import DhtPlayer
from tests.transcripts.players.gossip import GossipPlayer

PLAYERS: dict[str, Callable[[], Player]] = {
    "dht": DhtPlayer,
    "gossip": GossipPlayer,
}
