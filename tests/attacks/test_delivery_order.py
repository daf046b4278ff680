"""What of a wrong delivery reaches the environment: nothing, neither tokens nor name."""

from __future__ import annotations

import contextlib
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from p2p.errors import RemoteProtocolError
from p2p.identity import KeyPair
from p2p.wire import pack
from proofs.checks import Verdict
from roles.engines.base import Completion, Group
from roles.protocol.core.groups import AcceptedWork, Receipt, content_digest
from tests.trainer_bench import JUDGE, TRAINER, WORKER, Bench, open_bench

STRANGER = KeyPair(b"s" * 32)
Wrong = Callable[[Bench], Awaitable[AcceptedWork]]
END = 0


def with_tokens(change: Callable[[tuple[int, ...]], tuple[int, ...]]) -> Wrong:
    """The last completion of the last group is another; all the rest is as it should be."""

    async def made(bench: Bench) -> AcceptedWork:
        *groups, last = await bench.draw(0)
        *completions, one = last.completions
        changed = Completion(change(one.tokens), (), one.proof)
        wrong: tuple[Group, ...] = (
            *groups,
            replace(last, completions=(*completions, changed)),
        )
        count = sum(len(one.tokens) for group in wrong for one in group.completions)
        return await bench.verdict_on(wrong, 0, logprobs=bytes(2 * count), rewards=(0.0,) * 8)

    return made


def with_groups(change: Callable[[tuple[Group, ...]], tuple[Group, ...]]) -> Wrong:
    async def made(bench: Bench) -> AcceptedWork:
        wrong = change(await bench.draw(0))
        count = sum(len(one.tokens) for group in wrong for one in group.completions)
        return await bench.verdict_on(wrong, 0, logprobs=bytes(2 * count), rewards=(0.0,) * 8)

    return made


def saying(**lies: Any) -> Wrong:
    async def made(bench: Bench) -> AcceptedWork:
        return await bench.honest(0, **lies)

    return made


async def by_a_stranger(bench: Bench) -> AcceptedWork:
    return await bench.verdict_on(await bench.draw(0, STRANGER), 0, STRANGER)


async def by_a_liar(bench: Bench) -> AcceptedWork:
    bench.auditor.liars[JUDGE.peer_id] = "it lied before"
    return await bench.honest(0)


async def of_a_forgotten_policy(bench: Bench) -> AcceptedWork:
    work = await bench.honest(0)
    bench.held.clear()
    return work


async def with_another_signature(bench: Bench) -> AcceptedWork:
    work = await bench.honest(0)
    return replace(work, verdict=replace(work.verdict, reason="other"))


async def with_other_content(bench: Bench) -> AcceptedWork:
    work = await bench.honest(0)
    content = work.submission.content[:-1] + b"?"
    return replace(work, submission=replace(work.submission, content=content))


async def with_other_logprobs(bench: Bench) -> AcceptedWork:
    work = await bench.honest(0)
    return replace(work, logprobs=work.logprobs[:-2])


async def with_content_that_is_none(bench: Bench) -> AcceptedWork:
    content = pack(["no groups"])
    work = await bench.honest(0)
    commitment = replace(work.verdict.commitment, content=content_digest(content))
    signature = WORKER.sign("/shoal/rollout/1.0.0", commitment.to_bytes())
    verdict = replace(work.verdict, commitment=commitment).signed(JUDGE)
    submission = replace(
        work.submission, commitment=commitment, signature=signature, content=content
    )
    return replace(work, verdict=verdict, submission=submission)


WRONG: dict[str, Wrong] = {
    "verdict signed by another": saying(judge=TRAINER),
    "verdict changed": with_another_signature,
    "content changed": with_other_content,
    "log-probs cut": with_other_logprobs,
    "a rejection": saying(verdict=Verdict.REJECTED),
    "another run": saying(run=b"o" * 32),
    "author not admitted": by_a_stranger,
    "validator that lied": by_a_liar,
    "policy forgotten": of_a_forgotten_policy,
    "another policy": saying(policy=b"q" * 32),
    "another place": saying(place=1),
    "content that is no groups": with_content_that_is_none,
    "groups in another order": with_groups(lambda groups: groups[::-1]),
    "one group only": with_groups(lambda groups: groups[:1]),
    "one group twice": with_groups(lambda groups: (groups[0], groups[0])),
    "completions left out": with_groups(
        lambda groups: (groups[0], replace(groups[1], completions=groups[1].completions[:-1]))
    ),
    "token outside the vocabulary": with_tokens(lambda tokens: (50, *tokens[1:])),
    "no token": with_tokens(lambda _: ()),
    "too many tokens": with_tokens(lambda tokens: (1,) * 60 + tokens),
    "no end": with_tokens(lambda tokens: tokens[:-1] or (1,)),
    "tokens behind the end": with_tokens(lambda tokens: (END, *tokens)),
    "log-probs above 0": saying(logprobs=b"\x00\x3c" * 999),
    "too few log-probs": saying(logprobs=b""),
    "too few rewards": saying(rewards=(1.0,) * 7),
    "a reward that is no number": saying(rewards=(0.0,) * 7 + (float("nan"),)),
    "a reward of 3e38": saying(rewards=(0.0,) * 7 + (3e38,)),
    "a reward below 0": saying(rewards=(0.0,) * 7 + (-1.0,)),
}


@pytest.mark.parametrize("kind", WRONG)
async def test_an_environment_sees_nothing_of_a_wrong_delivery(
    tmp_path: Path, kind: str
) -> None:
    """Tasks were made for it before its place and shape were looked at."""
    async with open_bench(tmp_path) as bench:
        work = await WRONG[kind](bench)
        receipt = None
        with contextlib.suppress(RemoteProtocolError):
            receipt, _ = await bench.hand_over(work)
        assert receipt in (None, Receipt.UNWANTED)
        assert bench.environment.calls == []
        assert len(bench.intake.buffer) == 0
        assert bench.intake.taken == 0


async def test_a_right_delivery_is_paid_for_once_its_tasks_are_made(tmp_path: Path) -> None:
    async with open_bench(tmp_path) as bench:
        assert await bench.hand_over(await bench.honest(0)) == (Receipt.TAKEN, "")
        assert bench.environment.calls == ["tasks", "rewards"]


async def test_made_up_tokens_are_never_paid_for(tmp_path: Path) -> None:
    """The replay stands before the environment, too: it is text of a hostile model."""
    async with open_bench(tmp_path) as bench:
        receipt, _ = await bench.hand_over(await bench.made_up(0))
        assert receipt is Receipt.UNWANTED
        assert bench.environment.calls == ["tasks"]
