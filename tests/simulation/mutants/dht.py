"""Bugs in the DHT."""

from __future__ import annotations

from dataclasses import replace

from p2p.dht import service
from p2p.dht.core.requester import GetOperation
from p2p.dht.core.validation import RecordValidator
from p2p.dht.record import Record
from p2p.world import World


def trust_everybody(
    validator: RecordValidator, record: Record, key: bytes, wall: float
) -> bool:
    return _validate(replace(validator, verify=lambda *_: True), record, key, wall)


def keep_the_last(operation: GetOperation, record: Record) -> None:
    if (record.namespace, record.name) == (operation.namespace, operation.name):
        operation.records[record.publisher] = record


async def start_from_the_clock(world: World, _: str) -> int:
    return int(world.wall() * 1000)


_validate = RecordValidator.validate

BUGS = {
    "signatures of records are not checked": (87, RecordValidator, "validate", trust_everybody),
    "the last answer wins, not the newest": (5, GetOperation, "take", keep_the_last),
    "numbers of records start again": (52, service, "first_seqno", start_from_the_clock),
}
