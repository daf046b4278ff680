"""Nodes whose trainer is of another version of Shoal say which version whom is missing."""

from __future__ import annotations

import logging

import pytest

from p2p.errors import BadMessage
from p2p.identity import ProtocolId
from p2p.wire import pack, unpack_untrusted
from roles.contract.core.file import FORMAT, decode_run_untrusted
from roles.contract.core.sampling import SamplingTerms
from roles.own.status import SwarmStatus
from roles.protocol.core.answer import WORK_PROTOCOL, WORK_SINCE
from roles.trainer import role
from sim.node.swarm import Swarm
from sim.run.scenario import Scenario
from tests.support.runs import RUN
from tests.support.swarm import Play, perform, roles_of

SPEAKS = {"relay-1": "none", "trainer-1": "trainer", "inference-1": "inference"}


@pytest.mark.parametrize(
    ("runs", "said"),
    [
        ("0.1.0", f"it needs Shoal {WORK_SINCE} or newer (git pull in its checkout)"),
        ("9.1.2", "this node needs that version (git pull in its checkout)"),
    ],
)
def test_a_node_whose_trainer_speaks_another_protocol_names_the_version(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, runs: str, said: str
) -> None:
    """Nothing came of its work, and nothing was said."""
    monkeypatch.setattr(role, "WORK_PROTOCOL", ProtocolId("/shoal/rollout/1.0.0"))

    class Other(Play):
        async def _play(
            self, swarm: Swarm, scenario: Scenario, sampling: SamplingTerms
        ) -> SwarmStatus:
            await swarm.sleep(5)
            node, _ = self._open["trainer-1"]
            node.membership.me.update(version=runs)
            await swarm.sleep(60)
            return self._status(sampling)

    with caplog.at_level(logging.WARNING):
        health = perform(Other(SPEAKS | {"validator-1": "validator"}))
    sentences = [
        one["now"] for kind in ("inference", "validator") for one in roles_of(health, kind)
    ]
    assert len(sentences) == 2
    for sentence in sentences:
        assert said in sentence, sentence
        assert f"does not speak {WORK_PROTOCOL}" in sentence
        assert (f"the trainer runs Shoal {runs}," if runs else "another version") in sentence
    loud = [one for one in caplog.messages if one.startswith("other_version")]
    assert len(loud) == 2, "each says it once"


def test_a_run_file_of_another_format_names_the_remedy() -> None:
    head = unpack_untrusted(RUN.document)
    assert isinstance(head, list)
    for number, remedy in ((FORMAT + 1, "upgrade Shoal here"), (FORMAT - 1, "its owner signs")):
        with pytest.raises(BadMessage, match=remedy):
            decode_run_untrusted(pack([number, *head[1:]]))
