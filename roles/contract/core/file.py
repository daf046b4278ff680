"""The run file: the signed document of a run, which every node holds.

The owner writes a draft (TOML), signs it with a key that stays offline (``shoal run create``),
and hands the document to the first node. Every other node gets it from a peer, checks the
signature, shows owner and id, and pins them. A later edition has a higher epoch; no node goes
back to an older one.

The document is msgpack: ``[format, owner, terms, signature]``. ``terms`` is the packed table of
`Terms` with sorted keys; the signature covers format, owner and terms under `DOMAIN`. Bytes
that would be packed differently are refused, so an edition has one form.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Final, Protocol

from p2p.dht.stamp import MAX_DIFFICULTY, stamp_cost
from p2p.errors import BadMessage, ConfigError
from p2p.identity import PeerId, Signer, Verify, decode_peer_id_untrusted, verify as real_verify
from p2p.naming import printable
from p2p.node.admission import (
    ID_CHARS,
    Capability,
    GuestRules,
    SignedRun,
    UnusableEdition,
    check_same_owner,
    check_same_run,
)
from p2p.node.tables import read_table, write_table
from p2p.wire import KI, MIB, fields_untrusted, pack, unpack_untrusted
from proofs.checks import Limits, Shape
from proofs.sampling import DrawRule
from roles.contract.core.bounds import check_bounds
from roles.contract.core.diloco import Algorithm, DilocoTerms, Goal, Joining
from roles.contract.core.names import CAPSULES, NAME
from roles.contract.core.pin import CAPSULE_SUFFIX, MAX_CAPSULE, FilePin
from roles.contract.core.sampling import SamplingTerms
from roles.contract.core.shape import (
    ENGINES,
    MAX_CONTEXT,
    MAX_END_TOKENS,
    SEEDS,
    Dtype,
    ModelShape,
)
from roles.contract.core.sizes import WorkSize
from roles.contract.core.trust import TrustTerms

DOMAIN: Final = "/shoal/run/1.0.0"
FORMAT: Final = 6
"""Version of the document's format, raised when a field is added to `Terms` or to anything
inside it: then old nodes refuse, with a reason. 6: `sampling` has what nodes agree on; the rest
of the recipe is in learner.toml."""
MAX_RUN: Final = 256 * KI
"""Most bytes of a document: 4,096 peers of 54 characters, and 30 KiB for the rest. The lists
cannot all be full at once."""
MAX_PEERS: Final = 1_024
"""Most names in one list. Larger groups are admitted by rule, not by name."""
MAX_TABLE: Final = 6 * KI
"""Most keys and values of a document: five lists of `MAX_PEERS` names, and a thousand for
the rest."""
MAX_COMPLAINT: Final = 300
"""Most characters of a complaint about a void document, which quotes what a stranger wrote."""
MAX_NAMED: Final = 3
"""Most peers that a sentence names."""
MAX_NAME: Final = 64
"""Most characters of a name, which is shown on one line."""
MAX_ENVIRONMENTS: Final = 64
"""Most environments of one run; every worker imports each."""
MAX_KINDS: Final = 256
"""Most kinds of tasks that a run may name of one environment; reasoning-gym has 106
families."""
WEIGHTS: Final = (1e-6, 1e6)
"""Bounds of the weights of environments and of kinds. A weight of zero is written by leaving
the name out."""
MAX_LENGTHS: Final = 64
"""Most length targets of one environment."""
MAX_FILES: Final = 256
"""Most files of a base; the largest models in use come in 190 shards."""
MAX_EPOCH: Final = 2**53
"""Highest epoch; it is exact in every JSON reader."""
MAX_EXPIRY: Final = 2**37
"""Highest expiry, in seconds since 1970: the year 6325, which every calendar has, and exact as
a float."""
MAX_MEMORY: Final = 2**50
"""Highest number of bytes of memory: a petabyte, more than any machine has."""
_BEGINNING: Final = b"\x94"
"""First byte of every document: msgpack's byte for a list of four. No text begins with it."""
_INVITE_ID: Final = re.compile(rf"[0-9a-f]{{{ID_CHARS}}}")
_DATE: Final = re.compile(r"[0-9]{4}-[0-9]{2}-[0-9]{2}")


class AdmissionMode(Enum):
    """Rule by which peers may join."""

    OPEN = "open"
    """Every node with the work stamp of the DHT."""
    ALLOW = "allow"
    """The peers on the list, trainers, validators, and peers with an invite."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AdmissionRules:
    """Rules by which peers may join the run and submit rollouts."""

    mode: AdmissionMode = AdmissionMode.OPEN
    """``open``: everybody; ``allow``: the peers of ``allowed`` and invited ones."""

    allowed: tuple[PeerId, ...] = ()
    """Peers that may join a run in mode ``allow``."""

    inviters: tuple[PeerId, ...] = ()
    """Peers that may invite besides the owner. They cannot name further inviters."""

    revoked: tuple[str, ...] = ()
    """Ids of revoked invites, as ``shoal run invite`` prints them."""

    stamp_bits: int = 0
    """Difficulty of the work stamp that peers without a name or an invite need in an open run;
    0: none. 26 bits take half a minute of one core, and each more bit doubles it."""

    min_memory: int = 0
    """Bytes of memory that a node must lend its engine; 0: the estimate from shape and
    lengths."""

    min_tokens_per_second: float = 0.0
    """Accepted tokens a second below which a worker is shown as slow. It works on."""

    def __post_init__(self) -> None:
        check_bounds(
            self,
            {
                "stamp_bits": (0, MAX_DIFFICULTY),
                "min_memory": (0, MAX_MEMORY),
                "min_tokens_per_second": (0.0, 1e9),
            },
        )
        if len(self.revoked) > MAX_PEERS or len(set(self.revoked)) < len(self.revoked):
            raise ValueError(f"at most {MAX_PEERS} invites are revoked, each once")
        if not all(_INVITE_ID.fullmatch(one) for one in self.revoked):
            raise ValueError(f"the id of an invite is {ID_CHARS} hexadecimal characters")


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """Model that is trained."""

    engine: str = "torch"
    """``torch``: nodes compute, each with an engine of its choice; ``fake``: nodes pretend, in
    simulations (`roles.engines`)."""

    seed: int = 0
    """Seed of initial weights and warm-up, unless there is a base."""

    shape: ModelShape
    """Sizes of the network, which also tell its family."""

    base: tuple[FilePin, ...] = ()
    """The files of policy 0, a Hugging Face folder. Empty: the weights are drawn from ``seed``
    and warmed up."""

    dtype: Dtype = Dtype.FLOAT32
    """Number format of sampling and scoring: ``float32`` or ``bfloat16``."""

    draw: DrawRule = DrawRule.CDF
    """Rule by which a seed selects the next token: ``cdf`` or ``gumbel``."""

    context: int = 4096
    """Most tokens of a prompt and its completion together."""

    end_tokens: tuple[int, ...] = (0,)
    """Tokens that end a completion. The environment ``sort`` ends with 0."""

    def __post_init__(self) -> None:
        check_bounds(self, {"seed": SEEDS, "context": (2, MAX_CONTEXT)})
        check_bounds(self, {"end_tokens": (0, self.shape.vocabulary - 1)})
        if not 0 < len(self.end_tokens) <= MAX_END_TOKENS or len(set(self.end_tokens)) < len(
            self.end_tokens
        ):
            raise ValueError(f"a model has 1 to {MAX_END_TOKENS} end tokens, each once")
        names = [pin.name for pin in self.base]
        if len(names) > MAX_FILES or len(set(names)) < len(names):
            raise ValueError(f"a base has at most {MAX_FILES} files, each once")
        missing = {"config.json", "tokenizer.json"} - set(names)
        if names and missing:
            raise ValueError(f"a base without {' and '.join(sorted(missing))} is no model")
        if self.shape.architecture and not names:
            raise ValueError(f"a {self.shape.architecture} is what its base says: name a base")
        if names and self.engine == "fake":
            # What pretends has no processes: tokenizer and template would run in the node's.
            raise ValueError("the engine fake only pretends: it takes no base")
        if self.engine not in ENGINES:
            raise ValueError(
                f"there is no engine {self.engine!r:.40}; there are {', '.join(ENGINES)}"
            )

    @property
    def digest(self) -> bytes:
        """Digest of policy 0, 32 bytes: of the base's files, or of the seed and shape of a
        model that is warmed up. A calibration holds for one digest."""
        pins: list[object] = [write_table(pin) for pin in self.base]
        of = pins or [self.seed, write_table(self.shape)]
        return hashlib.sha256(pack([DOMAIN, _sorted(of)])).digest()


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibration:
    """Record of the measurement of a run's limits; ``shoal calibrate`` writes it."""

    model: bytes
    """`Model.digest` of the calibrated model."""

    dtype: Dtype
    """Number format of sampling and scoring."""

    draw: DrawRule
    """Rule by which tokens were drawn."""

    generators: tuple[str, ...]
    """Engines that drew."""

    validators: tuple[str, ...]
    """Engines that scored the work of each generator."""

    environments: Mapping[str, float]
    """Environments of the prompts, by weight."""

    tokens: int
    """Honest tokens; the limits were fitted to half of them."""

    submissions: int
    """Honest submissions, drawn from the other half to count refusals."""

    rejected: int
    """Number of those that were refused."""

    date: str
    """Date, as year-month-day."""

    def __post_init__(self) -> None:
        check_bounds(self, {"tokens": (1, 2**53), "submissions": (1, 2**53)})
        check_bounds(self, {"rejected": (0, self.submissions)})
        if len(self.model) != 32:
            raise ValueError("the model of a calibration is a digest of 32 bytes")
        if not _DATE.fullmatch(self.date):
            raise ValueError(
                f"the date of a calibration is like 2026-01-31, not {self.date!r:.40}"
            )
        parts = (self.generators, self.validators, self.environments)
        names = [name for part in parts for name in part]
        if not all(parts) or not all(NAME.fullmatch(name) for name in names):
            raise ValueError(f"a calibration names engines and environments, not {names!r:.80}")
        for name, weight in self.environments.items():
            if not WEIGHTS[0] <= weight <= WEIGHTS[1]:
                raise ValueError(f"the weight of {name} in a calibration cannot be {weight!r}")


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvironmentPin:
    """An environment, by name and by the digest of its source."""

    name: str
    """Name of its entry point (`roles.envs`)."""

    digest: bytes
    """SHA-256 of its source; ``run create`` fills it in."""

    weight: float = 1.0
    """Share of the tasks, relative to the weights of the other environments."""

    kinds: Mapping[str, float] = field(default_factory=dict)
    """Weights of its kinds of tasks; empty: the environment's own."""

    data: FilePin | None = None
    """File of questions that every node must have, pinned by size and digest. That of a capsule
    travels with the policies."""

    length_targets: tuple[int, ...] = ()
    """Lengths in tokens, of which each task's prompt asks for one. Empty: no length rewards."""

    length_penalty: float = 0.0
    """Subtracted from the reward for each token more or less than the target."""

    def __post_init__(self) -> None:
        check_bounds(self, {"weight": WEIGHTS, "length_penalty": (0.0, 1.0)})
        targets = self.length_targets
        if len(targets) > MAX_LENGTHS or not all(0 < one <= MAX_CONTEXT for one in targets):
            raise ValueError(
                f"length_targets are at most {MAX_LENGTHS} numbers of tokens, from 1 to"
                f" {MAX_CONTEXT:,}"
            )
        if bool(targets) != (self.length_penalty > 0):
            raise ValueError("length_targets and length_penalty are set together, or neither")
        if len(self.kinds) > MAX_KINDS:
            raise ValueError(f"an environment has at most {MAX_KINDS} kinds of tasks")
        for kind, weight in self.kinds.items():
            if not NAME.fullmatch(kind) or not WEIGHTS[0] <= weight <= WEIGHTS[1]:
                raise ValueError(
                    f"a kind of tasks has a name (letters, digits, . _ -) and a weight from"
                    f" {WEIGHTS[0]:g} to {WEIGHTS[1]:g}, not {kind!r:.40} and {weight!r:.40}"
                )
        if not NAME.fullmatch(self.name):
            # Not module:Class: what a run names is imported and called on every volunteer's
            # machine.
            raise ValueError(
                "an environment is named as its entry point is (letters, digits, . _ -), "
                f"not {self.name!r:.80}"
            )
        if len(self.digest) != 32:
            raise ValueError(f"the digest of environment {self.name!r} is not 32 bytes")
        if self.is_capsule:
            file = self.name.removeprefix(CAPSULES) + CAPSULE_SUFFIX
            if self.data is None or self.data.name != file or self.data.size > MAX_CAPSULE:
                raise ValueError(
                    f"the data of {self.name} is {file}, of at most {MAX_CAPSULE:,} bytes"
                )

    @property
    def is_capsule(self) -> bool:
        """True if its code travels with the policies."""
        return self.name.startswith(CAPSULES)


@dataclass(frozen=True, slots=True, kw_only=True)
class Delivery:
    """Delivery of policies."""

    chunk_bytes: int = 0
    """Raw bytes of a SHARDCAST chunk, 4 KiB to 4 MiB; 0: by the size of the policy."""

    adapters: bool = False
    """If True, policies travel as adapters of policy 0 when the trainer learns with ``[lora]``.
    An older Shoal cannot read them."""

    def __post_init__(self) -> None:
        if self.chunk_bytes and not 4 * KI <= self.chunk_bytes <= 4 * MIB:
            raise ValueError(
                f"chunk_bytes must be 0, or from 4 KiB to 4 MiB, not {self.chunk_bytes}"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    """Terms of a run, which its owner decides and signs."""

    name: str
    """Name of the run. With the owner's key it determines the run's id."""

    epoch: int = 1
    """Number of this edition; a higher one replaces it."""

    expiry: int
    """Seconds since 1970 at which this edition ends; drafts say ``days`` (30)."""

    environments: tuple[EnvironmentPin, ...]
    """Sources of tasks, by weight. A model without a base is warmed up on the first."""

    trainers: tuple[PeerId, ...]
    """Peers whose policies count."""

    validators: tuple[PeerId, ...]
    """Peers whose verdicts count; none: the trainer's scorer judges newcomers."""

    admission: AdmissionRules = field(default_factory=AdmissionRules)
    """Rules by which other peers may join."""

    model: Model
    """Model that is trained."""

    sampling: SamplingTerms
    """Sampling of answers, and the number of steps."""

    limits: Limits = field(default_factory=Limits.fp32)
    """Numeric errors that scorers accept."""

    delivery: Delivery = field(default_factory=Delivery)
    """Delivery of policies."""

    calibration: Calibration | None = None
    """Record that ``shoal calibrate`` writes of how the limits were measured."""
    algorithm: Algorithm = Algorithm.GRPO
    """``grpo``: one trainer learns from workers' rollouts; ``diloco``: several trainers."""

    diloco: DilocoTerms = field(default_factory=DilocoTerms)
    """Terms of ``algorithm = "diloco"``."""

    trust: TrustTerms = field(default_factory=TrustTerms)
    """Amount of work that is checked, and the way in which names earn standing."""

    def __post_init__(self) -> None:
        if not 0 < len(self.name) <= MAX_NAME or not self.name.isprintable():
            raise ValueError(f"a run's name is 1 to {MAX_NAME} printable characters")
        check_bounds(self, {"epoch": (1, MAX_EPOCH), "expiry": (1, MAX_EXPIRY)})
        if len(self.environments) > MAX_ENVIRONMENTS:
            raise ValueError(f"a run has at most {MAX_ENVIRONMENTS} environments")
        if len({pin.name for pin in self.environments}) < len(self.environments):
            raise ValueError("a run names each environment once; `kinds` has several weights")
        is_shared = self.algorithm is Algorithm.DILOCO
        if is_shared and self.diloco.goal is Goal.REWARD and not self.environments:
            raise ValueError('goal = "reward" needs at least one environment')
        if not self.trainers or (not is_shared and not self.environments):
            raise ValueError("a run needs at least one environment and one trainer")
        self.work_size.check()
        sampling = self.sampling
        if sampling.max_new_tokens + sampling.heard >= self.model.context:
            heard = f" and heard = {sampling.heard}" if sampling.heard else ""
            raise ValueError(
                f"max_new_tokens = {sampling.max_new_tokens}{heard} leave no room for a prompt"
                f" in a context of {self.model.context}: lower them in [sampling], or raise"
                " context in [model]"
            )
        if sampling.turns > 1 and (is_shared or self.model.engine == "fake"):
            raise ValueError("DiLoCo and the engine fake know one turn only: turns = 1")
        for pin in self.environments:
            if (most := max(pin.length_targets, default=0)) > self.sampling.max_new_tokens:
                raise ValueError(
                    f"a length target of {pin.name!r} is {most} tokens, and answers have"
                    f" at most {self.sampling.max_new_tokens}: lower it, or raise"
                    " max_new_tokens in [sampling]"
                )
            if (pin.length_targets or pin.is_capsule) and not self.model.base:
                raise ValueError(
                    "length_targets and capsules ask in words: they need a model with a base"
                )
        if self.delivery.adapters and not self.model.base:
            raise ValueError("adapters add to a model: in [delivery], they need a base")
        if self.calibration is not None:
            self._check_calibration(self.calibration)
        admission = self.admission
        lists = (self.trainers, self.validators, admission.allowed, admission.inviters)
        for names in lists:
            if len(names) > MAX_PEERS or len(set(names)) < len(names):
                raise ValueError(f"a list of peers has at most {MAX_PEERS} names, each once")

    def _check_calibration(self, record: Calibration) -> None:
        """Check that the limits were measured for this model, dtype, draw rule and
        environments."""
        model, again = self.model, "run shoal calibrate on this run's model"
        if record.model != model.digest:
            raise ValueError(
                f"the calibration is of another model ({record.model.hex()[:12]}, this run's is"
                f" {model.digest.hex()[:12]}): {again}"
            )
        if (record.dtype, record.draw) != (model.dtype, model.draw):
            raise ValueError(
                f"the calibration is of {record.dtype.value} and the rule {record.draw.value},"
                f" this run has {model.dtype.value} and {model.draw.value}: {again}"
            )

    def to_table(self) -> dict[str, object]:
        """Return the plain table that is signed. A run of one turn has the table that it had
        before there were several."""
        table = write_table(self)
        sampling = table["sampling"]
        assert isinstance(sampling, dict)
        if self.sampling.turns == 1:
            del sampling["turns"], sampling["heard"]
        if not self.delivery.adapters:
            table["delivery"] = {"chunk_bytes": self.delivery.chunk_bytes}
        return table

    @property
    def carried(self) -> tuple[FilePin, ...]:
        """Files that every policy carries beside its own weights."""
        capsules = (pin.data for pin in self.environments if pin.is_capsule and pin.data)
        return (*self.model.base, *capsules)

    @property
    def work_size(self) -> WorkSize:
        """Numbers from which the length of submissions follows."""
        sampling = self.sampling
        return WorkSize(
            groups=sampling.submission,
            completions=sampling.group_size,
            tokens=sampling.max_new_tokens,
            vocabulary=self.model.shape.vocabulary,
            proof_values=sampling.proof_values,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """A signed edition of a run (a `p2p.node.admission.SignedRun`), made by `sign_run` or
    `open_run` only."""

    owner: PeerId
    """Peer that signed the document."""

    terms: Terms
    """Signed terms."""

    document: bytes = field(repr=False)
    """The signed document."""

    @property
    def id(self) -> bytes:
        """Id of the run, 32 bytes: the digest of owner and name."""
        return run_id(self.owner, self.terms.name)

    @property
    def name(self) -> str:
        """Name of the run."""
        return self.terms.name

    @property
    def epoch(self) -> int:
        """Number of the edition."""
        return self.terms.epoch

    @property
    def expiry(self) -> int:
        """Time at which the edition ends, in seconds since 1970."""
        return self.terms.expiry

    @property
    def words(self) -> list[tuple[str, str]]:
        """Purpose and recipe of the run, for people."""
        terms, sampling, rounds = self.terms, self.terms.sampling, self.terms.diloco
        model = f"{'A chat model' if terms.model.base else 'A network'} of"
        model += f" {terms.model.shape.parameters:,} weights"
        tasks = ", ".join(pin.name for pin in terms.environments)
        answers = f"{sampling.group_size} answers to a task, drawn at temperature"
        answers += f" {sampling.temperature:g}, at most {sampling.lag} steps old"
        if terms.algorithm is Algorithm.GRPO:
            about = f"{model} learns {tasks} by trial and error, in {sampling.steps:,} steps"
            recipe = f"{answers}, of at most {sampling.max_new_tokens:,} tokens"
        else:
            names = ", ".join(rounds.corpora)
            goal = f"text ({names})" if rounds.goal is Goal.TEXT else f"rewards ({tasks})"
            about = (
                f"{model} learns from {goal} at several sites, in {rounds.outer_steps} rounds"
            )
            recipe = (
                f"{rounds.inner_steps} steps of {rounds.sequences} × {rounds.window} tokens a"
            )
            recipe += (
                f" round at each site ({rounds.inner.value}, rate {rounds.rate:g}), then the"
            )
            recipe += f" mean of all updates ({rounds.codec.value}, {rounds.outer.value}, rate"
            recipe += f" {rounds.outer_rate:g})"
        return [("learns", about), ("recipe", recipe)]

    @property
    def officers(self) -> tuple[PeerId, ...]:
        """Trainers, then validators, each once."""
        return tuple(dict.fromkeys((*self.terms.trainers, *self.terms.validators)))

    @property
    def digest(self) -> bytes:
        """SHA-256 of owner and terms, without the signature."""
        body = pack(_sorted(self.terms.to_table()))
        return hashlib.sha256(_signed(self.owner, body)).digest()

    @property
    def guest_rules(self) -> GuestRules:
        """Rules for peers that the document does not name."""
        rules = self.terms.admission
        return GuestRules(
            inviters=rules.inviters,
            revoked=frozenset(rules.revoked),
            stamp_bits=rules.stamp_bits,
        )

    @property
    def joins_as(self) -> tuple[str, str]:
        """Role with which others join, and words for who may; the words are empty if all
        may."""
        if self.terms.algorithm is not Algorithm.DILOCO:
            return "inference", ""
        is_named = self.terms.diloco.joining is Joining.NAMED
        return (
            "trainer",
            "with a key that the run file names as a trainer's" if is_named else "",
        )

    @property
    def work_stamp(self) -> str:
        """Work stamp that workers of an open run need, in words."""
        bits = self.terms.admission.stamp_bits
        return (
            f"the work stamp of {bits} bits that the run asks for (about"
            f" {stamp_cost(bits):,.0f} s of one core)"
        )

    @property
    def lacks_stamp(self) -> str:
        """Refusal of a worker that has not shown the work stamp."""
        bits = self.terms.admission.stamp_bits
        return (
            f"this run asks for a work stamp of {bits} bits, and none of yours was heard yet:"
            " your node makes one and shows it in its heartbeats; update it if it does not"
        )

    @property
    def components(self) -> dict[str, dict[str, object]]:
        """Settings that all nodes' components must share."""
        return {
            "shardcast": {"chunk_bytes": self.terms.delivery.chunk_bytes},
            "ledger": {"is_on": self.terms.algorithm is Algorithm.GRPO},
        }

    def may(self, peer: PeerId, capability: Capability) -> bool:
        """Return True if ``peer`` has ``capability``: trainers publish, validators validate,
        `AdmissionRules` decide the rest."""
        if capability is Capability.PUBLISH:
            return peer in self.terms.trainers
        if capability is Capability.VALIDATE:
            return peer in self.terms.validators
        rules = self.terms.admission
        if rules.mode is AdmissionMode.OPEN or peer == self.owner:
            return True
        return (
            peer in rules.allowed
            or peer in self.terms.trainers
            or peer in self.terms.validators
        )

    def needs_stamp(self, peer: PeerId) -> bool:
        """Return True if ``peer`` must show a work stamp: in an open run all peers that the
        document does not name."""
        if self.terms.admission.mode is not AdmissionMode.OPEN:
            return False
        named = (self.owner, *self.officers, *self.terms.admission.allowed)
        return peer not in named

    def shape(self) -> Shape:
        """Return the bounds of every group of this run, whatever its content."""
        return Shape(
            group_size=self.terms.sampling.group_size,
            max_new_tokens=self.terms.sampling.max_new_tokens,
            vocabulary=self.terms.model.shape.vocabulary,
            end_tokens=frozenset(self.terms.model.end_tokens),
            turns=self.terms.sampling.turns,
        )

    def check_job(self, peer: PeerId, job: str) -> None:
        """Raise `ConfigError` unless the node ``peer`` can do ``job`` (the name of a role) in
        this run.

        No node dials itself, and none judges its own work: three jobs, three nodes.
        """
        terms, remedy = self.terms, "give this role a node of its own, with its own --data"
        named = {"trainer": terms.trainers, "validator": terms.validators}.get(job)
        if terms.diloco.joining is Joining.ADMITTED and terms.algorithm is Algorithm.DILOCO:
            named = None
        if named is not None and peer not in named:
            raise ConfigError(
                f"{peer} is no {job} of run {self.name!r}: its owner names"
                f" {_few(named)}; take another --role, or the --data of one of those"
            )
        if terms.algorithm is Algorithm.DILOCO:
            if job != "trainer":
                raise ConfigError(
                    f"run {self.name!r} is learnt by many: it has trainers only, no {job}"
                )
            return
        if job == "validator" and peer == terms.trainers[0]:
            raise ConfigError(
                f"{peer} is the trainer of run {self.name!r} and cannot hand work to itself:"
                f" {remedy}"
            )
        if job == "inference" and peer in terms.validators:
            raise ConfigError(
                f"{peer} is a validator of run {self.name!r} and cannot judge itself: {remedy}"
            )

    def why_restart(self, newer: Run) -> str:
        """Return the changes of ``newer`` that a working role cannot adopt, in words; empty if
        there are none. Officers, admission, limits and expiry may change. Engines were opened
        and submissions under way were made with the rest: with two versions of it at a time
        honest work would be rejected."""
        fixed = ("environments", "model", "sampling", "delivery", "algorithm", "diloco")
        changed = [
            key for key in fixed if getattr(self.terms, key) != getattr(newer.terms, key)
        ]
        return " and ".join(changed)

    def check_store(self, keep_versions: int, keep_bytes: int) -> None:
        """Raise `ConfigError` if a trainer or validator that keeps so few policies cannot serve
        this run: workers would pay for it, whose work it could not judge."""
        if keep_versions <= self.terms.sampling.lag:
            raise ConfigError(
                f"run {self.name!r} uses policies that are {self.terms.sampling.lag} versions"
                " old: set keep_versions in [shardcast] to at least"
                f" {self.terms.sampling.lag + 1}, not {keep_versions}"
            )
        model = self.terms.model
        size = model.shape.parameters * (2 if model.dtype is Dtype.BFLOAT16 else 4)
        needed = (self.terms.sampling.lag + 1) * size
        if keep_bytes < needed:
            raise ConfigError(
                f"run {self.name!r} uses policies of {size:,} bytes that are"
                f" {self.terms.sampling.lag} versions old: lend it more (disk in [share], or"
                f" keep_bytes in [shardcast]), at least {needed:,} bytes, not {keep_bytes:,}"
            )

    def __str__(self) -> str:
        return f"{self.name} ({self.id.hex()[:12]}, epoch {self.epoch})"


def _few(peers: Sequence[PeerId]) -> str:
    """Return the first of ``peers``, for a sentence."""
    more = [f"and {len(peers) - MAX_NAMED} more"] if len(peers) > MAX_NAMED else []
    return ", ".join([*map(str, peers[:MAX_NAMED]), *more])


def run_id(owner: PeerId, name: str) -> bytes:
    """Return the id of a run: SHA-256 over owner and name."""
    return hashlib.sha256(b"".join((DOMAIN.encode(), owner.digest, name.encode()))).digest()


def sign_run(terms: Terms, owner: Signer) -> Run:
    """Sign ``terms``. Two documents of one owner, name and epoch must never differ."""
    body = pack(_sorted(terms.to_table()))
    signature = owner.sign(DOMAIN, _signed(owner.peer_id, body))
    document = pack([FORMAT, owner.peer_id.digest, body, signature])
    if len(document) > MAX_RUN:
        raise ConfigError(f"the run file would have {len(document)} bytes (at most {MAX_RUN})")
    return Run(owner=owner.peer_id, terms=terms, document=document)


def decode_run_untrusted(
    document: bytes, verify: Verify = real_verify, pin: SignedRun | None = None
) -> Run:
    """Decode a run document. Raises `BadMessage`, and nothing else, whatever the bytes.

    The signature is checked first. A document of another owner than that of ``pin`` is refused
    even before that, and the name is looked at before the rest of the table is read.
    """
    if len(document) > MAX_RUN:
        raise BadMessage(f"a run file of {len(document)} bytes is too long (at most {MAX_RUN})")
    if document[:1] != _BEGINNING:
        raise BadMessage("it is no run file: `shoal run create` signs a draft and writes one")
    head = fields_untrusted(
        unpack_untrusted(document), int, bytes, bytes, bytes, what="run file"
    )
    if head[0] != FORMAT:
        remedy = (
            "upgrade Shoal here (git pull in its checkout)"
            if head[0] > FORMAT
            else "its owner signs the draft again with this version (shoal run create)"
        )
        raise UnusableEdition(
            f"the run file has format {head[0]}; this version of Shoal reads format {FORMAT}:"
            f" {remedy}"
        )
    owner = decode_peer_id_untrusted(head[1])
    check_same_owner(pin, owner)
    if not verify(owner, DOMAIN, _signed(owner, head[2]), head[3]):
        raise BadMessage("the signature of the run file is not its owner's")
    try:
        terms = _decode_terms_untrusted(head[2], owner, pin)
    except UnusableEdition:
        raise
    except BadMessage as error:
        # Its owner's fault, or the next version's of Shoal. A peer that hands over a table that
        # is void here to a node that is in no run yet could have known better: it signed it, or
        # read it.
        raise (BadMessage if pin is None else UnusableEdition)(str(error)) from None
    return Run(owner=owner, terms=terms, document=bytes(document))


def _decode_terms_untrusted(body: bytes, owner: PeerId, pin: SignedRun | None) -> Terms:
    """Decode terms. Raise `BadMessage`, or `OtherRun` before most of it is read."""
    table = unpack_untrusted(body, max_items=MAX_TABLE, max_list=MAX_PEERS)
    name = table.get("name") if isinstance(table, dict) else None
    if isinstance(name, str):
        check_same_run(pin, run_id(owner, name), owner, name)
    try:
        terms = read_table(Terms, table, "the run file")
    except ConfigError as error:
        raise BadMessage(_complaint(error)) from None
    if pack(_sorted(terms.to_table())) != body:
        raise BadMessage("the run file is not in its one canonical form")
    return terms


def _complaint(error: ConfigError) -> str:
    """Return a complaint about a void document that fits one line of a terminal; a stranger
    may have written the document."""
    return printable(str(error)[:MAX_COMPLAINT])


def open_run(
    document: bytes, verify: Verify = real_verify, pin: SignedRun | None = None
) -> Run:
    """Open a run document (entry point group ``shoal.runs``). Raises `BadMessage`."""
    return decode_run_untrusted(document, verify, pin)


class InRun(Protocol):
    """A member of a run, which every `p2p.node.node.Node` is."""

    @property
    def run(self) -> SignedRun:
        """Newest edition of the run document."""
        ...


def run_of(node: InRun) -> Run:
    """Return the run of ``node`` with its terms. Raises `ConfigError` if the run is of
    another kind."""
    if not isinstance(node.run, Run):
        raise ConfigError(
            f"the run {node.run.name!r} is not one that Shoal's own roles can work for"
        )
    return node.run


def _signed(owner: PeerId, body: bytes) -> bytes:
    return pack([FORMAT, owner.digest, body])


def _sorted(value: object) -> object:
    """Return the table with sorted keys, as canonical msgpack has them."""
    if isinstance(value, dict):
        return {key: _sorted(value[key]) for key in sorted(value)}
    if isinstance(value, list):
        return [_sorted(item) for item in value]
    return value
