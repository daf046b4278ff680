"""Rules of `p2p.dht`."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Final

from bench.rules.rule import HUGE, UNLIMITED, UNLIMITED_EACH, Exam, Rule, Service, always, edit
from p2p.dht.core.validation import RecordValidator
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
    "tests/transcripts/test_transcripts.py",
)
_RULES_OF: Final = RecordValidator.rules


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


RULES: Final = {
    "requests": Rule(
        "a peer's requests cost a bounded share of a core",
        {f"{CORE}.responder:AnswerQuotas().requests": UNLIMITED_EACH},
        tests="flood_is_answered or floods",
    ),
    "answer bytes": Rule(
        "a peer gets a bounded number of bytes",
        {f"{CORE}.responder:AnswerQuotas()._answer_bytes": UNLIMITED_EACH},
        tests="eight_kib",
    ),
    "answers to all": Rule(
        "answers take a bounded share of the upload",
        {
            f"{CORE}.responder:AnswerQuotas()._shared": {True: UNLIMITED, False: UNLIMITED},
        },
        tests="all_strangers or pot_empty",
    ),
    "undecoded": Rule(
        "who is over quota is not decoded",
        {f"{CORE}.responder:AnswerQuotas.is_flooding": always(False)},
        tests="floods_is_not_even_read or no_longer_decoded",
    ),
    "known peers": Rule(
        "strangers share their bucket and store no records of others",
        {f"{CORE}.responder:Responder._knows": always(True)},
        tests="stores_its_own or newcomers_and_contacts",
    ),
    "publishers": Rule(
        "a key's records fit an answer",
        edit(f"{CORE}.store:RecordStore._evicted", ">= MAX_RECORDS", ">= 10**9"),
        scenarios=("squatters",),
        tests="squatters or prefix or publishers",
    ),
    "prefixes of a key": Rule(
        "one network gets a quarter of a key",
        edit(f"{CORE}.store:RecordStore._evicted", ">= 16", ">= 10**9"),
        scenarios=("squatters",),
        tests="squatters_of_one",
    ),
    "records of one": Rule(
        "a publisher's records take bounded memory",
        {f"{CORE}.store:MAX_PER_PUBLISHER": 10**5},
        tests="one_publisher_gets",
    ),
    "records": Rule(
        "records take bounded memory",
        {f"{CORE}.store:MAX_HELD": HUGE, f"{CORE}.store:RecordStore()._limit": HUGE},
        tests="full_node",
    ),
    "most goes first": Rule(
        "a full store takes from who has most",
        {f"{CORE}.store:RecordStore._take_from_most": always(False)},
        tests="takes_from_those",
    ),
    "secret rank": Rule(
        "no name is made to rank low",
        {f"{CORE}.store:RecordStore._rank": lambda _, publisher: publisher.digest[:8]},
        scenarios=("squatters",),
        tests="own_secret or squatters_who_came",
    ),
    "officers": Rule(
        "officers always have a place",
        {f"{CORE}.validation:RecordPriority().reserved": False},
        scenarios=("squatters",),
        tests="officers",
    ),
    "shortest first": Rule(
        "long records displace only themselves",
        {f"{CORE}.store:RecordStore.blobs": _blobs_unordered},
        scenarios=("squatters",),
        tests="long_records",
    ),
    "compaction": Rule(
        "renewals cost no memory",
        {f"{CORE}.store:RecordStore._compact": always(None)},
        tests="renewing_often",
    ),
    "spread": Rule(
        "one network gets few places in the table",
        {f"{CORE}.table:RoutingTable._is_spread": always(True)},
        tests="one_network or private_addresses",
    ),
    "long contacts": Rule(
        "contacts are short",
        {f"{CORE}.table:RoutingTable._is_dialable": lambda _, contact: bool(contact.addrs)},
        tests="long_contacts",
    ),
    "who is pinged": Rule(
        "peers without a place are not pinged",
        {f"{CORE}.table:RoutingTable.would_take": always(True)},
        tests="visitor or requests_of_attackers or visiting",
    ),
    "contact stamps": Rule(
        "contacts cost work",
        {f"{CORE}.neighbours:Neighbours.check": always(None)},
        tests="without_work",
    ),
    "record stamps": Rule(
        "records cost work", {f"{CORE}.validation:check_stamp": always(True)}, tests="stamp"
    ),
    "dead contacts": Rule(
        "silent contacts are not asked for a minute",
        {f"{CORE}.neighbours:Neighbours._mark_dead": always(None)},
        tests="dead or late or liars or dial",
    ),
    "three timeouts": Rule(
        "a lost message does not cost a place",
        {f"{CORE}.neighbours:Neighbours.timed_out": _failed_at_once},
        tests="lost_ping or held_up",
    ),
    "inbound not believed": Rule(
        "who connects makes us dial nobody",
        {f"{CORE}.neighbours:Neighbours.is_recent_inbound": always(False)},
        tests="visiting",
    ),
    "credit": Rule(
        "a liar makes us dial few",
        {f"{CORE}.lookup:CREDIT": HUGE},
        tests="liar_in_the_table or lying_seed",
    ),
    "asked contacts": Rule(
        "a lookup asks few", {f"{CORE}.lookup:MAX_ASKED": HUGE}, tests="never_asks_more"
    ),
    "disjoint paths": Rule(
        "liars on one path do not hide a record",
        {f"{CORE}.lookup:LookupShape().paths": 1},
        scenarios=("squatters",),
        tests="lookup_with_a_liar",
    ),
    "quorum": Rule(
        "one holder's word does not end a lookup",
        {f"{CORE}.lookup:LookupShape().quorum": 1},
        scenarios=("squatters",),
        tests="quorum or lies",
    ),
    "settling": Rule(
        "a key with dead holders does not delay a get",
        {f"{CORE}.requester:Requester._note_found": always(None)},
        tests="settled or dead or lies",
    ),
    "publishers found": Rule(
        "a get returns a bounded number of records",
        {f"{CORE}.requester:MAX_FOUND": HUGE},
        tests="bounded_number",
    ),
    "records validated": Rule(
        "a get remembers a bounded number of records",
        edit(f"{CORE}.requester:GetOperation.take_untrusted", "< 2 * MAX_FOUND", "< 10**9"),
        tests="bounded_number or editions",
    ),
    "no dial for a ping": Rule(
        "a stranger causes no dial",
        {f"{CORE}.requester:Requester._send": _always_sent},
        tests="has_gone or no_dial or visiting",
    ),
    "publications": Rule(
        "own records fit others' quota",
        {f"{CORE}.core:MAX_PUBLICATIONS": HUGE},
        tests="publications",
    ),
    "lifetime": Rule(
        "a record is gone after a day",
        {
            f"{CORE}.validation:RecordValidator.rules": lambda *asked: replace(
                _RULES_OF(*asked), max_lifetime=1e9
            )
        },
        tests="hour_at_most or time or five_minutes",
    ),
    "three keys": Rule(
        "liars at one key do not hide a record",
        {
            f"{CORE}.validation:RecordValidator.rules": lambda *asked: replace(
                _RULES_OF(*asked), salts=1
            )
        },
        scenarios=("squatters",),
        tests="squatters or lies or salted",
    ),
    "lost contacts": Rule(
        "both sides of a partition find each other",
        {
            f"{CORE}.neighbours:Neighbours.rejoin_candidates": lambda neighbours: [
                peer for peer in neighbours._seeds if neighbours.table.contact_of(peer) is None
            ]
        },
        tests="two_sides",
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
