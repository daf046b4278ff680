"""Changes of an owner that no node follows yet: to the draft, or to ``learner.toml``."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache
from pathlib import Path

from p2p.errors import ConfigError
from p2p.node.dashboard import commands
from p2p.node.tables import load_toml
from roles.own.layout import RunFolder


def pending(folder: RunFolder, learner: str = "") -> Iterator[tuple[str, str]]:
    """Yield each changed file, ``draft`` or ``learner``, with a sentence about it.

    Args:
        folder: Folder of the run.
        learner: Digest of the numbers that the trainer learns by; empty if it is not known.
    """
    files = (folder.draft, folder.people, folder.document, folder.learner)
    stamp = tuple(one.stat().st_mtime_ns if one.exists() else 0 for one in files)
    yield from _pending(folder.path, learner, stamp)


@lru_cache(maxsize=4)
def _pending(path: Path, learner: str, stamp: tuple[int, ...]) -> list[tuple[str, str]]:
    """``stamp`` changes with the files: they are read again then."""
    from roles.own.draft import digest_of
    from roles.own.editions import draft_of
    from roles.own.people import load_run
    from roles.rl.recipes import read_learner

    folder, found = RunFolder(path), list[tuple[str, str]]()
    if not folder.document.exists():
        return found
    try:
        run = load_run(folder.document)
    except ConfigError:
        return found
    try:
        if folder.draft.exists() and folder.owner.exists():
            signed = draft_of(run, folder.owner, folder.document)
            if digest_of(folder.draft) != signed:
                what = f"was changed after epoch {run.epoch} was signed, which nodes follow"
                again = f"end and repeat shoal run start {path} to sign it"
                found.append(("draft", f"{folder.draft.name} {what}: {again}"))
    except ConfigError as error:
        found.append(("draft", str(error)))
    try:
        if learner and folder.learner.exists():
            table = load_toml(folder.learner)
            now = read_learner(table, str(folder.learner), run.name, run.terms.model)
            if now.digest != learner:
                what = "was changed after the trainer began: start that again to use it"
                found.append(("learner", f"{folder.learner.name} {what}"))
    except ConfigError as error:
        found.append(("learner", str(error)))
    return found


def status_main(argv: Sequence[str]) -> int:
    """Print the current activity of the node in a folder."""
    return commands.status_main(
        argv, lambda data: list(pending(RunFolder(data.absolute().parent)))
    )
