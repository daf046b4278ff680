"""Proofs of bans and convictions, repeated by a bystander with the run's model, offline.

A trainer keeps a proof for each name that it banned and each validator that it convicted
(`roles.protocol.core.conviction`): the signed verdict, the worker's signed window, the content
and what its replay found. A bystander opens the proof, which checks all signatures and digests,
runs the model over the content and believes nobody. Only the policy has to be at hand. That it
is not refutes nothing.
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
from p2p.machine import open_world
from p2p.node.config import NodeConfig
from p2p.shardcast.index import MAX_INDEX, digest_of
from p2p.shardcast.manifest import MAX_MANIFEST
from p2p.shardcast.store import HEAD, StoredPolicy, decode_head_untrusted
from p2p.wire import KI
from p2p.world import World
from proofs.checks import Verdict
from roles.contract import Run
from roles.contract.core.sizes import MAX_SUBMISSION, MAX_VERDICT
from roles.engines.base import Engine, EngineError, Group, GroupTask, Scored
from roles.engines.client import open_engine
from roles.engines.config import AUTO, MachineLimits, engine_of
from roles.envs.client import ContainedEnvironment, open_environment_of
from roles.envs.contained import EnvironmentFailed
from roles.ledger.reading import read_regular
from roles.protocol.core.assignment import run_sampling
from roles.protocol.core.conviction import Conviction, open_conviction_untrusted, weigh
from roles.protocol.core.findings import Weight
from roles.protocol.core.terms import terms_digest
from roles.protocol.core.window import Commitment
from roles.protocol.scorer import Ruling, check_place, finding_against, replay_all

EVIDENCE: Final = "trainer/evidence"
"""Folder of a trainer's proofs, within its own folder."""
_MAX_PROOF: Final = MAX_SUBMISSION + MAX_VERDICT + 16 * KI
_MAX_POLICY_HEAD: Final = MAX_MANIFEST + MAX_INDEX + 4 * KI
POLICIES: Final = "policies"
"""Folder of a bystander that holds the policy for its engine."""
MODEL: Final = "model"
"""Folder with tokenizer and template on a node of a run with a base."""


class Outcome(Enum):
    """A bystander's result for a proof."""

    REPEATED = "repeated"
    """A replay finds what the proof says."""
    REFUTED = "refuted"
    """A replay does not find what the proof says."""
    UNKNOWN = "cannot be repeated"
    """A replay lacks something that it needs, or fails."""
    VOID = "void"
    """The proof is damaged or is of another run, so it convicts nobody."""


@dataclass(frozen=True, slots=True)
class Repeated:
    """The outcome for one proof."""

    path: Path
    accused: PeerId | None
    outcome: Outcome
    why: str

    @property
    def is_wrong(self) -> bool:
        """True if the proof bans somebody without reason, or claims to."""
        return self.outcome in (Outcome.REFUTED, Outcome.VOID)


class _Missing(Exception):
    """A file that a replay needs is missing. The message names it."""


class Sources:
    """Folders of nodes, where content and policies are looked for."""

    def __init__(self, world: World, run: Run, folders: Sequence[Path]) -> None:
        self._world = world
        self._run = run
        self._folders = folders
        self._store = f"{NodeConfig().shardcast.folder}/{run.id.hex()[:16]}"
        self._copied: tuple[bytes, str] = b"", ""
        """Digest of the policy in the world's folder, and its path there."""

    async def weights(self, commitment: Commitment) -> str:
        """Copy the policy that was committed to, as its trainer signed it, to the world's disk,
        and return the path there. Raises `_Missing`.

        Engines need the copy because they see neither home folders nor any ``/tmp`` but the
        world's.
        """
        if self._copied[0] == commitment.policy:
            return self._copied[1]
        for folder in self._folders:
            for policy in self._policies(folder):
                is_signed = policy.manifest.publisher in self._run.terms.trainers
                is_it = policy.manifest.weights_digest == commitment.policy
                if is_signed and is_it and await self._copy(folder, policy):
                    return self._copied[1]
        raise _Missing(
            f"policy {commitment.version} ({commitment.policy.hex()[:16]}) is whole in none of"
            " the folders"
        )

    async def _copy(self, folder: Path, policy: StoredPolicy) -> bool:
        """Copy a policy to the world's disk. Return False if a span cannot be read or has
        another digest."""
        disk, index = self._world.disk, policy.index
        await self._forget()
        copy = StoredPolicy(policy.manifest, index, POLICIES)
        copy.stored = True
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
        """Remove the copied policy. Only one is kept, since a policy may fill a disk."""
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
                    policy.stored = True
                    yield policy


class Bystander:
    """Repeats proofs, one after the other."""

    def __init__(
        self, run: Run, environment: ContainedEnvironment, engine: Engine, sources: Sources
    ) -> None:
        self._run = run
        self._environment = environment
        self._engine = engine
        self._sources = sources
        self._loaded = ""

    async def look(self, path: Path) -> Repeated:
        """Check the proof at ``path`` by repeating its work."""
        accused = None
        try:
            data = read_regular(path, _MAX_PROOF)
            proof = open_conviction_untrusted(data, [terms_digest(self._run)], verify)
            accused = proof.accused
            outcome, why = await self._repeat(proof)
        except BadMessage as error:
            outcome, why = Outcome.VOID, str(error)
        except (_Missing, EngineError, EnvironmentFailed) as error:
            outcome, why = Outcome.UNKNOWN, str(error)
        return Repeated(path, accused, outcome, why)

    async def _score(self, tasks: Sequence[GroupTask], groups: Sequence[Group]) -> list[Scored]:
        return await self._engine.score(tasks, groups, run_sampling(self._run))

    async def _repeat(self, proof: Conviction) -> tuple[Outcome, str]:
        """Replay the work that a proof is about, and return the outcome and the reason for it.

        Raises `BadMessage` for a proof of another run, `_Missing`, and what engine and
        environment raise.
        """
        submission, verdict = proof.submission, proof.verdict
        if submission.commitment.run != self._run.id:
            raise BadMessage("it is about another run")
        weights = await self._sources.weights(submission.commitment)
        if weights != self._loaded:
            self._loaded = ""
            await self._engine.load(weights)
            self._loaded = weights

        def blames(ruling: Ruling) -> bool:
            return finding_against(verdict, ruling) is not None

        ruling = await check_place(
            self._run, self._environment, self._score, submission, replay_all, blames=blames
        )
        found = finding_against(verdict, ruling)
        if ruling.verdict is Verdict.INCONCLUSIVE and found is None:
            return Outcome.UNKNOWN, ruling.reason
        said = str(found or "a replay finds nothing wrong with this work")
        if proof.accused == verdict.validator:
            is_repeated = weigh(verdict, found) >= Weight.STRIKE
        else:
            is_repeated = found is not None and found.weight is Weight.LIE
        return (Outcome.REPEATED if is_repeated else Outcome.REFUTED), said


@asynccontextmanager
async def open_bystander(
    run: Run, folders: Iterable[Path], model: Path | None
) -> AsyncIterator[Bystander]:
    """Open a bystander that finds policies in ``folders`` of nodes and, in a run with a base,
    the tokenizer in ``model``. Raises `ConfigError`."""
    if run.terms.model.base and model is None:
        raise ConfigError(
            f"run {run.name!r} speaks text: give the folder of its base as --model"
        )
    limits = MachineLimits()
    config = engine_of(run, limits).computed_with(AUTO)
    mounts = {} if model is None else {MODEL: model}
    async with (
        open_world(mounts=mounts) as world,
        open_environment_of(world, run, limits, MODEL if mounts else None) as environment,
        open_engine(world, config, name="bystander") as runner,
    ):
        yield Bystander(run, environment, runner, Sources(world, run, list(folders)))


def proofs_in(folder: Path) -> list[Path]:
    """Return the paths of the proofs that the trainer in ``folder`` keeps."""
    return sorted((folder / EVIDENCE).glob("*-*"))
