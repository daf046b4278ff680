"""Officers that tell two stories, of their ledger or their beacon, and what becomes of them."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import trio

from p2p.errors import BadMessage
from p2p.identity import KeyPair, Signer, verify
from p2p.ledger import open_ledger
from p2p.ledger.core.chain import EMPTY, LedgerFork, make_entry
from p2p.machine import RealWorld
from p2p.policy import PolicyVersion
from roles.ledger.core.wording import wording_untrusted
from roles.protocol.away import HeardAway
from roles.protocol.beacon import HeardBeacon
from roles.protocol.core.away import Away
from roles.protocol.core.beacon import (
    Chain,
    Pledge,
    Reveal,
    TwoPledges,
    decode_two_pledges_untrusted,
)
from roles.protocol.core.statements import PLEDGES_KIND
from roles.validator import prosecution
from roles.validator.prosecution import Prosecution
from tests.trainer_bench import JUDGE, OWNER, TRAINER, Bench, open_bench

CHAINS = [Chain(letter * 32) for letter in (b"a", b"b")]
OTHER = KeyPair(b"o" * 32)
CROWD = [KeyPair(bytes([number]) * 32).peer_id for number in range(40, 60)]


def pledge(run: bytes, which: int, *, began: int = 1000, by: Signer = TRAINER) -> Pledge:
    return Pledge(run, by.peer_id, began, CHAINS[which].end).signed(by)


def proof_for(run: bytes, by: Signer = TRAINER) -> TwoPledges:
    return TwoPledges(pledge(run, 0, by=by), pledge(run, 1, by=by))


def test_two_pledges_are_a_proof_and_nothing_less_is() -> None:
    whole = proof_for(b"r" * 32).to_bytes()
    assert decode_two_pledges_untrusted(whole, verify) == proof_for(b"r" * 32)
    for at in range(len(whole)):
        changed = whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :]
        with pytest.raises(BadMessage):
            decode_two_pledges_untrusted(changed, verify)
    one = pledge(b"r" * 32, 0)
    others = (one, pledge(b"r" * 32, 1, began=1001), pledge(b"q" * 32, 1))
    for other in (*others, pledge(b"r" * 32, 1, by=OWNER)):
        with pytest.raises(ValueError, match="different ends"):
            TwoPledges(one, other)


async def test_a_node_that_has_heard_one_chain_learns_of_the_other_from_a_ledger(
    tmp_path: Path,
) -> None:
    """A validator states the proof, once; nobody has to trust it."""
    async with open_bench(tmp_path / "bench", ban_seconds=60) as bench:
        proof = proof_for(bench.run.id)
        here = HeardBeacon(bench.node)
        assert here.hear(Reveal(pledge(bench.run.id, 0), 1, CHAINS[0].link(1)))
        assert here.links.is_live(bench.world.now())
        world = RealWorld(JUDGE, tmp_path / "judge")
        async with open_ledger(world) as ledger:
            await accuse(bench, ledger, proof)
            await accuse(bench, ledger, proof)
            entries = [entry async for entry in ledger.entries(PLEDGES_KIND)]
        assert len(entries) == 1
        assert wording_untrusted(entries[0], verify).about == TRAINER.peer_id
        bench.ledgers.take_own(entries[0])
        assert here.links.forked == proof
        assert not here.links.is_live(bench.world.now())
        assert not HeardBeacon(bench.node).links.is_live(
            bench.world.now()
        )  # a role that starts


async def accuse(bench: Bench, ledger: Any, proof: TwoPledges) -> None:
    async def opened() -> Any:
        await trio.lowlevel.checkpoint()
        return ledger

    node: Any = SimpleNamespace(world=bench.world, ledger=SimpleNamespace(opened=opened))
    heard = HeardBeacon(bench.node)
    heard.links.convict(proof)
    durable: Any = SimpleNamespace(insist=lambda write: write())
    judge: Any = None
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(prosecution, "beacon_of", lambda _: heard)
        await Prosecution(node, judge, durable, lambda: None).accuse_trainer()


@pytest.mark.parametrize("body", [b"", b"nonsense", proof_for(b"q" * 32).to_bytes()])
async def test_what_proves_nothing_about_this_trainer_ends_no_lots(
    tmp_path: Path, body: bytes
) -> None:
    async with open_bench(tmp_path, ban_seconds=60) as bench:
        here = HeardBeacon(bench.node)
        here.hear(Reveal(pledge(bench.run.id, 0), 1, CHAINS[0].link(1)))
        stranger = proof_for(bench.run.id, by=OWNER).to_bytes()
        for number, said in enumerate((body, stranger)):
            judge = JUDGE if not number else TRAINER
            bench.ledgers.take_own(make_entry(EMPTY, judge, PLEDGES_KIND, said, 1.0))
        assert here.links.is_live(bench.world.now())


@pytest.mark.parametrize("is_heard_first", [False, True])
async def test_a_validator_whose_ledger_forks_gets_no_lots_any_more(
    tmp_path: Path, is_heard_first: bool
) -> None:
    """Its deliveries were refused, and workers went on handing it theirs. Nobody waits for a
    word of the trainer's, which may be away."""
    judges = (JUDGE.peer_id, OTHER.peer_id)
    async with open_bench(tmp_path, ban_seconds=60, validators=judges) as bench:
        one, other = (make_entry(EMPTY, JUDGE, "verdict", body, 1.0) for body in (b"1", b"2"))
        heard = None if is_heard_first else HeardAway(bench.node)
        bench.ledgers.take_own(LedgerFork(one, other))
        heard = heard or HeardAway(bench.node)
        run, version = bench.run, PolicyVersion(3)
        assert {heard.judge_of(run, who, version) for who in CROWD} == {OTHER.peer_id}
        heard.hear(TRAINER.peer_id, Away(1, ()))
        assert heard.validators == {JUDGE.peer_id}
        if not is_heard_first:  # what it has judged before is on its way
            assert any(JUDGE.peer_id in heard.judges_of(run, who, version) for who in CROWD)
