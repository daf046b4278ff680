"""Bugs in the DHT."""

from __future__ import annotations

from dataclasses import replace

from p2p.dht import service
from p2p.dht.core.operations import Reading
from p2p.dht.record import Judgement, Record, RecordJudge
from p2p.world import World


def trust_everybody(judge: RecordJudge, record: Record, key: bytes, wall: float) -> Judgement:
    return _judge(replace(judge, verify=lambda *_: True), record, key, wall)


def keep_the_last(reading: Reading, record: Record) -> None:
    if (record.namespace, record.name) == (reading.namespace, reading.name):
        reading.records[record.publisher] = record


async def start_from_the_clock(world: World) -> int:
    return 0


_judge = RecordJudge.judge

BUGS = {
    "signatures of records are not checked": (23, RecordJudge, "judge", trust_everybody),
    "the last answer wins, not the newest": (5, Reading, "take", keep_the_last),
    "numbers of records start again": (52, service, "_load_seqno", start_from_the_clock),
}
