"""``shoal ledger audit --evidence``: what a bystander finds out about a proof, offline."""

from __future__ import annotations

import json
import shutil
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import trio

from p2p.identity import verify
from p2p.ledger import open_ledger
from p2p.machine import RealWorld
from p2p.node.rundoc import PATH
from p2p.policy import NO_POLICY
from p2p.shardcast.index import Index, PolicyFile, Span, digest_of
from p2p.shardcast.manifest import Encoding, Manifest
from p2p.shardcast.store import StoredPolicy
from proofs.checks import Reason, Verdict
from roles.ledger.command import main
from roles.ledger.repeating import EVIDENCE
from roles.protocol.core.conviction import Conviction, convict
from roles.protocol.core.findings import NO_ANSWER, Finding
from roles.protocol.core.groups import NOTHING
from roles.protocol.core.verdict import SignedVerdict
from roles.protocol.core.window import Submission, content_digest
from tests.support.drawn import JUDGE, TRAINER, VERSION, WEIGHTS, WORKER, Drawer, judge

FAR_OFF = Finding(Reason.DRAW_DISTANCE.value, 99.0, 0.001)
"""What a replay finds of tokens that nobody drew."""


class Stage:
    """A trainer's folder with proofs, its ledger, and the policy that they are about."""

    def __init__(self, tmp_path: Path) -> None:
        self.folder = tmp_path / "trainer"
        self.drawer = Drawer(tmp_path / "drawn")
        self._drawn = tmp_path / "drawn"

    def act(self, prove: Callable[[], Awaitable[Any]]) -> None:
        """Open the folder and let ``prove`` keep proofs in it."""

        async def play() -> None:
            await self.drawer.open()
            self._publish()
            await prove()
            async with open_ledger(RealWorld(TRAINER, self.folder)) as ledger:
                await ledger.append("trainer/step", b"")

        trio.run(play)

    def _publish(self) -> None:
        """Put the policy into the folder, as a node keeps it."""
        run = self.drawer.run
        weights = (self._drawn / WEIGHTS).read_bytes()
        spans = [Span(digest_of(weights), len(weights), 2)]
        index = Index.of([PolicyFile("", len(weights))], spans)
        self.drawer.policy = index.digest
        manifest = Manifest(
            TRAINER.peer_id, run.id, VERSION, NO_POLICY, b"", index.digest, len(weights),
            (Encoding.anchor(index, len(weights)),),
        ).sign(TRAINER)  # fmt: skip
        policy = StoredPolicy(manifest, index, f"store/{run.id.hex()[:16]}")
        policy.stored = True
        self.weights = self.folder / policy.final
        self.weights.parent.mkdir(parents=True)
        self.weights.write_bytes(weights)
        (self.folder / policy.head).write_bytes(policy.encode_head())
        (self.folder / PATH).write_bytes(run.document)

    def keep(self, name: str, data: bytes) -> Path:
        path = self.folder / EVIDENCE / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
        return path

    def prove(
        self, verdict: SignedVerdict, submission: Submission, finding: Finding | None
    ) -> Conviction:
        commitment = submission.commitment
        return convict(
            commitment, commitment.terms, verdict, submission, finding, verify
        )  # as the trainer does

    async def accepted_lie(self, index: int) -> Conviction:
        groups = await self.drawer.make_up(index)
        submission = self.drawer.submit(index, groups)
        verdict = await self.drawer.accept(submission, groups)
        return self.prove(verdict, submission, FAR_OFF)

    async def ban(self, index: int, *, is_deserved: bool) -> Conviction:
        draw = self.drawer.make_up if is_deserved else self.drawer.draw
        submission = self.drawer.submit(index, await draw(index))
        numbers = FAR_OFF.statistic, FAR_OFF.limit
        verdict = judge(submission, TRAINER, Verdict.REJECTED, FAR_OFF.reason, numbers)
        return self.prove(verdict, submission, FAR_OFF)

    def audit(self, capsys: pytest.CaptureFixture[str], *more: str) -> tuple[int, list[Any]]:
        code = main(["audit", "--evidence", "--json", str(self.folder), *more])
        return code, json.loads(capsys.readouterr().out)["proofs"]


@pytest.fixture
def stage(tmp_path: Path) -> Stage:
    return Stage(tmp_path)


def test_true_proofs_are_repeated(stage: Stage, capsys: pytest.CaptureFixture[str]) -> None:
    """Against a worker, a validator that stamps, and one that refuses what is in order."""

    async def prove() -> None:
        refused = stage.drawer.submit(2, await stage.drawer.draw(2))
        refusal = judge(refused, JUDGE, Verdict.REJECTED, NO_ANSWER)
        stage.keep("ban-0", (await stage.ban(0, is_deserved=True)).to_bytes())
        stage.keep("lie-1", (await stage.accepted_lie(1)).to_bytes())
        stage.keep("lie-2", stage.prove(refusal, refused, None).to_bytes())

    stage.act(prove)
    code, found = stage.audit(capsys)
    assert [one["outcome"] for one in found] == ["repeated"] * 3, found
    assert code == 0
    assert [one["accused"] for one in found] == [
        str(who.peer_id) for who in (WORKER, JUDGE, JUDGE)
    ]
    assert "limit" in found[0]["why"]


def test_slander_is_refuted(stage: Stage, capsys: pytest.CaptureFixture[str]) -> None:
    """Signatures and digests fit, and the content is in order."""

    async def prove() -> None:
        groups = await stage.drawer.draw(1)
        honest = stage.drawer.submit(1, groups)
        accepted = await stage.drawer.accept(honest, groups)
        stage.keep("ban-0", (await stage.ban(0, is_deserved=False)).to_bytes())
        stage.keep("lie-1", stage.prove(accepted, honest, FAR_OFF).to_bytes())

    stage.act(prove)
    code, found = stage.audit(capsys)
    assert [one["outcome"] for one in found] == ["refuted"] * 2, found
    assert code == 1
    assert main(["audit", "--evidence", str(stage.folder)]) == 1
    assert ": refuted (a replay finds nothing wrong" in capsys.readouterr().out


def test_what_cannot_be_decided_proves_nothing(
    stage: Stage, capsys: pytest.CaptureFixture[str]
) -> None:
    """Neither side lies about content that its worker says is lost."""

    async def prove() -> None:
        groups = await stage.drawer.draw(0)
        lost = stage.drawer.submit(0, groups, contents=(content_digest(NOTHING),))
        lost = replace(lost, content=NOTHING)
        for who, finding in (("ban", FAR_OFF), ("lie", None)):
            numbers = FAR_OFF.statistic, FAR_OFF.limit
            verdict = judge(lost, JUDGE, Verdict.REJECTED, FAR_OFF.reason, numbers)
            stage.keep(f"{who}-0", stage.prove(verdict, lost, finding).to_bytes())

    stage.act(prove)
    code, found = stage.audit(capsys)
    assert [one["outcome"] for one in found] == ["cannot be repeated"] * 2, found
    assert code == 0


def test_what_does_not_open_convicts_nobody(
    stage: Stage, capsys: pytest.CaptureFixture[str]
) -> None:
    async def prove() -> None:
        drawer = stage.drawer
        proof = await stage.ban(0, is_deserved=True)
        groups = await drawer.make_up(1)
        for number, changes in enumerate([{"terms": bytes(32)}, {"run": bytes(32)}]):
            foreign = drawer.submit(1, groups, **changes)
            verdict = await drawer.accept(foreign, groups)
            stage.keep(f"lie-{number}", stage.prove(verdict, foreign, FAR_OFF).to_bytes())
        other = drawer.submit(1, groups)
        stage.keep("lie-2", replace(proof, submission=other).to_bytes())
        forged = replace(proof.verdict, statistic=98.0)
        stage.keep("lie-3", replace(proof, verdict=forged).to_bytes())
        stage.keep("lie-4", b"no proof at all")
        stage.keep("lie-5", proof.to_bytes()[:-1])
        stage.keep("lie-6", replace(proof, finding=Finding("", 1.0, 1.0)).to_bytes())

    stage.act(prove)
    code, found = stage.audit(capsys)
    assert [one["outcome"] for one in found] == ["void"] * 7, found
    assert code == 1


@pytest.mark.parametrize("harm", ["policy gone", "policy rotten"])
def test_a_policy_that_is_not_at_hand_refutes_nothing(
    stage: Stage, tmp_path: Path, capsys: pytest.CaptureFixture[str], harm: str
) -> None:
    """It is found in another node's folder, if one is named that has it."""

    async def prove() -> None:
        stage.keep("lie-0", (await stage.accepted_lie(0)).to_bytes())

    stage.act(prove)
    shutil.copytree(stage.folder, tmp_path / "other")
    data = stage.weights.read_bytes()
    stage.weights.unlink()
    if harm == "policy rotten":
        stage.weights.write_bytes(b"\0" + data[1:])
    code, found = stage.audit(capsys)
    assert (code, found[0]["outcome"]) == (0, "cannot be repeated")
    assert "policy 0" in found[0]["why"]
    code, found = stage.audit(capsys, "--from", str(tmp_path / "other"))
    assert (code, found[0]["outcome"]) == (0, "repeated")


def test_a_folder_without_proofs_says_so(
    stage: Stage, capsys: pytest.CaptureFixture[str]
) -> None:
    async def prove() -> None:
        await trio.lowlevel.checkpoint()

    stage.act(prove)
    assert stage.audit(capsys) == (0, [])
    assert main(["audit", "--evidence", str(stage.folder)]) == 0
    assert "keeps no proofs" in capsys.readouterr().out
