"""Whole members on simulated hosts: what goes wrong costs a round at most, and no replica."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest
import trio

from p2p.host import Stream
from roles.diloco.core.messages import Ready, Record, Sum
from roles.diloco.core.pieces import digest_of
from roles.diloco.exchange import Blob, PieceServer
from roles.diloco.session import DilocoSession
from sim.faults.plan import Fault
from sim.net.link import LinkSpec
from sim.run.runner import run_scenario
from sim.run.scenario import Scenario, load_scenario
from sim.run.sweep import changed
from sim.workloads import diloco


def quiet(**changes: Any) -> Scenario:
    """Four founders, no faults but those given."""
    scenario = replace(load_scenario("diloco"), **{"nodes": 4, "faults": (), **changes})
    return changed(scenario, {"founders": 4, "rounds": 6, "join_at": 1})


def played(scenario: Scenario, seed: int = 1) -> Mapping[str, Any]:
    metrics = run_scenario(scenario, seed).metrics
    assert metrics["replicas_differ"] == 0
    assert metrics["wrongly_named"] == 0
    return metrics


@pytest.mark.parametrize("seed", range(1, 4))
def test_a_storm_of_faults_leaves_equal_replicas(seed: int) -> None:
    metrics = played(load_scenario("diloco"), seed)
    assert metrics["rounds"] == 14
    assert metrics["members_end"] == 7


@pytest.mark.parametrize("second", [12.5, 14.0, 21.0, 22.0, 23.5, 30.0])
@pytest.mark.parametrize("kind", ["kill", "torn"])
def test_a_trainer_killed_at_any_point_comes_back_and_contradicts_nothing(
    second: float, kind: str
) -> None:
    """Power cuts as well: what it had signed was durable before it was sent."""
    fault = Fault(at=second, kind=kind, who=("site-1",), seconds=2.0)
    metrics = played(quiet(faults=(fault,)))
    assert metrics["rounds"] == 6
    assert metrics["members_end"] == 4
    assert metrics["convicted"] == 0


def test_a_wiped_disk_is_a_joiner() -> None:
    fault = Fault(at=25.0, kind="wipe", who=("site-1",), seconds=3.0)
    metrics = played(quiet(faults=(fault,)))
    assert metrics["rounds"] == 6
    assert metrics["members_end"] == 4


def test_a_full_disk_stops_no_other_and_loses_nothing() -> None:
    fault = Fault(at=15.0, kind="full_disk", who=("site-1",), seconds=20.0)
    metrics = played(quiet(faults=(fault,)))
    assert metrics["rounds"] == 6
    assert metrics["convicted"] == 0


def test_half_killed_at_once_goes_on_with_the_anchor() -> None:
    fault = Fault(at=25.0, kind="vanish", who=("site-2", "site-3"))
    metrics = played(changed(quiet(faults=(fault,)), {"anchor": 1}))
    assert metrics["rounds"] == 6
    assert metrics["members_end"] == 2


def test_without_an_anchor_half_of_them_stop() -> None:
    fault = Fault(at=25.0, kind="vanish", who=("site-2", "site-3"))
    metrics = played(quiet(faults=(fault,), duration=150.0))
    assert metrics["rounds"] < 4


def test_hostile_sites_are_named_and_do_not_hold_the_run_up() -> None:
    scenario = replace(load_scenario("diloco_hostile"), nodes=7)
    metrics = played(changed(scenario, {"founders": 7, "rounds": 6}))
    assert metrics["rounds"] == 6
    assert metrics["convicted"] == 2
    assert metrics["named_by_round"] <= 3
    assert metrics["loss"] < 0.3


def test_with_overlap_compute_does_not_wait_for_the_exchange() -> None:
    """On lines of 0.2 Mbit/s the exchange takes a fifth of a round; steps go on meanwhile, and
    what was learnt in them is kept."""
    slow = LinkSpec(up=0.2, down=0.2)
    found = {}
    for overlap in (0, 1):
        scenario = changed(quiet(link=slow, duration=900.0), {"overlap": overlap})
        found[overlap] = played(scenario)
        assert found[overlap]["rounds"] == 6
    assert found[1]["utilised"] >= 0.97 > found[0]["utilised"]
    assert found[1]["seconds"] < found[0]["seconds"]
    assert found[1]["loss"] < 2 * found[0]["loss"] + 0.01


class HeldBack(PieceServer):
    """Gives nothing before the sum is whole."""

    def offer_pieces(self, step: int, view: int, pieces: Sequence[bytes]) -> None:
        """To no one."""


class SilentOwner(HeldBack):
    """Never gives what it has summed."""

    def offer_sum(self, total: Sum, pieces: Sequence[bytes]) -> None:
        """To no one."""


class UnreadableSums(HeldBack):
    """Signs sums that cannot be decoded."""

    def offer_sum(self, total: Sum, pieces: Sequence[bytes]) -> None:
        wrong = [b"\xc0\x7f" + piece[2:] for piece in pieces]
        lie = replace(total, digests=tuple(map(digest_of, wrong)))
        super().offer_sum(lie.signed(diloco.RUN, self._world.signer), wrong)


class ShortSums(HeldBack):
    """Gives fewer pieces than it owns."""

    def offer_sum(self, total: Sum, pieces: Sequence[bytes]) -> None:
        super().offer_sum(total, pieces[:-1])


class SilentContributor(PieceServer):
    """Never gives a piece of its own updates; what it has summed it gives."""

    async def _give(self, stream: Stream, root: bytes, first: int, count: int) -> None:
        await trio.sleep_forever()


class LateOwner(PieceServer):
    """Gives what it has summed after half a minute."""

    async def _give_sum(self, stream: Stream, step: int, view: int) -> None:
        await self._world.sleep(40.0)
        await super()._give_sum(stream, step, view)


async def honest(self: DilocoSession, record: Record, tokens: int) -> Ready:
    return await DilocoSession._encode(self, record, tokens)


@pytest.mark.parametrize(
    "kind", [SilentOwner, UnreadableSums, ShortSums, SilentContributor, LateOwner]
)
def test_pieces_that_do_not_come_cost_a_view_and_not_the_run(
    kind: type[PieceServer], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next proposer leaves those out that a third of the members got nothing from; the
    update that each has kept is summed again, and the divisor is that of those who are left."""
    monkeypatch.setattr(diloco, "NanServer", kind)
    monkeypatch.setattr(diloco.NanSession, "_encode", honest)
    scenario = changed(quiet(duration=900.0), {"hostile": 1, "rounds": 3})
    metrics = played(scenario)
    assert metrics["newest"] == 3
    assert metrics["views"] >= 1
    assert metrics["convicted"] == (kind is UnreadableSums)


class WrongStates(PieceServer):
    """Gives joiners states that are none, under the right roots."""

    def offer(self, blob: Blob) -> bytes:
        """As the honest one; but other pieces than the digests say."""
        root = super().offer(blob)
        if len(blob.digests) > 1 and len(blob.piece(0)) == 1024:
            self._blobs[root] = Blob(blob.digests, lambda one: bytes(len(blob.piece(one))))
        return root


def test_a_joiner_takes_no_wrong_state_from_a_source(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each piece is judged by the record's digest, and the source that lied is left."""
    monkeypatch.setattr(diloco, "NanServer", WrongStates)
    monkeypatch.setattr(diloco.NanSession, "_encode", honest)
    scenario = replace(load_scenario("diloco"), nodes=5, faults=())
    metrics = played(changed(scenario, {"founders": 4, "hostile": 1, "rounds": 6}))
    assert metrics["rounds"] == 6
    assert metrics["members_end"] >= 4


class TwoRuns(diloco.Pretraining):
    """One site has another run file."""

    strangers = ("site-3",)


def test_a_member_of_another_run_is_not_listened_to() -> None:
    """It counts for nothing: the others go on without it, and it stops."""
    scenario = replace(quiet(), workload="tests.simulation.test_diloco:TwoRuns", duration=150.0)
    metrics = run_scenario(scenario, 1).metrics
    assert metrics["replicas_differ"] == 0
    assert metrics["convicted"] == 0
    assert metrics["members_end"] == 3
    assert metrics["newest"] == 6


def test_same_seed_same_trace() -> None:
    traces = [run_scenario(load_scenario("diloco"), 5).trace_hash for _ in range(2)]
    assert traces[0] == traces[1]
