"""``python -m roles.calibrate``: as ``shoal calibrate``."""

import sys

from roles.calibrate import main

if __name__ == "__main__":
    sys.exit(main())
