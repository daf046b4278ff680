"""How nodes learn that an officer of their run has told two stories, and from whom.

It is what the exchange of ledgers takes from gossip and membership (`p2p.ledger`).
"""

from __future__ import annotations

import logging
from functools import partial

from p2p.equivocation import Equivocation
from p2p.errors import BadMessage
from p2p.gossip import Gossip, Validity
from p2p.gossip.messages import MAX_DATA
from p2p.host import Host
from p2p.identity import PeerId
from p2p.ledger import LedgerExchange, Statement
from p2p.membership import Membership

logger = logging.getLogger(__name__)


def fork_topic(run_id: bytes) -> str:
    """The gossip topic on which proofs of two stories travel."""
    return f"/shoal/run/{run_id.hex()}/stories"


def fellows(membership: Membership, host: Host, run_id: bytes) -> list[PeerId]:
    """Whom to ask: members of the run that are connected, of whom each has five or more."""
    connected = dict.fromkeys(host.connected)
    return [
        one.peer for one in membership.members() if one.run == run_id and one.peer in connected
    ]


def tell_stories(gossip: Gossip, ledgers: LedgerExchange, run_id: bytes) -> None:
    """Hear proofs on the topic of the run, and tell those that are found here; nothing in a run
    whose nodes do not exchange ledgers."""
    if ledgers.is_on:
        topic = fork_topic(run_id)
        gossip.subscribe(topic, partial(judge_fork, ledgers), _taken_when_judged)
        ledgers.on_found(partial(tell_fork, gossip, topic))


def _taken_when_judged(_: PeerId, __: bytes) -> None:
    """The ledgers took the proof when they judged it."""


def judge_fork(ledgers: LedgerExchange, author: PeerId, data: bytes) -> Validity:
    """Whether gossip passes a proof on: only one that proves something, and is news."""
    try:
        return Validity.ACCEPT if ledgers.hear_fork_untrusted(data) else Validity.IGNORE
    except BadMessage as error:
        logger.info("ledger.proof_refused author=%r reason=%s", author, error)
        return Validity.REJECT


def tell_fork(gossip: Gossip, topic: str, fork: Equivocation[Statement]) -> None:
    """Pass a proof on that was found here. One that is too long for gossip goes from question
    to question."""
    if len(data := fork.encode()) <= MAX_DATA:
        gossip.publish(topic, data)
