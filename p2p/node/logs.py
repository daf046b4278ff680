"""What a node's log looks like: lines for people, or an object a line for machines.

Messages that a program may wait for begin with a name, ``run.pinned`` or ``policy_damaged``,
and fields follow, ``epoch=%d``. docs/events.md lists the names; a test holds the list.
"""

from __future__ import annotations

import json
import logging
import math
import re
from datetime import UTC, datetime
from typing import Any, Final

FORMATS: Final = ("text", "json")
TEXT: Final = "%(asctime)s %(levelname)s %(name)s %(message)s"
"""A line for people."""
EVENT: Final = re.compile(r"[a-z0-9]+(?:[._][a-z0-9]+)+(?=[\s:,]|$)")
"""The name at the beginning of a message: words with dots or underscores between them."""
_FIELD: Final = re.compile(r"(?:\b(\w+)=)?%[-.\d]*[a-z]")
"""A place of a template, and the name before it, if it has one."""


def formatter(kind: str) -> logging.Formatter:
    """One of `FORMATS`."""
    return JsonFormatter() if kind == "json" else TextFormatter(TEXT)


class TextFormatter(logging.Formatter):
    """A record as a line for people, and below it a traceback. What strangers said in it ends
    no line and moves no cursor: it is escaped as Python does."""

    def format(self, record: logging.LogRecord) -> str:
        """One line, or more with a traceback."""
        record.exc_text = None  # that of another handler, as it came
        return super().format(record)

    def formatMessage(self, record: logging.LogRecord) -> str:
        """The line."""
        return _escaped(super().formatMessage(record))

    def formatException(self, ei: Any) -> str:
        """The traceback."""
        return "\n".join(map(_escaped, super().formatException(ei).split("\n")))


def _escaped(text: str) -> str:
    return "".join(
        sign if sign.isprintable() else sign.encode("unicode_escape").decode() for sign in text
    )


class JsonFormatter(logging.Formatter):
    """A record as one line of JSON: time, level, logger, message, and its event with fields."""

    def format(self, record: logging.LogRecord) -> str:
        """As ASCII without line ends."""
        name = EVENT.match(str(record.msg))
        line: dict[str, object] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if name is not None:
            line |= {"event": name[0], "fields": _fields(record)}
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return json.dumps(line)


def _fields(record: logging.LogRecord) -> dict[str, object]:
    """The arguments that the template names, as they are if JSON has them, else as text: it has
    no NaN."""
    places = _FIELD.findall(str(record.msg))
    values = record.args if isinstance(record.args, tuple) else ()
    return {
        name: value if _is_in_json(value) else str(value)
        for name, value in zip(places, values, strict=False)
        if name
    }


def _is_in_json(value: object) -> bool:
    return isinstance(value, int) or (isinstance(value, float) and math.isfinite(value))
