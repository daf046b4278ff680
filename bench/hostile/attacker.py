"""``python -m bench.hostile.attacker NAME ADDR SECONDS RUN SEED TREE``: one attack, in a
process of its own.

It prints a line when it begins, and at its end, or when it is told to end (SIGTERM), what it
did as JSON.
"""

from __future__ import annotations

import json
import resource
import signal
import sys
from collections.abc import Sequence
from random import Random
from typing import Final

import trio

from bench.hostile.kinds import KINDS
from bench.hostile.raw import TROUBLE, Attack, Target

SEEDS_APART: Final = 1_000_003
"""Distance of seeds, so that runs of neighbouring seeds share no keys."""


async def _run(name: str, attack: Attack) -> None:
    with (
        trio.move_on_after(attack.seconds) as scope,
        trio.open_signal_receiver(signal.SIGTERM) as signals,
    ):

        async def end_when_told() -> None:
            async for _ in signals:
                scope.cancel()

        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(end_when_told)
                await KINDS[name].run(attack)
                nursery.cancel_scope.cancel()
        except* TROUBLE as group:
            attack.tally[f"ended by {type(group.exceptions[0]).__name__}"] += 1


def main(arguments: Sequence[str]) -> int:
    """Attack; return 0 whatever the outcome."""
    name, addr, seconds, run, seed, tree = arguments
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    attack = Attack(
        Target.parse(addr),
        float(seconds),
        bytes.fromhex(run),
        Random(int(seed) * SEEDS_APART),
        tree,
    )
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    trio.run(_run, name, attack)
    sys.stdout.write(json.dumps(dict(attack.tally)) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
