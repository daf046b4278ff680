"""``python -m roles.doctor``."""

import sys

from roles.doctor.command import main

sys.exit(main())
