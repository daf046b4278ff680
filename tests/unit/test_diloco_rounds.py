"""Outer steps are agreed on whatever happens to whom: hundreds of seeds, each a small world."""

from __future__ import annotations

import sys
from dataclasses import replace
from random import Random

import pytest

from p2p.errors import BadMessage
from p2p.identity import PeerId
from roles.diloco.core.election import choose, is_majority
from roles.diloco.core.messages import Outcome, Plan, Promise, Record, RoundMessage, Vote
from roles.diloco.core.round import check_record, genesis
from tests.sweeps import swept
from tests.unit.core_swarm import FakeSigner, fake_verify, peer_named
from tests.unit.diloco_swarm import RUN, DilocoSwarm, Machine, digest, double_vote


@pytest.mark.parametrize("seed", swept(range(40), 1))
def test_faults_of_all_kinds_cost_no_step_and_no_replica(seed: int) -> None:
    """Loss, deaths in the middle of anything, restarts, partitions, clocks off by a minute,
    late joiners: one history, one state a step, no step lost that a majority has signed, and
    the run goes on after the faults. `python -m tests.unit.test_diloco_rounds` plays 200."""
    play_faults(seed)
    play_deaths(seed)


def play_faults(seed: int) -> None:
    swarm = DilocoSwarm(7, seed, skew=60.0, loss=0.05, founders=5)
    dice = Random(seed)
    swarm.start(0, 1, 2, 3, 4)
    swarm.at(dice.uniform(5, 60), lambda: swarm.start(5))
    swarm.at(dice.uniform(5, 60), lambda: swarm.start(6))
    for _ in range(3):
        victim, when = dice.randrange(5), dice.uniform(1, 100)
        swarm.at(when, lambda v=victim: swarm.kill(v))
        swarm.at(when + dice.uniform(1, 40), lambda v=victim: swarm.start(v))
    sides = dice.sample(range(7), 7)
    cut, when = dice.randrange(1, 6), dice.uniform(1, 90)
    swarm.at(when, lambda: swarm.partition(sides[:cut], sides[cut:]))
    swarm.at(when + dice.uniform(5, 60), swarm.heal)
    swarm.run(170)
    swarm.check()
    before = swarm.step()
    swarm.run(230)
    swarm.check()
    assert len(swarm.alive) == 7, seed
    assert swarm.step() > before, f"seed {seed} stands still at {before}"
    assert len(swarm.machines[0].records[-1].members) == 7, f"seed {seed}: some are out"


def play_deaths(seed: int) -> None:
    """Dead proposers, three joins in a round, then half of the members at once."""
    swarm = DilocoSwarm(8, seed, skew=60.0, loss=0.02, founders=5, anchor=0)
    dice = Random(seed)
    swarm.start(0, 1, 2, 3, 4)
    for _ in range(3):
        kill_proposer(swarm, dice.uniform(1, 50), dice)
    swarm.at(dice.uniform(5, 50), lambda: swarm.start(5, 6, 7))
    swarm.run(130)
    swarm.check()
    assert len(swarm.machines[0].records[-1].members) == 8, f"seed {seed}: some are out"
    half = dice.sample(range(1, 8), 4)
    swarm.at(swarm.now + dice.uniform(0, 12), lambda: swarm.kill(*half))
    at = swarm.machines[0].held
    swarm.run(swarm.now + 130)
    swarm.check()
    assert swarm.step() >= at + 3, f"seed {seed} stands still at {swarm.step()}"
    assert len(swarm.machines[0].records[-1].members) == 4


def kill_proposer(swarm: DilocoSwarm, after: float, dice: Random) -> None:
    """From ``after`` seconds on, the first proposer whose plan is being computed."""

    def look() -> None:
        victim = swarm.proposer()
        if victim is None or victim.core is None:
            swarm.at(swarm.now + 0.1, look)
            return
        number = swarm.machines.index(victim)
        swarm.kill(number)
        swarm.at(swarm.now + dice.uniform(0.5, 20), lambda: swarm.start(number))

    swarm.at(after, look)


# Majorities and what must be proposed again.

PEERS = tuple(sorted(peer_named(n) for n in range(5)))
BEFORE = genesis(RUN, PEERS)


def outcome(name: bytes) -> Outcome:
    plan = Plan(1, BEFORE.digest, ((PEERS[0], digest(name)),), PEERS)
    return Outcome(plan, digest(name), digest(name))


def vote(number: int, view: int, name: bytes) -> Vote:
    signer = FakeSigner(PEERS[number])
    return Vote(1, view, outcome(name), author=PEERS[number]).signed(RUN, signer)


def promise(number: int, voted: Vote | None = None) -> Promise:
    return Promise(1, 9, BEFORE.digest, voted, author=PEERS[number])


def test_half_is_a_majority_only_with_the_anchor() -> None:
    four = PEERS[:4]
    assert not is_majority(four[:2], four, None)
    assert is_majority(four[:2], four, four[0])
    assert not is_majority(four[2:], four, four[0])
    assert is_majority(four[1:], four, four[0])
    assert not is_majority(four[:2], four, PEERS[4])


def test_the_newest_vote_is_proposed_again() -> None:
    """Also when its own view cannot have decided it: an earlier one may have, and bound it."""
    a = [promise(n, vote(n, view, b"a")) for n, view in ((0, 0), (1, 0), (3, 1))]
    assert choose(a, PEERS, None) == [outcome(b"a")]
    b = [promise(0, vote(0, 0, b"a")), promise(1, vote(1, 1, b"b")), promise(2)]
    assert choose(b, PEERS, None) == [outcome(b"b")]
    assert choose([promise(0), promise(1), promise(2)], PEERS, None) == []
    # what a liar voted for alone binds no one once the others have promised
    lie = promise(4, vote(4, 0, b"lie"))
    assert choose([lie, promise(0), promise(1)], PEERS, None) == [outcome(b"lie")]
    assert choose([lie, promise(0), promise(1), promise(2)], PEERS, None) == []


def test_a_member_that_votes_for_what_it_made_up_stops_no_round() -> None:
    swarm = DilocoSwarm(4, 1)
    liar = swarm.machines[3]

    def lie(machine: Machine, peer: PeerId, message: RoundMessage) -> RoundMessage:
        if machine is liar and isinstance(message, Vote):
            return double_vote(machine.core, message).other
        if machine is liar and isinstance(message, Promise) and machine.core.round.vote:
            made_up = double_vote(machine.core, machine.core.round.vote).other
            said = Promise(
                message.step, message.view, message.previous, made_up, author=machine.peer
            )
            return said.signed(RUN, FakeSigner(machine.peer))
        return message

    swarm.twist = lie
    swarm.start()
    for second in range(20, 140, 40):  # each death opens a view
        swarm.at(second, lambda: swarm.kill(0))
        swarm.at(second + 3, lambda: swarm.start(0))
    swarm.run(180)
    swarm.check()
    assert swarm.machines[1].held >= 6


def test_of_two_stories_in_one_view_the_one_that_may_have_won_is_carried() -> None:
    told = [promise(0, vote(0, 0, b"a")), promise(1, vote(1, 0, b"b")), promise(2)]
    assert len(choose(told, PEERS, None)) == 2
    more = [*told, promise(3, vote(3, 0, b"b"))]
    assert choose(more, PEERS, None) == [outcome(b"b")]
    spread = [*told[:2], promise(2), promise(3)]
    assert choose(spread, PEERS, None) == []


def test_a_record_needs_the_signatures_of_a_majority_of_the_members_before() -> None:
    votes, other_run = [vote(n, 0, b"a") for n in range(3)], digest(b"another run")
    good = Record(0, outcome(b"a"), tuple((v.author, v.signature) for v in votes))
    check_record(good, BEFORE, RUN, fake_verify, None)
    few, strange = good.signatures[:2], (peer_named(9), votes[0].signature)
    for record, before, run, said in (
        (replace(good, signatures=few), BEFORE, RUN, "no majority"),
        (replace(good, signatures=(strange, *few)), BEFORE, RUN, "no majority"),
        (replace(good, view=1), BEFORE, RUN, "no majority"),
        (good, BEFORE, other_run, "no majority"),
        (good, genesis(other_run, PEERS), RUN, "does not follow"),
    ):
        with pytest.raises(BadMessage, match=said):
            check_record(record, before, run, fake_verify, None)


if __name__ == "__main__":
    first, last = map(int, sys.argv[1:] or ("0", "199"))
    for number in range(first, last + 1):
        play_faults(number)
        play_deaths(number)
    sys.stdout.write(f"seeds {first} to {last}: one history, no step lost, all went on\n")
