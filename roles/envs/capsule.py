"""Capsules: environments as one file of pure Python that travels with a run.

A capsule is a zip (``NAME.capsule``) with ``environment.py`` in it, which has a class
``Environment`` as `roles.envs.text` describes, and whatever modules and data that needs. A run
names it ``capsule.NAME`` and pins the file, which every policy carries
(`roles.protocol.model_files`). Nothing of it runs in a node: each call starts an interpreter of
wasm (`roles.envs.wasm`) that gets the files through its standard input, has bounds in fuel and
memory, and reaches nothing. So it needs no installation, and no trust in its author.

Within the interpreter ``roles.envs.text`` has `Message`, `TextTask` and `is_held_out`, and
``roles.envs.answers`` has `spoken`; beside them there is Python's standard library.
``__loader__.get_data("words.txt")`` reads a file of the capsule.

A start takes 0.1 CPU s, so calls that are known to come are made together (`Capsule.expect`).
A batch in which one call raises, or that exceeds a bound, is thrown away, and each of its calls
runs by itself when it is made: no answer costs another its reward.
"""

from __future__ import annotations

import hashlib
import inspect
import io
import json
import lzma
import re
import struct
import zipfile
import zlib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from p2p.errors import BadMessage, ConfigError, ShoalError
from p2p.wire import MIB, fields_untrusted
from roles.contract.core.pin import MAX_CAPSULE
from roles.envs import answers, text
from roles.envs.text import Message, TextTask
from roles.envs.wasm import Interpreter

MAX_FILES: Final = 64
MAX_UNPACKED: Final = 16 * MIB
"""Bytes of all files of a capsule."""
FUEL: Final = 2_000_000_000
"""Fuel of one call: 0.4 CPU seconds on a machine of 2026."""
EVALUATION_FUEL: Final = 50_000_000_000
BATCH: Final = 256
"""Calls of one batch, which have this fuel together:"""
BATCH_FUEL: Final = 5_000_000_000
OUTPUT: Final = 4 * MIB
"""Most bytes of a reply."""
KEPT: Final = 65_536
"""Replies that are kept, each by the digest of its call."""
_PATH: Final = re.compile(r"(?:\w[\w-]{0,63}/){0,3}\w[\w.-]{0,63}", re.ASCII)
NATIVE: Final = (".so", ".pyd", ".dll", ".dylib", ".pyc")

_DRIVER: Final = """
import sys
from _frozen_importlib import ModuleSpec
from _json import encode_basestring_ascii as quoted
size, _, raw = sys.stdin.buffer.read().partition(b"\\n")
listed, calls = eval(raw[:int(size)])
files, at = {}, int(size)
for name, length in listed:
    files[name], at = raw[at : at + length], at + length
write = sys.stdout.write
class Quiet:
    def write(self, text): return len(text)
    def flush(self): pass
sys.stdout = sys.stderr = Quiet()
class Loader:
    def find_spec(self, name, path=None, target=None):
        for end in (".py", "/__init__.py"):
            file = name.replace(".", "/") + end
            if file in files:
                return ModuleSpec(name, self, origin=file, is_package=end != ".py")
    def create_module(self, spec): pass
    def exec_module(self, module):
        file = module.__spec__.origin
        exec(compile(files[file], file, "exec"), module.__dict__)
    def get_data(self, path): return files[path]
sys.meta_path.insert(0, Loader())
def plain(value):
    if hasattr(value, "messages"):
        said = [[one.role, one.content] for one in value.messages]
        return [said, value.prefill, value.answer, value.info, value.kind]
    return [plain(one) for one in value] if isinstance(value, (list, tuple)) else value
def dump(value):
    if isinstance(value, str): return quoted(value)
    if isinstance(value, list): return "[" + ",".join(map(dump, value)) + "]"
    if value is None: return "null"
    return repr(float(value)).replace("inf", "1e999").replace("nan", "NaN")
def called(name, *given):
    if name == "talks": return hasattr(environment, "respond")
    made = getattr(environment, name)
    if name == "task": return made(given[0], held_out=given[1])
    if given: given = (TextTask(*given[0]), *given[1:])
    value = made(*given)
    if not hasattr(value, "send"): return value
    try: value.send(None)
    except StopIteration as end: return end.value
    raise RuntimeError("it awaits something, and nothing ever comes")
replies, environment = [], None
for call in calls:
    try:
        if environment is None:
            from roles.envs.text import TextTask
            from environment import Environment
            environment = Environment()
        replies.append("[true," + dump(plain(called(*call))) + "]")
    except BaseException as error:
        where, at = "", error.__traceback__
        while at:
            name = at.tb_frame.f_code.co_filename
            where = f" ({name}:{at.tb_lineno})" if name in files else where
            at = at.tb_next
        replies.append("[false," + quoted(f"{type(error).__name__}: {error}{where}") + "]")
write("[" + ",".join(replies) + "]")
"""
_TEXT: Final = f"""
import hashlib
HELD_OUT_BELOW = {text.HELD_OUT_BELOW}
class Message:
    def __init__(self, role, content): self.role, self.content = role, content
class TextTask:
    def __init__(self, messages, prefill, answer, info="", kind=""):
        self.messages = tuple(m if hasattr(m, "role") else Message(*m) for m in messages)
        self.prefill, self.answer, self.info, self.kind = prefill, answer, info, kind
{inspect.getsource(text.is_held_out)}"""
_ANSWERS: Final = f"""
import re
import struct
_THOUGHT, _ENDS = re.compile({answers._THOUGHT.pattern!r}, re.I), {sorted(answers._ENDS)}
{inspect.getsource(answers._ends)}{inspect.getsource(answers.spoken)}"""
_GIVEN: Final = {
    "roles/__init__.py": b"",
    "roles/envs/__init__.py": b"",
    "roles/envs/text.py": _TEXT.encode(),
    "roles/envs/answers.py": _ANSWERS.encode(),
}
"""The files of Shoal that a capsule can import."""


class CapsuleFailed(ShoalError):
    """A capsule raised in its interpreter, or exceeded a bound there."""


class Capsule:
    """An environment of text, each call of which runs in an interpreter of its own."""

    name = "capsule"

    def __init__(self, files: Mapping[str, bytes], python: Interpreter) -> None:
        self._python = python
        self._listed = [(name, len(data)) for name, data in files.items()]
        self._blob = b"".join(files.values())
        self._known = dict[bytes, Any]()

    def task(self, seed: bytes, *, held_out: bool = False) -> TextTask:
        return _task_untrusted(self.call("task", seed, held_out))

    async def reward(self, task: TextTask, said: Any, ended: bool) -> float:
        paid: float = self.call("reward", task, said, ended)
        return paid

    def evaluation(self) -> list[TextTask]:
        return [_task_untrusted(one) for one in self.call("evaluation")]

    def call(self, name: str, *given: Any) -> Any:
        """Return the result of a call, in plain values.

        Raises:
            CapsuleFailed: The capsule raised, or exceeded a bound.
        """
        key, call = _plain((name, *given))
        if key not in self._known:
            fuel = EVALUATION_FUEL if name == "evaluation" else FUEL
            ((is_good, value),) = self._run([call], fuel)
            if not is_good:
                raise CapsuleFailed(f"{name}() of a capsule: {value!s:.500}")
            self._keep({key: value})
        return self._known[key]

    def expect(self, calls: Iterable[tuple[Any, ...]]) -> None:
        """Make calls that are likely to come, in few starts of the interpreter, and keep the
        results."""
        new = [one for one in dict(map(_plain, calls)).items() if one[0] not in self._known]
        for start in range(0, len(new), BATCH):
            batch = new[start : start + BATCH]
            replies = self._run([call for _, call in batch], BATCH_FUEL)
            if all(is_good for is_good, _ in replies):
                pairs = zip(batch, replies, strict=True)
                self._keep({key: value for (key, _), (_, value) in pairs})

    def _keep(self, replies: Mapping[bytes, Any]) -> None:
        if len(self._known) >= KEPT:
            self._known.clear()
        self._known.update(replies)

    def _run(self, calls: Sequence[str], fuel: int) -> list[tuple[bool, Any]]:
        """Return for each call whether it succeeded, and its result or error."""
        head = f"{self._listed!r},[{','.join(calls)}]".encode()
        given = b"%d\n%b%b" % (len(head), head, self._blob)
        outcome = self._python.run(_DRIVER, given, fuel=fuel, output=OUTPUT)
        why = "it exceeds a bound of fuel, memory, recursion or output"
        if outcome.code == 0:
            try:
                replies = json.loads(outcome.text)
                if len(replies) == len(calls):
                    return [(one[0] is True, one[1]) for one in replies]
            except (ValueError, TypeError, IndexError, KeyError, RecursionError):
                pass
            why = "it answers nonsense, or ends its interpreter"
        return [(False, why)] * len(calls)


class TalkingCapsule(Capsule):
    """A capsule that answers the model."""

    async def respond(self, task: TextTask, said: Sequence[str]) -> str | None:
        words = self.call("respond", task, said)
        return None if words is None else str(words)


def open_capsule(data: bytes = b"") -> Capsule:
    """Return the environment that a capsule holds.

    Raises:
        ConfigError: The capsule cannot be used, or wasmtime is not installed.
    """
    try:
        files = {**read_capsule_untrusted(data), **_GIVEN}
        capsule = Capsule(files, Interpreter("cpython"))
        return TalkingCapsule(files, capsule._python) if capsule.call("talks") else capsule
    except (BadMessage, CapsuleFailed) as error:
        raise ConfigError(f"this capsule cannot be used: {error}") from error


def read_capsule_untrusted(data: bytes) -> dict[str, bytes]:
    """Return the files of a capsule by name.

    Raises:
        BadMessage: The bytes are no capsule. Nothing else is raised, whatever the bytes.
    """
    if len(data) > MAX_CAPSULE:
        raise BadMessage(f"it has {len(data):,} bytes, over {MAX_CAPSULE:,}")
    files, left = dict[str, bytes](), MAX_UNPACKED
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            for info in archive.infolist():
                name = info.filename
                if not _PATH.fullmatch(name) or name in files or len(files) == MAX_FILES:
                    raise BadMessage(
                        f"{name!r:.80} is no name of a file in it, stands there twice, or is"
                        f" one of more than {MAX_FILES}"
                    )
                if Path(name).suffix in NATIVE:
                    raise BadMessage(f"{name} is no source: a capsule is pure Python and data")
                if info.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
                    # zipfile unpacks these as a whole: 463 bytes of bzip2 take 800 MiB.
                    raise BadMessage(f"{name} is neither stored nor deflated")
                with archive.open(info) as file:
                    files[name] = file.read(left + 1)
                left -= len(files[name])
                if left < 0:
                    raise BadMessage(f"its files have over {MAX_UNPACKED:,} bytes")
    except (zipfile.BadZipFile, zlib.error, lzma.LZMAError, OSError, EOFError, ValueError,
            RuntimeError, struct.error, IndexError) as error:  # fmt: skip
        raise BadMessage(f"it is no zip that can be read: {error!s:.200}") from None
    if "environment.py" not in files:
        raise BadMessage("it has no environment.py")
    return files


def pack(folder: Path) -> bytes:
    """Return the capsule of a folder; the same folder always gives the same bytes.

    Raises:
        ConfigError: The folder cannot be packed.
    """
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as archive:
        for path in sorted(folder.rglob("*")):
            name = path.relative_to(folder)
            is_hidden = any(one.startswith((".", "__pycache__")) for one in name.parts)
            if path.is_file() and not is_hidden:
                if path.stat().st_size > MAX_UNPACKED:
                    raise ConfigError(f"{path} is over the {MAX_UNPACKED:,} bytes of a capsule")
                entry = zipfile.ZipInfo(name.as_posix())  # with no date and no owner
                archive.writestr(entry, path.read_bytes(), zipfile.ZIP_DEFLATED)
    try:
        read_capsule_untrusted(packed.getvalue())
    except BadMessage as error:
        raise ConfigError(f"{folder} makes no capsule: {error}") from error
    return packed.getvalue()


def _task_untrusted(value: object) -> TextTask:
    turns, *rest = fields_untrusted(value, list, str, str, str, str, what="task of a capsule")
    pairs = (fields_untrusted(turn, str, str, what="message") for turn in turns)
    return TextTask(tuple(Message(*pair) for pair in pairs), *rest)


def _plain(call: tuple[Any, ...]) -> tuple[bytes, str]:
    """Return a call as the driver evaluates it, with its digest."""
    written = repr([_fields(one) if isinstance(one, TextTask) else one for one in call])
    return hashlib.sha256(written.encode()).digest(), written


def _fields(task: TextTask) -> list[Any]:
    said = [[one.role, one.content] for one in task.messages]
    return [said, task.prefill, task.answer, task.info, task.kind]
