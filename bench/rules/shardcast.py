"""Rules of `p2p.shardcast`."""

from __future__ import annotations

from functools import reduce
from operator import or_
from typing import Any, Final

from bench.rules.rule import HUGE, UNLIMITED, Exam, Rule, Service, always, edit, fixed
from p2p.shardcast.chunkset import EMPTY

CORE: Final = "p2p.shardcast.core"
SCENARIOS: Final = {
    "lab_uneven": Exam(),
    "lab_slow_relay": Exam(),
    "lab_killed": Exam(),
    "lab_adsl": Exam(),
    "lab_even_20": Exam(),
    "lab_broadcast": Exam(),
    "lab_warm": Exam(),
    "warm_far": Exam(changes={"versions": 2}),
    "black_hole": Exam(),
    "black_hole_forty": Exam(),
    "boaster": Exam(changes={"nodes": 101, "versions": 2}),
    "overclaim": Exam(changes={"versions": 3}),
    "liar": Exam(changes={"versions": 2}),
    "dripper": Exam(changes={"versions": 2}),
    "slow_relay": Exam(  # a few machines have slow downlinks, instead of slow uplinks
        changes={"versions": 1, "slow_relays": 0, "weak_share": 0.1, "weak_down": 4.0}
    ),
    "after_push": Exam(("join_seconds_100",)),
    "after_ticket": Exam(),
    "crowd": Exam(),
    "late_joiners": Exam(("join_seconds_100",)),
    "origin_dies": Exam(changes={"versions": 2}),
    "deltas": Exam(),
}


def everything_held(_: object, download: Any, claims: Any) -> Any:
    """Believe what any holder claims to have."""
    return reduce(or_, (download.holders[peer] for peer in claims), EMPTY)


TESTS: Final = (
    "tests/attacks/test_content_shardcast.py",
    "tests/attacks/test_receipts.py",
    "tests/unit/test_shardcast_handout.py",
    "tests/unit/test_shardcast_liars.py",
    "tests/unit/test_shardcast_parts.py",
    "tests/unit/test_shardcast_core.py",
    "tests/transcripts/test_transcripts.py",
)
BOUNDED: Final = "size of a `BoundedDict`"
FORMATS: Final = {
    **dict.fromkeys(
        ("codec", "messages", "patch", "index", "manifest", "chunkset"),
        "fields of the format",
    ),
    "http.core.answers": "fields of the format",
    "core.peers": BOUNDED,
}
RULES: Final = {
    "earliest finish": Rule(
        "the root that confirms last is not given the last chunk",
        {f"{CORE}.handout:Root.finish": fixed(0.0)},
        ("lab_adsl", "lab_uneven", "lab_even_20"),
    ),
    "late roots": Rule(
        "what a root does not confirm goes to another",
        {f"{CORE}.handout:HandOut.expire": always(None)},
        ("black_hole", "lab_killed"),
    ),
    "asked twice": Rule(
        "what two peers miss comes along another stripe",
        {f"{CORE}.handout:HandOut.ask": always(False)},
        ("black_hole", "lab_killed", "dripper"),
    ),
    "demotion": Rule(
        "a root that relays nothing loses its stripe",
        {f"{CORE}.handout:HandOut.report": always(False)},
        ("black_hole", "black_hole_forty"),
    ),
    "roster is dialled": Rule(
        "no root is reported before its children are there",
        edit(f"{CORE}.handout:HandOut.suspect", "> MESH", "> 10**9"),
        ("after_push", "late_joiners", "lab_broadcast", "crowd"),
    ),
    "settle": Rule(
        "those that come together get one roster",
        {f"{CORE}.handout:Origin()._settle": 0.0},
        ("after_ticket", "after_push", "crowd"),
    ),
    "line credit": Rule(
        "a long line is filled", {f"{CORE}.handout:Line.credit": always(2)}, ("warm_far",)
    ),
    "two classes": Rule(
        "who asks does not hold up a stripe",
        {f"{CORE}.upload:SendQueue.push": lambda queue, header: queue._stripes.append(header)},
        ("crowd", "late_joiners", "dripper"),
    ),
    "one answer": Rule(
        "a crowd of askers does not hold up the stripes",
        {f"{CORE}.upload:SendQueue.waits": fixed(False)},
        ("crowd", "after_push", "late_joiners"),
    ),
    "dial ahead": Rule(
        "hops do not dial one after another",
        {f"{CORE}.upload:Upload.connect": always(())},
        ("dripper", "lab_slow_relay", "warm_far"),
    ),
    "origin's turns": Rule(
        "chunks that are on their way are not asked of the origin",
        {f"{CORE}.download:LateChunks._overdue_after": property(lambda late: late._stall)},
        ("black_hole", "dripper", "crowd"),
    ),
    "usual lag": Rule(
        "a node behind its neighbours does not pull what is coming",
        {f"{CORE}.pace:ChunkPace.note_lag": always(None)},
        ("slow_relay",),
    ),
    "proven holders": Rule(
        "who boasts is asked for one chunk",
        {f"{CORE}.repair:Repair._believable": everything_held},
        ("black_hole", "boaster", "liar"),
    ),
    "trial": Rule(
        "who drips costs each asker one wait",
        {f"{CORE}.repair:Source.room": property(lambda source: 4 - source.owed)},
        ("black_hole", "dripper"),
    ),
    "own line": Rule(
        "no node asks for more than its line carries",
        edit(f"{CORE}.repair:Repair._plan", "2 * self._stall", "1e9 * self._stall"),
        ("lab_adsl", "deltas", "late_joiners"),
    ),
    "credulity": Rule(
        "one claim does not bend the forest",
        edit(f"{CORE}.receipts:Capacities.believe", "4 * median", "1e9 * median"),
        ("boaster", "overclaim"),
    ),
    "receipts": Rule(
        "who claims much and relays little is believed what it relays",
        {f"{CORE}.receipts:ReceiptBook.judge": lambda *_: iter(())},
        ("overclaim", "dripper"),
    ),
    "rare first": Rule(
        "a restarted origin gives what most lack",
        {f"{CORE}.handout:HandOut._doubt_what_is_rare": always(None)},
        ("origin_dies", "black_hole"),
    ),
    "unfinished frames": Rule(
        "frames of strangers take bounded memory",
        {"p2p.shardcast.bulk:MAX_UNFINISHED": HUGE},
    ),
    "waiting items": Rule(
        "a peer that takes nothing is given up",
        edit("p2p.shardcast.bulk:Sender.push_nowait", "> 64", "> 10**9"),
    ),
    "rates": Rule(
        "a node keeps to its owner's rates",
        {"p2p.shardcast.bulk:Throttle()._bucket": UNLIMITED},
    ),
    "indexes": Rule(
        "a peer gets few indexes",
        edit(f"{CORE}.upload:Upload.answer", "<= 16", ""),
    ),
    "manifests": Rule(
        "a publisher's versions take bounded memory",
        {f"{CORE}.statements:MAX_MANIFESTS": HUGE},
    ),
    "rosters": Rule("rosters take bounded memory", {f"{CORE}.statements:MAX_ROSTERS": HUGE}),
    "fetches": Rule("few versions are fetched at once", {f"{CORE}.versions:MAX_FETCHES": HUGE}),
    "largest credit": Rule(
        "a line is given a bounded credit", {f"{CORE}.upload:MAX_CREDIT": HUGE}, ("warm_far",)
    ),
    "holders": Rule(
        "sources of a download take bounded memory", {f"{CORE}.download:MAX_HOLDERS": HUGE}
    ),
}


SERVICE: Final = Service("shardcast", RULES, SCENARIOS, TESTS, FORMATS)
