"""Who may train, by the run's newest edition."""

from __future__ import annotations

from typing import Protocol

from p2p.identity import PeerId
from p2p.node.admission import Capability
from p2p.node.node import Node
from roles.contract.core.diloco import Joining


class MayTrain(Protocol):
    """Asked of every peer that speaks of rounds."""

    def may_train(self, peer: PeerId) -> bool:
        """Whether ``peer`` may be a member of the run."""
        ...


class RunMembers:
    """By the run file: its trainers, or all that it admits."""

    def __init__(self, node: Node, joining: Joining) -> None:
        self._node = node
        self._capability = Capability.PUBLISH if joining is Joining.NAMED else Capability.TRAIN

    def may_train(self, peer: PeerId) -> bool:
        """See `MayTrain`."""
        return self._node.may(peer, self._capability)

    def why_not(self, peer: PeerId) -> str:
        """Why ``peer`` may not be one, with the remedy; empty if it may."""
        return self._node.book.why_not(peer, self._capability)
