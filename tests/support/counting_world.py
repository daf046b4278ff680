"""A world for the fake engine, which counts the seconds that it would have computed."""

from collections.abc import Callable
from typing import Any, cast

from p2p.world import World


class MemoryDisk:
    def __init__(self) -> None:
        self.files: dict[str, bytes] = {}

    async def read(self, path: str, offset: int = 0, length: int | None = None) -> bytes:
        return self.files[path]

    async def replace(self, path: str, data: bytes) -> None:
        self.files[path] = data

    async def rename(self, old: str, new: str) -> None:
        self.files[new] = self.files.pop(old)

    async def size(self, path: str) -> int | None:
        return len(self.files[path]) if path in self.files else None


class CountingWorld:
    """The doors that the fake engine uses."""

    def __init__(self) -> None:
        self.disk = MemoryDisk()
        self.spent = 0.0

    async def run_blocking(self, function: Callable[..., Any], *args: Any, cost: float) -> Any:
        self.spent += cost
        return function(*args)

    def buggify(self, name: str) -> bool:
        return False


def make_world() -> tuple[CountingWorld, World]:
    world = CountingWorld()
    return world, cast(World, world)
