"""``python -m tests.simulation.mutants [NAME ...]``: hunt mutants anew and keep the shrunk plans."""

from __future__ import annotations

import sys

from tests.simulation.mutants import MUTANTS, hunt

for name, seeds in hunt(sys.argv[1:] or list(MUTANTS)):
    sys.stdout.write(f"{name}: found with {seeds} seeds\n")
    sys.stdout.flush()
