"""Majorities: how many votes decide, and what an earlier view may have decided.

A value is decided when a majority of the members before has signed it in one view. A new view
begins with the promises of a majority to vote in no earlier one. Any two majorities share a
member, so its promise carries the vote that may have completed a decision, and the new view
proposes that again. This is single-decree Paxos; the run's *anchor* makes exactly half of the
members a majority if it is among them: two such halves share the anchor, and a half and more
than a half share some member.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from enum import Enum

from p2p.identity import PeerId
from roles.diloco.core.messages import Outcome, Promise


class Freedom(Enum):
    """What a proposer of a later view may do, if it carries nothing."""

    FREE = "free"
    """Nothing was decided: it may propose what it likes."""
    OPEN = "open"
    """Two outcomes may have been decided, so a member or an owner told two stories. More
    promises are needed."""


def is_majority(
    voters: Collection[PeerId], members: Sequence[PeerId], anchor: PeerId | None
) -> bool:
    """Whether ``voters`` decide for ``members``."""
    count = sum(1 for peer in members if peer in voters)
    half = 2 * count == len(members)
    return 2 * count > len(members) or (half and anchor in members and anchor in voters)


def choose(
    promises: Sequence[Promise], members: Sequence[PeerId], anchor: PeerId | None
) -> Outcome | Freedom:
    """What must be proposed again after the promises of a majority.

    That is the newest vote. The votes of one view differ only where an owner of pieces told two
    stories. Its proposer was not bound then, or all would have voted for what it carried, so
    only this view can have decided: an outcome for which the voters, with all members that
    have not promised, would be a majority.
    """
    voted = {one.author: one.vote for one in promises if one.vote is not None}
    promised = {one.author for one in promises}
    if not voted:
        return Freedom.FREE
    newest = max(vote.view for vote in voted.values())
    by_digest: dict[bytes, tuple[Outcome, list[PeerId]]] = {}
    for peer, vote in voted.items():
        if vote.view == newest:
            by_digest.setdefault(vote.outcome.digest, (vote.outcome, []))[1].append(peer)
    silent = [peer for peer in members if peer not in promised]
    possible = [
        outcome
        for outcome, voters in by_digest.values()
        if len(by_digest) == 1 or is_majority([*voters, *silent], members, anchor)
    ]
    if not possible:
        return Freedom.FREE
    return possible[0] if len(possible) == 1 else Freedom.OPEN
