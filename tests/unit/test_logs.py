"""What a node's log says to machines."""

from __future__ import annotations

import json
import logging
from pathlib import Path

from p2p.node.process import logging_to
from tests import errors
from tests.events import TABLE, events, table


def test_each_error_and_each_loud_event_has_a_remedy() -> None:
    assert errors.PAGE.read_text(encoding="utf-8") == errors.page(), (
        "python -m tests.errors --write"
    )
    assert [name for name, remedy in errors.remedies().items() if not remedy.strip()] == []


def test_the_table_of_events_is_what_the_code_says() -> None:
    assert TABLE.read_text(encoding="utf-8") == table(), "run python -m tests.events --write"
    assert len({name for name, *_ in events()}) > 50


def test_a_line_of_the_log_is_an_object_whatever_a_peer_said(tmp_path: Path) -> None:
    said = 'a"b\nc\u2028d\x00'
    with logging_to(tmp_path / "log", "info", form="json"):
        log = logging.getLogger("p2p.test")
        log.info("run.pinned id=%s owner=%s epoch=%d", "ab", said, 7)
        log.info("%r broke a protocol: %s", said, said)
    first, second = map(json.loads, (tmp_path / "log").read_text("utf-8").splitlines())
    assert first["event"] == "run.pinned"
    assert first["fields"] == {"id": "ab", "owner": said, "epoch": 7}
    assert (first["level"], first["logger"]) == ("info", "p2p.test")
    assert "event" not in second
