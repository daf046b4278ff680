"""Convictions of validators repeated by a bystander, offline.

Theory of operation
-------------------
A trainer's entry of kind `LIE_KIND` says that a validator has accepted work that cannot be as
it signed. A bystander that has the delivery and the policy runs the model, as the trainer did
(`roles.protocol.replay`), and believes nobody: the work is bound by its worker's signature and
by the digest that the verdict signs, the policy by the digest that the worker signed, and by
its trainer's signature. Limits are those of the run file that the bystander holds.

The result is an `Outcome`. A delivery or a policy that is not at hand refutes nothing.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
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
from roles.engines.base import Engine, EngineError
from roles.engines.client import open_engine
from roles.engines.config import AUTO, MachineLimits
from roles.envs.client import ContainedEnvironment, open_environment_of
from roles.envs.contained import EnvironmentFailed
from roles.ledger.reading import read_regular
from roles.protocol.core.lies import Lie, Weight, decode_lie_untrusted, open_lie, worst
from roles.protocol.core.messages import AcceptedWork, Commitment
from roles.protocol.core.statements import LIE_KIND
from roles.protocol.replay import examine
from roles.run import Run

_MAX_POLICY_HEAD: Final = MAX_MANIFEST + MAX_INDEX + 4 * KI
POLICIES: Final = "policies"
"""Folder of a bystander's own with the policy that its engine has."""
MODEL: Final = "model"
"""Where a node keeps tokenizer and template of a run with a base."""


class Outcome(Enum):
    """What a bystander can say of a conviction."""

    REPEATED = "repeated"
    """A replay finds a lie or a strike, too."""
    REFUTED = "refuted"
    """A replay finds too little in this work."""
    UNKNOWN = "cannot be repeated"
    """Something is not at hand."""
    VOID = "void"
    """It counts for nobody in this run."""


@dataclass(frozen=True, slots=True)
class Repeated:
    """One conviction, looked at."""

    author: PeerId
    entry: int
    culprit: PeerId | None
    outcome: Outcome
    why: str

    @property
    def is_wrong(self) -> bool:
        """Whether it accuses a validator without reason."""
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

    def delivery(self, entry: Entry, lie: Lie) -> AcceptedWork:
        """The delivery that the trainer keeps. Raises `_Missing`, also of one that is damaged
        or another, and `BadMessage` if the entry names no place for it."""
        path = Path(lie.path)
        if path.is_absolute() or ".." in path.parts:
            raise BadMessage("the path of the delivery leads out of the trainer's folder")
        for folder in self._folders:
            with suppress(FileNotFoundError, BadMessage):
                kept = read_regular(folder / path, self._run.terms.work_size.max_delivery)
                return open_lie(entry.body, kept, verify)
        raise _Missing(f"the delivery {lie.path} is in none of the folders")

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
    """Repeats convictions, one after the other."""

    def __init__(
        self, run: Run, environment: ContainedEnvironment, engine: Engine, sources: Sources
    ) -> None:
        self._run = run
        self._environment = environment
        self._engine = engine
        self._sources = sources
        self._loaded = ""

    async def look(self, entry: Entry) -> Repeated:
        """What can be said of the conviction in ``entry``."""
        culprit = None
        try:
            lie = decode_lie_untrusted(entry.body, verify)
            culprit = lie.verdict.validator
            self._check_parties(entry, lie)
            outcome, why = await self._repeat(entry, lie)
        except BadMessage as error:
            outcome, why = Outcome.VOID, str(error)
        except (_Missing, EngineError, EnvironmentFailed) as error:
            outcome, why = Outcome.UNKNOWN, str(error)
        return Repeated(entry.author, entry.seqno, culprit, outcome, why)

    def _check_parties(self, entry: Entry, lie: Lie) -> None:
        """Raise `BadMessage` unless a trainer of this run accuses a validator of it."""
        terms = self._run.terms
        if lie.verdict.commitment.run != self._run.id:
            raise BadMessage("it is about another run")
        if entry.author not in terms.trainers or lie.verdict.validator not in terms.validators:
            raise BadMessage("only a trainer of the run convicts, and only its validators")

    async def _repeat(self, entry: Entry, lie: Lie) -> tuple[Outcome, str]:
        """Raises `BadMessage`, `_Missing`, and what engine and environment raise."""
        work = self._sources.delivery(entry, lie)
        weights = await self._sources.weights(lie.verdict.commitment)
        if weights != self._loaded:
            self._loaded = ""
            await self._engine.load(weights)
            self._loaded = weights
        finding = worst(await examine(self._run, self._environment, self._engine, work))
        if finding is None:
            return Outcome.REFUTED, "a replay finds nothing wrong with this work"
        is_borne_out = finding.weight >= Weight.STRIKE
        return Outcome.REPEATED if is_borne_out else Outcome.REFUTED, str(finding)


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


def convictions_in(entries: Iterable[Entry]) -> list[Entry]:
    """The convictions among ``entries``, each once, by author and number."""
    found = {entry.digest: entry for entry in entries if entry.kind == LIE_KIND}
    return sorted(found.values(), key=lambda entry: (entry.author, entry.seqno))
