"""What a node's log looks like: lines for people, or an object a line for machines.

Messages that a program may wait for begin with a name, ``run.pinned`` or ``policy_damaged``,
and fields follow, ``epoch=%d``. docs/events.md lists the names; a test holds the list.
"""

from __future__ import annotations

import json
import logging
import re
from datetime import UTC, datetime
from typing import Final

FORMATS: Final = ("text", "json")
TEXT: Final = "%(asctime)s %(levelname)s %(name)s %(message)s"
"""A line for people."""
EVENT: Final = re.compile(r"[a-z0-9]+(?:[._][a-z0-9]+)+(?=[\s:,]|$)")
"""The name at the beginning of a message: words with dots or underscores between them."""
_FIELD: Final = re.compile(r"(?:\b(\w+)=)?%[-.\d]*[a-z]")
"""A place of a template, and the name before it, if it has one."""


def formatter(kind: str) -> logging.Formatter:
    """One of `FORMATS`."""
    return JsonFormatter() if kind == "json" else logging.Formatter(TEXT)


class JsonFormatter(logging.Formatter):
    """A record as one line of JSON: time, level, logger, message, and its event with fields."""

    def format(self, record: logging.LogRecord) -> str:
        """As UTF-8 text without line ends."""
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
        return json.dumps(line, ensure_ascii=False).replace("\u2028", "\\u2028")


def _fields(record: logging.LogRecord) -> dict[str, object]:
    """The arguments that the template names, as they are if JSON has them, else as text."""
    places = _FIELD.findall(str(record.msg))
    values = record.args if isinstance(record.args, tuple) else ()
    return {
        name: value if isinstance(value, int | float | bool) else str(value)
        for name, value in zip(places, values, strict=False)
        if name
    }
