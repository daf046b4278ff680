"""The folder between a trainer node and a trainer of somebody's own: its names and its formats.

The node's side is `roles.engines.external`, ours for TRL is `roles.trl`; this module imports
nothing of a node. Every file is written under another name and renamed, and no version is ever
written twice, so either side may be killed at any time and finds what it needs by looking.

* ``task.json`` (node, at each start): the run, its numbers, the folder of the model to begin
  with, and ``life``, a nonce;
* ``ready-<life>.json`` (trainer): ``run``, ``who`` (a nonce of its process), and ``step``, the
  newest version that it has written;
* ``refused-<who>.json`` (node): ``reason``, a sentence; that process must end;
* ``groups-<N>.msgpack`` (node): what step N learns from (`encode_groups`);
* ``weight_v<N>/`` (trainer): the weights after step N, a folder in Hugging Face's layout;
* ``report-<N>.json`` (trainer, after the weights): numbers of step N;
* ``checkpoint-<N>.json`` (trainer): ``path`` of its checkpoint after step N, which is on disk;
* ``taken.json`` (node): ``step``; versions up to it are the node's, and not written again.

N has six digits. A trainer that is started again begins at its newest checkpoint, learns from
the groups that are there, and writes the versions after ``taken``.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import msgpack
import numpy as np
from numpy.typing import NDArray

FORMAT: Final = 1
TASK: Final = "task.json"
TAKEN: Final = "taken.json"
GROUPS, WEIGHTS, REPORT, CHECKPOINT = "groups-", "weight_v", "report-", "checkpoint-"
_NUMBERED: Final = re.compile(
    r"(groups-)(\d{6})\.msgpack|(weight_v)(\d{6})|(report-|checkpoint-)(\d{6})\.json"
)


def ready(life: str) -> str:
    return f"ready-{life}.json"


def refused(who: str) -> str:
    return f"refused-{who}.json"


def name_of(kind: str, step: int) -> str:
    """Return the name of the file or folder of ``kind`` for ``step``."""
    ending = {GROUPS: ".msgpack", WEIGHTS: ""}.get(kind, ".json")
    return f"{kind}{step:06d}{ending}"


def steps_of(kind: str, names: Sequence[str]) -> list[int]:
    """Return the steps of which ``names`` has a ``kind``, in order."""
    found = filter(None, map(_NUMBERED.fullmatch, names))
    pairs = ([part for part in one.groups() if part is not None] for one in found)
    return sorted(int(step) for which, step in pairs if which == kind)


@dataclass(frozen=True, slots=True)
class Row:
    """One answer: all tokens of its prompt and text, with masks and advantages."""

    ids: NDArray[np.uint32]
    mask: NDArray[np.uint8]
    """1 where the token was drawn."""
    logprobs: NDArray[np.float32]
    """Log-probs of the drawn tokens under the policy that drew them, as the scorer recomputed
    them; 0 elsewhere.
    """
    reward: float
    advantage: float


def encode_groups(step: int, groups: Sequence[Sequence[Row]]) -> bytes:
    """Return the file of a step: msgpack of ``{step, groups}``; a group is a list of answers,
    whose columns are little-endian bytes."""
    rows = [
        [
            {
                "ids": row.ids.astype("<u4").tobytes(),
                "mask": row.mask.tobytes(),
                "logprobs": row.logprobs.astype("<f4").tobytes(),
                "reward": row.reward,
                "advantage": row.advantage,
            }
            for row in group
        ]
        for group in groups
    ]
    packed: bytes = msgpack.packb({"format": FORMAT, "step": step, "groups": rows})
    return packed


def decode_groups(data: bytes) -> list[list[Row]]:
    """Return the groups that `encode_groups` encoded."""
    table: dict[str, Any] = msgpack.unpackb(data)
    return [
        [
            Row(
                np.frombuffer(one["ids"], "<u4"),
                np.frombuffer(one["mask"], "u1"),
                np.frombuffer(one["logprobs"], "<f4"),
                one["reward"],
                one["advantage"],
            )
            for one in group
        ]
        for group in table["groups"]
    ]
