"""``python -m p2p.node``."""

import sys

from p2p.node.cli import node_main

sys.exit(node_main())
