"""Sign editions of runs, and never two texts under one epoch.

Two documents of one owner, name and epoch that say different things prove equivocation against
the owner, and nodes work on under the one that they met first. So a record beside the key
(``owner.key.signed``, a line of JSON for each edition) holds what the key has signed, wherever
the documents went. An edition is in the record before anybody can see its document.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Final, TextIO

from p2p.errors import BadMessage, ConfigError
from p2p.identity import KeyPair
from p2p.naming import derived
from roles.contract.core.file import MAX_RUN, Run, Terms, decode_run_untrusted, run_id, sign_run

RECORD: Final = ".signed"
"""Suffix of the record's name, after that of the key."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Edition:
    """An edition that was signed before."""

    run: str
    epoch: int
    expiry: int
    digest: str
    file: str
    draft: str = ""
    """Digest of the draft that it stands for; empty if it stands for none."""

    @staticmethod
    def of(run: Run, file: Path, draft: str = "") -> _Edition:
        return _Edition(
            run=run.id.hex(),
            epoch=run.epoch,
            expiry=run.expiry,
            digest=run.digest.hex(),
            file=str(file.absolute()),
            draft=draft,
        )


class SignedBefore(ConfigError):
    """Another text of this epoch, or a later edition, was signed before."""

    def __init__(self, terms: Terms, newest: _Edition) -> None:
        what = (
            "and says something else"
            if newest.epoch == terms.epoch
            else f"and nodes take no epoch {terms.epoch} any more"
        )
        self.before = f"epoch {newest.epoch} of run {terms.name!r} is signed already, {what}"
        self.file = newest.file
        super().__init__(
            f"{self.before} ({self.file}): set epoch = {newest.epoch + 1} in the draft, or"
            " leave it out, to sign this one as the next edition"
        )


def sign_edition(
    terms: Terms, key: KeyPair, key_file: Path, out: Path, *, is_next: bool = False
) -> Run:
    """Return the edition that `write_edition` may write to ``out``.

    Terms that were signed before keep their end, so that the document is the same. Other terms
    get the next epoch if ``is_next``.

    Raises:
        SignedBefore: Another text of this epoch, or a later edition, was signed before.
        ConfigError: The record beside the key cannot be read or written.
    """
    with _open_record(key_file) as record:
        newest = _newest(run_id(key.peer_id, terms.name), _read(record, key_file), out)
    if newest is None or newest.epoch < terms.epoch:
        return sign_run(terms, key)
    epoch = newest.epoch if is_next else terms.epoch
    again = sign_run(replace(terms, epoch=epoch, expiry=newest.expiry), key)
    if again.digest.hex() != newest.digest:
        if is_next:
            return sign_run(replace(terms, epoch=epoch + 1), key)
        raise SignedBefore(terms, newest)
    if again.expiry != terms.expiry:
        print(  # noqa: T201 - for the person; the run alone is on standard output
            f"epoch {again.epoch} says this already, and keeps its end: renew it with epoch ="
            f" {again.epoch + 1} in the draft",
            file=sys.stderr,
        )
    return again


def draft_of(run: Run, key_file: Path, out: Path) -> str:
    """Return the digest of the draft of ``run``; empty if a later edition was signed whose
    document is not here.

    Raises:
        ConfigError: The record beside the key cannot be read.
    """
    with _open_record(key_file) as record:
        newest = _newest(run.id, _read(record, key_file), out)
    is_newest = newest is not None and newest.digest == run.digest.hex()
    return newest.draft if newest is not None and is_newest else ""


def write_edition(run: Run, key_file: Path, out: Path, draft: str = "") -> None:
    """Note a signed edition beside its key, with the digest of its draft, and then write its
    document.

    Raises:
        SignedBefore: Another text of this epoch, or a later edition, was signed meanwhile.
        ConfigError: The record beside the key cannot be read or written.
    """
    made = _Edition.of(run, out, draft)
    with _open_record(key_file) as record:
        signed = _read(record, key_file)
        newest = _newest(run.id, signed, out)
        if newest is not None and newest.epoch >= made.epoch and newest.digest != made.digest:
            raise SignedBefore(run.terms, newest)
        if (made.digest, draft) not in [(one.digest, one.draft) for one in signed]:
            record.write(json.dumps(asdict(made)) + "\n")
            record.flush()
            os.fsync(record.fileno())
        whole = out.with_name(derived(out.name, before=".", after=".new"))
        whole.write_bytes(run.document)  # a full disk is to leave the edition that is there
        whole.replace(out)


def _newest(run: bytes, signed: list[_Edition], out: Path) -> _Edition | None:
    """Return the last edition of a run in the record or in the file to be replaced."""
    editions = [edition for edition in (*_at(out), *signed) if edition.run == run.hex()]
    return max(reversed(editions), key=lambda edition: edition.epoch, default=None)


def _at(out: Path) -> Iterator[_Edition]:
    """Yield the edition at ``out`` if there is one, for keys of older versions, which have no
    record."""
    try:
        with out.open("rb") as file:
            yield _Edition.of(decode_run_untrusted(file.read(MAX_RUN + 1)), out)
    except (OSError, BadMessage):
        return


def _open_record(key_file: Path) -> TextIO:
    """Open the record of a key, locked until it is closed."""
    import fcntl  # not at the top: Windows has none, and is told so by `p2p.node.process`

    path = key_file.with_name(derived(key_file.name, after=RECORD))
    try:
        record = path.open("a+", encoding="utf-8")
        fcntl.flock(record, fcntl.LOCK_EX)
    except OSError as error:
        raise ConfigError(
            f"{path} cannot be written ({error.strerror}), and without this record a key could"
            " sign two texts of one epoch: put the key where it can be kept"
        ) from None
    return record


def _read(record: TextIO, key_file: Path) -> list[_Edition]:
    try:
        record.seek(0)
        whole, _, torn = record.read().rpartition("\n")
        if torn:  # by a crash, before anybody saw the document
            record.truncate(len(whole.encode()) + bool(whole))
        return [_Edition(**json.loads(line)) for line in whole.splitlines()]
    except (ValueError, TypeError):
        raise ConfigError(
            f"{key_file}{RECORD} is damaged: it says what this key has signed. Restore it, or"
            " remove it and give the next edition an epoch that was never used"
        ) from None
