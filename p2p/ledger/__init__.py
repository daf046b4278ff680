"""The signed, hash-chained log of what this node has done.

The folder `core` touches no disk. Start there, with `p2p.ledger.core.chain`: what an entry is,
what proves that an author forked its log, and the file that tells a torn end from rot.
`ledger` is the driver: it appends, and recovers after kill -9.

Others' ledgers: `core.exchange` is what is kept of each author, what nodes ask each other, and
which authors equivocate; `service` asks and answers, `ledger` has copies on the disk.

Entries flow one way: a role's statement is signed, written, synced, and only then acknowledged.

A newcomer asks a node for it (``node.ledger.opened``), and calls `Ledger.append`, `Ledger.read`
and `Ledger.entries`; every other method is for the package itself.
"""

from p2p.ledger.core.chain import Entry, Statement
from p2p.ledger.ledger import Ledger
from p2p.ledger.service import ExchangeConfig, LedgerExchange

__all__ = ["Entry", "ExchangeConfig", "Ledger", "LedgerExchange", "Statement"]
