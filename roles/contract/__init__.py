"""The run document: a run's terms, signed by its owner.

The signed document is in the folder `core`. A node calls `open_run`, a role `run_of`. Drafts,
keys and editions are the owner's side: `roles.own`.
"""

from roles.contract.core.file import (
    Calibration,
    Run,
    Terms,
    decode_run_untrusted,
    open_run,
    run_of,
    sign_run,
)

__all__ = [
    "Calibration",
    "Run",
    "Terms",
    "decode_run_untrusted",
    "open_run",
    "run_of",
    "sign_run",
]
