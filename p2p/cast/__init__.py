"""Files from one machine to many: ``shoal push``, ``pull``, ``serve``, ``inspect``.

The files, in the order in which to read them
---------------------------------------------
- `ticket`: what a puller needs to know, as one word;
- `modes`: what files have beside their bytes, and empty folders;
- `swarm`: the services of one push, composed: gossip, membership, SHARDCAST;
- `view`: what a terminal, a pipe or a program is told meanwhile;
- `commandline`: what the command lines share;
- `weight_v`: folders of weights as datacentres' receivers read them;
- `pusher`: `push`, `serve`, `inspect`; `puller`: `pull`; `pull_http`: `pull` from HTTP servers.

How files flow
--------------
::

    push:  a folder, where it lies -> SHARDCAST's index and manifest -> a ticket
    pull:  ticket -> membership -> SHARDCAST: spans from all holders -> store -> links in DIR

`push`, `pull`, `serve` and `inspect` take a command line and return an exit code; `open_cast`
and `Ticket` are for programs.
"""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["inspect", "pull", "push", "serve"]


def push(arguments: Sequence[str]) -> int:
    """Give a file or folder to many machines; prints a ticket."""
    from p2p.cast import pusher

    return pusher.push(arguments)


def pull(arguments: Sequence[str]) -> int:
    """Fetch the content of a ticket, and pass it on meanwhile."""
    from p2p.cast import puller

    return puller.pull(arguments)


def serve(arguments: Sequence[str]) -> int:
    """Offer a file or folder over HTTP, to shardcast's clients too."""
    from p2p.cast import pusher

    return pusher.serve(arguments)


def inspect(arguments: Sequence[str]) -> int:
    """Describe the content of a ticket, file or folder."""
    from p2p.cast import pusher

    return pusher.inspect(arguments)
