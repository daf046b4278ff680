"""``shoal ledger audit --evidence``: what a bystander finds out about a conviction, offline."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import trio

from p2p.ledger import open_ledger
from p2p.machine import RealWorld
from p2p.node.rundoc import PATH
from p2p.policy import NO_POLICY
from p2p.shardcast.index import Index, PolicyFile, Span, digest_of
from p2p.shardcast.manifest import Encoding, ManifestBody
from p2p.shardcast.stored import StoredPolicy
from proofs.checks import Reason
from roles.ledger.command import main
from roles.protocol.core.lies import Finding, Lie
from roles.protocol.core.messages import AcceptedWork
from roles.protocol.core.statements import LIE_KIND
from roles.trainer.audit import LIES
from tests import trainer_bench
from tests.trainer_bench import JUDGE, TRAINER, VERSION, WEIGHTS, Bench, open_bench


class Stage:
    """A trainer's folder, with the convictions in its ledger."""

    def __init__(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.bench_folder, self.folder = tmp_path / "bench", tmp_path / "trainer"
        self.monkeypatch = monkeypatch

    def act(self, convict: Callable[[Bench], Any], author: Any = TRAINER) -> None:
        async def play() -> None:
            async with open_bench(self.bench_folder) as bench:
                self.publish(bench)
                statements = await convict(bench)
                (self.folder / PATH).write_bytes(bench.run.document)
                async with open_ledger(RealWorld(author, self.folder)) as ledger:
                    for body in statements:
                        await ledger.append(LIE_KIND, body)

        trio.run(play)

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

    def conviction(self, work: AcceptedWork) -> Lie:
        """One for this work, whatever it is, and the delivery itself."""
        path = f"{LIES}/{work.verdict.commitment.content.hex()}"
        (self.folder / LIES).mkdir(parents=True, exist_ok=True)
        (self.folder / path).write_bytes(work.to_bytes())
        return Lie(work.verdict, Finding(Reason.DRAW_DISTANCE.value, 99.0, 0.001), path)

    def audit(self, capsys: pytest.CaptureFixture[str], *more: str) -> tuple[int, list[Any]]:
        code = main(["audit", "--evidence", "--json", str(self.folder), *more])
        return code, json.loads(capsys.readouterr().out)["convictions"]


@pytest.fixture
def stage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Stage:
    return Stage(tmp_path, monkeypatch)


def test_a_liars_conviction_is_repeated_and_a_slanderers_refuted(
    stage: Stage, capsys: pytest.CaptureFixture[str]
) -> None:
    async def convict(bench: Bench) -> list[bytes]:
        lie, slander = await bench.made_up(0), await bench.honest(1)
        foreign = await bench.honest(2, run=bytes(32))
        out = replace(stage.conviction(await bench.honest(3)), path="../x")
        rest = [stage.conviction(one) for one in (lie, slander, foreign)]
        return [one.to_bytes() for one in (*rest, out)] + [b"no lie at all"]

    stage.act(convict)
    code, found = stage.audit(capsys)
    assert [one["outcome"] for one in found] == ["repeated", "refuted", "void", "void", "void"]
    assert code == 1
    assert "limit" in found[0]["why"]
    assert found[0]["validator"] == str(JUDGE.peer_id)
    assert main(["audit", "--evidence", str(stage.folder)]) == 1
    assert ": refuted (a replay finds nothing wrong" in capsys.readouterr().out


def test_only_a_trainer_convicts(stage: Stage, capsys: pytest.CaptureFixture[str]) -> None:
    async def convict(bench: Bench) -> list[bytes]:
        return [stage.conviction(await bench.made_up(0)).to_bytes()]

    stage.act(convict, author=JUDGE)
    assert [one["outcome"] for one in stage.audit(capsys)[1]] == ["void"]


@pytest.mark.parametrize(
    "harm", ["delivery gone", "delivery cut", "policy gone", "policy rotten"]
)
def test_what_is_not_at_hand_refutes_nothing(
    stage: Stage, tmp_path: Path, capsys: pytest.CaptureFixture[str], harm: str
) -> None:
    """And is found in another node's folder, if one is named that has it."""

    async def convict(bench: Bench) -> list[bytes]:
        return [stage.conviction(await bench.made_up(0)).to_bytes()]

    stage.act(convict)
    shutil.copytree(stage.folder, tmp_path / "other")
    (content,) = (stage.folder / LIES).iterdir()
    harmed = stage.weights if harm.startswith("policy") else content
    data = harmed.read_bytes()
    if harm.endswith("gone"):
        harmed.unlink()
    else:
        harmed.write_bytes(data[:-1] if harm.endswith("cut") else b"\0" + data[1:])
    code, found = stage.audit(capsys)
    assert (code, found[0]["outcome"]) == (0, "cannot be repeated")
    assert ("policy 0" if harm.startswith("policy") else "the delivery") in found[0]["why"]
    code, found = stage.audit(capsys, "--from", str(tmp_path / "other"))
    assert (code, found[0]["outcome"]) == (0, "repeated")
