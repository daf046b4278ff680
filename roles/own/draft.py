"""What the owner of a run writes: a TOML draft.

Everything that has a good default may be left out.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Final

from p2p.errors import ConfigError
from p2p.identity import PeerId
from p2p.node.tables import read_table, write_table
from p2p.node.usage import remark
from proofs.checks import Limits
from roles.contract.core.diloco import Algorithm, DilocoTerms, Goal
from roles.contract.core.file import (
    AdmissionRules,
    Calibration,
    Delivery,
    EnvironmentPin,
    Model,
    Terms,
)
from roles.contract.core.pin import FilePin
from roles.contract.core.sampling import NO_SAMPLING, SamplingTerms
from roles.contract.core.shape import Dtype
from roles.contract.core.trust import TrustTerms
from roles.envs.base import environment_digest, make_environment
from roles.envs.check import why_not_repeatable
from roles.envs.data import pin_data, read_data
from roles.models.bundle import check_weights, pin_folder, read_config
from roles.models.ends import need_end_tokens
from roles.models.fetch import base_folder

DAY: Final = 24 * 3600
"""Seconds."""
MAX_DAYS: Final = 3650.0
"""Days that a document may be valid. After ten years what it was signed with is no longer to be
trusted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftEnvironment:
    """One environment of a run; its digest is taken from what is installed here."""

    name: str
    """Its entry point."""

    weight: float = 1.0
    """How many tasks come from it, beside the weights of the others."""

    kinds: Mapping[str, float] = field(default_factory=dict)
    """Weights of its kinds of tasks; left out: as it likes."""

    data: str = ""
    """Path of the file of questions that it reads: its name, size and digest are pinned."""

    def pin(self) -> EnvironmentPin:
        """What the run file says of it. Raises `ConfigError` on a file that cannot be read, and
        on kinds that the environment does not have: no node could open it."""
        pin = EnvironmentPin(
            name=self.name,
            digest=environment_digest(self.name),
            weight=self.weight,
            kinds=self.kinds,
            data=pin_data(self.data) if self.data else None,
        )
        if pin.kinds:
            self.make(pin.data)
        return pin

    def make(self, data: FilePin | None) -> Any:
        """Return the environment itself. Raises `ConfigError`."""
        options: dict[str, object] = {"kinds": dict(self.kinds)} if self.kinds else {}
        if data is not None:
            options["data"] = read_data(data, str(Path(self.data).parent))
        return make_environment(self.name, **options)


@dataclass(frozen=True, slots=True, kw_only=True)
class Draft:
    """The keys of a draft. Environments are named; their digests are taken from what is
    installed here."""

    name: str
    """What people call the run."""

    epoch: int = 1
    """Edition; count it up to replace an older document."""

    days: float = 30.0
    """How long the document is valid, from now. A month: nodes that hear of no later edition
    stop by then, and an owner signs twelve a year."""

    environments: tuple[object, ...] = ("sort",)
    """Where tasks come from: names, or tables of `DraftEnvironment`."""

    trainers: tuple[PeerId, ...]
    """Whose policies count."""

    validators: tuple[PeerId, ...] = ()
    """Whose verdicts count."""

    admission: AdmissionRules = field(default_factory=AdmissionRules)
    """All other nodes."""

    model: Mapping[str, object] = field(default_factory=dict)
    """What is trained. With ``base``, a folder in Hugging Face's layout or the name of a model
    that ``shoal models fetch`` made, its files are pinned, and shape, context and end tokens
    come from it where the draft names none."""

    sampling: SamplingTerms | None = None
    """How answers are drawn; of no use to DiLoCo on text."""

    limits: Mapping[str, object] = field(default_factory=dict)
    """Differences from ``preset`` (``fp32`` or ``bf16``; left out: by the model's dtype) of
    `proofs.checks.Limits`."""

    calibration: Mapping[str, object] | None = None
    """What ``limits`` were measured on: the table that ``shoal calibrate`` writes beside
    them, with the digest of the model in hexadecimal."""

    delivery: Delivery = field(default_factory=Delivery)
    """How policies travel."""

    algorithm: Algorithm = Algorithm.GRPO
    """``grpo`` or ``diloco``."""

    diloco: DilocoTerms = field(default_factory=DilocoTerms)
    """Of a run of many trainers; its validators are left out, and unless its ``goal`` is
    ``reward`` its environments."""

    @property
    def is_of_environments(self) -> bool:
        """Whether its trainers learn from what environments pay."""
        return self.algorithm is Algorithm.GRPO or self.diloco.goal is Goal.REWARD

    trust: TrustTerms = field(default_factory=TrustTerms)
    """What a newcomer owes, and how much of the work is looked at."""

    def __post_init__(self) -> None:
        if not 0 < self.days <= MAX_DAYS:
            raise ValueError(
                f"days must be more than 0 and at most {MAX_DAYS:g}, not {self.days:g}"
            )


def read_draft(table: object, where: str, now: float) -> Terms:
    """The terms that a draft stands for. ``now`` is wall time. Raises `ConfigError` naming the
    key."""
    draft = read_table(Draft, table, where)
    model = _model(dict(draft.model), f"{where}: model")
    try:
        return Terms(
            name=draft.name,
            epoch=draft.epoch,
            expiry=int(now + draft.days * DAY),
            environments=tuple(
                _environment(value, f"{where}: environments[{number}]").pin()
                for number, value in enumerate(
                    draft.environments if draft.is_of_environments else ()
                )
            ),
            trainers=draft.trainers,
            validators=draft.validators,
            admission=draft.admission,
            model=model,
            sampling=draft.sampling or _no_sampling(draft, where),
            limits=_limits(draft, model.dtype, f"{where}: limits"),
            delivery=draft.delivery,
            calibration=_calibration(draft.calibration, f"{where}: calibration"),
            algorithm=draft.algorithm,
            diloco=draft.diloco,
            trust=draft.trust,
        )
    except ValueError as error:
        raise ConfigError(f"{where}: {error}") from error


def _no_sampling(draft: Draft, where: str) -> SamplingTerms:
    if draft.is_of_environments:
        raise ConfigError(f"{where}: the table [sampling] is missing")
    return NO_SAMPLING


def check_environments(table: object, where: str) -> None:
    """Make the environments of a draft, and have each pay twice for the same answers.

    Raises:
        ConfigError: One cannot be made, its file has bad lines, or it does not repeat itself:
            no node could use it.
    """
    draft = read_table(Draft, table, where)
    for number, value in enumerate(draft.environments if draft.is_of_environments else ()):
        environment = _environment(value, f"{where}: environments[{number}]")
        data = pin_data(environment.data) if environment.data else None
        if why := why_not_repeatable(environment.make(data)):
            raise ConfigError(f"{where}: environments[{number}]: {why}")


def _model(table: dict[str, object], where: str) -> Model:
    """With the pins, and whatever else can be read, of the folder that ``base`` names."""
    base = table.pop("base", None)
    if base is None:
        return read_table(Model, table, where)
    if not isinstance(base, str):
        raise ConfigError(f"{where}: base must be the path of a folder")
    folder = base_folder(base, where)
    config = read_config(folder)
    if "shape" in table:
        raise ConfigError(f"{where}: shape is that of {folder}: remove it")
    check_weights(folder, config)
    read: dict[str, object] = {
        "shape": write_table(config.shape),
        "base": [write_table(pin) for pin in pin_folder(folder)],
        "context": config.context,
    }
    notes = config.notes
    if "end_tokens" not in table:
        ends = need_end_tokens(folder, config)
        notes += ends.notes
        read["end_tokens"] = list(ends.tokens)
    for note in notes:
        remark(f"{folder}: {note}")
    return read_table(Model, {**read, **table}, where)


def _environment(value: object, where: str) -> DraftEnvironment:
    """A table, or a name alone."""
    return read_table(
        DraftEnvironment, {"name": value} if isinstance(value, str) else value, where
    )


def check_calibrated(terms: Terms) -> None:
    """Raise `ConfigError` if these limits were not measured where they must be.

    In float32 honest errors are rounding errors, whatever the model, and the preset is
    measured. In bfloat16 they depend on model, task and engines.
    """
    if terms.model.dtype is Dtype.FLOAT32:
        return
    if terms.calibration is None:
        raise ConfigError(
            f"run {terms.name!r} computes in {terms.model.dtype.value}, and its limits were"
            " measured on no model: they may refuse honest work, or let an older policy"
            " through. Put the tables [limits] and [calibration] that shoal calibrate writes"
            " into the draft, or pass --uncalibrated"
        )
    played = {pin.name for pin in terms.environments}
    if not played <= terms.calibration.environments.keys():
        others = ", ".join(sorted(played - terms.calibration.environments.keys()))
        raise ConfigError(
            f"the limits of run {terms.name!r} were not measured on {others}: run shoal"
            " calibrate on this run's environments, or pass --uncalibrated"
        )


def _calibration(table: Mapping[str, object] | None, where: str) -> Calibration | None:
    """Digests, which TOML has no type for, are written in hexadecimal."""
    if table is None:
        return None
    digest = table.get("model")
    try:
        model = bytes.fromhex(digest) if isinstance(digest, str) else digest
    except ValueError as error:
        raise ConfigError(f"{where}: model is no digest in hexadecimal") from error
    return read_table(Calibration, {**table, "model": model}, where)


def _limits(draft: Draft, dtype: Dtype, where: str) -> Limits:
    """Those of ``dtype``, unless the table names others: in bfloat16 those of float32 reject
    all honest work. Beside a calibration all are named: a preset is not what it measured."""
    table = dict(draft.limits)
    presets = {"fp32": Limits.fp32, "bf16": Limits.bf16}
    name = table.pop("preset", "fp32" if dtype is Dtype.FLOAT32 else "bf16")
    if not isinstance(name, str) or name not in presets:
        raise ConfigError(f"{where}: preset must be one of {', '.join(presets)}")
    missing = [one.name for one in fields(Limits) if one.name not in table]
    if draft.calibration is not None and missing:
        raise ConfigError(
            f"{where}: {', '.join(missing)} would be the preset's, though the draft has a"
            " calibration: take the whole table [limits] that was written with it"
        )
    return read_table(Limits, {**write_table(presets[name]()), **table}, where)
