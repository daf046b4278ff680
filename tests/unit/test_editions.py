"""An owner's tools never sign two texts under one epoch."""

from __future__ import annotations

import errno
import itertools
import os
from pathlib import Path
from random import Random

import pytest

from p2p.errors import ConfigError
from p2p.identity import KeyPair
from p2p.node.rundoc import are_rivals
from roles.contract import Run
from roles.envs.data import pin_data
from roles.own.__main__ import main
from roles.own.init import renew
from roles.own.layout import RunFolder
from roles.own.people import load_run
from tests.support.runs import SORTING_TEXT

TRAINER, VALIDATOR = (KeyPair(bytes([number]) * 32).peer_id for number in (1, 2))


class Owner:
    def __init__(self, folder: Path) -> None:
        self.folder, self.key = folder, folder / "owner.key"
        self.signed: list[Run] = []

    def draft(self, epoch: int = 1, rate: float = 0.5, name: str = "mine") -> Path:
        path = self.folder / f"{name}-{epoch}-{rate}.toml"
        path.write_text(
            f'name = "{name}"\nepoch = {epoch}\ntrainers = ["{TRAINER}"]\n'
            f'validators = ["{VALIDATOR}"]\n'
            f"{SORTING_TEXT}[limits]\nsurprise = {rate}\n"
        )
        return path

    def create(self, draft: Path, out: str = "run.shoal") -> int:
        return self._play("create", draft, out)

    def amend(self, document: str, out: str, *changes: str) -> int:
        return self._play("amend", self.folder / document, out, *changes)

    def _play(self, command: str, source: Path, out: str, *more: str) -> int:
        path = self.folder / out
        before = path.read_bytes() if path.exists() else None
        arguments = [command, str(source), "--key", str(self.key), "--out", str(path), *more]
        code = main(arguments)
        if code == 0:
            self.signed.append(load_run(path))
        else:
            assert (path.read_bytes() if path.exists() else None) == before
        return code


@pytest.fixture
def owner(tmp_path: Path) -> Owner:
    return Owner(tmp_path)


@pytest.mark.parametrize("out", ["run.shoal", "elsewhere.shoal"])
def test_another_text_of_a_signed_epoch_is_refused_and_the_next_is_offered(
    owner: Owner, out: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """It was signed, exit 0: every node that had the first went on under the old recipe."""
    assert owner.create(owner.draft(rate=0.5)) == 0
    assert owner.create(owner.draft(rate=0.7), out) == 2
    said = capsys.readouterr().err
    assert "epoch 1 of run 'mine' is signed already" in said
    assert "epoch = 2" in said
    assert said.count("\n") == 1
    assert owner.create(owner.draft(epoch=2, rate=0.7), out) == 0
    assert owner.create(owner.draft(epoch=1, rate=0.9)) == 2
    assert "epoch = 3" in capsys.readouterr().err


def test_the_same_draft_gives_the_same_document(
    owner: Owner, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its end is counted from now, and made another text of it each second."""
    assert owner.create(owner.draft()) == 0
    now = owner.signed[0].expiry
    monkeypatch.setattr("time.time", lambda: now - 60.0)
    assert owner.create(owner.draft(), "copy.shoal") == 0
    assert owner.signed[0].document == owner.signed[1].document
    assert "renew it with epoch = 2" in capsys.readouterr().err
    assert owner.create(owner.draft(name="another")) == 0  # each run counts for itself


def test_two_changes_of_one_edition_are_not_both_the_next(
    owner: Owner, capsys: pytest.CaptureFixture[str]
) -> None:
    assert owner.create(owner.draft()) == 0
    assert owner.amend("run.shoal", "next.shoal", "--allow", str(TRAINER)) == 0
    assert owner.amend("run.shoal", "other.shoal", "--forbid", str(TRAINER)) == 2
    said = capsys.readouterr().err
    assert "run.shoal is not the newest edition" in said
    assert str(owner.folder / "next.shoal") in said
    assert owner.create(owner.draft(epoch=2)) == 2
    assert owner.amend("next.shoal", "other.shoal", "--forbid", str(TRAINER)) == 0


def test_a_key_without_a_record_knows_the_document_that_it_would_replace(owner: Owner) -> None:
    assert owner.create(owner.draft(rate=0.5)) == 0
    (owner.folder / "owner.key.signed").unlink()
    assert owner.create(owner.draft(rate=0.7)) == 2


def test_what_a_crash_has_cut_off_is_forgotten_and_other_damage_is_not(
    owner: Owner, capsys: pytest.CaptureFixture[str]
) -> None:
    record = owner.folder / "owner.key.signed"
    assert owner.create(owner.draft()) == 0
    whole = record.read_text()
    record.write_text(whole + whole[:30])
    assert owner.create(owner.draft(epoch=2)) == 0
    assert record.read_text().startswith(whole + '{"')
    assert len(record.read_text().splitlines()) == 2
    record.write_bytes(b"\xff\xfe" + whole.encode())
    assert owner.create(owner.draft(epoch=3)) == 2
    record.write_text("what is this\n" + whole)
    assert owner.create(owner.draft(epoch=3)) == 2
    assert "owner.key.signed is damaged" in capsys.readouterr().err


def test_init_signs_no_other_run_where_one_was_lost(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "mine"
    assert main(["init", str(folder), "--nodes", "1"]) == 0
    document = folder / "run.shoal"
    first = document.read_bytes()
    document.unlink()
    assert main(["init", str(folder), "--nodes", "1"]) == 0  # the same again
    assert document.read_bytes() == first
    document.unlink()
    draft = tmp_path / "other.toml"
    draft.write_text(f'name = "mine"\n{SORTING_TEXT}')
    assert main(["init", str(folder), "--draft", str(draft)]) == 2
    assert f"put {document} back, or name another folder" in capsys.readouterr().err


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    assert main(["init", str(tmp_path / "mine"), "--nodes", "1"]) == 0
    return RunFolder(tmp_path / "mine")


def change(path: Path, before: str, after: str) -> None:
    text = path.read_text()
    assert before in text
    path.write_text(text.replace(before, after))


def test_a_draft_that_was_changed_is_signed_at_the_next_start_and_no_other(
    folder: RunFolder,
) -> None:
    first = load_run(folder.document)
    assert renew(folder) == ""
    change(folder.draft, "steps = 60", "steps = 70")
    said = renew(folder)
    assert said == "draft.toml was changed (sampling): signed as epoch 2"
    second = load_run(folder.document)
    assert (second.id, second.epoch, second.terms.sampling.steps) == (first.id, 2, 70)
    assert renew(folder) == ""
    change(folder.draft, "# each is a policy", "# policies")  # says the same
    assert renew(folder) == ""
    assert load_run(folder.document) == second
    change(folder.people, "validators = [", f'validators = ["{TRAINER}", ')
    assert "(validators): signed as epoch 3" in renew(folder)


def test_a_disk_that_takes_no_document_loses_neither_edition(
    folder: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The document was cut off, and put back it passed for the newest."""
    first = load_run(folder.document)
    change(folder.draft, "steps = 60", "steps = 70")
    write = Path.write_bytes

    def refuse(self: Path, data: bytes) -> int:
        write(self, data[:100])
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as full:
        full.setattr(Path, "write_bytes", refuse)
        with pytest.raises(OSError, match="No space left"):
            renew(folder)
    assert load_run(folder.document) == first
    assert "signed as epoch 2" in renew(folder)
    assert load_run(folder.document).terms.sampling.steps == 70


def test_pipes_and_folders_in_place_of_a_file_are_one_sentence(folder: RunFolder) -> None:
    """A pipe that nobody writes to was waited for."""
    folder.people.unlink()
    os.mkfifo(folder.people)
    with pytest.raises(ConfigError, match="no regular file"):
        renew(folder)
    folder.people.unlink()
    folder.people.mkdir()
    with pytest.raises(ConfigError, match="no regular file"):
        renew(folder)
    os.mkfifo(folder.path / "pipe")
    for name in (str(folder.path / "pipe"), "a\0b"):
        with pytest.raises(ConfigError, match=r"no regular file|cannot be read"):
            pin_data(name)


def amend(folder: RunFolder, *change: str) -> None:
    document = str(folder.document)
    assert (
        main(["amend", document, "--key", str(folder.owner), "--out", document, *change]) == 0
    )


def test_an_edition_that_ends_is_renewed_at_the_next_start(folder: RunFolder) -> None:
    amend(folder, "--expires", "2h")
    assert renew(folder) == "draft.toml would be void within a day: signed as epoch 3"
    assert renew(folder) == ""


def test_a_change_of_learner_toml_signs_nothing(folder: RunFolder) -> None:
    """A new learning rate was a new edition, and an upgrade of each volunteer."""
    change(folder.learner, "rate = 0.0008", "rate = 0.0004")
    assert renew(folder) == ""


def test_what_was_amended_is_kept_until_the_draft_is_changed(folder: RunFolder) -> None:
    amend(folder, "--allow", str(VALIDATOR))
    assert renew(folder) == ""
    assert load_run(folder.document).epoch == 2
    change(folder.draft, "lag = 2", "lag = 1")
    assert "(admission, sampling): signed as epoch 3" in renew(folder)


@pytest.mark.parametrize(
    ("before", "after", "said"),
    [
        ('name = "mine"', 'name = "yours"', "is of a run 'yours', and .* holds 'mine'"),
        ("seed = 0", "seed = 1", "names another model than the one that .* trains"),
        ("lag = 2", "rate = 1e-4", "rate belongs in learner.toml"),
        ("lag = 2", "lag = ", "is not TOML"),
        ("[limits]", "trainers = []\n[limits]", "there is no key 'trainers'"),
        ("days = 30", "days = 30\ntrainers = []", "stands in .* and in .*: remove it from one"),
    ],
)
def test_a_draft_that_cannot_be_signed_again_is_a_sentence(
    folder: RunFolder, before: str, after: str, said: str
) -> None:
    signed = folder.document.read_bytes()
    change(folder.draft, before, after)
    with pytest.raises(ConfigError, match=said):
        renew(folder)
    assert folder.document.read_bytes() == signed


@pytest.mark.parametrize("seed", range(5))
def test_whatever_an_owner_does_no_two_documents_are_rivals(owner: Owner, seed: int) -> None:
    rng = Random(seed)
    outs = ["run.shoal", "next.shoal", "old.shoal"]
    for _ in range(40):
        out, there = rng.choice(outs), [name for name in outs if (owner.folder / name).exists()]
        if not there or rng.random() < 0.5:
            epoch, rate = rng.randrange(1, 9), rng.choice((0.5, 0.7))
            owner.create(owner.draft(epoch, rate, rng.choice(("mine", "another"))), out)
        else:
            change = rng.choice(("--allow", "--forbid")), str(rng.choice((TRAINER, VALIDATOR)))
            owner.amend(rng.choice(there), out, *change)
        if there and rng.random() < 0.2:
            (owner.folder / rng.choice(there)).unlink()
    assert len({(run.id, run.epoch) for run in owner.signed}) > 3
    pairs = itertools.combinations(owner.signed, 2)
    assert not any(are_rivals(one, other) for one, other in pairs)
