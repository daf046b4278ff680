"""Level 0 replays what cores were told at level 1, to the same effects."""

from __future__ import annotations

import importlib
from dataclasses import replace
from random import Random
from unittest.mock import patch

import pytest

from p2p.shardcast.core.statements import Statements
from sim.run import tape
from sim.run.runner import run_scenario
from sim.run.tape import CORES, Tape, recording
from tests.simulation.storms import load_storm

SPINE = replace(load_storm("spine"), duration=15.0, expect=())
"""All cores of a node, in a storm."""


def record(*names: str) -> tuple[str, Tape]:
    with recording(*names) as told:
        return run_scenario(SPINE, 1).trace_hash, told


def test_cores_on_the_bare_heap_do_what_they_did_under_trio() -> None:
    trace_hash, told = record()
    assert trace_hash == run_scenario(SPINE, 1).trace_hash, "recording changes nothing"
    assert set(told.counts) == {place.partition(":")[2] for place in CORES.values()}
    assert len(told) > 1000
    replayed = told.replay()
    assert replayed.differs_at is None
    assert replayed.digest == told.digest
    assert replayed.events == len(told)


@pytest.mark.parametrize("core", CORES)
def test_a_core_that_is_not_pure_is_found(core: str) -> None:
    module, _, name = CORES[core].partition(":")
    kind = getattr(importlib.import_module(module), name)
    handle, dice = kind.handle, Random(0)

    def moody(self, event, now):
        effects = handle(self, event, now)
        return effects[1:] if dice.random() < 0.2 else effects

    with patch.object(kind, "handle", moody):
        _, told = record(core)
        differs_at = told.replay().differs_at
    assert differs_at is not None
    assert told.who(differs_at) == name


def test_a_core_that_reads_what_others_change_is_found() -> None:
    believed: dict[str, None] = {}
    believes = Statements.is_trusted

    def fickle(self, trainer):
        believed[str(len(believed))] = None
        return believes(self, trainer) and len(believed) < 10

    with patch.object(Statements, "is_trusted", fickle):
        _, told = record("shardcast")
        assert told.replay().differs_at is not None


class Shelf:
    def __init__(self) -> None:
        self.items: list[str] = []

    def put(self, item: str) -> None:
        self.items.append(item)


class Clerk:
    def __init__(self, shelf: Shelf) -> None:
        self._shelf = shelf

    def handle(self, event: str, now: float) -> list[str]:
        self._shelf.put(event)
        return list(self._shelf.items)


def fill(*, behind_its_back: bool) -> Tape:
    places = {"clerk": f"{__name__}:Clerk"}
    with patch.dict(CORES, places), patch.object(tape, "PARTS", (f"{__name__}:Shelf",)):
        with recording("clerk") as noted:
            shelf = Shelf()
            clerk = Clerk(shelf)
            clerk.handle("one", 1.0)
            shelf.put("two")
            if behind_its_back:
                shelf.items.append("three")
            assert clerk.handle("four", 2.0)[-1] == "four"
        return noted


def test_what_a_driver_tells_a_part_is_told_again() -> None:
    assert fill(behind_its_back=False).replay().differs_at is None
    assert fill(behind_its_back=True).replay().differs_at == 1
