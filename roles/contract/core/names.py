"""What things that a run names may be called."""

from __future__ import annotations

import re
from typing import Final

NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
"""What an environment may be called. ``module:Class`` is no name: a run's owner could call
``os:abort`` on every volunteer's machine, while entry points exist only where the machine's
owner installed a package."""
