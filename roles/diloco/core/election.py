"""Majorities: the number of votes that decide, and outcomes that an earlier view may have
decided.

A value is decided when a majority of the members before has signed it in one view. A new view
begins with the promises of a majority to vote in no earlier one. Any two majorities share a
member, so its promise carries the vote that may have completed a decision, and the new view
proposes that again. This is single-decree Paxos; the run's *anchor* makes exactly half of the
members a majority if it is among them: two such halves share the anchor, and a half and more
than a half share some member.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from p2p.identity import PeerId
from roles.diloco.core.messages import Outcome, Promise


def is_majority(
    voters: Collection[PeerId], members: Sequence[PeerId], anchor: PeerId | None
) -> bool:
    """Return True if ``voters`` are a majority of ``members``; in a tie the anchor's side
    wins.
    """
    count = sum(1 for peer in members if peer in voters)
    half = 2 * count == len(members)
    return 2 * count > len(members) or (half and anchor in members and anchor in voters)


def choose(
    promises: Sequence[Promise], members: Sequence[PeerId], anchor: PeerId | None
) -> list[Outcome]:
    """Return the outcomes that may have been decided, and so must be proposed again, given the
    promises of a majority. Without such an outcome the proposer is free; with two it needs more
    promises.

    An outcome may have been decided if those whose newest vote is for it, with all members that
    have not promised, would be a majority: its voters vote for nothing else later, as every
    later view was bound to it. Of several the newest counts; two of one view mean that an owner
    of pieces told two stories. What one liar has voted for alone binds no one for long.
    """
    voted = {one.author: one.vote for one in promises if one.vote is not None}
    promised = {one.author for one in promises}
    silent = [peer for peer in members if peer not in promised]
    newest: dict[bytes, tuple[int, Outcome, list[PeerId]]] = {}
    for peer, vote in voted.items():
        view, outcome, voters = newest.get(vote.outcome.digest, (-1, vote.outcome, []))
        newest[outcome.digest] = max(view, vote.view), outcome, [*voters, peer]
    possible = [
        (view, outcome)
        for view, outcome, voters in newest.values()
        if is_majority([*voters, *silent], members, anchor)
    ]
    last = max((view for view, _ in possible), default=-1)
    return [outcome for view, outcome in possible if view == last]
