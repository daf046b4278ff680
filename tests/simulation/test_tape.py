"""Level 0 replays what cores were told at level 1, to the same effects."""

from __future__ import annotations

import dataclasses

import p2p.membership.service
from sim.faults import Fault
from sim.runner import run_scenario
from sim.scenario import load_scenario
from sim.tape import Tape, recording

SMALL = dataclasses.replace(
    load_scenario("churn"),
    nodes=15,
    duration=90.0,
    expect=(),
    faults=(Fault(at=40.0, kind="kill", who=("n3", "n4"), seconds=10.0),),
)


def record() -> tuple[str, Tape]:
    with recording(p2p.membership.service, "MembershipCore") as tape:
        return run_scenario(SMALL, 7).trace_hash, tape


def test_cores_on_the_bare_heap_do_what_they_did_under_trio() -> None:
    _, tape = record()
    assert len(tape) > 1000
    replayed = tape.replay()
    assert replayed.differs_at is None
    assert replayed.digest == tape.digest
    assert replayed.events == len(tape)


def test_recording_changes_nothing() -> None:
    trace_hash, _ = record()
    assert trace_hash == run_scenario(SMALL, 7).trace_hash


def test_a_core_that_is_not_pure_is_found() -> None:
    _, tape = record()
    step = tape._steps[500]
    tape._steps[500] = dataclasses.replace(step, now=step.now + 1000.0)
    assert tape.replay().differs_at is not None
