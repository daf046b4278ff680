"""Convictions of trainers outlast a restart, reach newcomers, and need a proof."""

from __future__ import annotations

import logging
from glob import glob
from pathlib import Path

import pytest
import trio
import trio.testing

from p2p.errors import BadMessage
from p2p.identity import KeyPair
from p2p.shardcast import messages as msg
from p2p.shardcast.core import events as ev
from p2p.shardcast.index import digest_of
from p2p.shardcast.manifest import NO_POLICY, Manifest, PolicyVersion
from p2p.wire import KI, pack, unpack_untrusted
from tests.attacks.test_content_shardcast import PEERS, TRAINER, Course, manifest
from tests.support.shardcast_town import Member, Town, publish
from tests.unit.test_shardcast_core import Policies

ANOTHER = KeyPair(digest_of(b"another"))


def contradiction(trainer: KeyPair, version: int = 1) -> tuple[Manifest, Manifest]:
    """What a trainer signs that tells two peers two things."""
    made = []
    for seed in (0, 1):
        one, _, _ = Policies(trainer).make(version, 64 * KI, 32 * KI, seed=seed)
        made.append(one)
    return made[0], made[1]


async def convict(town: Town, victim: Member) -> None:
    """Let ``victim`` hear both halves of what its trainer signed."""
    for one in contradiction(town.keys[0], version=7):
        data = msg.encode_message(msg.news_of(one, None))
        victim.shardcast.receive_announcement(town.keys[1].peer_id, data)
    assert set(victim.shardcast.halted) == {town.keys[0].peer_id}


async def wait_written(folder: Path) -> Path:
    """Return the file of convictions when it is there."""
    while not (found := glob(f"{folder}/policies/*/convictions")):
        await trio.testing.wait_all_tasks_blocked(0.01)
    return Path(found[0])


async def test_a_restarted_node_still_halts_and_keeps_what_was_whole(tmp_path: Path) -> None:
    town = Town(tmp_path)
    with trio.fail_after(20):
        async with town.member(0) as trainer, town.member(1) as node:
            await publish(trainer, 5)
            await node.shardcast.wait_policy(PolicyVersion(5))
            await convict(town, node)
            await wait_written(tmp_path / "1")
        async with town.member(1) as again:
            assert set(again.shardcast.halted) == {town.keys[0].peer_id}
            assert again.shardcast.newest == 5, "as before it was restarted"
            async with town.member(0) as trainer:
                await publish(trainer, 8)
                async with town.member(2) as newcomer:
                    while not newcomer.shardcast.halted:
                        await trio.testing.wait_all_tasks_blocked(0.01)
                    [evidence] = newcomer.shardcast.halted.values()
                    assert evidence.author in newcomer.shardcast.halted
            assert again.shardcast.newest == 5


@pytest.mark.parametrize("damage", ["flip", "cut", "words", "another", "innocent"])
async def test_damaged_convictions_are_discarded_with_a_line(
    tmp_path: Path, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    town = Town(tmp_path)
    with trio.fail_after(20):
        async with town.member(1) as node:
            await convict(town, node)
            path = await wait_written(tmp_path / "1")
        data = path.read_bytes()
        [[first, _]] = unpack_untrusted(data)
        bad = {
            "flip": data[:100] + bytes([data[100] ^ 1]) + data[101:],
            "cut": data[: len(data) // 2],
            "words": pack(["convicted"]),
            "another": pack([[first, contradiction(ANOTHER)[0].encode()]]),
            "innocent": pack([[first, first]]),
        }
        path.write_bytes(bad[damage])
        with caplog.at_level(logging.WARNING):
            async with town.member(1) as again:
                assert again.shardcast.halted == {}
                assert again.shardcast.newest == NO_POLICY
        assert sum("convictions_damaged" in line for line in caplog.messages) == 1


@pytest.mark.parametrize(
    "pair",
    [
        (manifest().encode(), manifest().encode()),
        tuple(one.encode() for one in contradiction(ANOTHER)),
        (contradiction(TRAINER)[0].encode()[:-1] + b"\0", contradiction(TRAINER)[1].encode()),
    ],
    ids=["no contradiction", "of a stranger", "forged"],
)
def test_evidence_in_answer_to_a_hello_is_verified_before_it_is_believed(
    pair: tuple[bytes, bytes],
) -> None:
    course = Course()
    try:
        effects = course.hear(PEERS[0], msg.Evidence(*pair))
    except BadMessage:
        effects = []
    assert not any(isinstance(effect, ev.Halt) for effect in effects)
    assert course.core.statements.is_trusted(TRAINER.peer_id)


def test_a_hello_names_few_convicted_and_is_answered_once() -> None:
    named = tuple(KeyPair(digest_of(b"%d" % n)).peer_id for n in range(msg.MAX_CONVICTED + 1))
    assert msg.decode_message_untrusted(msg.encode_message(msg.Hello(3, named[1:])))
    for hello in (msg.encode_message(msg.Hello(3, named)), pack(["hello", 3, bytes(31)])):
        with pytest.raises(BadMessage):
            msg.decode_message_untrusted(hello)
    course = Course()
    first, second = contradiction(TRAINER)
    run_first, run_second = (one.encode() for one in (first, second))
    course.hear(PEERS[0], msg.Evidence(run_first, run_second))
    answered = sum(
        isinstance(effect, ev.Send) and isinstance(effect.message, msg.Evidence)
        for _ in range(1000)
        for effect in course.hear(PEERS[1], msg.Hello(-1))
    )
    assert answered == 1
