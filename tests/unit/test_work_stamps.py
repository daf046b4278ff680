"""Work stamps for those who submit work to an open run: what they cost, whom they bind, and
who is refused without."""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

import pytest

from p2p.dht.stamp import stamp_cost
from p2p.node.admission import Capability, find_work, work_bits
from p2p.node.node import Node
from roles.contract import Run
from roles.contract.core.file import AdmissionRules, sign_run
from roles.contract.core.sampling import SamplingTerms
from roles.inference.role import Inference
from roles.trainer.core.pace import Paces
from sim.node.swarm import Swarm
from sim.workloads import spine
from tests.support.runs import OWNER, RUN, STRANGER, TERMS, TRAINER
from tests.support.swarm import CAST, Play, perform, scored, trainer_of

BITS = 10


def test_a_stamp_is_checked_by_one_hash_and_is_of_one_run_and_identity() -> None:
    made = [find_work(RUN.id, peer, BITS) for peer in (STRANGER.peer_id, TRAINER.peer_id)]
    assert work_bits(RUN.id, STRANGER.peer_id, made[0]) >= BITS
    assert work_bits(RUN.id, STRANGER.peer_id, made[1]) < BITS
    assert work_bits(bytes(32), STRANGER.peer_id, made[0]) < BITS
    assert work_bits(RUN.id, STRANGER.peer_id, made[0] + b"\0") == 0
    assert find_work(RUN.id, STRANGER.peer_id, 250) == b""  # not among so many tries
    assert stamp_cost(26) == pytest.approx(34, rel=0.05)


def with_stamps(monkeypatch: pytest.MonkeyPatch) -> None:
    real = spine.Spine.make_run

    def make_run(self: spine.Spine, swarm: Swarm, sampling: SamplingTerms) -> Run:
        rules = AdmissionRules(stamp_bits=BITS)
        terms = replace(real(self, swarm, sampling).terms, admission=rules)
        return sign_run(terms, swarm.simulation.keys.signer("owner"))

    monkeypatch.setattr(spine.Spine, "make_run", make_run)


class Sparing(Inference):
    """Does honest work, and makes no stamp for it."""

    name: ClassVar[str] = "sparing"

    async def run(self, node: Node) -> None:
        node.book.lacks_work = lambda *_, **__: False  # type: ignore[method-assign]
        await super().run(node)


def test_who_shows_its_stamp_works_and_who_does_not_is_told_what_to_do(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Ten fresh names cost a key each, and each had its share of the scorer."""
    with_stamps(monkeypatch)
    sparing = {"sparing-1": f"{__name__}:Sparing"}
    cast = {name: role for name, role in CAST.items() if name != "inference-2"}
    health = perform(Play({**cast, **sparing}), steps=1000, seconds=30)
    assert scored(health, "inference-1")["accepted"] > 5
    assert scored(health, "sparing-1")["accepted"] == 0
    assert trainer_of(health)["refused"]["no work stamp"] > 0


def test_a_run_names_whom_it_asks_for_no_stamp() -> None:
    rules = AdmissionRules(stamp_bits=BITS, allowed=(STRANGER.peer_id,))
    run = sign_run(replace(TERMS, admission=rules), OWNER)
    assert not run.needs_stamp(STRANGER.peer_id)
    assert run.may(STRANGER.peer_id, Capability.GENERATE)
    assert f"{BITS} bits" in run.lacks_stamp
    assert len(run.lacks_stamp) <= 200
    for wrong in ({"stamp_bits": 41}, {"stamp_bits": -1}, {"min_memory": -1}):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            AdmissionRules(**wrong)  # type: ignore[arg-type]
    for revoked in (("zz",), ("0" * 16, "0" * 16)):
        with pytest.raises(ValueError, match="invite"):
            AdmissionRules(revoked=revoked)


def test_a_pace_is_what_was_accepted_of_late() -> None:
    paces, worker, other = Paces(), STRANGER.peer_id, TRAINER.peer_id
    for second in range(0, 7200, 10):
        paces.note(worker, 500, float(second))
    assert paces.of(worker, 7200.0) == pytest.approx(50, rel=0.05)
    assert paces.of(worker, 7200.0 + 3600) == pytest.approx(50 * 0.135, rel=0.1)
    paces.note(other, 600, 7200.0)
    assert paces.of(other, 7200.0) == pytest.approx(10, rel=0.05)
    shown = paces.health(7200.0, 20.0)
    assert [one["is_slow"] for one in shown.values()] == [False, True]
