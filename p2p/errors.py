"""Errors that say whose fault they are. Each docstring is the sentence that an operator
reads."""


class ShoalError(Exception):
    """Something in Shoal failed."""


class ConfigError(ShoalError):
    """The configuration is wrong; the message names the file, the key and the remedy."""


class MissingDependency(ShoalError):
    """An optional package is not installed; the message names it and how to install it."""


class ProtocolError(ShoalError):
    """A protocol was broken."""


class LocalProtocolError(ProtocolError):
    """This process broke the protocol. It is a bug of ours."""


class RemoteProtocolError(ProtocolError):
    """The peer broke the protocol. Drop the connection and lower its score."""


class BadMessage(RemoteProtocolError):
    """The peer sent bytes that are not a valid message."""


class WrongPeer(RemoteProtocolError):
    """The peer that answered is not the one that was dialled."""


class PeerUnreachable(ShoalError):
    """No connection to the peer could be opened: it is offline, or its addresses are stale."""


class ProtocolNotSupported(ShoalError):
    """The peer does not speak the protocol that was asked for."""


class LimitExceeded(ShoalError):
    """A named limit of this node was reached; the message says which."""


class StorageError(ShoalError):
    """The disk refused: full, read-only, or gone. Nothing verified was lost."""


class NoRoom(StorageError):
    """The disk takes data, but not as much as this needs: make room on it."""

    def __init__(self, message: str, needed: int = 0) -> None:
        super().__init__(message)
        self.needed = needed
        """Number of bytes that must be free."""


class Unnameable(StorageError):
    """This machine can have no file of that name: it is too long, or has signs that the
    encoding of file names lacks. Trying again does not help."""


class WorkerDied(ShoalError):
    """An engine's worker process ended while it was needed; its last words are in the
    message.
    """


class WorkerNotStarted(ShoalError):
    """The operating system refused to start a worker process, for lack of memory, processes or
    open files. The message says what to raise."""
