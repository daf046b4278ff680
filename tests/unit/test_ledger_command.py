"""``shoal ledger``: whatever is wrong with a ledger or a receipt is found, and named."""

from __future__ import annotations

import csv
import io
import json
import os
import shutil
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import trio

from p2p.identity import KeyPair, Signer, verify
from p2p.ledger import Ledger
from p2p.ledger.core.inspection import inspect
from p2p.machine import KEY, RealWorld, load_or_create_key
from p2p.node.rundoc import PATH
from p2p.policy import NO_POLICY, PolicyVersion
from p2p.shardcast.index import Index, PolicyFile, Span, digest_of
from p2p.shardcast.manifest import Encoding, Manifest
from p2p.shardcast.store import StoredPolicy
from p2p.wire import MIB
from proofs.checks import Reason, Verdict
from roles.contract.core.file import Run, sign_run
from roles.contract.core.shape import ModelShape
from roles.ledger.command import main
from roles.ledger.core.receipt import sign_receipt
from roles.ledger.reading import MAX_FILE
from roles.ledger.repeating import EVIDENCE
from roles.protocol.core.conviction import Conviction, convict
from roles.protocol.core.findings import NO_ANSWER, Finding
from roles.protocol.core.groups import NOTHING
from roles.protocol.core.statements import EARNED_KIND, LEARNT_KIND, VERDICT_KIND, learnt_parts
from roles.protocol.core.verdict import SignedVerdict
from roles.protocol.core.window import Commitment, Submission, content_digest
from roles.protocol.core.work import Work, work_of
from tests.support import drawn
from tests.support.drawn import JUDGE, VERSION, WEIGHTS, Drawer, judge
from tests.support.runs import OWNER, RUN, TERMS, TRAINER, VALIDATOR

WORKER = KeyPair(b"w" * 32)
QWEN3_32B = ModelShape(
    layers=64, width=5120, feed_forward=25600, query_heads=64, key_heads=8, head_width=128,
    vocabulary=151936,
)  # fmt: skip
QWEN3_06B = ModelShape(
    layers=28, width=1024, feed_forward=3072, query_heads=16, key_heads=8, head_width=128,
    vocabulary=151936,
)  # fmt: skip


def verdict(
    index: int = 0, *, worker: Signer = WORKER, validator: Signer = VALIDATOR, run: Run = RUN,
    said: Verdict = Verdict.ACCEPTED,
) -> SignedVerdict:  # fmt: skip
    content = bytes([index]) * 32
    commitment = Commitment(
        *(run.id, b"t" * 32, worker.peer_id, PolicyVersion(1), b"p" * 32, index, content)
    )
    work = work_of([(10, 20)] * 4) if said is Verdict.ACCEPTED else None
    unsigned = SignedVerdict(
        validator.peer_id, commitment, said, "within limits", 0.0, 1.0, (1.0,) * 4, work=work
    )
    return unsigned.signed(validator)


def node(
    folder: Path, key: Signer, statements: Sequence[tuple[str, bytes]], segment_bytes: int = 1
) -> Path:
    folder.mkdir(parents=True)
    (folder / PATH).write_bytes(RUN.document)

    async def state() -> None:
        ledger = await Ledger(RealWorld(key, folder), segment_bytes=segment_bytes).opened()
        for statement in statements:
            await ledger.append(*statement)

    trio.run(state)
    return folder


def test_flops_are_those_that_intellect_2_counts() -> None:
    """Two vectors of INTELLECT-2's ``work_counting``."""
    assert work_of([(100, 1000)]).flops(QWEN3_32B) == (6_407_297_433_600, 65_226_407_936_000)
    assert work_of([(10, 20)]).flops(QWEN3_06B) == (11_932_303_360, 23_933_419_520)


def test_every_byte_that_is_changed_is_found_and_named(tmp_path: Path) -> None:
    said = [("verdict", b"a"), ("lie", b"bc"), ("verdict", b"")]
    place = node(tmp_path / "node", VALIDATOR, said) / "ledger"
    files = {path.name: path.read_bytes() for path in place.iterdir()}
    whole = {name: data for name, data in files.items() if name != "synced"}
    sound = inspect(whole, files["synced"], verify)
    assert (len(sound.entries), sound.flaws, sound.torn) == (3, [], None)
    for number, (name, data) in enumerate(sorted(whole.items())):
        for at in range(len(data)):
            changed = data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]
            found = inspect({**whole, name: changed}, files["synced"], verify)
            assert found.flaws, f"byte {at} of {name}"
            assert {flaw.entry for flaw in found.flaws} == {number}
            assert found.flaws[0].file == name
            assert found.torn is None
    marks = files["synced"]
    for at in [*range(0, 200), *range(200, 4096, 97), *range(4096, len(marks))]:
        changed = marks[:at] + bytes([marks[at] ^ 1]) + marks[at + 1 :]
        found = inspect(whole, changed, verify)
        assert [flaw.file for flaw in found.flaws] == ["synced"], at


def test_a_torn_end_is_told_from_rot_and_a_lost_end_from_both(tmp_path: Path) -> None:
    said = [("verdict", b"a"), ("verdict", b"b")]
    place = node(tmp_path / "node", VALIDATOR, said) / "ledger"
    marks = (place / "synced").read_bytes()
    one, two = ((place / f"0000000{number}.seg").read_bytes() for number in range(2))
    first, second = "00000000.seg", "00000001.seg"
    torn = inspect({first: one, second: two + two[:40]}, marks, verify)
    assert (len(torn.entries), torn.flaws) == (2, [])
    assert torn.torn is not None
    assert (torn.torn.offset, torn.torn.entry) == (len(two), 2)
    cut = inspect({first: one, second: two[:-1]}, marks, verify)
    assert cut.torn is None
    assert [flaw.entry for flaw in cut.flaws][:1] == [1]
    for lost in ({first: one}, {second: two}, {}):
        assert inspect(lost, marks, verify).flaws
    assert inspect({first: one}, None, verify).flaws[0].file == "synced"


def test_audit_says_which_entry_is_wrong(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A validator may sign an entry whose verdict another has signed; a changed byte is rot."""
    theirs = verdict(validator=OWNER).to_bytes()
    said = [(VERDICT_KIND, verdict().to_bytes()), (VERDICT_KIND, theirs)]
    folder = node(tmp_path / "v", VALIDATOR, said)
    assert main(["audit", str(folder)]) == 1
    assert "entry 1: a verdict of" in capsys.readouterr().err
    path = folder / "ledger" / "00000000.seg"
    data = path.read_bytes()
    path.write_bytes(data[:60] + bytes([data[60] ^ 4]) + data[61:])
    assert main(["audit", "--json", str(folder)]) == 1
    flaws = json.loads(capsys.readouterr().out)["flaws"]
    assert flaws[0] == "00000000.seg, byte 0, entry 0: a record does not have its checksum"
    assert main(["export", str(folder)]) == 2
    assert "shoal ledger audit" in capsys.readouterr().err
    assert main(["show", str(tmp_path)]) == 2
    assert "--data" in capsys.readouterr().err


def test_what_a_stranger_wrote_moves_no_cursor_and_is_no_markup(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    evil = replace(verdict(), verdict=Verdict.REJECTED, reason="\x1b[2J[red]gone", work=None)
    said = [(VERDICT_KIND, evil.signed(VALIDATOR).to_bytes()), ("\x1b]0;[b]", b"x")]
    folder = node(tmp_path / "v", VALIDATOR, said)
    assert main(["show", str(folder)]) == 0
    told = capsys.readouterr().out
    assert "\x1b" not in told
    assert "[red]" in told
    assert "?]0;[b]" in told
    assert main(["audit", str(folder)]) == 0


@pytest.mark.parametrize("kind", ["pipe", "folder", "device", "long"])
@pytest.mark.parametrize("name", ["ledger/00000000.seg", "ledger/synced", "run.shoal"])
def test_what_is_no_file_of_a_size_to_read_is_refused_with_a_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], kind: str, name: str
) -> None:
    """A pipe was waited for, for good; a device has no end."""
    folder = node(tmp_path / "v", VALIDATOR, [("verdict", b"a")])
    (folder / name).unlink()
    if kind == "pipe":
        os.mkfifo(folder / name)
    elif kind == "folder":
        (folder / name).mkdir()
    elif kind == "device":
        (folder / name).symlink_to("/dev/zero")
    else:
        (folder / name).touch()
        os.truncate(folder / name, MAX_FILE + 1)
    assert main(["export", str(folder)]) == 2
    said = capsys.readouterr().err
    assert ("longer than" if kind == "long" else "is no regular file") in said
    assert str(folder / name) in said


def test_contributions_are_counted_once_and_only_from_those_whose_word_counts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    foreign = sign_run(replace(TERMS, name="other"), OWNER)
    said = [
        (VERDICT_KIND, verdict(0).to_bytes()),
        (VERDICT_KIND, verdict(0).to_bytes()),
        (VERDICT_KIND, verdict(1, said=Verdict.REJECTED).to_bytes()),
        (VERDICT_KIND, verdict(2, run=foreign).to_bytes()),
    ]
    learnt = [work_of([(10, 20)]), work_of([(10, 20)] * 2)]
    steps = [
        (LEARNT_KIND, part)
        for work in learnt
        for part in learnt_parts(1, {WORKER.peer_id: work})
    ]
    folders = [
        node(tmp_path / "v", VALIDATOR, said),
        node(tmp_path / "t", TRAINER, steps),
        node(tmp_path / "w", WORKER, [(VERDICT_KIND, verdict(3).to_bytes())]),
    ]
    assert main(["export", *map(str, folders)]) == 0
    (row,) = csv.DictReader(io.StringIO(capsys.readouterr().out))
    assert row["worker"] == str(WORKER.peer_id)
    counts = {name: int(value) for name, value in row.items() if name != "worker"}
    shape = TERMS.model.shape
    assert counts == {
        "accepted_submissions": 1, "rejected_submissions": 1, "accepted_prompt_tokens": 40,
        "accepted_tokens": 80, "accepted_prompt_flops": work_of([(10, 20)] * 4).flops(shape)[0],
        "accepted_flops": work_of([(10, 20)] * 4).flops(shape)[1], "learnt_tokens": 40,
        "learnt_flops": work_of([(10, 20)] * 2).flops(shape)[1],
    }  # fmt: skip


def test_a_receipt_is_what_a_stranger_checks_offline(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    worker = load_or_create_key(tmp_path / KEY)
    said = [verdict(number, worker=worker).to_bytes() for number in (0, 1, 1)]
    folder = node(tmp_path / "w", worker, [(EARNED_KIND, body) for body in said])
    (tmp_path / KEY).rename(folder / KEY)
    out, run = tmp_path / "receipt", tmp_path / "run"
    assert main(["receipt", str(folder), "-o", str(out)]) == 0
    capsys.readouterr()
    assert main(["verify", "--json", str(out)]) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["name"], told["tokens"], told["submissions"]) == ("sorting", 160, 2)
    assert told["validators"] == {str(VALIDATOR.peer_id): 160}
    run.write_bytes(sign_run(replace(TERMS, name="other"), OWNER).document)
    assert main(["verify", str(out), "--run", str(run)]) == 1
    assert "is for run 'sorting'" in capsys.readouterr().err
    data = out.read_bytes()
    for at in range(0, len(data), 7):
        out.write_bytes(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])
        assert main(["verify", str(out)]) == 1, at
        assert "proves nothing" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("verdicts", "complaint"),
    [
        ([verdict(0, worker=OWNER)], "work of another node"),
        ([verdict(0, run=sign_run(replace(TERMS, name="other"), OWNER))], "another run"),
        ([verdict(0, said=Verdict.REJECTED)], "does not accept"),
        ([verdict(0), verdict(0)], "a second time"),
        ([replace(verdict(0), work=Work(tokens=10**9))], "signature is not its scorer's"),
    ],
)
def test_a_receipt_cannot_be_padded(
    verdicts: list[SignedVerdict],
    complaint: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A worker signs what it likes; the verdicts in it are others'."""
    told = tmp_path / "receipt"
    told.write_bytes(sign_receipt(RUN, verdicts, WORKER, 1000.0))
    assert main(["verify", str(told)]) == 1
    assert complaint in capsys.readouterr().err
    told.write_bytes(sign_receipt(RUN, [verdict(0, validator=WORKER)], WORKER, 1000.0))
    assert main(["verify", "--json", str(told)]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["tokens"], found["not_counted"]) == (0, 1), "no validator that the run names"


@pytest.mark.parametrize("command", ["audit", "show", "export"])
def test_a_folder_of_holes_is_refused_before_it_is_read(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], command: str
) -> None:
    """Files with holes have any length, and take no room in what is sent."""
    folder = node(tmp_path / "v", VALIDATOR, [("verdict", b"a")])
    for number in range(1, 40):
        with (folder / f"ledger/{number:08d}.seg").open("wb") as file:
            file.truncate(60 * MIB)
    assert main([command, str(folder)]) == 2
    said = capsys.readouterr().err
    assert "1,073,741,824 of a ledger are read" in said


# What a bystander finds out about a proof, offline


FAR_OFF = Finding(Reason.DRAW_DISTANCE.value, 99.0, 0.001)
"""What a replay finds of tokens that nobody drew."""


class Stage:
    def __init__(self, tmp_path: Path) -> None:
        self.folder = tmp_path / "trainer"
        self.drawer = Drawer(tmp_path / "drawn")
        self._drawn = tmp_path / "drawn"

    def act(self, prove: Callable[[], Awaitable[Any]]) -> None:
        async def play() -> None:
            await self.drawer.open()
            self._publish()
            await prove()
            ledger = await Ledger(RealWorld(drawn.TRAINER, self.folder)).opened()
            await ledger.append("trainer/step", b"")

        trio.run(play)

    def _publish(self) -> None:
        run = self.drawer.run
        weights = (self._drawn / WEIGHTS).read_bytes()
        spans = [Span(digest_of(weights), len(weights), 2)]
        index = Index.of([PolicyFile("", len(weights))], spans)
        self.drawer.policy = index.digest
        manifest = Manifest(
            drawn.TRAINER.peer_id, run.id, VERSION, NO_POLICY, b"", index.digest, len(weights),
            (Encoding.anchor(index, len(weights)),),
        ).sign(drawn.TRAINER)  # fmt: skip
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
        verdict = judge(submission, drawn.TRAINER, Verdict.REJECTED, FAR_OFF.reason, numbers)
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
        str(who.peer_id) for who in (drawn.WORKER, JUDGE, JUDGE)
    ]
    assert "limit" in found[0]["why"]


def test_slander_is_refuted(stage: Stage, capsys: pytest.CaptureFixture[str]) -> None:
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
    stage.act(trio.lowlevel.checkpoint)
    assert stage.audit(capsys) == (0, [])
    assert main(["audit", "--evidence", str(stage.folder)]) == 0
    assert "keeps no proofs" in capsys.readouterr().out
