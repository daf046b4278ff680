"""What a validator says is shown to the operator of an inference node."""

from __future__ import annotations

import itertools
import logging
from typing import ClassVar

import pytest
import trio

from p2p.host import Stream, send_frame
from p2p.node.node import Node
from roles.protocol.core.groups import OFFER_PROTOCOL, Refusal, encode_reply
from roles.validator.role import Validator
from tests.attacks.judged import play

ESCAPES = "\x1b[2J\x1b]0;mine\x07\nERROR p2p.node: type your password"


class Mocker(Validator):
    """Refuses whatever it is handed, by turns for ever and for now."""

    name: ClassVar[str] = "validator"

    async def run(self, node: Node) -> None:
        retries = itertools.cycle((False, True))

        async def serve(stream: Stream) -> None:
            async with stream:
                await send_frame(stream, encode_reply(Refusal(ESCAPES, next(retries))))

        with node.host.serving(OFFER_PROTOCOL, serve):
            await trio.sleep_forever()


def test_a_refusal_does_not_rewrite_the_operators_terminal(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """It went into the log as it came, with a line of its own, and so to standard error."""
    with caplog.at_level(logging.INFO, logger="roles.inference"):
        play({"validator-1": f"{__name__}:Mocker", "inference-1": "inference"}, 20.0)
    said = [record for record in caplog.records if "password" in record.getMessage()]
    assert {record.levelname for record in said} == {"INFO", "WARNING"}
    assert all(record.getMessage().isprintable() for record in said)
