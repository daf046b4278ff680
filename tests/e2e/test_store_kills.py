"""kill -9 at any moment of publishing, relaying and fetching: nothing unverified has a final
name, and a stream brings at most one chunk twice.

By hand, more of it: ``python -m tests.e2e.test_store_kills 50``.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from random import Random
from typing import Final

import pytest

from bench.store import BenchProcess, write_weights
from p2p.shardcast.index import digest_of
from p2p.wire import MIB

SIZE: Final = 24 * MIB
CHUNKS: Final = 384  # of 64 KiB: about as many as `SIZE` is cut into
STREAMS: Final = 2  # that bring chunks to one of three nodes
KILLS: Final = 6


class Nodes:
    """An origin and two that fetch, and relay to each other."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        self.folder = folder
        self.stack = stack
        self.running: dict[int, BenchProcess] = {}
        self.addrs: dict[int, str] = {}
        self.came: dict[int, set[int]] = {}
        (folder / "0").mkdir()
        write_weights(self.weights, SIZE, noise=True)
        self.digest = digest_of(self.weights.read_bytes())

    @property
    def weights(self) -> Path:
        """What is published."""
        return self.folder / "0" / "weights"

    def start(self, number: int) -> BenchProcess:
        """A life of a node; what its last one had brought must be there."""
        told = {"number": number, "count": 3, "folder": str(self.folder / str(number))}
        node = self.running[number] = BenchProcess(**told, traces=True)
        self.stack.callback(node.kill)
        resumed = set(node.line_with("resumed")["resumed"])
        self.addrs[number] = node.line_with("listens")["listens"]
        lost = self.came.get(number, set()) - resumed
        assert len(lost) <= STREAMS, f"node {number} lost {len(lost)} chunks"
        self.came[number] = resumed  # what this life has not yet fetched again was counted
        node.order(dial=[self.addrs[n] for n in self.running if n != number])
        node.line_with("dialled")
        return node

    def kill(self, number: int) -> None:
        """kill -9; note what had come."""
        node = self.running.pop(number)
        self.came.setdefault(number, set()).update(
            said["came"] for said in node.kill() if "came" in said
        )
        self.check(number)

    def check(self, number: int) -> None:
        """What has a final name is what was published."""
        for path in (self.folder / str(number)).glob("policies/*/*.safetensors"):
            assert digest_of(path.read_bytes()) == self.digest, path

    def let_come(self, number: int, chunks: int) -> None:
        """Return when so many chunks have come to a node in this life, or all."""
        for _ in range(chunks):
            said = self.running[number].line_with("came", "whole")
            if "whole" in said:
                return
            self.came.setdefault(number, set()).add(said["came"])


def kill_at_random(folder: Path, kills: int, seed: int) -> None:
    """A hand-out of one policy, with that many kills in it."""
    rng = Random(seed)
    with ExitStack() as stack:
        nodes = Nodes(folder, stack)
        nodes.start(0).order(publish=1, path="weights")
        nodes.running[0].kill_after(rng.uniform(0.0, 0.3))  # while it publishes
        nodes.kill(0)
        origin = nodes.start(0)
        origin.order(publish=1, path="weights")  # the same content: no other version 1
        for number in (1, 2):
            nodes.start(number)
        for _ in range(kills - 1):
            number = rng.choice((0, 1, 2))
            if number:
                nodes.let_come(number, rng.randrange(CHUNKS // 3))
            nodes.kill(number)
            nodes.start(number)
            if not number:
                nodes.running[0].order(publish=1, path="weights")
        for number in (1, 2):
            path = folder / str(number) / nodes.running[number].line_with("whole")["weights"]
            assert digest_of(path.read_bytes()) == nodes.digest


@pytest.mark.deep
def test_kills_at_random_points(tmp_path: Path) -> None:
    kill_at_random(tmp_path, KILLS, seed=1)


def main(argv: Sequence[str]) -> None:
    """Many kills, some in each of several hand-outs."""
    for seed in range(1, -(-int(argv[0]) // KILLS) + 1):
        with tempfile.TemporaryDirectory() as folder:
            kill_at_random(Path(folder), KILLS, seed)
        sys.stdout.write(f"seed {seed}: {KILLS} kills, nothing lost\n")


if __name__ == "__main__":
    main(sys.argv[1:])
