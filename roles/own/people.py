"""The people of a run: ``shoal run invite`` and ``shoal run amend``.

An invite is signed and printed; nothing else knows of it. Who may be in at all is changed by
the run's next edition: `amend` takes the signed file, changes its lists, counts its epoch up
and signs it again, so that an owner needs no draft to remove a validator in a hurry.
"""

from __future__ import annotations

import argparse
import re
import secrets
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from p2p.errors import BadMessage, ConfigError
from p2p.identity import SEED_BYTES, KeyPair, PeerId
from p2p.machine import load_or_create_key
from p2p.node.admission import MAX_USES, sign_invite
from p2p.node.usage import check_target, say, whole_number
from roles.contract.core.diloco import Algorithm, Joining
from roles.contract.core.file import MAX_RUN, Run, Terms, decode_run_untrusted
from roles.own.editions import SignedBefore, draft_of, sign_edition, write_edition

UNITS: Final = {"h": 3_600, "d": 86_400}
"""Seconds of what durations are counted in."""
_DURATION: Final = re.compile(r"([0-9]{1,5})([hd])")


def add_arguments(commands: Any) -> None:
    """Add the two commands to those of ``shoal run``."""
    invite = commands.add_parser("invite", help="print an invite to a run")
    invite.add_argument("document", type=Path, metavar="RUN", help="the signed run file")
    invite.add_argument("--role", default="inference", help="what the guest may do")
    invite.add_argument("--uses", type=whole_number(1, MAX_USES), default=1, metavar="N",
                        help="how many identities it admits (default 1)")  # fmt: skip
    invite.add_argument("--expires", type=_duration, default="7d", metavar="7d",
                        help="when what it admits to ends: hours (h) or days (d)")  # fmt: skip
    invite.add_argument("--key", type=Path, required=True, metavar="FILE",
                        help="the owner's key, or that of an inviter")  # fmt: skip
    amend = commands.add_parser("amend", help="sign the next edition of a run file")
    amend.add_argument("document", type=Path, metavar="RUN", help="the newest edition")
    amend.add_argument("--key", type=Path, required=True, metavar="FILE", help="the owner's")
    amend.add_argument("--out", type=Path, required=True, metavar="FILE",
                       help="where the next edition goes")  # fmt: skip
    amend.add_argument("--expires", type=_duration, metavar="30d",
                       help="how long it is valid from now (default: as before)")  # fmt: skip
    for option, what in (
        ("--drop-validator", "name this validator no more"),
        ("--add-validator", "name this validator"),
        ("--allow", "put this node on the list"),
        ("--forbid", "take this node off the list"),
        ("--inviter", "let this one invite"),
        ("--drop-inviter", "let this one invite no more; its guests are out"),
    ):
        amend.add_argument(
            option, type=_peer, action="append", default=[], metavar="PEER", help=what
        )
    amend.add_argument("--revoke", action="append", default=[], metavar="ID",
                       help="an invite that admits nobody any more")  # fmt: skip


def _duration(text: str) -> int:
    found = _DURATION.fullmatch(text)
    if found is None or not int(found[1]):
        raise argparse.ArgumentTypeError(f"{text!r} is not like 12h or 7d")
    return int(found[1]) * UNITS[found[2]]


def _peer(text: str) -> PeerId:
    try:
        return PeerId.from_base58(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def invite(options: argparse.Namespace) -> None:
    """Print an invite.

    Raises:
        ConfigError: Its author may not invite, or there is no such role.
    """
    run, key = load_run(options.document), _key_at(options.key)
    rules, terms = run.guest_rules, run.terms
    if key.peer_id != run.owner and key.peer_id not in rules.inviters:
        raise ConfigError(
            f"{options.key} is the key of {key.peer_id}, who may not invite to {run.name!r}:"
            f" use that of its owner {run.owner}, or have the owner sign `shoal run amend"
            f" {options.document} --inviter {key.peer_id}`"
        )
    admits = terms.diloco.joining is Joining.ADMITTED and terms.algorithm is Algorithm.DILOCO
    if options.role == "trainer" and not admits:
        raise ConfigError(
            f"run {run.name!r} names its trainers: an invite cannot make one; see `shoal run"
            " amend`"
        )
    now = time.time()  # noqa: TID251 - a tool for people, outside any node
    until = min(int(now) + options.expires, run.expiry)
    secret = secrets.token_bytes(SEED_BYTES)
    try:
        made = sign_invite(run.id, options.role, options.uses, until, secret, key)
    except ValueError as error:
        raise ConfigError(str(error)) from None
    say(made.to_text())
    print(  # noqa: T201 - for the person; the invite alone is on standard output
        f"invite {made.grant.id}: {options.uses} nodes as {options.role} until"
        f" {made.grant.until}; revoke it with `shoal run amend --revoke {made.grant.id}`",
        file=sys.stderr,
    )


def amend(options: argparse.Namespace) -> Run:
    """Return the next edition, signed and written.

    Raises:
        ConfigError: The options or the document are wrong.
    """
    check_target("--out", options.out, text=False)
    run, key = load_run(options.document), _key_at(options.key)
    if key.peer_id != run.owner:
        raise ConfigError(
            f"{options.key} is the key of {key.peer_id}: only {run.owner} signs {run.name!r}"
        )
    dropped = list(options.drop_validator)
    now = time.time()  # noqa: TID251 - a tool for people, outside any node
    expiry = run.expiry if options.expires is None else int(now) + options.expires
    try:
        terms = next_edition(run.terms, dropped, options, expiry)
    except ValueError as error:
        raise ConfigError(f"the next edition of {run.name!r} cannot be: {error}") from None
    try:
        signed = sign_edition(terms, key, options.key, options.out)
    except SignedBefore as error:
        raise ConfigError(
            f"{options.document} is not the newest edition: {error.before}: amend {error.file}"
        ) from None
    # It stands for the same draft: shoal run start must not sign that one again.
    draft = draft_of(run, options.key, options.document)
    write_edition(signed, options.key, options.out, draft)
    return signed


def next_edition(
    terms: Terms, dropped: Sequence[PeerId], options: argparse.Namespace, expiry: int
) -> Terms:
    """Return the terms with the lists changed.

    Raises:
        ValueError: They make no run.
    """
    rules = terms.admission
    return replace(
        terms,
        epoch=terms.epoch + 1,
        expiry=expiry,
        validators=_changed(terms.validators, options.add_validator, dropped),
        admission=replace(
            rules,
            allowed=_changed(rules.allowed, options.allow, options.forbid),
            inviters=_changed(rules.inviters, options.inviter, options.drop_inviter),
            revoked=tuple(dict.fromkeys((*rules.revoked, *options.revoke))),
        ),
    )


def _changed(
    names: Sequence[PeerId], more: Sequence[PeerId], fewer: Sequence[PeerId]
) -> tuple[PeerId, ...]:
    return tuple(name for name in dict.fromkeys((*names, *more)) if name not in fewer)


def _key_at(path: Path) -> KeyPair:
    if not path.exists():
        raise ConfigError(f"there is no key at {path}: give the owner's, or an inviter's")
    return load_or_create_key(path)


def load_run(path: Path) -> Run:
    """Return the signed document at ``path``.

    Raises:
        ConfigError: The file is no run document.
    """
    with path.open("rb") as file:
        document = file.read(MAX_RUN + 1)
    try:
        return decode_run_untrusted(document)
    except BadMessage as error:
        raise ConfigError(f"{path} cannot be shown: {error}") from None
