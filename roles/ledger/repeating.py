"""Bans repeated by a bystander: what they cite, and the model that is run on it, offline.

Theory of operation
-------------------
A ban says that work cannot have been drawn by the policy that it names. Who has the work and
the policy runs the model, as any validator does (`roles.protocol.replay`), and believes nobody:
the work is bound by its worker's signature and by the digest that the verdict signs, the policy
by the digest that the worker signed, and by its trainer's signature. Limits are those of the
run file that the bystander holds.

What comes of it is an `Outcome`. That content or policy is not at hand refutes nothing.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, replace
from enum import Enum
from pathlib import Path
from typing import Final

from p2p.errors import BadMessage, ConfigError
from p2p.identity import PeerId, verify
from p2p.ledger import Entry
from p2p.machine import open_world
from p2p.node.config import NodeConfig
from p2p.shardcast.index import MAX_INDEX, digest_of
from p2p.shardcast.manifest import MAX_MANIFEST
from p2p.shardcast.stored import HEAD, StoredPolicy, decode_head_untrusted
from p2p.wire import KI
from p2p.world import World
from proofs.checks import Verdict
from roles.engines.base import Engine, EngineError
from roles.engines.client import open_engine
from roles.engines.config import AUTO, MachineLimits
from roles.envs.client import ContainedEnvironment, open_environment_of
from roles.envs.contained import EnvironmentFailed
from roles.ledger.reading import read_regular
from roles.protocol.core.bans import (
    BAN_KIND,
    Ban,
    Bans,
    convicts,
    decode_ban_untrusted,
)
from roles.protocol.core.findings import worst
from roles.protocol.core.groups import (
    Commitment,
    SignedVerdict,
    Submission,
    decode_submission_untrusted,
)
from roles.protocol.core.refusals import is_repeatable
from roles.protocol.replay import open_refused, violated
from roles.run import Run
from roles.shared.evidence import FOLDER as EVIDENCE
from roles.shared.sizes import MAX_HEAD, MAX_SUBMISSION

_MAX_POLICY_HEAD: Final = MAX_MANIFEST + MAX_INDEX + 4 * KI
POLICIES: Final = "policies"
"""Folder of a bystander's own with the policy that its engine has."""
MODEL: Final = "model"
"""Where a node keeps tokenizer and template of a run with a base."""


class Outcome(Enum):
    """What a bystander can say of a ban."""

    REPEATED = "repeated"
    """A replay finds enough to convict, too."""
    REFUTED = "refuted"
    """It was about this work, in which a replay finds too little."""
    UNKNOWN = "cannot be repeated"
    """Something is not at hand."""
    VOID = "void"
    """It counts for nobody in this run."""


@dataclass(frozen=True, slots=True)
class Repeated:
    """One ban, looked at."""

    author: PeerId
    entry: int
    culprit: PeerId | None
    outcome: Outcome
    why: str

    @property
    def is_wrong(self) -> bool:
        """Whether it shuts somebody out without reason, or means to."""
        return self.outcome in (Outcome.REFUTED, Outcome.VOID)


class _Missing(Exception):
    """What a replay would need."""


class Sources:
    """Folders of nodes, where content and policies are looked for."""

    def __init__(self, world: World, run: Run, folders: Sequence[Path]) -> None:
        self._world = world
        self._run = run
        self._folders = folders
        self._store = f"{NodeConfig().shardcast.folder}/{run.id.hex()[:16]}"
        self._copied: tuple[bytes, str] = b"", ""
        """The policy that is in the world's folder, and its path there."""

    def submission(self, commitment: Commitment) -> Submission:
        """The work that was committed to. Raises `_Missing`."""
        name = commitment.content.hex()
        for folder in self._folders:
            with suppress(FileNotFoundError, BadMessage):
                data = read_regular(folder / EVIDENCE / name, MAX_SUBMISSION + MAX_HEAD)
                submission = decode_submission_untrusted(data, verify)
                if submission.commitment == commitment:
                    return submission
        raise _Missing(f"the work {name[:16]} is in none of the folders")

    async def weights(self, commitment: Commitment) -> str:
        """The path, on the world's disk, of a copy of the policy that was committed to, every
        byte as its trainer signed it. Raises `_Missing`.

        It is copied as engines see no homes of people, and no ``/tmp`` but the world's.
        """
        if self._copied[0] == commitment.policy:
            return self._copied[1]
        for folder in self._folders:
            for policy in self._policies(folder):
                is_signed = policy.manifest.trainer in self._run.terms.trainers
                is_it = policy.manifest.weights_digest == commitment.policy
                if is_signed and is_it and await self._copy(folder, policy):
                    return self._copied[1]
        raise _Missing(
            f"policy {commitment.version} ({commitment.policy.hex()[:16]}) is whole in none of"
            " the folders"
        )

    async def _copy(self, folder: Path, policy: StoredPolicy) -> bool:
        """Whether every span hashes right."""
        disk, index = self._world.disk, policy.index
        await self._forget()
        copy = StoredPolicy(policy.manifest, index, POLICIES)
        copy.mark_stored()
        self._copied = b"", copy.final
        for number, span in enumerate(index.spans):
            place = index.place(number)
            path = folder / policy.file(place.file)
            try:
                if not path.is_file():
                    return False
                with path.open("rb") as file:
                    file.seek(place.offset)
                    data = file.read(span.size)
            except OSError:
                return False
            if digest_of(data) != span.digest:
                return False
            await disk.write(copy.file(place.file), data, place.offset)
        self._copied = policy.manifest.weights_digest, copy.final
        return True

    async def _forget(self) -> None:
        """One at a time: a policy may fill a disk."""
        for name in await self._world.disk.list(POLICIES):
            await self._world.disk.remove(f"{POLICIES}/{name}")
        self._copied = b"", ""

    def _policies(self, folder: Path) -> Iterator[StoredPolicy]:
        for path in sorted((folder / self._store).glob(f"*{HEAD}")):
            with suppress(FileNotFoundError, BadMessage):
                data = read_regular(path, _MAX_POLICY_HEAD)
                policy = decode_head_untrusted(data, self._run.id, verify, self._store)
                is_inside = not policy.source.startswith("/") and ".." not in policy.source
                if not policy.is_patch and is_inside:
                    policy.mark_stored()
                    yield policy


class Bystander:
    """Repeats bans, one after the other."""

    def __init__(
        self, run: Run, environment: ContainedEnvironment, engine: Engine, sources: Sources
    ) -> None:
        self._run = run
        self._environment = environment
        self._engine = engine
        self._sources = sources
        self._bans = Bans(verify)
        self._loaded = ""

    async def look(self, entry: Entry) -> Repeated:
        """What can be said of the ban in ``entry``."""
        culprit = None
        try:
            culprit = decode_ban_untrusted(entry.body, verify).culprit
            ban = self._bans.note_untrusted(entry, self._run, entry.wall)
            if ban is None:
                outcome, why = Outcome.VOID, "the same work had banned its worker before"
            else:
                outcome, why = await self._repeat(ban)
        except BadMessage as error:
            outcome, why = Outcome.VOID, str(error)
        except (_Missing, EngineError, EnvironmentFailed) as error:
            outcome, why = Outcome.UNKNOWN, str(error)
        return Repeated(entry.author, entry.seqno, culprit, outcome, why)

    async def _repeat(self, ban: Ban) -> tuple[Outcome, str]:
        """Raises `_Missing`, and what engine and environment raise."""
        found = []
        for verdict in ban.evidence:
            ours = await self._replay(verdict)
            if ours is not None:
                found.append(ours)
        said = "; ".join(
            f"{one.reason} ({one.statistic:g}, limit {one.limit:g})" for one in found
        )
        if convicts(found):
            return Outcome.REPEATED, said
        if not all(is_repeatable(verdict.reason) for verdict in ban.evidence):
            raise _Missing("it rests on more of the worker's work than it cites")
        return Outcome.REFUTED, said or "a replay finds nothing wrong with this work"

    async def _replay(self, verdict: SignedVerdict) -> SignedVerdict | None:
        """The verdict that we would sign; None if the work is in order, or is none of which a
        model says anything."""
        submission = self._sources.submission(verdict.commitment)
        weights = await self._sources.weights(verdict.commitment)
        try:
            tasks, groups = await open_refused(self._run, self._environment, submission)
        except BadMessage:
            return None
        if weights != self._loaded:
            self._loaded = ""
            await self._engine.load(weights)
            self._loaded = weights
        finding = worst(await violated(self._run, self._engine, tasks, groups))
        if finding is None:
            return None
        return replace(
            verdict,
            verdict=Verdict.REJECTED,
            reason=finding.reason,
            statistic=finding.statistic,
            limit=finding.limit,
        )


@asynccontextmanager
async def open_bystander(
    run: Run, folders: Iterable[Path], model: Path | None, engine: str = AUTO
) -> AsyncIterator[Bystander]:
    """One who has the content and policies in ``folders`` of nodes, and, in a run with a base,
    its tokenizer in ``model``. Raises `ConfigError`."""
    if run.terms.model.base and model is None:
        raise ConfigError(
            f"run {run.name!r} speaks text: give the folder of its base as --model"
        )
    limits = MachineLimits()
    config = run.engine_config(limits).computed_with(engine)
    mounts = {} if model is None else {MODEL: model}
    async with (
        open_world(mounts=mounts) as world,
        open_environment_of(world, run, limits, MODEL if mounts else None) as environment,
        open_engine(world, config, name="bystander") as runner,
    ):
        yield Bystander(run, environment, runner, Sources(world, run, list(folders)))


def bans_in(entries: Iterable[Entry]) -> list[Entry]:
    """The bans among ``entries``, each once, by author and number."""
    found = {entry.digest: entry for entry in entries if entry.kind == BAN_KIND}
    return sorted(found.values(), key=lambda entry: (entry.author, entry.seqno))
