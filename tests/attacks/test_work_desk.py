"""What peers, and a run's own environment, may try at the trainer's desk."""

from __future__ import annotations

from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from itertools import count
from typing import Any, ClassVar, cast

import pytest
import trio

from p2p.errors import PeerUnreachable
from p2p.identity import KeyPair
from p2p.node.node import Node
from p2p.wire import FrameReader, frame
from proofs.checks import Verdict
from roles.contract import run_of
from roles.engines.base import EngineError, GroupTask, Sampling
from roles.envs.base import Task
from roles.envs.client import LocalEnvironment
from roles.envs.contained import AnswerFailed, EnvironmentFailed, reward_of, task_of
from roles.envs.sort import SortEnvironment
from roles.inference.role import Inference
from roles.protocol.core import answer as msg
from roles.protocol.core.terms import terms_digest
from roles.protocol.core.verdict import SignedVerdict
from roles.protocol.core.window import Claim, SignedWindow, Window, content_digest
from roles.rl.recipes import NETWORK
from roles.trainer.curve import LearningCurve
from tests.support.swarm import (
    CAST,
    Health,
    Play,
    nobody_honest_is_rejected,
    perform,
    roles_of,
    scored,
    trainer_of,
)
from tests.unit import work_messages as made

CONTENT = b"content that answers nothing"


class Attacker(Inference):
    """A node that says to the trainer what it likes."""

    name: ClassVar[str] = "attacker"
    tries: ClassVar[Callable[[Attacker], Awaitable[None]]]
    node: Node

    async def run(self, node: Node) -> None:
        self.node = node
        await node.shardcast.wait_policy(node.shardcast.newest + 1)
        await node.locate(self.trainer)
        await type(self).tries(self)
        await trio.sleep_forever()

    @property
    def trainer(self) -> Any:
        return run_of(self.node).terms.trainers[0]

    def window(self, **changes: Any) -> Window:
        run, node = run_of(self.node), self.node
        version = node.shardcast.newest
        policy = node.shardcast.manifest(version).weights_digest
        claims = bytes([Claim.SPREAD] * run.terms.sampling.submission)
        digest = content_digest(CONTENT)
        head = run.id, terms_digest(run), node.peer_id, version, policy
        return replace(Window(*head, 0, (digest,), claims), **changes)

    def sign(self, window: Window) -> SignedWindow:
        return SignedWindow.sign(window, self.node.world.signer)

    async def ask(self, *parts: bytes) -> msg.Reply | None:
        """Send frames, each when the last was answered; None if the stream ends instead."""
        try:
            async with await self.node.host.open_stream(
                self.trainer, msg.WORK_PROTOCOL
            ) as stream:
                reader, data = FrameReader(stream, msg.MAX_ANSWER + 8192), None
                for part in parts:
                    await stream.send_all(part)
                    data = await reader.receive()
                return None if data is None else msg.decode_reply_untrusted(data, None)
        except (trio.BrokenResourceError, PeerUnreachable):
            return None

    async def commit(self, window: Window) -> msg.Reply | None:
        return await self.ask(frame(msg.encode_request(msg.WindowRequest(self.sign(window)))))

    def content(
        self, window: Window, answer: msg.Answer, index: int, content: bytes, length: int = -1
    ) -> tuple[bytes, bytes]:
        answer = replace(answer, window=window.digest, wanted=(index,))
        length = len(content) if length < 0 else length
        request = msg.ContentRequest(self.sign(window), answer, index, length)
        return frame(msg.encode_request(request)), frame(content)

    def verdict(self, window: Window, validator: KeyPair | None = None) -> SignedVerdict:
        """Return a rejection in the trainer's or another's name, signed by nobody of these."""
        who = self.trainer if validator is None else validator.peer_id
        commitment = window.commitment(window.first)
        said = SignedVerdict(who, commitment, Verdict.REJECTED, "a lie", 9.0, 1.0, ())
        return replace(said, signature=bytes(64))


def play(
    tries: Callable[[Attacker], Awaitable[None]],
    monkeypatch: pytest.MonkeyPatch,
    *,
    cast: dict[str, str] | None = None,
    **parameters: float,
) -> Health:
    monkeypatch.setattr(Attacker, "tries", tries, raising=False)
    without = {name: role for name, role in CAST.items() if role != "validator"}
    health = perform(
        Play({**(without if cast is None else cast), "attacker-1": f"{__name__}:Attacker"}),
        **{"steps": 8, "seconds": 200, **parameters},
    )
    assert health["done"] == 1
    assert nobody_honest_is_rejected(health)
    return health


def count_signatures(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Count the windows and verdicts of which the trainer checks a signature, by signer."""
    seen: Counter[str] = Counter()
    for kind, who in (
        (SignedWindow, lambda one: one.window.node),
        (SignedVerdict, lambda one: one.commitment.node),
    ):
        plain = kind.has_valid_signature

        def check(self: Any, verify: Any, plain: Any = plain, who: Any = who) -> bool:
            seen[str(who(self))] += 1
            return bool(plain(self, verify))

        monkeypatch.setattr(kind, "has_valid_signature", check)
    return seen


AT_A_GLANCE: dict[str, tuple[dict[str, Any], str]] = {
    "another run": ({"run": b"x" * 32}, "start the node with that run"),
    "other terms": ({"terms": b"x" * 32}, "do not hold any more"),
    "another policy": ({"policy": b"x" * 32}, "another policy"),
}
"""What is wrong with a window, and what its sender is told."""


def test_windows_that_break_a_rule_are_refused_with_a_sentence_and_blame_nobody(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What is wrong at a glance costs no signature check."""
    seen, told, glance = count_signatures(monkeypatch), dict[str, msg.Reply | None](), []
    broken = list[msg.Reply | None]()

    async def tries(self: Attacker) -> None:
        version = self.node.shardcast.newest
        for number in range(20):
            told[f"{number} to come"] = await self.commit(
                self.window(version=version + 1 + number)
            )
        for name, (changes, _) in AT_A_GLANCE.items():
            told[name] = await self.commit(self.window(**changes))
        for number, validator in enumerate((None, made.key(77, "validator"))):
            verdict = self.verdict(self.window(), validator)
            contest = msg.ContestRequest(verdict, self.sign(self.window()))
            for request in (contest, msg.VerdictRequest(verdict)):
                name = f"{type(request).__name__} {number}"
                told[name] = await self.ask(frame(msg.encode_request(request)))
        glance.append(seen[str(self.node.peer_id)])
        honest = self.window()
        told["another node"] = await self.commit(replace(honest, node=self.trainer))
        told["a gap"] = await self.commit(replace(honest, first=3))
        told["too few claims"] = await self.commit(replace(honest, claims=honest.claims[:-1]))
        told["honest"] = await self.commit(honest)
        told["the same"] = await self.commit(honest)
        told["other content"] = await self.commit(replace(honest, contents=(b"x" * 32,)))
        unsigned = SignedWindow(replace(honest, first=1), bytes(64))
        for data in (msg.encode_request(msg.WindowRequest(unsigned)), bytes(range(200))):
            broken.append(await self.ask(frame(data)))

    health = play(tries, monkeypatch)
    assert glance == [0]
    answers = [told.pop("honest"), told.pop("the same")]
    assert all(isinstance(one, msg.Answer) and one.wanted == (0,) for one in answers)
    words = {name: said for name, (_, said) in AT_A_GLANCE.items()} | {
        "another node": "from the node that signed it", "too few claims": "groups, not",
    }  # fmt: skip
    assert len(told) == 20 + 3 + 4 + 4
    for name, reply in told.items():
        assert isinstance(reply, msg.Refused), (name, reply)
        sentence = "the newest policy is" if "to come" in name else words.get(name, "")
        assert sentence in reply.reason
    assert broken == [None, None]
    assert scored(health, "attacker-1")["rejected"] == 0
    assert health["attacker-1"]["peer"] not in trainer_of(health)["bans"]


def test_content_is_judged_by_the_window_that_was_committed_and_by_no_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The claims beside the content were believed."""
    told: dict[str, msg.Reply | None] = {}

    async def tries(self: Attacker) -> None:
        window = self.window()
        answer = await self.commit(window)
        assert isinstance(answer, msg.Answer)
        turned = replace(window, claims=bytes([Claim.ALIKE] * len(window.claims)))
        two = replace(window, contents=window.contents * 2, claims=window.claims * 2)
        told["other claims"] = await self.ask(*self.content(turned, answer, 0, CONTENT)[:1])
        told["a longer window"] = await self.ask(*self.content(two, answer, 0, CONTENT)[:1])
        told["a place that is not committed"] = await self.ask(
            *self.content(two, answer, 1, CONTENT)[:1]
        )
        told["too long"] = await self.ask(*self.content(window, answer, 0, CONTENT, 2**23)[:1])
        told["longer than announced"] = await self.ask(
            *self.content(window, answer, 0, CONTENT + b"more", len(CONTENT))
        )
        told["other content"] = await self.ask(*self.content(window, answer, 0, CONTENT[::-1]))
        told["the window again"] = await self.commit(window)
        forged = self.sign(window)
        request = msg.ContentRequest(SignedWindow(window, bytes(64)), answer, 0, len(CONTENT))
        assert forged.window == window
        told["content"] = await self.ask(frame(msg.encode_request(request)), frame(CONTENT))
        told["after that"] = await self.commit(self.window(first=1))

    health = play(tries, monkeypatch)
    assert [isinstance(told.pop(name), msg.Answer) for name in ("the window again",)] == [True]
    said = told.pop("content")
    assert isinstance(said, SignedVerdict)
    assert said.verdict is Verdict.REJECTED
    assert told.pop("longer than announced") is None
    assert told.pop("other content") is None
    assert all(isinstance(one, msg.Refused) and not one.retry for one in told.values()), told
    after = told["after that"]
    assert isinstance(after, msg.Refused)
    assert "banned" in after.reason
    peer = health["attacker-1"]["peer"]
    assert trainer_of(health)["bans"][peer]["times"] == 1
    assert scored(health, "attacker-1")["rejected"] == 1


def test_questions_about_an_account_are_metered_and_slow_streams_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    told = list[msg.Reply | None]()
    slow = list[msg.Reply | None]()

    async def tries(self: Attacker) -> None:
        async with await self.node.host.open_stream(self.trainer, msg.WORK_PROTOCOL) as stream:
            await self.node.world.sleep(2)
            try:
                await stream.send_all(frame(msg.encode_request(msg.AccountRequest())))
                slow.append(await FrameReader(stream, msg.MAX_ANSWER).receive())
            except trio.BrokenResourceError:
                slow.append(None)
        for _ in range(40):
            told.append(await self.ask(frame(msg.encode_request(msg.AccountRequest()))))

    play(tries, monkeypatch)
    assert len(told) == 40
    assert 1 <= sum(one is not None for one in told) <= 20
    assert slow == [None]


# What a run's own environment does to the roles


def _deep(*_: object) -> float:
    return _deep()


def _raises(error: Exception) -> Callable[..., float]:
    def fail(*_: object) -> float:
        raise error

    return fail


PLACE = r"\((.*\.py:\d+|roles\.envs\.sort\.SortEnvironment)\)$"
FAILURES: dict[str, Callable[..., Any]] = {
    "division": lambda *_: 1 / 0,
    "lookup": lambda *_: {}["missing"],
    "type": lambda *_: len(3),  # type: ignore[arg-type]
    "recursion": _deep,
    "assertion": _raises(AssertionError("never so")),
    "memory": _raises(MemoryError()),
    "own": _raises(type("OwnError", (Exception,), {})("of the package")),
    "nan": lambda *_: float("nan"),
    "huge": lambda *_: 3e38,
    "negative": lambda *_: -0.5,
    "text": lambda *_: "much",
    "nothing": lambda *_: None,
}


@pytest.mark.parametrize("failure", FAILURES.values(), ids=FAILURES.keys())
def test_whatever_an_environment_raises_or_pays_is_one_error_with_a_place(
    failure: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """An environment's exception went through to the role, and a reward could be anything."""
    environment = SortEnvironment()
    task = environment.task(bytes(32))
    monkeypatch.setattr(SortEnvironment, "reward", failure)
    monkeypatch.setattr(SortEnvironment, "task", failure)
    with pytest.raises(AnswerFailed, match=r"reward\(\) of the environment 'sort': .*" + PLACE):
        reward_of(environment, task, (1, 2))
    with pytest.raises(
        EnvironmentFailed, match=r"task\(\) of the environment 'sort': .*" + PLACE
    ):
        task_of(environment, bytes(32))


def test_an_environment_that_does_not_repeat_itself_convicts_no_validator(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Nothing shows of it at the start. The validator was convicted of lying about rewards."""
    original, calls = SortEnvironment.reward, count()

    def reward(self: SortEnvironment, task: Task, tokens: Sequence[int]) -> float:
        is_kind = next(calls) // 3 % 2
        is_tried = tuple(tokens) in (task.answer, task.prompt, ())
        return 1.0 if is_kind and not is_tried else original(self, task, tokens)

    monkeypatch.setattr(SortEnvironment, "reward", reward)
    trainer = trainer_of(perform(Play(), steps=2, submission=1, seconds=60))
    assert trainer["step"] == 2
    assert (trainer["liars"], trainer["lies"], trainer["bans"]) == ({}, 0, {})
    assert "answers another reward when asked again" in caplog.text


def test_a_task_that_fails_ends_no_worker(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It is drawn by all roles; a worker stops until the next policy has other tasks."""
    original = SortEnvironment.task

    def task(self: SortEnvironment, seed: bytes, *, held_out: bool = False) -> Task:
        if seed[0] < 2:
            raise LookupError("no such puzzle")
        return original(self, seed, held_out=held_out)

    monkeypatch.setattr(SortEnvironment, "task", task)
    workers = dict.fromkeys(("inference-3", "inference-4"), "inference")
    health = perform(Play({**CAST, **workers}), steps=3, seconds=120)
    assert trainer_of(health)["step"] == 3
    assert [judge["rejected"] for judge in roles_of(health, "validator")] == [0]
    errors = [record.getMessage() for record in caplog.records if record.levelname == "ERROR"]
    assert errors
    assert len(errors) <= len(health), "each role of a node says it once"


async def test_an_evaluation_that_fails_stops_no_learning(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The held-out tasks are paid by the same foreign code."""

    def reward(*_: object) -> float:
        raise EnvironmentFailed("no such word")

    class Learner:
        async def answer(self, tasks: list[GroupTask], sampling: Sampling) -> list[Any]:
            if sampling.temperature:
                raise EngineError("answer failed with MemoryError")
            return [(task.prompt,) for task in tasks]

    environment = SortEnvironment()
    learner = replace(NETWORK.learner, evaluate_every=1)
    curve = LearningCurve(
        cast(Any, None), NETWORK.sampling, learner, LocalEnvironment(environment)
    )
    await curve.evaluate(cast(Any, Learner()), 0)
    assert "answer failed" in caplog.text
    monkeypatch.setattr(SortEnvironment, "reward", reward)
    await curve.evaluate(cast(Any, Learner()), 0)
    assert "no such word" in caplog.text
    assert curve.learnt.curve == []
    assert "evaluation_failed step=0" in caplog.text
