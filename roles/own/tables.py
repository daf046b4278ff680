"""Files of questions, chats and text as others keep them, turned into our JSON lines.

A row of Parquet or JSON lines has ``messages``, ``prompt`` and ``completion``, ``question`` and
``answer``, or ``text``: the names that Hugging Face's libraries use. The owner's machine
converts a file once, row by row, and the run pins the result. No node reads Parquet, so none
needs pyarrow.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Final

from p2p.errors import ConfigError, MissingDependency
from p2p.node.usage import remark
from p2p.wire import MIB
from roles.diloco.corpus import MAX_BYTES
from roles.envs.questions import PARQUET

Row = Mapping[str, Any]
COLUMNS: Final = ("messages", "prompt", "completion", "question", "answer", "gold", "text")
BEGINNINGS: Final = ("messages", "prompt", "question", "answer", "gold", "text")
"""Columns of which a row has at least one."""
MAX_ROW: Final = 8 * MIB  # bytes of a line, before it is parsed
_TOO_LONG: Final = f"has over {MAX_ROW >> 20} MiB"
AT_ONCE: Final = 16  # rows of Parquet in memory: one may be long
_NAMES: Final = "messages, prompt and completion, question and answer, or text"


def is_parquet(path: Path) -> bool:
    """Return True if the file begins as Parquet does."""
    with path.open("rb") as file:
        return file.read(len(PARQUET)) == PARQUET


def read_rows(path: Path) -> Iterator[tuple[str, Row]]:
    """Yield each row of a file, or of all Parquet files in a folder, after its place (such as
    "row 7"), which error messages name.

    Raises:
        ConfigError: A file cannot be read or parsed, a row is too long, or a Parquet file has
            none of the columns in `BEGINNINGS`.
        MissingDependency: The file is Parquet, and pyarrow is not installed.
    """
    try:
        if path.is_dir():
            for one in sorted(path.rglob("*.parquet")):
                yield from _parquet_rows(one)
        else:
            yield from (_parquet_rows if is_parquet(path) else _json_rows)(path)
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror or error}") from None


def _json_rows(path: Path) -> Iterator[tuple[str, Row]]:
    with path.open("rb") as file:
        for number, line in enumerate(iter(partial(file.readline, MAX_ROW + 1), b""), 1):
            if len(line) > MAX_ROW:
                raise ConfigError(f"{path}: line {number} {_TOO_LONG}")
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except (ValueError, RecursionError):
                row = None
            if not isinstance(row, dict):
                raise ConfigError(f"{path}: line {number} is no JSON object")
            yield f"line {number}", row


def _parquet_rows(path: Path) -> Iterator[tuple[str, Row]]:
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError:
        raise MissingDependency(
            f"{path} is Parquet, which needs pyarrow: pip install 'shoal[data]'"
        ) from None
    try:
        file = parquet.ParquetFile(path, buffer_size=MIB, pre_buffer=False)
        there = file.schema_arrow.names
        names = [name for name in COLUMNS if name in there]
        if not set(names) & set(BEGINNINGS):
            raise ConfigError(
                f"{path} has the columns {', '.join(there)!s:.200}: it needs {_NAMES}"
            )
        number = 0
        for batch in file.iter_batches(AT_ONCE, columns=names, use_threads=False):
            if batch.nbytes > AT_ONCE * MAX_ROW:  # a few KB on disk may be many GB here
                raise ConfigError(f"{path}: row {number + 1} or one of the next {_TOO_LONG}")
            for row in batch.to_pylist():
                number += 1
                yield f"row {number}", row
    except (pyarrow.ArrowException, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is no sound Parquet: {error!s:.160}") from None


def _turns(row: Row) -> list[dict[str, str]]:
    """Return the conversation of a row. Raises ValueError with the end of a sentence that
    begins with the row, as all functions below do."""
    if row.get("messages") is not None:
        return _messages(row["messages"], "messages")
    for asked, said in (("prompt", "completion"), ("question", "answer")):
        if row.get(asked) is not None:
            sides = ((asked, "user"), (said, "assistant"))
            return [turn for name, role in sides for turn in _side(row.get(name), name, role)]
    raise ValueError(f"has {', '.join(row)!s:.80}: it needs {_NAMES}")


def _side(value: Any, name: str, role: str) -> list[dict[str, str]]:
    if isinstance(value, list):
        return _messages(value, name)
    return [{"role": role, "content": _text(value, name)}]


def _messages(value: Any, name: str) -> list[dict[str, str]]:
    if not isinstance(value, list) or not value:
        raise ValueError(
            f"has {type(value).__name__} under {name!r}: a list of turns is needed"
        )
    turns = []
    for turn in value:
        if not isinstance(turn, dict):
            raise ValueError(f"has a turn under {name!r} without role and content")
        turns.append({key: _text(turn.get(key), key) for key in ("role", "content")})
    return turns


def _text(value: Any, name: str) -> str:
    if not isinstance(value, str):
        what = "nothing" if value is None else type(value).__name__
        raise ValueError(f"has {what} under {name!r}: each row needs text there")
    try:
        value.encode()
    except UnicodeEncodeError:
        raise ValueError(f"has half a character under {name!r}") from None
    return value


def as_chat(row: Row) -> Row:
    """Return a row as a chat."""
    turns = _turns(row)
    if turns[-1]["role"] != "assistant":
        raise ValueError(f"ends with a turn of {turns[-1]['role']!r:.40}, not of the assistant")
    return {"messages": turns}


def as_question(row: Row) -> Row:
    """Return a row as a question and its answer. A row that has text under these names stays as
    it is; the reader of the file checks it."""
    if ours := [name for name in ("question", "answer", "gold") if row.get(name) is not None]:
        for name in ours:
            _text(row[name], name)
        return row
    turns = _turns(row)
    if [turn["role"] for turn in turns] != ["user", "assistant"]:
        raise ValueError(
            f"has the turns {', '.join(turn['role'] for turn in turns)!s:.80}: a question is"
            " one of user, and its answer one of assistant"
        )
    return {"question": turns[0]["content"], "answer": turns[1]["content"]}


def as_text(row: Row) -> Row:
    """Return a row as one document: its text, or its turns with a blank line between."""
    if "text" in row:
        return {"text": _text(row["text"], "text")}
    return {"text": "\n\n".join(turn["content"] for turn in _turns(row))}


def is_other_form(path: Path, ours: tuple[str, ...]) -> bool:
    """Return True if nodes could not read the rows of ``path``: they are Parquet, or JSON lines
    of chats without any of the names that are ``ours``."""
    if path.is_dir():
        return any(path.rglob("*.parquet"))
    if not path.is_file():
        return False
    if is_parquet(path):
        return True
    if path.suffix not in (".jsonl", ".json"):
        return False
    _, row = next(read_rows(path), ("", {}))
    return not set(ours) & row.keys() and bool(set(BEGINNINGS) & row.keys())


def convert(
    source: Path, target: Path, form: Callable[[Row], Row], most: int = MAX_BYTES
) -> None:
    """Write the rows of ``source`` to ``target`` as JSON lines.

    Args:
        source: A file of rows, or a folder of Parquet files.
        target: Replaced when all of it is written.
        form: Converts a row to ours, or raises ValueError.
        most: Maximum bytes of the result.

    Raises:
        ConfigError: A row is bad, or there are no rows or too many.
    """
    part, size, count = target.with_name(f"{target.name}.part"), 0, 0
    digest = hashlib.sha256()
    try:
        with part.open("wb") as file:
            for place, row in read_rows(source):
                try:
                    line = json.dumps(form(row), ensure_ascii=False).encode() + b"\n"
                except ValueError as error:
                    raise ConfigError(f"{source}: {place} {error}") from None
                if len(line) > MAX_ROW:
                    raise ConfigError(f"{source}: {place} {_TOO_LONG}")
                size, count = size + len(line), count + 1
                if size > most:
                    raise ConfigError(
                        f"{source}: the first {count:,} rows have over {most >> 20:,} MiB as"
                        " JSON lines, which is the limit: give a part of it"
                    )
                digest.update(line)
                file.write(line)
        if not count:
            raise ConfigError(f"{source} has no rows")
        part.replace(target)
    finally:
        part.unlink(missing_ok=True)
    remark(f"{source.name}: {count:,} rows to {target}, sha256 {digest.hexdigest()[:16]}")
