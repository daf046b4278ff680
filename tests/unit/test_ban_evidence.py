"""``shoal ledger audit --evidence``: what a bystander finds out about a ban, offline."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import trio

from p2p.identity import Signer
from p2p.ledger import open_ledger
from p2p.machine import RealWorld
from p2p.node.rundoc import PATH
from p2p.policy import NO_POLICY
from p2p.shardcast.index import Index, PolicyFile, Span, digest_of
from p2p.shardcast.manifest import Encoding, ManifestBody
from p2p.shardcast.stored import StoredPolicy
from proofs.checks import Reason, Verdict
from roles.ledger.command import main
from roles.protocol.core.bans import BAN_KIND, Ban
from roles.protocol.core.groups import AcceptedWork, SignedVerdict
from roles.shared.evidence import FOLDER
from tests import trainer_bench
from tests.trainer_bench import JUDGE, TRAINER, VERSION, WEIGHTS, Bench, open_bench

TERM = 3600


class Stage:
    """A validator's folder, with the bans that it has signed."""

    def __init__(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.bench_folder, self.folder = tmp_path / "bench", tmp_path / "validator"
        self.monkeypatch = monkeypatch

    def act(self, bans: Callable[[Bench], Any], **changes: Any) -> None:
        trio.run(self._act, bans, changes)

    async def _act(self, bans: Callable[[Bench], Any], changes: dict[str, Any]) -> None:
        async with open_bench(
            self.bench_folder, is_drawn=False, ban_seconds=TERM, **changes
        ) as bench:
            self.publish(bench)
            statements = await bans(bench)
            (self.folder / PATH).write_bytes(bench.run.document)
            async with open_ledger(RealWorld(JUDGE, self.folder)) as ledger:
                for body in statements:
                    await ledger.append(BAN_KIND, body)

    def publish(self, bench: Bench) -> None:
        """The policy of the bench, as a node keeps it."""
        weights = (self.bench_folder / WEIGHTS).read_bytes()
        spans = [Span(digest_of(weights), len(weights), 2)]
        index = Index.of([PolicyFile("", len(weights))], spans)
        self.monkeypatch.setattr(trainer_bench, "POLICY", index.digest)
        body = ManifestBody(
            bench.run.id, VERSION, NO_POLICY, b"", index.digest, len(weights),
            (Encoding.anchor(index, len(weights)),),
        )  # fmt: skip
        policy = StoredPolicy(body.sign(TRAINER), index, f"store/{bench.run.id.hex()[:16]}")
        policy.mark_stored()
        self.weights = self.folder / policy.final
        self.weights.parent.mkdir(parents=True)
        self.weights.write_bytes(weights)
        (self.folder / policy.head).write_bytes(policy.encode_head())

    def ban(self, work: AcceptedWork, by: Signer = JUDGE) -> bytes:
        """A ban by this work, whatever it is, and the work itself."""
        commitment = work.submission.commitment
        said = SignedVerdict(
            by.peer_id,
            commitment,
            Verdict.REJECTED,
            Reason.DRAW_DISTANCE.value,
            99.0,
            0.001,
            (),
        ).signed(by)
        place = self.folder / FOLDER
        place.mkdir(parents=True, exist_ok=True)
        (place / commitment.content.hex()).write_bytes(work.submission.to_bytes())
        return Ban((said,), 2**40).to_bytes()

    def audit(self, capsys: pytest.CaptureFixture[str], *more: str) -> tuple[int, list[Any]]:
        code = main(["audit", "--evidence", "--json", str(self.folder), *more])
        return code, json.loads(capsys.readouterr().out)["bans"]


@pytest.fixture
def stage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Stage:
    return Stage(tmp_path, monkeypatch)


def test_a_cheats_ban_is_repeated_and_a_slanderers_refuted(
    stage: Stage, capsys: pytest.CaptureFixture[str]
) -> None:
    async def bans(bench: Bench) -> list[bytes]:
        foreign = replace((await bench.honest(5)).submission.commitment, run=bytes(32))
        return [
            stage.ban(await bench.made_up(0)),
            stage.ban(await bench.honest(1)),
            b"no ban at all",
            Ban((rejected(foreign),), 2**40).to_bytes(),
        ]

    stage.act(bans)
    code, found = stage.audit(capsys)
    assert [(one["entry"], one["outcome"]) for one in found] == [
        (0, "repeated"),
        (1, "refuted"),
        (2, "void"),
        (3, "void"),
    ]
    assert code == 1
    assert "limit" in found[0]["why"]
    assert found[0]["worker"] == str(trainer_bench.WORKER.peer_id)
    assert main(["audit", "--evidence", str(stage.folder)]) == 1
    assert ": refuted (a replay finds nothing wrong" in capsys.readouterr().out


def rejected(commitment: Any) -> SignedVerdict:
    reason = Reason.DRAW_DISTANCE.value
    said = SignedVerdict(JUDGE.peer_id, commitment, Verdict.REJECTED, reason, 99.0, 0.001, ())
    return said.signed(JUDGE)


@pytest.mark.parametrize(
    "harm", ["content gone", "content cut", "policy gone", "policy rotten"]
)
def test_what_is_not_at_hand_refutes_nothing(
    stage: Stage, tmp_path: Path, capsys: pytest.CaptureFixture[str], harm: str
) -> None:
    """And is found in another node's folder, if one is named that has it."""

    async def bans(bench: Bench) -> list[bytes]:
        return [stage.ban(await bench.made_up(0))]

    stage.act(bans)
    shutil.copytree(stage.folder, tmp_path / "other")
    (content,) = (stage.folder / FOLDER).iterdir()
    harmed = stage.weights if harm.startswith("policy") else content
    data = harmed.read_bytes()
    if harm.endswith("gone"):
        harmed.unlink()
    else:
        harmed.write_bytes(data[:-1] if harm.endswith("cut") else b"\0" + data[1:])
    code, found = stage.audit(capsys)
    assert (code, found[0]["outcome"]) == (0, "cannot be repeated")
    assert ("policy 0" if harm.startswith("policy") else "the work") in found[0]["why"]
    code, found = stage.audit(capsys, "--from", str(tmp_path / "other"))
    assert (code, found[0]["outcome"]) == (0, "repeated")


def test_evidence_on_several_submissions_is_weighed_together(
    stage: Stage, capsys: pytest.CaptureFixture[str]
) -> None:
    """One finding beyond doubt among three is enough; the same work bans once."""

    async def bans(bench: Bench) -> list[bytes]:
        works = [await bench.honest(0), await bench.made_up(1), await bench.honest(2)]
        for work in works:
            stage.ban(work)
        cited = tuple(rejected(work.submission.commitment) for work in works)
        return [Ban(cited, 2**40).to_bytes(), Ban(cited[1:2], 2**40).to_bytes()]

    stage.act(bans)
    code, found = stage.audit(capsys)
    assert [one["outcome"] for one in found] == ["repeated", "void"]
    assert code == 1
