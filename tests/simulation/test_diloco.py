"""Whole members on simulated hosts: what goes wrong costs a round at most, and no replica."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import trio

from p2p.errors import StorageError
from p2p.host import Stream
from p2p.identity import PeerId
from p2p.world import World
from roles.diloco.core.messages import PIECES_PROTOCOL, Ready, Record, RoundMessage, Sum
from roles.diloco.core.pieces import CLIP, digest_of
from roles.diloco.core.round import RoundCore
from roles.diloco.exchange import Blob, PieceClient, PieceServer, PiecesUnavailable, Read
from roles.diloco.session import DilocoSession
from roles.engines.base import EngineError
from sim.faults.plan import Fault
from sim.net.link import LinkSpec
from sim.node.swarm import SimNode, Swarm
from sim.run.runner import run_scenario
from sim.run.scenario import Scenario, load_scenario
from sim.run.sweep import changed
from sim.workloads import diloco
from sim.workloads.inner import FakeInner
from tests.support.pieces import in_memory
from tests.support.simulated import on_swarm
from tests.sweeps import swept

Quiet = Callable[..., Scenario]
ALGORITHMS = [{}, {"parallel": 1}, {"fragments": 4}]
NAMES = ["diloco", "parallel", "fragments"]


def founders(settings: Mapping[str, int], **changes: Any) -> Scenario:
    """Four, no faults but those given."""
    scenario = replace(load_scenario("diloco"), **{"nodes": 4, "faults": (), **changes})
    return changed(scenario, {"founders": 4, "rounds": 6, "join_at": 1, **settings})


@pytest.fixture(params=swept(ALGORITHMS, 1), ids=swept(NAMES, 1))
def quiet(request: pytest.FixtureRequest) -> Quiet:
    """Founders under each outer algorithm: rounds and recovery are the same for all."""
    return partial(founders, request.param)


def played(scenario: Scenario, seed: int = 1) -> Mapping[str, Any]:
    metrics = run_scenario(scenario, seed).metrics
    assert metrics["replicas_differ"] == 0
    assert metrics["wrongly_named"] == 0
    return metrics


@pytest.mark.parametrize("seed", swept(range(1, 4), 1))
@pytest.mark.parametrize("settings", swept(ALGORITHMS, 1), ids=swept(NAMES, 1))
def test_a_storm_of_faults_leaves_equal_replicas(
    settings: Mapping[str, int], seed: int
) -> None:
    metrics = played(changed(load_scenario("diloco"), settings), seed)
    assert metrics["rounds"] == 14
    assert metrics["members_end"] == 7


@pytest.mark.parametrize("point", swept(range(20), 2))
def test_a_trainer_killed_at_any_point_loses_one_inner_phase_at_most(
    quiet: Quiet, point: int
) -> None:
    """By turns with a power cut: what it signed was durable before it was sent."""
    kind = ("kill", "torn")[point % 2]
    fault = Fault(at=12.0 + 1.05 * point, kind=kind, who=("site-1",), seconds=2.0)
    scenario = changed(quiet(faults=(fault,)), {"rounds": 4})
    metrics = played(scenario)
    assert metrics["rounds"] == 4
    assert metrics["members_end"] == 4
    assert metrics["convicted"] == 0
    assert metrics["steps_again"] <= 100


def test_a_wiped_disk_is_a_joiner(quiet: Quiet) -> None:
    fault = Fault(at=25.0, kind="wipe", who=("site-1",), seconds=3.0)
    metrics = played(quiet(faults=(fault,)))
    assert metrics["rounds"] == 6
    assert metrics["members_end"] == 4


def test_a_full_disk_stops_no_other_and_loses_nothing(quiet: Quiet) -> None:
    fault = Fault(at=15.0, kind="full_disk", who=("site-1",), seconds=20.0)
    metrics = played(quiet(faults=(fault,)))
    assert metrics["rounds"] == 6
    assert metrics["convicted"] == 0


@pytest.mark.parametrize("way", swept(range(5), 1))
def test_one_hostile_site_of_fourteen_is_named_or_bounded(way: int) -> None:
    """Some are convicted within three rounds, the others' harm is clipped."""
    scenario = changed(load_scenario("diloco_hostile"), {"hostile": 1, "way": way, "rounds": 5})
    metrics = played(scenario, seed=way + 1)
    assert metrics["rounds"] == 5
    assert metrics["convicted"] == (way not in diloco.BOUNDED)
    assert metrics["named_by_round"] <= 3
    assert metrics["moved"] <= CLIP / 14 * 1.01
    assert metrics["loss"] < 0.3


def test_a_disk_that_takes_no_weights_is_waited_for(
    quiet: Quiet, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine's own files are written each round; a disk that refused one ended the role."""
    refused = 0
    load = FakeInner.load

    async def full(self: FakeInner, state: str, span: slice, *, is_ahead: bool) -> None:
        nonlocal refused
        refused += 1
        if refused in range(3, 9):
            raise StorageError("no space left")
        await load(self, state, span, is_ahead=is_ahead)

    monkeypatch.setattr(FakeInner, "load", full)
    assert played(quiet())["rounds"] == 6
    assert refused > 9


@pytest.mark.parametrize("fragments", swept([1, 4], 1))
def test_with_overlap_compute_does_not_wait_for_the_exchange(fragments: int) -> None:
    """On lines of 0.2 Mbit/s the exchange takes a fifth of a round."""
    slow = LinkSpec(up=0.2, down=0.2)
    found = {}
    for overlap in (0, 1):
        settings = {"overlap": overlap, "fragments": fragments}
        scenario = founders(settings, link=slow, duration=900.0)
        found[overlap] = played(scenario)
        assert found[overlap]["rounds"] == 6
    assert found[1]["utilised"] >= 0.97 > found[0]["utilised"]
    assert found[1]["seconds"] < found[0]["seconds"]
    assert found[1]["loss"] < 2 * found[0]["loss"] + 0.01


class HeldBack(PieceServer):
    """Gives nothing before the sum is whole."""

    history: bytes

    def offer_pieces(self, step: int, view: int, read: Read, span: range) -> None:
        """To no one."""


class SilentOwner(HeldBack):
    """Never gives what it has summed."""

    async def offer_sum(self, total: Sum, read: Read) -> None:
        """To no one."""


class UnreadableSums(HeldBack):
    """Signs sums that cannot be decoded."""

    spoilt = staticmethod(lambda piece: b"\xc0\x7f" + piece[2:])

    async def offer_sum(self, total: Sum, read: Read) -> None:
        async def wrong(index: int) -> bytes:
            return self.spoilt(await read(index))

        digests = [digest_of(await wrong(one)) for one in total.span]
        lie = replace(total, digests=tuple(digests))
        await super().offer_sum(lie.signed(self.history, self._world.signer), wrong)


class LongSums(UnreadableSums):
    spoilt = staticmethod(lambda piece: piece + b"\0")


class ShortSums(HeldBack):
    """Gives fewer pieces than it owns."""

    async def offer_sum(self, total: Sum, read: Read) -> None:
        await super().offer_sum(replace(total, digests=total.digests[:-1]), read)


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
    "kind",
    swept([SilentOwner, UnreadableSums, LongSums, ShortSums, SilentContributor, LateOwner], 2),
)
def test_pieces_that_do_not_come_cost_a_view_and_not_the_run(
    quiet: Quiet, kind: type[PieceServer], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next proposer leaves out whom a third got nothing from."""
    monkeypatch.setattr(diloco, "NanServer", kind)
    monkeypatch.setattr(diloco.NanSession, "_encode", honest)
    scenario = changed(quiet(duration=900.0), {"hostile": 1, "rounds": 3})
    metrics = played(scenario)
    assert metrics["newest"] == 3
    assert metrics["views"] >= 1
    assert metrics["convicted"] == issubclass(kind, UnreadableSums)


class Zeros(Blob):
    """Gives nothing of a state but its length."""

    async def read(self, index: int) -> bytes:
        piece = await super().read(index)
        return bytes(len(piece)) if len(piece) == 1024 else piece


class WrongStates(PieceServer):
    """Gives joiners states that are none, under the right roots."""

    def offer(self, blob: Blob) -> bytes:
        return super().offer(Zeros(blob.digests, blob.file))


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


def test_a_member_of_another_run_is_not_listened_to(quiet: Quiet) -> None:
    """It counts for nothing: the others go on without it, and it stops."""
    scenario = replace(quiet(), workload="tests.simulation.test_diloco:TwoRuns", duration=150.0)
    metrics = run_scenario(scenario, 1).metrics
    assert metrics["replicas_differ"] == 0
    assert metrics["convicted"] == 0
    assert metrics["members_end"] == 3
    assert metrics["newest"] == 6


@pytest.mark.parametrize("settings", swept([{}, {"overlap": 1}, {"parallel": 1}], 1))
def test_a_paused_member_leaves_at_a_border_and_comes_back(
    monkeypatch: pytest.MonkeyPatch, settings: Mapping[str, int]
) -> None:
    """It went on computing for others on a machine that its owner wanted for something else."""
    session: list[DilocoSession] = []
    at: list[int] = []
    taken: list[int] = []
    work = DilocoSession.work_forever

    async def paused(self: DilocoSession) -> None:
        if self._host.peer_id != self._beginning.members[1]:
            await work(self)
            return
        session.append(self)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(work, self)
            while self.step < 1:
                await self._world.sleep(0.5)
            self.rest(True)
            while self.step < 4:
                await self._world.sleep(0.5)
                if self.step >= 3:
                    taken.append(self.figures.inner_steps)
            at.append(self.step)
            assert not self.core.is_member
            self.rest(False)

    monkeypatch.setattr(DilocoSession, "work_forever", paused)
    metrics = played(changed(founders(settings), {"rounds": 8}))
    (one,) = session
    members = [one.core.me in record.members for record in one.core.records]
    assert metrics["rounds"] == 8
    assert metrics["convicted"] == 0
    assert metrics["members_end"] == 4
    assert not any(members[3 : at[0] + 1])
    assert members[-1]
    assert len({*taken}) == 1  # nothing is computed meanwhile


def test_a_member_whose_inner_steps_fail_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    """An environment that raised was only logged, and the screen went on saying "learning"."""
    sessions: list[DilocoSession] = []
    work = DilocoSession.work_forever

    async def work_forever(self: DilocoSession) -> None:
        sessions.append(self)
        await work(self)

    async def train(self: FakeInner, first: int, steps: int, window: int) -> Any:
        await trio.lowlevel.checkpoint()
        raise EngineError("task() of the environment 'sums': OSError: gone")

    monkeypatch.setattr(DilocoSession, "work_forever", work_forever)
    monkeypatch.setattr(FakeInner, "train", train)
    run_scenario(replace(founders({}), duration=30.0), 1)
    assert sessions
    for session in sessions:
        assert "'sums': OSError: gone" in session.trouble
        assert session.health()["now"] == f"learning nothing: {session.trouble}"


def test_a_message_that_crashes_ends_no_member(
    quiet: Quiet, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever it was ended every member that it came to."""
    receive = RoundCore._receive
    crashed = []

    def crash(self: RoundCore, peer: PeerId, message: RoundMessage, now: float) -> None:
        if isinstance(message, Ready) and peer == max(self.members) and len(crashed) < 6:
            crashed.append(self.me)
            raise OverflowError("intermediate overflow in fsum")
        receive(self, peer, message, now)

    monkeypatch.setattr(RoundCore, "_receive", crash)
    metrics = played(quiet())
    assert crashed
    assert metrics["rounds"] == 6


# A state from several members at once


PIECES = [bytes([one]) * 200_000 for one in range(48)]
LINE = LinkSpec(up=8.0, down=100.0)


class Liar(PieceServer):
    """Gives other bytes than it was asked for."""

    def offer(self, blob: Blob) -> bytes:
        return super().offer(in_memory([bytes(200_000)] * 48, blob.digests))


class Half(PieceServer):
    """Has the list, and half of the pieces."""

    def offer(self, blob: Blob) -> bytes:
        half = [piece if one < 24 else piece[:-1] for one, piece in enumerate(PIECES)]
        return super().offer(in_memory(half, blob.digests))


class Dripper(PieceServer):
    """Has all, and gives a byte a second."""

    async def _give(self, stream: Stream, root: bytes, first: int, count: int) -> None:
        for byte in b"\xff" * 1000:
            await stream.send_all(bytes([byte]))
            await self._world.sleep(1.0)


class Mute(PieceServer):
    """Takes every question, and answers none."""

    async def serve(self, stream: Stream) -> None:
        await trio.sleep_forever()


def fetched(kinds: list[type[PieceServer]], most: float = 600.0) -> tuple[float, list[bytes]]:
    """Seconds, and the pieces, of one joiner from sources of these kinds."""
    done: list[tuple[float, list[bytes]]] = []

    async def source(kind: type[PieceServer], machine: SimNode) -> None:
        server = kind(machine.world, lambda peer: True)
        server.offer(in_memory(PIECES))
        async with machine.open_host() as host:
            with host.serving(PIECES_PROTOCOL, server.serve):
                await trio.sleep_forever()

    async def joiner(machine: SimNode) -> None:
        world: World = machine.world
        async with machine.open_host() as host:
            for other in machine.siblings:
                host.add_addrs(other.peer_id, [other.addr])
            client = PieceClient(world, host)
            began = world.now()
            sources = [other.peer_id for other in machine.siblings]
            found: dict[int, bytes] = {}

            async def take(index: int, piece: bytes) -> None:
                found[index] = piece

            try:
                await client.blob(in_memory(PIECES).root, sources, len(PIECES), take)
            except PiecesUnavailable:
                found.clear()
            done.append((world.now() - began, [found[one] for one in sorted(found)]))

    async def play(swarm: Swarm) -> None:
        for number, kind in enumerate(kinds):
            swarm.add(f"s{number}", lambda machine, k=kind: source(k, machine), link=LINE)
        await swarm.sleep(1)
        swarm.add("joiner", joiner, link=LINE)
        while not done and swarm.simulation.now < most:
            await swarm.sleep(0.5)

    on_swarm(play)
    return done[0]


@pytest.fixture(scope="module")
def alone() -> float:
    seconds, pieces = fetched([PieceServer])
    assert pieces == PIECES
    return seconds


@pytest.mark.parametrize("sources", swept([2, 3, 4], 1))
def test_recovery_from_several_is_faster_by_their_number(alone: float, sources: int) -> None:
    """At least 0.7 times as much faster; PRIME's joiner had one source, picked by hand."""
    seconds, pieces = fetched([PieceServer] * sources)
    assert pieces == PIECES
    assert alone / seconds >= 0.7 * sources


@pytest.mark.parametrize("kind", [Liar, Half])
def test_one_source_that_lies_or_has_half_does_no_harm(kind: type[PieceServer]) -> None:
    for kinds in ([kind, PieceServer, PieceServer], [PieceServer, kind]):
        assert fetched(kinds)[1] == PIECES


@pytest.mark.parametrize("kind", [Dripper, Mute])
def test_a_source_that_drips_delays_no_recovery(alone: float, kind: type[PieceServer]) -> None:
    """The first source was waited for, a minute for each piece."""
    seconds, pieces = fetched([kind, PieceServer, PieceServer])
    assert pieces == PIECES
    assert seconds < alone


def test_without_an_honest_source_there_is_no_state() -> None:
    assert fetched([Liar, Liar])[1] == []
