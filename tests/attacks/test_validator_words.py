"""What a validator says is shown to the operator of an inference node."""

from __future__ import annotations

import logging

import pytest

from roles.inference.session import InferenceSession
from roles.inference.stats import InferenceCounts
from roles.protocol.core.messages import Refusal
from tests.unit.test_shardcast_core import key

ESCAPES = "\x1b[2J\x1b]0;mine\x07\nERROR p2p.node: type your password"


@pytest.mark.parametrize("retry", [False, True])
def test_a_refusal_does_not_rewrite_the_operators_terminal(
    retry: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """It went into the log as it came, with a line of its own, and so to standard error."""
    session = object.__new__(InferenceSession)
    session.counts = InferenceCounts()
    with caplog.at_level(logging.INFO):
        session._note_refusal(key(1).peer_id, Refusal(ESCAPES, retry))
    (record,) = caplog.records
    assert record.getMessage().isprintable()
    assert "type your password" in record.getMessage()
