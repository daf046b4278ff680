"""Who may do what: the only question this package asks about people.

A run is a document that its owner signed; what is in it is the business of the package that
registered its reader under the entry point group ``shoal.runs``. The node needs a name for the
run, a version to never roll back, and answers.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Protocol

from p2p.errors import BadMessage
from p2p.identity import PeerId, Verify


class UnusableEdition(BadMessage):
    """The run document is of no use here, and that is not the fault of the peer that handed it
    over.
    """


class OtherRun(UnusableEdition):
    """The document is of another run than the one this node is pinned to."""


class Capability(Enum):
    """What a peer may be allowed to do in a run."""

    GOSSIP = "gossip"
    """Be a member: its heartbeats and messages are passed on, it gets a place in the forest."""
    TRAIN = "train"
    """Be a member of a run whose members all train, if it admits them by rule."""
    GENERATE = "generate"
    """Submit rollouts."""
    VALIDATE = "validate"
    """Judge rollouts; its verdicts count."""
    PUBLISH = "publish"
    """Publish policies and collect accepted rollouts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GuestRules:
    """What an edition says of those whom it does not name."""

    inviters: tuple[PeerId, ...] = ()
    """Who may invite besides the owner."""
    revoked: frozenset[str] = frozenset()
    """Ids of invites that admit nobody any more."""
    stamp_bits: int = 0
    """Bits of the work stamp that those must show who submit work; 0 asks for none."""


class Admission(Protocol):
    """Answers what a peer may do."""

    def may(self, peer: PeerId, capability: Capability) -> bool:
        """Whether ``peer`` has ``capability``, as of the newest document."""
        ...

    def needs_stamp(self, peer: PeerId) -> bool:
        """Whether ``peer`` must bring a work stamp: every peer may join, and the document does
        not name this one.
        """
        ...


class SignedRun(Admission, Protocol):
    """A run as the node sees it. `roles.contract.Run` is one."""

    @property
    def id(self) -> bytes:
        """32 bytes that name the run for ever: a digest of its owner and its name."""
        ...

    @property
    def name(self) -> str:
        """What its owner calls it."""
        ...

    @property
    def owner(self) -> PeerId:
        """Whose signature the document bears."""
        ...

    @property
    def epoch(self) -> int:
        """Grows with every edition of the document; a node never goes back."""
        ...

    @property
    def expiry(self) -> int:
        """Seconds since 1970 after which the document is void."""
        ...

    @property
    def officers(self) -> tuple[PeerId, ...]:
        """Trainers and validators: every member sends them heartbeats, and finds them."""
        ...

    @property
    def document(self) -> bytes:
        """The signed document itself: what is pinned on disk and handed to newcomers."""
        ...

    @property
    def digest(self) -> bytes:
        """32 bytes of what its owner signed, however that is signed and encoded: two editions
        of one epoch with two digests prove that their owner contradicts himself.
        """
        ...

    @property
    def guest_rules(self) -> GuestRules:
        """Who may invite, which invites are void, and what work is asked for."""
        ...

    @property
    def joins_as(self) -> tuple[str, str]:
        """The role that others join with, and in words who of them may; empty if all may."""
        ...

    @property
    def components(self) -> dict[str, dict[str, object]]:
        """Settings that must be the same on every node, by component (``shardcast``), over the
        local ones.
        """
        ...


def check_same_owner(pin: SignedRun | None, owner: PeerId) -> None:
    """Raise `OtherRun` if a document of ``owner`` cannot be of the run that this node is pinned
    to.
    """
    if pin is not None and owner != pin.owner:
        raise OtherRun(f"it is of a run of another owner, {owner}; {_pinned(pin)}")


def check_same_run(pin: SignedRun | None, run_id: bytes, owner: PeerId, name: str) -> None:
    """Raise `OtherRun` if a document of this run is not of the one that this node is pinned
    to.
    """
    if pin is not None and run_id != pin.id:
        raise OtherRun(
            f"it is of run {name!r:.80} ({run_id.hex()[:12]}) by {owner}; {_pinned(pin)}"
        )


def _pinned(pin: SignedRun) -> str:
    return (
        f"this node is pinned to {pin.name!r} ({pin.id.hex()[:12]}) by {pin.owner}: use another"
        " --data, or a member of that run"
    )


class RunReader(Protocol):
    """Opens a signed run document. Raises `BadMessage`, and nothing else, whatever the
    bytes.
    """

    def __call__(
        self, document: bytes, verify: Verify, pin: SignedRun | None = None, /
    ) -> SignedRun:
        """Of a document that is not of the run of ``pin`` (None: of any) the reader judges as
        little as will show that, at most one signature, and raises `OtherRun`
        (`admission.check_same_run`).

        `UnusableEdition` says that a document is void for a reason that its bearer could not
        know: it was signed by the owner of ``pin``, or is of a format to come.
        """
        ...
