"""Strangers that send windows as fast as they can, and newcomers that all want to be scored by
the trainer, do not shut out those who work."""

from __future__ import annotations

from statistics import median
from typing import Any

import pytest
import trio

from p2p.errors import PeerUnreachable
from p2p.identity import PeerId
from p2p.shardcast.manifest import PolicyVersion
from p2p.wire import FrameReader, frame
from roles.contract.core.trust import TrustTerms
from roles.protocol.core.answer import (
    MAX_ANSWER,
    WORK_PROTOCOL,
    Answer,
    WindowRequest,
    decode_reply_untrusted,
    encode_request,
)
from roles.protocol.core.terms import terms_digest
from roles.protocol.core.window import Claim, SignedWindow, Window
from roles.protocol.scorer import Scorer
from sim.node.swarm import NodeMain, SimNode, Swarm
from tests.support.gates import TRUST, with_one_listed
from tests.support.swarm import CAST, Play, nobody_honest_is_rejected, perform, trainer_of
from tests.sweeps import swept

STRANGERS = 100
STREAMS = 4
SECONDS = 25


class Flooded(Play):
    """Strangers with keys of their own, and no more than that, come to the trainer."""

    def __init__(self, strangers: int, *, is_slow: bool = False) -> None:
        super().__init__({**CAST, "inference-3": "inference"}, with_one_listed(TRUST))
        self._strangers = strangers
        self._is_slow = is_slow
        self.answers = 0

    async def disturb(self, swarm: Swarm) -> None:
        for number in range(self._strangers):
            swarm.add(f"stranger-{number}", self._flood())

    def _flood(self) -> NodeMain:
        async def live(machine: SimNode) -> None:
            swarm = self._swarm
            assert swarm is not None
            trainer = swarm.nodes["trainer-1"]
            async with machine.open_host() as host, trio.open_nursery() as nursery:
                host.add_addrs(trainer.peer_id, (trainer.addr,))
                for number in range(STREAMS):
                    nursery.start_soon(self._send, machine, host, trainer.peer_id, number)

        return live

    async def _send(self, machine: SimNode, host: Any, trainer: PeerId, number: int) -> None:
        run = self._run
        assert run is not None
        claims = bytes([Claim.SPREAD] * run.terms.sampling.submission)
        first = 0
        while True:
            shardcast = self._open["trainer-1"][0].shardcast
            version = PolicyVersion(max(0, shardcast.newest))
            policy = shardcast.manifest(version).weights_digest
            head = run.id, terms_digest(run), machine.peer_id, version, policy  # type: ignore[attr-defined]
            window = Window(*head, first, (bytes(31) + bytes([number]),), claims)
            signed = SignedWindow.sign(window, machine.world.signer)
            try:
                async with await host.open_stream(trainer, WORK_PROTOCOL) as stream:
                    if self._is_slow:
                        await machine.world.sleep(30)
                    await stream.send_all(frame(encode_request(WindowRequest(signed))))
                    data = await FrameReader(stream, MAX_ANSWER + 1024).receive()
                    reply = None if data is None else decode_reply_untrusted(data, None)
                    self.answers += isinstance(reply, Answer)
                    first += isinstance(reply, Answer)
            except (trio.BrokenResourceError, PeerUnreachable):
                await machine.world.sleep(0.1)


@pytest.mark.deep
@pytest.mark.parametrize("is_slow", swept([False, True], 1))
def test_strangers_take_at_most_a_fifth_of_honest_acceptances(is_slow: bool) -> None:
    quiet = trainer_of(perform(Flooded(0), steps=400, seconds=SECONDS))
    play = Flooded(STRANGERS, is_slow=is_slow)
    health = perform(play, steps=400, seconds=SECONDS)
    flooded = trainer_of(health)
    assert is_slow or play.answers > 100
    assert nobody_honest_is_rejected(health)
    assert flooded["submissions_taken"] >= 0.8 * quiet["submissions_taken"] > 20


class Crowded(Play):
    """Many newcomers, whom the trainer has to score itself, beside one in standing."""

    def __init__(self, newcomers: int) -> None:
        names = [f"inference-{number}" for number in range(1, newcomers + 2)]
        cast = {"relay-1": "none", "trainer-1": "trainer", **dict.fromkeys(names, "inference")}
        trust = TrustTerms(share=0.25, probation=10_000, window=4)
        super().__init__(cast, with_one_listed(trust))


@pytest.mark.deep
def test_newcomers_do_not_starve_those_in_standing_at_the_trainers_scorer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """They were scored in turn with everybody: with twelve of them one place in thirteen was
    learnt from."""
    check = Scorer._check

    async def slow(self: Scorer, *args: Any) -> Any:
        await self._node.world.sleep(0.15)
        return await check(self, *args)

    monkeypatch.setattr(Scorer, "_check", slow)
    ratios = []
    for seed in (1, 2, 3):  # single seeds scatter from 0.6 to 1.4
        alone = trainer_of(perform(Crowded(0), seed, steps=400, seconds=SECONDS))
        among = trainer_of(perform(Crowded(12), seed, steps=400, seconds=SECONDS))
        assert alone["submissions_taken"] > 20
        assert among["accepted"] > among["submissions_taken"]  # newcomers get their share
        ratios.append(among["submissions_taken"] / alone["submissions_taken"])
    assert median(ratios) >= 0.7
