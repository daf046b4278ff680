"""Other officers' bans, repeated: what does not come, what does not bear out, whose turn."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import trio
import trio.testing

from p2p.identity import KeyPair, PeerId
from roles.protocol.core.bans import Ban
from roles.protocol.core.groups import SignedVerdict
from roles.shared import evidence
from roles.validator import prosecution
from roles.validator.core.docket import (
    FIRST_PAUSE,
    LONGEST_PAUSE,
    MAX_CASES,
    MISSED,
    REFUTED,
    Docket,
)
from roles.validator.prosecution import FETCH_SECONDS, Prosecution
from tests.unit.test_bans import CLEAR, JUDGES, NEAR, NOW, RUN, rejection

AUTHOR, OTHER = JUDGES[0].peer_id, JUDGES[1].peer_id
LATER = int(NOW) + 3600


def ban_of(number: int, by: KeyPair = JUDGES[0]) -> Ban:
    worker = KeyPair(number.to_bytes(32, "big"))
    return Ban((rejection(by=by, worker=worker, index=number),), LATER)


def test_a_case_comes_up_again_twice_as_late_until_its_ban_ends() -> None:
    docket, now = Docket(), 0.0
    docket.add(AUTHOR, ban_of(1))
    pauses = []
    for _ in range(9):
        case = docket.take(now)
        assert case is not None
        docket.put_back(case, now, NOW)
        pauses.append(docket.next_due() - now)
        assert docket.take(now + MISSED / 2) is None
        now = docket.next_due()
    assert pauses[:3] == [FIRST_PAUSE, 2 * FIRST_PAUSE, 4 * FIRST_PAUSE]
    assert pauses[-1] == LONGEST_PAUSE
    case = docket.take(now)
    assert case is not None
    docket.put_back(case, now, LATER + 1)
    assert len(docket) == 0


def test_authors_go_round_and_one_that_failed_is_passed_over() -> None:
    docket = Docket()
    for number in range(2 * MAX_CASES):
        docket.add(AUTHOR, ban_of(number))
    docket.add(OTHER, ban_of(1, JUDGES[1]))
    assert len(docket) == MAX_CASES + 1
    cases = [docket.take(0.0) for _ in range(3)]
    assert [case and case.author for case in cases] == [AUTHOR, OTHER, AUTHOR]
    docket.doubt(AUTHOR, 0.0)
    docket.add(OTHER, ban_of(2, JUDGES[1]))
    cases = [docket.take(1.0) for _ in range(2)]
    assert [case and case.author for case in cases] == [OTHER, None]
    assert docket.next_due() == REFUTED
    assert docket.take(REFUTED) is not None


class Scene:
    """A validator's prosecution, and officers that ban."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, clock: trio.testing.MockClock) -> None:
        self.clock = clock
        self.waiting: list[tuple[PeerId, Ban]] = []
        self.signed: list[PeerId] = []
        self.news = trio.Event()
        self.fetched: list[tuple[float, PeerId]] = []
        self.sources: dict[PeerId, Callable[[], Any]] = {}
        self.said: dict[PeerId, SignedVerdict] = {}
        self.woken = 0
        disk = SimpleNamespace(replace=nothing, remove=nothing)
        world = SimpleNamespace(now=clock.current_time, wall=lambda: NOW, disk=disk)
        node: Any = SimpleNamespace(world=world, run=RUN, peer_id=JUDGES[2].peer_id)
        monkeypatch.setattr(prosecution, "bans_of", lambda _: self)
        monkeypatch.setattr(prosecution, "fetch_evidence", self.fetch)
        judge: Any = SimpleNamespace(repeat=self.repeat)
        durable: Any = SimpleNamespace(insist=lambda write: write())
        self.prosecution = Prosecution(node, judge, durable, self.wake)

    def hear(self, author: PeerId, ban: Ban) -> None:
        self.waiting.append((author, ban))
        self.news.set()

    def wake(self) -> None:
        self.woken += 1

    def take_unexamined(self) -> list[tuple[PeerId, Ban]]:
        found, self.waiting, self.news = self.waiting, [], trio.Event()
        return found

    async def wait_news(self) -> None:
        await self.news.wait()

    def is_open(self, author: PeerId, ban: Ban) -> bool:
        return True

    async def fetch(self, node: Any, author: PeerId, verdict: SignedVerdict) -> Any:
        self.fetched.append((self.clock.current_time(), author))
        found = await self.sources[author]()
        content = SimpleNamespace(commitment=verdict.commitment, to_bytes=bytes)
        return content if found else None

    async def repeat(self, job: Any) -> SignedVerdict | None:
        await trio.lowlevel.checkpoint()
        commitment = job.submission.commitment
        return self.said.get(commitment.node, rejection(by=JUDGES[2], index=commitment.index))

    async def sign(self, verdicts: Any) -> None:
        await trio.lowlevel.checkpoint()
        self.signed.append(verdicts[0].commitment.node)


async def nothing(*_: object) -> None:
    await trio.lowlevel.checkpoint()


async def here() -> bool:
    await trio.lowlevel.checkpoint()
    return True


async def away() -> bool:
    await trio.lowlevel.checkpoint()
    return False


async def passing(seconds: float) -> None:
    with trio.move_on_after(seconds):
        await trio.sleep_forever()


@asynccontextmanager
async def examining(scene: Scene) -> Any:
    async with trio.open_nursery() as nursery:
        nursery.start_soon(scene.prosecution.fetch_forever)
        yield
        nursery.cancel_scope.cancel()


async def test_a_source_that_never_answers_holds_up_no_judging_and_no_other_case(
    monkeypatch: pytest.MonkeyPatch, autojump_clock: trio.testing.MockClock
) -> None:
    """The scorer waited for each fetch, up to two minutes."""
    scene = Scene(monkeypatch, autojump_clock)
    scene.sources = {AUTHOR: trio.sleep_forever, OTHER: here}
    async with examining(scene):
        for number in range(20):
            scene.hear(AUTHOR, ban_of(number))
        scene.hear(OTHER, ban_of(100, JUDGES[1]))
        began, turns = autojump_clock.current_time(), 0
        while not scene.signed:
            with trio.fail_after(0.001):
                await scene.prosecution.examine()
            turns += 1
            await passing(0.1)
            assert autojump_clock.current_time() < began + 2 * FETCH_SECONDS
        assert turns > 1
        await passing(10 * FETCH_SECONDS)
    asked = [when for when, author in scene.fetched if author == AUTHOR]
    assert len(asked) <= 2 * 12 / 2 + 2


async def test_evidence_that_is_away_is_asked_for_again_and_refutes_nothing(
    monkeypatch: pytest.MonkeyPatch, autojump_clock: trio.testing.MockClock, caplog: Any
) -> None:
    scene = Scene(monkeypatch, autojump_clock)
    scene.sources = {AUTHOR: away}
    async with examining(scene):
        scene.hear(AUTHOR, ban_of(1))
        await passing(FIRST_PAUSE / 2)
        await scene.prosecution.examine()
        assert "not borne out" not in caplog.text
        assert scene.signed == []
        scene.sources = {AUTHOR: here}
        await passing(FIRST_PAUSE)
        assert scene.woken == 1
        await scene.prosecution.examine()
        assert len(scene.signed) == 1


@pytest.mark.parametrize("excess", [NEAR, CLEAR, None])
async def test_a_ban_that_a_replay_does_not_bear_out_costs_its_author_ten_minutes(
    monkeypatch: pytest.MonkeyPatch,
    autojump_clock: trio.testing.MockClock,
    caplog: Any,
    excess: float | None,
) -> None:
    """One that cannot be repeated here, as its policy is gone, costs it nothing."""
    scene = Scene(monkeypatch, autojump_clock)
    scene.sources = {AUTHOR: here}
    first = ban_of(1)
    scene.said = {first.culprit: None if excess is None else rejection(excess)}  # type: ignore[dict-item]
    async with examining(scene):
        scene.hear(AUTHOR, first)
        await passing(1)
        await scene.prosecution.examine()
        scene.hear(AUTHOR, ban_of(2))
        await passing(REFUTED / 2)
        await scene.prosecution.examine()
        assert len(scene.signed) == (excess is None)
        assert ("not borne out" in caplog.text) == (excess is not None)
        await passing(REFUTED)
        await scene.prosecution.examine()
        assert len(scene.signed) == 1


async def test_validators_may_ask_for_what_a_wave_of_bans_cites(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Who was refused took a busy source for a false accuser, and the source was penalised for
    its silence."""
    answers: list[bytes] = []

    class Reader:
        def __init__(self, *_: object) -> None: ...

        async def receive(self) -> bytes:
            return bytes(32)

    async def send(_: object, data: bytes) -> None:
        answers.append(data)

    async def read(_: str) -> bytes:
        return b"content"

    async def names(_: str) -> list[str]:
        return [bytes(32).hex()]

    monkeypatch.setattr(evidence, "FrameReader", Reader)
    monkeypatch.setattr(evidence, "send_frame", send)
    disk = SimpleNamespace(read=read, list=names)
    node: Any = SimpleNamespace(world=SimpleNamespace(disk=disk, now=lambda: 0.0), run=RUN)
    store = evidence.EvidenceStore(node, SimpleNamespace())  # type: ignore[arg-type]
    await store.recall()
    for who, most in ((JUDGES[1].peer_id, 96), (KeyPair(b"m" * 32).peer_id, 6)):
        answers.clear()
        stream: Any = SimpleNamespace(peer=who)
        for _ in range(100):
            await store.serve(stream)
        assert answers == [b"content"] * most + [b""] * (100 - most)
