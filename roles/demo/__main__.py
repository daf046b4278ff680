"""``python -m roles.demo``."""

from __future__ import annotations

import sys

from roles.demo.command import main

if __name__ == "__main__":
    sys.exit(main())
