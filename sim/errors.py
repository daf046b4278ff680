"""Errors that end a simulation early."""

from __future__ import annotations


class SimulationError(Exception):
    """Base of the errors that end a simulation early."""


class SimDeadlock(SimulationError):
    """Every task waits, and no event is left that could wake one; the message names who waits
    where."""


class SimStuck(SimulationError):
    """Virtual time stands still: a task spins on checkpoints, or events breed events at one
    instant."""


class SimForbidden(SimulationError):
    """A simulation tried to use a thread, a process or a real socket, which ignore virtual
    time.
    """


class NodeFailed(SimulationError):
    """A simulated node raised; its name and the virtual time are in the message, the error is
    the cause."""

    def __init__(self, node: str, seconds: float, error: BaseException) -> None:
        super().__init__(f"node {node} failed at {seconds:.6f} s: {error!r}")
        self.node = node
        self.seconds = seconds
        self.error = error


class LabError(SimulationError):
    """The lab's links or processes could not be set up, or broke."""


class LabUnavailable(LabError):
    """This machine does not let us make shaped network namespaces; the message names what is
    missing."""
