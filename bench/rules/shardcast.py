"""Rules of `p2p.shardcast`."""

from __future__ import annotations

from functools import reduce
from operator import or_
from typing import Any, Final

from bench.rules.rule import Exam, Rule, Service, always, fixed
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
    "lab_warm_small": Exam(),
    "warm_far": Exam(changes={"versions": 2}),
    "black_hole": Exam(),
    "black_hole_forty": Exam(),
    "black_hole_roots": Exam(),
    "boaster": Exam(changes={"nodes": 101, "versions": 2}),
    "overclaim": Exam(changes={"versions": 3}),
    "slander": Exam(changes={"versions": 2}),
    "liar": Exam(changes={"versions": 2}),
    "dripper": Exam(changes={"versions": 2}),
    "slow_relay": Exam(changes={"versions": 2}),
    "after_push": Exam(("join_seconds_100",)),
    "after_ticket": Exam(),
    "crowd": Exam(),
    "late_joiners": Exam(("join_seconds_100",)),
    "origin_dies": Exam(changes={"versions": 2}),
    "deltas": Exam(),
    "deltas_thousand": Exam(("times_bound_99",), changes={"nodes": 300}),
}


def everything_held(_: object, download: Any, claims: Any) -> Any:
    """Believe what any holder claims to have."""
    return reduce(or_, (download.holders[peer] for peer in claims), EMPTY)


RULES: Final = {
    "earliest finish": Rule(
        "the root that confirms last is not given the last chunk",
        {f"{CORE}.handout:Root.finish": fixed(0.0)},
    ),
    "late roots": Rule(
        "what a root does not confirm goes to another",
        {f"{CORE}.handout:HandOut.expire": always(None)},
    ),
    "asked twice": Rule(
        "what two peers miss comes along another stripe",
        {f"{CORE}.handout:HandOut.ask": always(False)},
    ),
    "demotion": Rule(
        "a root that relays nothing loses its stripe",
        {f"{CORE}.handout:HandOut.report": always(False)},
    ),
    "roster is dialled": Rule(
        "no root is reported before its children are there", {f"{CORE}.handout:MESH": 10**9}
    ),
    "busy origin": Rule(
        "asking does not keep the origin's line from its roots",
        {f"{CORE}.upload:Upload.lanes": fixed(0)},
    ),
    "settle": Rule("those that come together get one roster", {f"{CORE}.handout:_SETTLE": 0.0}),
    "line credit": Rule("a long line is filled", {f"{CORE}.queue:Line.credit": always(2)}),
    "two classes": Rule(
        "who asks does not hold up a stripe",
        {f"{CORE}.queue:SendQueue.push": lambda queue, header: queue._stripes.append(header)},
    ),
    "one answer": Rule(
        "a crowd of askers does not hold up the stripes",
        {f"{CORE}.queue:SendQueue.waits": fixed(False)},
    ),
    "withholding": Rule(
        "a slow child does not hold its siblings up", {f"{CORE}.upload:CHILD_BACKLOG": 10**6}
    ),
    "dial ahead": Rule(
        "hops do not dial one after another",
        {f"{CORE}.upload:Upload.connect": lambda *_: iter(())},
    ),
    "origin's turns": Rule(
        "chunks that are on their way are not asked of the origin",
        {f"{CORE}.download:LateChunks._overdue_after": property(lambda late: late._stall)},
    ),
    "usual lag": Rule(
        "a node behind its neighbours does not pull what is coming",
        {f"{CORE}.pace:ChunkPace.note_lag": always(None)},
    ),
    "proven holders": Rule(
        "who boasts is asked for one chunk",
        {f"{CORE}.repair:Repair._believable": everything_held},
    ),
    "trial": Rule(
        "who drips costs each asker one wait",
        {f"{CORE}.repair:Source.room": property(lambda source: 4 - source.owed)},
    ),
    "own line": Rule(
        "no node asks for more than its line carries", {f"{CORE}.repair:_AHEAD": 1e9}
    ),
    "credulity": Rule(
        "one claim does not bend the forest", {f"{CORE}.receipts:_CREDULITY": 1e9}
    ),
    "receipts": Rule(
        "who claims much and relays little is believed what it relays",
        {f"{CORE}.receipts:ReceiptBook.judge": lambda *_: iter(())},
    ),
    "rare first": Rule(
        "a restarted origin gives what most lack",
        {f"{CORE}.handout:HandOut._doubt_what_is_rare": always(None)},
    ),
}


SERVICE: Final = Service("shardcast", RULES, SCENARIOS)
