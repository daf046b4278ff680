"""What roles do when another trainer's weights take the place of their version."""

from __future__ import annotations

from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

from roles.inference.session import InferenceSession
from roles.inference.stats import InferenceCounts

VERSION: Any = 3


class Shardcast:
    """Version 3, as whichever trainer's weights are chosen."""

    def __init__(self) -> None:
        self.chosen = b"one"

    def manifest(self, version: int) -> Any:
        return SimpleNamespace(weights_digest=self.chosen)

    async def wait_policy(self, at_least: int) -> int:
        return VERSION

    def holds(self, version: int) -> bool:
        return version == VERSION

    @contextmanager
    def pin(self, version: int) -> Any:
        yield

    async def check_weights(self, version: int) -> str:
        return self.chosen.decode()


async def test_an_engine_reloads_when_its_version_is_another_trainers() -> None:
    shardcast, loaded = Shardcast(), []

    async def load(path: str) -> None:
        loaded.append(path)

    session = InferenceSession.__new__(InferenceSession)
    world = SimpleNamespace(buggify=lambda _: False, sometimes=lambda *_: None)
    node: Any = SimpleNamespace(shardcast=shardcast, world=world)
    engine: Any = SimpleNamespace(load=load)
    session.node, session.engine = node, engine
    session.counts, session._policy = InferenceCounts(), b""
    for chosen in (b"one", b"one", b"other", b"other"):
        shardcast.chosen = chosen
        assert await session.load_newest() == VERSION
        assert session._policy == chosen, "what is drawn is told under what was loaded"
    assert loaded == ["one", "other"]
