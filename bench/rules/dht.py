"""Rules of `p2p.dht`."""

from __future__ import annotations

from typing import Any, Final

from bench.rules.rule import HUGE, UNLIMITED, UNLIMITED_EACH, Exam, Rule, Service, always
from p2p.events import Send

CORE: Final = "p2p.dht.core"
SQUATTERS: Final = (
    "officers_in_key_least",
    "honest_in_key_least",
    "latecomers_in_key_least",
    "officers_located_least",
)
TESTS: Final = (
    "tests/attacks/test_dht_answers.py",
    "tests/attacks/test_dht_dials.py",
    "tests/attacks/test_dht_records.py",
    "tests/attacks/test_dht_squatters.py",
    "tests/attacks/test_dht_table.py",
    "tests/unit/test_dht_lookup.py",
    "tests/unit/test_dht_record.py",
    "tests/unit/test_dht_swarm.py",
    "tests/unit/test_dht_table.py",
)


def _failed_at_once(neighbours: Any, contact: Any, now: float) -> None:
    neighbours.failed(contact, now)


def _blobs_unordered(store: Any, key: bytes) -> tuple[bytes, ...]:
    room, taken = 64 * 1024, []
    for held in store._keys.get(key, {}).values():
        room -= len(held.blob)
        if room >= 0:
            taken.append(held.blob)
    return tuple(taken)


def _always_sent(requester: Any, call: Any) -> None:
    requester._emit(Send(call.peer, call.data))


def tested(law: str, off: dict[str, object]) -> Rule:
    """Return a rule that the scenario does not concern."""
    return Rule(law, off, ())


RULES: Final = {
    "requests": tested(
        "a peer's requests cost a bounded share of a core",
        {f"{CORE}.responder:AnswerQuotas().requests": UNLIMITED_EACH},
    ),
    "answer bytes": tested(
        "a peer gets a bounded number of bytes",
        {f"{CORE}.responder:AnswerQuotas()._answer_bytes": UNLIMITED_EACH},
    ),
    "answers to all": tested(
        "answers take a bounded share of the upload",
        {
            f"{CORE}.responder:AnswerQuotas()._shared": {True: UNLIMITED, False: UNLIMITED},
        },
    ),
    "undecoded": tested(
        "who is over quota is not decoded",
        {f"{CORE}.responder:AnswerQuotas.is_flooding": always(False)},
    ),
    "known peers": tested(
        "strangers share their bucket and store no records of others",
        {f"{CORE}.responder:Responder._knows": always(True)},
    ),
    "publishers": Rule("a key's records fit an answer", {f"{CORE}.store:MAX_PUBLISHERS": HUGE}),
    "prefixes of a key": Rule(
        "one network gets a quarter of a key", {f"{CORE}.store:MAX_PER_PREFIX": HUGE}
    ),
    "records of one": tested(
        "a publisher's records take bounded memory", {f"{CORE}.store:MAX_PER_PUBLISHER": 10**5}
    ),
    "records": tested(
        "records take bounded memory",
        {f"{CORE}.store:MAX_HELD": HUGE, f"{CORE}.store:RecordStore()._limit": HUGE},
    ),
    "most goes first": tested(
        "a full store takes from who has most",
        {f"{CORE}.store:RecordStore._take_from_most": always(False)},
    ),
    "secret rank": Rule(
        "no name is made to rank low",
        {f"{CORE}.store:RecordStore._rank": lambda _, publisher: publisher.digest[:8]},
    ),
    "officers": Rule(
        "officers always have a place", {f"{CORE}.validation:RecordPriority().reserved": False}
    ),
    "shortest first": Rule(
        "long records displace only themselves",
        {f"{CORE}.store:RecordStore.blobs": _blobs_unordered},
    ),
    "compaction": tested(
        "renewals cost no memory", {f"{CORE}.store:RecordStore._compact": always(None)}
    ),
    "spread": tested(
        "one network gets few places in the table",
        {f"{CORE}.table:RoutingTable._is_spread": always(True)},
    ),
    "long contacts": tested("contacts are short", {f"{CORE}.table:MAX_TABLED": HUGE}),
    "who is pinged": tested(
        "peers without a place are not pinged",
        {f"{CORE}.table:RoutingTable.would_take": always(True)},
    ),
    "contact stamps": tested(
        "contacts cost work", {f"{CORE}.neighbours:Neighbours.check": always(None)}
    ),
    "record stamps": tested(
        "records cost work", {f"{CORE}.validation:check_stamp": always(True)}
    ),
    "ping once a minute": tested(
        "strangers do not make us ping",
        {f"{CORE}.neighbours:Neighbours.claim_ping": always(True)},
    ),
    "dead contacts": tested(
        "silent contacts are not asked for a minute",
        {f"{CORE}.neighbours:Neighbours._mark_dead": always(None)},
    ),
    "three timeouts": tested(
        "a lost message does not cost a place",
        {f"{CORE}.neighbours:Neighbours.timed_out": _failed_at_once},
    ),
    "inbound not believed": tested(
        "who connects makes us dial nobody",
        {f"{CORE}.neighbours:Neighbours.is_recent_inbound": always(False)},
    ),
    "credit": tested("a liar makes us dial few", {f"{CORE}.lookup:CREDIT": HUGE}),
    "asked contacts": tested("a lookup asks few", {f"{CORE}.lookup:MAX_ASKED": HUGE}),
    "disjoint paths": Rule(
        "liars on one path do not hide a record", {f"{CORE}.lookup:LookupShape().paths": 1}
    ),
    "quorum": Rule(
        "one holder's word does not end a lookup", {f"{CORE}.lookup:LookupShape().quorum": 1}
    ),
    "settling": tested(
        "a key with dead holders does not delay a get",
        {f"{CORE}.requester:Requester._note_found": always(None)},
    ),
    "seeds asked": tested("a join asks few", {f"{CORE}.requester:MAX_SEEDS_ASKED": HUGE}),
    "verifying": tested(
        "few inbound peers are pinged at once", {f"{CORE}.requester:MAX_VERIFYING": HUGE}
    ),
    "publishers found": tested(
        "a get returns a bounded number of records", {f"{CORE}.requester:MAX_FOUND": HUGE}
    ),
    "records validated": tested(
        "a get remembers a bounded number of records", {f"{CORE}.requester:MAX_VALIDATED": HUGE}
    ),
    "no dial for a ping": tested(
        "a stranger causes no dial", {f"{CORE}.requester:Requester._send": _always_sent}
    ),
    "publications": tested(
        "own records fit others' quota", {f"{CORE}.core:MAX_PUBLICATIONS": HUGE}
    ),
    "lifetime": tested(
        "a record is gone after a day",
        {
            f"{CORE}.validation:MAX_LIFETIME": 1e9,
            f"{CORE}.validation:Namespace().max_lifetime": 1e9,
        },
    ),
    "three keys": Rule(
        "liars at one key do not hide a record",
        {f"{CORE}.validation:SALTS": 1, f"{CORE}.validation:Namespace().salts": 1},
    ),
    "lost contacts": tested(
        "both sides of a partition find each other",
        {
            f"{CORE}.neighbours:Neighbours.rejoin_candidates": lambda neighbours: [
                peer for peer in neighbours._seeds if neighbours.table.contact_of(peer) is None
            ]
        },
    ),
}
SERVICE: Final = Service(
    "dht",
    RULES,
    {"squatters": Exam(SQUATTERS)},
    TESTS,
    {
        "messages": "fields of the format",
        "record": "fields of the format",
        "stamp": "work that a stamp may show",
    },
)
