"""The run: its signed file, and the ledger of what was done in it."""

from roles.run.chain import Entry, Equivocation
from roles.run.file import Run, Terms, decode_run_untrusted, open_run, run_of, sign_run
from roles.run.ledger import Ledger, open_ledger

__all__ = [
    "Entry",
    "Equivocation",
    "Ledger",
    "Run",
    "Terms",
    "decode_run_untrusted",
    "open_ledger",
    "open_run",
    "run_of",
    "sign_run",
]
