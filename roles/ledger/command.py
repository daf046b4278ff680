"""Command ``shoal ledger``: shows what nodes have signed, and makes proofs of it for
strangers."""

from __future__ import annotations

import argparse
import csv
import datetime
import io
import json
import time
from collections import deque
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final

import trio

from p2p.errors import BadMessage, ConfigError, ShoalError
from p2p.identity import verify
from p2p.ledger import Entry
from p2p.ledger.core.inspection import MAX_FLAWS
from p2p.machine import KEY, load_or_create_key
from p2p.naming import printable
from p2p.node.folders import add_folder, node_of
from p2p.node.usage import (
    BEGINS_AGAIN,
    FAILED,
    WRONG_USAGE,
    CommandParser,
    check_target,
    complain,
    expanded,
    interruptible,
    say,
    whole_number,
    write_text,
)
from roles.ledger.core.contribution import COLUMNS, contributions
from roles.ledger.core.receipt import (
    MAX_RECEIPT,
    WorkReceipt,
    decode_receipt_untrusted,
    sign_receipt,
)
from roles.ledger.core.wording import Wording, wording_untrusted
from roles.ledger.reading import read_copies, read_ledger, read_regular, read_run
from roles.ledger.repeating import MODEL, Repeated, open_bystander, proofs_in
from roles.protocol.core.statements import EARNED_KIND
from roles.protocol.core.verdict import SignedVerdict, decode_verdict_untrusted

LAST: Final = 20
"""Entries that `show` lists by default: as many as fit on a screen of 24 lines."""


def main(argv: Sequence[str] | None = None) -> int:
    """Show, audit and export ledgers; make and verify receipts.

    Returns 0, 1 if something is not as it should be, or 2 if the command makes no sense.
    """
    return interruptible(partial(_main, argv), BEGINS_AGAIN)


def _main(argv: Sequence[str] | None) -> int:
    options = parser().parse_args(argv)
    try:
        code: int = options.work(options)
    except ConfigError as error:
        complain(error)
        return WRONG_USAGE
    except (ShoalError, OSError) as error:
        complain(error)
        return FAILED
    return code


# fmt: off
def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    whole = CommandParser(prog="shoal ledger", description=main.__doc__)
    commands = whole.add_subparsers(dest="command", required=True, metavar="COMMAND")

    def add(name: str, text: str, work: Any, **folder: Any) -> Any:
        one: argparse.ArgumentParser = commands.add_parser(name, help=text, description=text)
        one.set_defaults(work=work)
        if folder:
            one.add_argument("folder", type=Path, metavar="DIR", **folder)
        elif name != "verify":
            add_folder(one)
        if name not in ("show", "verify"):
            one.add_argument("--run", type=Path, metavar="FILE",
                             help="run file (default: what the node has pinned)")
        return one.add_argument

    option = add("show", "list the newest entries of a node's ledger", _show)
    option("--last", type=whole_number(1, 10**9), default=LAST, metavar="N",
           help=f"so many (default {LAST})")
    option("--others", action="store_true",
           help="what officers of its run have signed, as it has heard")
    option("--kind", metavar="WORD", help="only entries of this kind")
    option("--json", action="store_true", help="for machines")
    option = add("audit", "check every byte, and name what is wrong", _audit)
    option("--evidence", action="store_true",
           help="repeat a trainer's proofs of bans and convictions with the run's model")
    option("--from", dest="sources", type=Path, nargs="+", default=[], metavar="DIR",
           help="other nodes' folders with policies")
    option("--model", type=Path, metavar="DIR",
           help="base of the run (default: DIR/model, if it is there)")
    option("--json", action="store_true", help="for machines")
    option = add("export", "who has contributed what, in tokens and FLOPs, as CSV", _export,
                 nargs="+", help="folders of the validators and the trainer")
    option("-o", "--out", type=Path, metavar="FILE", default=Path("-"),
           help="default: standard output")
    option = add("receipt", "sign a receipt of a node's own accepted work", _receipt)
    option("-o", "--out", type=Path, metavar="FILE", required=True)
    option = add("verify", "check a receipt, offline, and say what it proves", _verify)
    option("receipt", type=Path, metavar="FILE")
    option("--run", type=Path, metavar="FILE", help="the run that it must be for")
    option("--json", action="store_true", help="for machines")
    return whole
# fmt: on


def _when(wall: int) -> str:
    try:
        return f"{datetime.datetime.fromtimestamp(wall, datetime.UTC):%Y-%m-%d %H:%M:%S}"
    except (ValueError, OverflowError, OSError):
        return str(wall)


def _worded(entry: Entry) -> tuple[Wording, str]:
    """Return an entry in words, and the reason why it is invalid; empty if it is valid."""
    try:
        worded = wording_untrusted(entry, verify)
        return Wording(worded.about, printable(worded.text)), ""
    except BadMessage as error:
        why = printable(str(error))
        return Wording(None, f"(cannot be read: {why})"), why


def _show(options: argparse.Namespace) -> int:
    folder = node_of(options)
    chosen: deque[Entry] = deque(maxlen=options.last)

    def take(entry: Entry) -> None:
        if options.kind in (None, entry.kind):
            chosen.append(entry)

    read = None if options.others else read_ledger(folder, take)
    copies = read_copies(folder) if read is None else []
    for one in copies:
        take(one)
    for entry in chosen:
        worded, _ = _worded(entry)
        about = worded.about
        if options.json:
            say(json.dumps({"author": str(entry.author), "entry": entry.seqno,
                            "wall": entry.wall, "kind": entry.kind,
                            "about": about and str(about), "says": worded.text,
                            "digest": entry.digest.hex()}))  # fmt: skip
            continue
        named = f" {about.short}" if about else ""
        say(f"{entry.author.short} {entry.seqno:>6}  {_when(entry.wall)} UTC "
            f" {printable(entry.kind)}{named}: {worded.text}")  # fmt: skip
    if read is not None and not options.json:
        read.check()
    return 0


def _audit(options: argparse.Namespace) -> int:
    folder = node_of(options)
    if not options.evidence and (options.sources or options.model):
        raise ConfigError("--from and --model are for proofs: say --evidence, too")
    for source in map(expanded, options.sources):
        if not source.is_dir():
            raise ConfigError(f"--from: there is no folder {source}")
    void, more = list[str](), 0

    def take(entry: Entry) -> None:
        nonlocal more
        _, why = _worded(entry)
        if why and len(void) < MAX_FLAWS:
            void.append(f"entry {entry.seqno}: {why}")
        elif why:
            more += 1

    read = read_ledger(folder, take)
    found = read.found
    more += found.more
    wrong = [*map(str, found.flaws), *void]
    wrong += [f"and {more:,} more of the kind"] if more else []
    torn = None if found.torn is None else str(found.torn)
    proofs = _repeat_proofs(options, folder) if options.evidence else []
    if options.json:
        say(json.dumps({"author": None if found.author is None else str(found.author),
                        "entries": found.count, "head": found.head.digest.hex(),
                        "flaws": wrong, "torn": torn,
                        "proofs": [{"file": one.path.name,
                                    "accused": one.accused and str(one.accused),
                                    "outcome": one.outcome.value, "why": one.why}
                                   for one in proofs]}))  # fmt: skip
        return FAILED if wrong or any(one.is_wrong for one in proofs) else 0
    for line in wrong:
        complain(line)
    if torn is not None:
        say(f"a crash left half an entry, which was never acknowledged ({torn}); no fault")
    say(f"{read.path}: {found.count:,} sound entries of {found.author or 'nobody'}")
    for one in proofs:
        say(f"proof against {one.accused or 'nobody'}: {one.outcome.value}"
            f" ({printable(one.why)}); {one.path}")  # fmt: skip
    if options.evidence and not proofs:
        say(f"{folder} keeps no proofs: those of bans and convictions lie in the trainer's")
    if wrong:
        raise ShoalError(
            "the ledger is not as it was written: restore it from a copy, and believe nothing"
            " that it says from the first fault on"
        )
    return FAILED if any(one.is_wrong for one in proofs) else 0


def _repeat_proofs(options: argparse.Namespace, folder: Path) -> list[Repeated]:
    run = read_run(options.run, folder)
    own = folder / MODEL
    model = options.model or (own if own.is_dir() else None)
    folders = [folder, *(expanded(one) for one in options.sources)]
    paths = proofs_in(folder)
    if not paths:
        return []

    async def repeat() -> list[Repeated]:
        async with open_bystander(run, folders, model) as bystander:
            return [await bystander.look(path) for path in paths]

    return trio.run(repeat)


def _export(options: argparse.Namespace) -> int:
    check_target("--out", options.out)
    folders = [expanded(folder) for folder in options.folder]
    run = read_run(options.run, folders[0])
    entries: list[Entry] = []
    for folder in folders:
        read = read_ledger(folder)
        read.check()
        entries += [*read.found.entries, *read_copies(folder)]
    found = contributions(entries, run, verify)
    text = io.StringIO()
    table = csv.DictWriter(text, COLUMNS, lineterminator="\n")
    table.writeheader()
    table.writerows(one.row(worker, run) for worker, one in found.items())
    write_text("--out", options.out, text.getvalue())
    return 0


def _receipt(options: argparse.Namespace) -> int:
    check_target("--out", options.out, text=False)
    folder = node_of(options)
    run, read = read_run(options.run, folder), read_ledger(folder)
    read.check()
    if not (folder / KEY).exists():
        raise ConfigError(f"there is no key {folder / KEY}: a receipt is signed by its worker")
    signer = load_or_create_key(folder / KEY)
    earned: dict[object, SignedVerdict] = {}  # of what a kill brought twice the first
    for entry in read.found.entries:
        if entry.kind == EARNED_KIND:
            verdict = decode_verdict_untrusted(entry.body, verify)
            if verdict.commitment.run == run.id:
                place = verdict.commitment.version, verdict.commitment.index
                earned.setdefault(place, verdict)
    verdicts = list(earned.values())
    if not verdicts:
        raise ConfigError(f"{read.path} has no accepted work of its own for run {run.name!r}")
    wall = time.time()  # noqa: TID251 - a tool for people, outside any node
    data = sign_receipt(run, verdicts, signer, wall)
    if len(data) > MAX_RECEIPT:
        raise ConfigError(f"the receipt would have {len(data):,} bytes (at most {MAX_RECEIPT})")
    options.out.write_bytes(data)
    say(_summary(decode_receipt_untrusted(data, verify, run)))
    return 0


def _verify(options: argparse.Namespace) -> int:
    run = None if options.run is None else read_run(options.run, options.run.parent)
    try:
        receipt = decode_receipt_untrusted(read_regular(options.receipt), verify, run)
    except FileNotFoundError:
        raise ConfigError(f"there is no receipt {options.receipt}") from None
    except BadMessage as error:
        raise ShoalError(f"{options.receipt} proves nothing: {printable(str(error))}") from None
    say(json.dumps(_receipt_table(receipt)) if options.json else _summary(receipt))
    return 0


def _receipt_table(receipt: WorkReceipt) -> dict[str, Any]:
    total = receipt.total
    prompt_flops, flops = total.flops(receipt.run.terms.model.shape)
    return {
        "run": receipt.run.id.hex(), "name": receipt.run.name, "owner": str(receipt.run.owner),
        "worker": str(receipt.worker), "wall": receipt.wall,
        "submissions": sum(receipt.submissions.values()), "prompt_tokens": total.prompt,
        "tokens": total.tokens, "prompt_flops": prompt_flops, "flops": flops,
        "validators": {str(who): work.tokens for who, work in receipt.accepted.items()},
        "not_counted": receipt.unnamed,
    }  # fmt: skip


def _summary(receipt: WorkReceipt) -> str:
    table, run = _receipt_table(receipt), receipt.run
    lines = [
        f"run        {printable(run.name)}, id {run.id.hex()[:16]}, of {run.owner}",
        f"worker     {receipt.worker}",
        f"accepted   {table['tokens']:,} tokens in {table['submissions']:,} submissions,"
        f" {table['flops']:.3g} FLOPs",
        *(
            f"signed by  {who}: {work.tokens:,} tokens,"
            f" {receipt.submissions[who]:,} submissions"
            for who, work in receipt.accepted.items()
        ),
        f"made       {_when(receipt.wall)} UTC, by the worker's clock",
    ]
    if receipt.unnamed:
        lines.append(
            f"not counted: {receipt.unnamed:,} submissions accepted by peers that this"
            " edition of the run file names no officers"
        )
    return "\n".join(lines)
