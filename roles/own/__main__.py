"""``shoal run``: make a run of your own (``init DIR``), play it on this machine (``start
DIR``), and say who is in it."""

from __future__ import annotations

import argparse
import datetime
import json
import sys
import time
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

from p2p.errors import ConfigError, ShoalError
from p2p.machine import load_or_create_key
from p2p.node.process import check_key_place
from p2p.node.tables import write_table
from p2p.node.usage import (
    FAILED,
    WRONG_USAGE,
    CommandParser,
    check_target,
    complain,
    interruptible,
)
from p2p.wire import MIB
from proofs.checks import Limits
from roles import own
from roles.contract.core.diloco import Algorithm, Goal
from roles.contract.core.file import Run
from roles.contract.core.trust import TrustTerms
from roles.own import people
from roles.own.draft import (
    check_calibrated,
    check_environments,
    data_files,
    digest_of,
    load_draft,
    read_draft,
)
from roles.own.editions import sign_edition, write_edition
from roles.own.layout import RunFolder
from roles.own.pending import pending


def main(argv: Sequence[str] | None = None) -> int:
    """Make a run of your own, play it, and report it; sign run files.

    Returns 0, or with one sentence on standard error 1, or 2 if the command makes no sense.
    """
    return interruptible(partial(_main, argv))


def _main(argv: Sequence[str] | None) -> int:
    parser = CommandParser(prog="shoal run", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    own.add_arguments(commands)
    create = commands.add_parser("create", help="sign a draft")
    create.add_argument("draft", type=Path, help="TOML file; keys in docs/run-file.md")
    create.add_argument(
        "--key", type=Path, required=True, help="the owner's key; made if it is not there"
    )
    create.add_argument(
        "--out", type=Path, required=True, help="where the signed document goes"
    )
    create.add_argument(
        "--uncalibrated",
        action="store_true",
        help="sign a run in bfloat16 with limits that were measured on no model",
    )
    people.add_arguments(commands)
    show = commands.add_parser("show", help="check a document and print it")
    show.add_argument("document", type=Path)
    show.add_argument("--json", action="store_true", help="the whole table, for machines")
    options = parser.parse_args(argv)
    if options.command in own.COMMANDS:
        return own.COMMANDS[options.command](options)
    try:
        if options.command == "create":
            check_target("--out", options.out, text=False)
            check_target("--key", options.key, text=False)
            check_key_place(options.key)
            run = _create(options)
            print(_summary(run))  # noqa: T201 - this is the result
        elif options.command == "amend":
            print(_summary(people.amend(options)))  # noqa: T201 - this is the result
        elif options.command == "invite":
            people.invite(options)
        else:
            run = people.load_run(options.document)
            folder = RunFolder(options.document.absolute().parent)
            notes = "".join(f"\n{label:<12}{text}" for label, text in pending(folder))
            print(_as_json(run) if options.json else _summary(run) + notes)  # noqa: T201
    except ConfigError as error:
        complain(error)
        return WRONG_USAGE
    except (ShoalError, OSError) as error:
        complain(error)
        return FAILED
    return 0


def _create(options: argparse.Namespace) -> Run:
    now = time.time()  # noqa: TID251 - a tool for people, outside any node
    draft: Path = options.draft
    table = load_draft(draft)
    terms = read_draft(table, str(draft), now, draft.parent)
    if not options.uncalibrated:
        check_calibrated(terms)
    check_environments(terms, data_files(table, draft.parent))
    owner, is_next = load_or_create_key(options.key), "epoch" not in table
    run = sign_edition(terms, owner, options.key, options.out, is_next=is_next)
    write_edition(run, options.key, options.out, digest_of(draft))
    return run


def _summary(run: Run) -> str:
    until = datetime.datetime.fromtimestamp(run.expiry, datetime.UTC)
    lines = [
        f"run         {run.name}",
        f"id          {run.id.hex()}",
        f"owner       {run.owner}",
        f"epoch       {run.epoch}, valid until {until:%Y-%m-%d %H:%M} UTC",
        _work(run),
        *_base(run),
        f"limits      {_limits(run)}",
        f"admission   {_admission(run)}",
        _trust(run.terms.trust),
        *(f"trainer     {peer}" for peer in run.terms.trainers),
        *(f"validator   {peer}" for peer in run.terms.validators),
    ]
    return "\n".join(lines)


def _admission(run: Run) -> str:
    rules = run.terms.admission
    parts = [rules.mode.value]
    parts += [f"{len(rules.allowed)} on the list"] if rules.allowed else []
    parts += [f"{len(rules.inviters)} may invite"] if rules.inviters else []
    parts += [f"{len(rules.revoked)} invites revoked"] if rules.revoked else []
    parts += [f"work stamps of {rules.stamp_bits} bits"] if rules.stamp_bits else []
    return ", ".join(parts)


def _work(run: Run) -> str:
    terms, engine = run.terms, run.terms.model.engine
    if terms.algorithm is Algorithm.DILOCO:
        diloco = terms.diloco
        is_text = diloco.goal is Goal.TEXT
        names = diloco.corpora if is_text else [pin.name for pin in terms.environments]
        return (
            f"{'pre-trains ' if is_text else 'trains     '} {engine} on {', '.join(names)}:"
            f" {diloco.outer_steps} rounds of {diloco.inner_steps} steps, {diloco.codec.value}"
        )
    return f"trains      {engine} on {', '.join(pin.name for pin in terms.environments)}"


def _base(run: Run) -> Iterator[str]:
    pins = run.terms.model.base
    if pins:
        names = ", ".join(pin.name for pin in pins)
        size = sum(pin.size for pin in pins) / MIB
        yield f"base        {names} ({size:,.0f} MiB)"


def _limits(run: Run) -> str:
    record = run.terms.calibration
    if record is None:
        presets = {"fp32": Limits.fp32(), "bf16": Limits.bf16()}
        names = [
            f"the {name} preset" for name, one in presets.items() if one == run.terms.limits
        ]
        return f"uncalibrated: {', '.join(names) or 'as the draft says'}"
    return (
        f"calibrated {record.date} on {record.tokens:,} tokens of model"
        f" {record.model.hex()[:12]} ({record.dtype.value}, {record.draw.value},"
        f" {', '.join(record.environments)}; {'/'.join(record.generators)} to"
        f" {'/'.join(record.validators)}): {record.rejected} of {record.submissions:,} honest"
        " submissions refused"
    )


def _trust(trust: TrustTerms) -> str:
    """Return the terms of trust in words: places that a newcomer owes, and checks
    afterwards."""
    return (
        f"trust       a newcomer's first {trust.probation} places are scored whole; later what"
        f" is learnt from, and {trust.share:.0%} of the rest"
    )


def _as_json(run: Run) -> str:
    """Return the whole document as JSON, with digests in hexadecimal."""
    table = {"id": run.id.hex(), "owner": str(run.owner), **write_table(run.terms)}
    return json.dumps(table, default=bytes.hex)


if __name__ == "__main__":
    sys.exit(main())
