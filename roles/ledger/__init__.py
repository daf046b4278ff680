"""``shoal ledger``: ledgers read by people, audited by strangers, and turned into receipts.

`command` is the command line; `reading` gets ledgers and the run from nodes' folders;
`repeating` runs the model on the proofs of bans and convictions that a trainer keeps. The
folder `core` decides: `contribution`, how much each worker has done, `receipt`, what a worker
shows a stranger of it, and `wording`, an entry in words. What is a sound ledger says
`p2p.ledger.core.inspection`.
"""

from roles.ledger.command import main

__all__ = ["main"]
