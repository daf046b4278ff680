"""Names that a run file may use."""

from __future__ import annotations

import re
from typing import Final

NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
"""Names of environments, kinds and engines. ``module:Class`` is none: a run's owner could call
``os:abort`` on every volunteer's machine, while entry points exist only where the machine's
owner installed a package."""
CAPSULES: Final = "capsule."
"""Names of environments that travel with the run begin so (`roles.envs.capsule`)."""
