"""What the demo says at its end."""

from __future__ import annotations

import io
from typing import Any

from rich.console import Console

from roles.demo.gate import SORTING_PROMISE, LearningGate
from roles.demo.shows import SORTING
from roles.engines.evaluation import Evaluation
from roles.own.status import Doorbell, SwarmStatus
from roles.own.view import draw


def test_a_promised_rise_is_judged_with_its_standard_error() -> None:
    """Of 512 held-out tasks a share is off by 0.02 by chance."""
    start = Evaluation(0.3, 0.3)
    by_chance = LearningGate(start, Evaluation(0.52, 0.52), SORTING_PROMISE, 512)
    assert by_chance.passed
    (greedy, _) = LearningGate(start, Evaluation(0.48, 0.48), SORTING_PROMISE, 512).failures()
    assert greedy == "greedy reward rose by 0.180 (give or take 0.030), not by 0.25"
    assert not LearningGate(start, by_chance.end).passed, "without tasks nothing is chance"
    full = LearningGate(Evaluation(0.7, 0.7), Evaluation(0.7, 0.7), SORTING_PROMISE, 512)
    assert not list(full.failures())
    assert not full.passed
    assert "no rise is promised" in full.shortfalls()[0]


def swarm(*guests: dict[str, Any], accepted: int = 0) -> SwarmStatus:
    shardcast = dict.fromkeys(
        ("newest", "from_peers", "from_origin", "uploaded_as_origin", "uploaded_as_relay"), 0
    )
    records = {"12D3KooWguestx7Qk": {"accepted": accepted, "rejected": 0, "reasons": {}}}
    health = {"accepted": 0, "rejected": 0, "nodes": records}
    relay = {"peer": "R", "members": 2, "shardcast": shardcast, "known": guests, "roles": {}}
    return SwarmStatus(
        {
            "relay-1": relay,
            "validator-1": {**relay, "peer": "V", "roles": {"validator": health}},
        },
        128,
    )


def test_a_stranger_who_joins_gets_a_row_and_a_welcome() -> None:
    """The demo printed a line to join with, and never showed who did."""
    own = {"peer": "V", "roles": ["validator"], "policy": 3}
    guest = {"peer": "12D3KooWguestx7Qk", "roles": ["inference"], "policy": 3}
    door = Doorbell()
    assert list(door.news(swarm(own))) == []
    (welcome,) = door.news(swarm(own, guest))
    assert welcome.startswith("welcome, guest-x7Qk: your work counts as soon as")
    (thanks,) = door.news(swarm(own, guest, accepted=2))
    assert thanks == "thank you, guest-x7Qk: your first 256 rollouts are accepted"
    assert list(door.news(swarm(own, guest, accepted=3))) == []
    out = io.StringIO()
    shown = draw(swarm(own, guest, accepted=3), 9.0, SORTING)
    Console(file=out, width=80).print(shown)
    (row,) = [line for line in out.getvalue().splitlines() if "x7Qk" in line]
    assert " ".join(row.split()) == "guest-x7Qk 3 3 accepted, 0 rejected"
