"""pytest plugin: ``SHOAL_RULE_OFF=gossip:promises pytest -p bench.rules.off`` plays tests with
a rule switched off. The tests keep the constants that they imported; only p2p has others.
"""

from __future__ import annotations

import os
from typing import Final

from bench.rules import SERVICES
from bench.rules.rule import switch_off

VARIABLE: Final = "SHOAL_RULE_OFF"


def pytest_collection_finish() -> None:
    """Switch the rule off once all tests are imported."""
    service, _, rule = os.environ[VARIABLE].partition(":")
    switch_off(SERVICES[service].rules[rule])
