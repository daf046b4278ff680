"""Requests to be neighbours, urgent or not, do not take a node's neighbours from it.

The swarms here are attacked for a minute; `python -m sim run urgent_links` is the long form.
"""

from __future__ import annotations

import itertools
from random import Random
from typing import Any

import pytest

from p2p.events import Received, Send, Tick
from p2p.membership import messages as msg
from p2p.membership.config import MembershipConfig
from p2p.membership.core.events import Bootstrap
from p2p.membership.core.member_list import MemberList
from p2p.membership.heartbeat import key_of
from p2p.multiaddr import Multiaddr
from tests.attacks.membership_enemies import HostileSwarm, watch
from tests.sweeps import swept
from tests.unit.core_swarm import Node, peer_named
from tests.unit.membership_swarm import addr_of, heartbeat_of, make_core, sent, tell

SIZE = 40
QUIET = 900.0
"""Bytes per second that a node of such a swarm sends when nothing happens: 760 to 800."""


@pytest.mark.parametrize("kind", swept(["urgent", "join", "link", "beat"], 1))
def test_a_flood_of_requests_leaves_every_node_its_neighbours(kind: str) -> None:
    swarm = HostileSwarm(SIZE)
    honest = list(swarm.nodes)
    swarm.run(40)
    enemies, rng = swarm.enlist(16), Random(1)
    swarm.be_polite()

    def ask() -> None:
        for enemy in enemies:
            for victim in rng.sample(honest, 3):
                words = swarm.words(enemy, int(swarm.now * 1000))
                message = {
                    "urgent": msg.Neighbor(True, words),
                    "join": msg.Join(words),
                    "link": msg.Neighbor(False, words),
                    "beat": msg.Beat(True, words),
                }[kind]
                swarm.tell(enemy, victim, message)

    swarm.every(2.0, ask)
    seen = watch(swarm, honest, 60)
    assert seen.neighbours >= 3
    assert seen.share >= 0.7
    assert seen.bytes_per_second <= 3 * QUIET


def test_neighbours_of_our_own_choice_stay_and_the_oldest_are_anchors() -> None:
    swarm = HostileSwarm(30)
    honest = list(swarm.nodes)
    swarm.run(120)
    victim = swarm.nodes[honest[7]]
    anchors = victim.core._active_view.anchors
    assert 1 <= len(anchors) <= 2
    for number in range(200):
        enemy = swarm.enlist(1)[0]
        swarm.tell(enemy, victim.peer, msg.Neighbor(True, swarm.words(enemy, 1)))
        if number % 20 == 0:
            swarm.run(0.5)
    swarm.run(2)
    assert victim.core._active_view.anchors == anchors
    assert set(anchors) <= set(victim.core.neighbours)


def of_one_network(number: int) -> Multiaddr:
    return Multiaddr.parse(f"/ip4/8.8.8.{number % 250 + 1}/tcp/4001")


def test_one_network_has_a_share_of_the_view() -> None:
    swarm = HostileSwarm(40)
    swarm.run(60)
    victim = swarm.nodes[peer_named(3)]
    enemies = swarm.enlist(240)
    for number, enemy in enumerate(enemies):
        words = swarm.words(enemy, 1, addrs=(of_one_network(number),))
        swarm.tell(enemy, victim.peer, msg.Join(words) if number % 2 else msg.Beat(True, words))
    swarm.run(2)
    bad = set(enemies)
    members = [member.peer for member in victim.core.members()]
    assert sum(peer in bad for peer in members) <= 53
    assert sum(peer not in bad for peer in members) == 39
    swarm.run(5)
    # a peer without a place is no news, though it comes again and again
    for enemy in enemies[:8]:
        words = swarm.words(enemy, 2, addrs=(of_one_network(enemies.index(enemy)),))
        swarm.drive(victim, Received(enemy, msg.encode_message(msg.Beat(False, words))))
    assert not victim.core._dissemination.has_newcomers


def test_names_that_push_each_other_out_do_not_silence_those_of_honest_members() -> None:
    """Each is new each time; named first, as newcomers are, they filled every beat."""
    swarm, told = HostileSwarm(40), dict[bytes, None]()
    honest = list(swarm.nodes)
    swarm.run(60)
    victim = swarm.nodes[peer_named(3)]
    enemies = swarm.enlist(200)
    turn = itertools.count()

    def ask() -> None:
        for _ in range(8):
            number = next(turn) % len(enemies)
            words = swarm.words(enemies[number], 1, addrs=(of_one_network(number),))
            swarm.tell(enemies[number], victim.peer, msg.Join(words))

    def note(node: Node, effect: Any) -> None:
        carry_out(node, effect)
        if node is victim and isinstance(effect, Send):
            message = msg.decode_message_untrusted(effect.data)
            if isinstance(message, msg.Beat):
                told.update(dict.fromkeys(digest.key for digest in message.digests))

    swarm.every(0.5, ask)
    swarm.run(20)
    carry_out, swarm.carry_out = swarm.carry_out, note  # type: ignore[method-assign]
    swarm.run(60)
    named = sum(key_of(peer) in told for peer in honest if peer != victim.peer)
    assert named >= 36, f"{named} of 39 honest members were named in a minute"


def test_a_full_view_is_not_flushed_by_those_that_come_last() -> None:
    """Sybils without end get an eighth in ten minutes."""
    config = MembershipConfig()
    swarm = HostileSwarm(0, config=config)
    view = MemberList(peer_named(0), config, Random(1))
    honest = [peer_named(number) for number in range(1, config.capacity + 1)]
    for peer in honest:
        view.name_next(view.admit(swarm.words(peer, 1), 0.0))
    active = dict.fromkeys(honest[:7], 0.0)
    for number in range(2000):
        enemy = peer_named(10_000 + number)
        view.name_next(view.admit(swarm.words(enemy, 1), 700.0 + number / 10))
        surplus = view.evictee(active, enemy, 700.0 + number / 10)
        assert surplus is not None
        view.drop(surplus)
    members = [member.peer for member in view.members()]
    assert len(members) == config.capacity
    assert sum(peer in honest for peer in members) / len(members) > 0.86


def test_after_a_restart_the_anchors_are_asked_first() -> None:
    event = Bootstrap((addr_of(5),), (addr_of(3), addr_of(4)))
    asked = [peer for peer, _ in sent(make_core().handle(event, 1.0))]
    assert asked == [peer_named(3), peer_named(4)]


@pytest.mark.parametrize("accusers", [0, 5, 8])
def test_silent_accusers_take_no_seat_of_a_lonely_node(accusers: int) -> None:
    """While each kept a seat for ten seconds, five made it refuse every honest peer."""
    core = make_core(1000)
    core.handle(Bootstrap((addr_of(2),)), 0.0)
    about_it = msg.Suspect((heartbeat_of(core.peer),))
    for step in range(50):
        now = 0.2 * step
        core.handle(Tick(), now)
        for number in range(accusers):
            tell(core, peer_named(10_000 + number), about_it, now)
    answers = []
    for number in range(10, 15):
        ask = msg.Neighbor(number % 2 == 0, heartbeat_of(peer_named(number)))
        said = tell(core, peer_named(number), ask, 10.0)
        answers += [one.accepted for _, one in said if isinstance(one, msg.NeighborReply)]
    assert answers == [True] * 5


@pytest.mark.parametrize("seed", swept([1, 3, 5], 1))
def test_a_node_that_restarts_without_its_bootstrap_finds_neighbours_among_silent_accusers(
    seed: int,
) -> None:
    """While accusers kept seats it took 20 s; without them 6 to 10."""
    swarm = HostileSwarm(SIZE, seed)
    honest = list(swarm.nodes)
    swarm.run(60)
    swarm.kill(honest[0])
    swarm.run(30)
    swarm.kill(honest[7], silent=True)
    swarm.hang_up(honest[7])
    swarm.run(2)
    enemies, turn = swarm.enlist(10), itertools.count()
    victim = swarm.start(7, bootstrap=0)

    def accuse() -> None:
        enemy = enemies[next(turn) % len(enemies)]
        swarm.tell(enemy, victim.peer, msg.Suspect((swarm.words(victim.peer, 1),)))

    swarm.every(0.2, accuse)
    swarm.run(12)
    assert sum(peer in honest for peer in victim.core.neighbours) >= 1
    swarm.run(8)
    assert sum(peer in honest for peer in victim.core.neighbours) >= 3


@pytest.mark.parametrize("seed", swept(range(1, 6), 1))
def test_an_accuser_that_refuses_does_not_take_every_turn(seed: int) -> None:
    """It was asked each second, and twelve honest members not within two minutes."""
    rng, core, enemy = Random(seed), make_core(1000), peer_named(10_000)
    core.handle(Bootstrap((addr_of(2),)), 0.0)
    honest = [peer_named(10 + number) for number in range(12)]
    suspicions = [(rng.uniform(0, 10), peer) for peer in honest]
    suspicions += [(0.01 * number, enemy) for number in range(1000)]
    about_it = msg.Suspect((heartbeat_of(core.peer),))
    asked = []
    for now, accuser in sorted(suspicions, key=lambda one: one[0]):
        for peer, said in tell(core, accuser, about_it, now):
            if isinstance(said, msg.Neighbor):
                asked.append(peer)
            if isinstance(said, msg.Neighbor) and peer == enemy:
                refusal = msg.NeighborReply(False, heartbeat_of(enemy, round(1000 * now) + 1))
                tell(core, enemy, refusal, now)
    assert asked.count(enemy) == 1
    assert sum(peer in honest for peer in asked) >= 7


def test_of_accusers_that_agree_a_lonely_node_takes_as_many_as_have_a_seat() -> None:
    core = make_core(1000)
    core.handle(Bootstrap((addr_of(2),)), 0.0)
    about_it = msg.Suspect((heartbeat_of(core.peer),))
    enemies = [peer_named(10_000 + number) for number in range(13)]
    for number, enemy in enumerate(enemies):
        tell(core, enemy, about_it, 0.1 + 0.7 * number)
    for enemy in enemies:
        agreed = msg.NeighborReply(True, heartbeat_of(enemy, 1))
        tell(core, enemy, agreed, 9.5)
    assert 1 <= len(core.neighbours) <= 5
