"""A worker whose weak signals lean loses its standing, and is not punished otherwise."""

from __future__ import annotations

import pytest

from p2p.identity import PeerId
from p2p.shardcast.manifest import PolicyVersion
from roles.protocol.core.pooled import PooledSignals, Signals
from roles.protocol.core.standing import Standings
from tests.simulation.test_lots import CAST, SMALL, with_lots, workers
from tests.simulation.test_roles_faults import Play, perform

__all__ = ["with_lots"]


def test_a_leaning_worker_is_a_newcomer_again(monkeypatch: pytest.MonkeyPatch) -> None:
    leaning: list[PeerId] = []
    fallen: list[PeerId] = []

    def note(_: PooledSignals, worker: PeerId, version: PolicyVersion, seen: Signals) -> bool:
        assert version >= 0
        assert seen.off == seen.surprise == 0
        if leaning:
            return False
        leaning.append(worker)
        return True

    reject = Standings.note_rejected

    def note_rejected(standings: Standings, identity: PeerId) -> None:
        assert standings.earned(identity, 0.0) > 0
        fallen.append(identity)
        reject(standings, identity)

    monkeypatch.setattr(PooledSignals, "note", note)
    monkeypatch.setattr(Standings, "note_rejected", note_rejected)
    health = perform(Play(CAST), steps=6, **SMALL)
    assert health["done"] == 1
    assert fallen == leaning
    assert len(fallen) == 1
    assert all(one["life"]["rejected"] == 0 for one in workers(health))
