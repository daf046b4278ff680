"""Weights in the folder format of slime, SGLang, vime and ModelExpress.

Below one root lies a folder ``weight_v000007`` for each version. It is a full checkpoint, or,
if the metadata of its index has ``delta_encoding``, what has changed since the version before.
A delta has a safetensors file in which each changed tensor is one zstd frame, of type U8, and
``__metadata__`` has the checksum of each tensor's new bytes. Version 0 is the receiver's own
base and is never written. We write ``xor`` with ``adler32``, which every receiver accepts, and
read ``overwrite`` and ``blake3`` too. Beside each folder that we write, a JSON file has the
publisher's signed manifest and the digest of the state.
"""

from __future__ import annotations

import errno
import json
import mmap
import os
import re
import shutil
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import zstandard
from blake3 import blake3
from numpy.typing import NDArray

from p2p.errors import BadMessage, ConfigError
from p2p.shardcast.layout import LENGTH_BYTES, header_bytes, tensors_untrusted
from p2p.wire import MIB

WEIGHT_V: Final = "weight_v"
INDEX: Final = "model.safetensors.index.json"


@dataclass(frozen=True, slots=True)
class Stored:
    """The place of a tensor in its file."""

    path: Path
    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int

    @property
    def kind(self) -> tuple[str, tuple[int, ...], int]:
        """Dtype, shape and size, which no version may change."""
        return self.dtype, self.shape, self.end - self.start


def folder_of(root: Path, version: int) -> Path:
    return root / f"weight_v{version:06d}"


def versions(root: Path) -> list[int]:
    """Return the versions that have a folder, oldest first."""
    folders = [path.name for path in root.iterdir() if path.is_dir()]
    found = [re.fullmatch(r"weight_v(\d{6})", name) for name in folders]
    return sorted(int(match[1]) for match in found if match is not None)


def stamp_of(folder: Path) -> list[tuple[str, int, int]]:
    """Return a stamp that changes while somebody writes to a folder."""
    found = sorted((path.name, path.lstat()) for path in folder.iterdir())
    return [(name, one.st_size, one.st_mtime_ns) for name, one in found]


def metadata_of(folder: Path) -> Mapping[str, Any]:
    """Return the metadata of a version's index; empty if it has no index. Raises
    `ConfigError`."""
    path = folder / INDEX
    if not path.exists():
        return {}
    try:
        if not path.is_file():  # a pipe would wait for a writer
            raise ValueError
        with path.open("rb") as file:
            table = json.loads(file.read(64 * MIB))
    except (ValueError, RecursionError):
        table = None
    found = table.get("metadata", {}) if isinstance(table, dict) else None
    if not isinstance(found, dict):
        raise ConfigError(f"{path} is no index of safetensors files")
    return found


def is_delta(folder: Path) -> bool:
    return "delta_encoding" in metadata_of(folder)


def _header(path: Path) -> tuple[int, dict[str, Any]]:
    """Return where the data begins, and the header. Raises `ConfigError`."""
    size = path.stat().st_size
    try:
        with path.open("rb") as file:
            front = file.read(LENGTH_BYTES + 1)
            length = header_bytes(front, size)
            file.seek(LENGTH_BYTES)
            header = file.read(length)
        found: dict[str, Any] = json.loads(header) if length else {}
        if not length or (
            found.keys() - {"__metadata__"} and not tensors_untrusted(header, size)
        ):
            raise BadMessage("its header makes no sense")
    except (BadMessage, ValueError, AttributeError, RecursionError) as error:
        raise ConfigError(f"{path} is no whole safetensors file: {error}") from None
    return LENGTH_BYTES + length, found


def _shards(folder: Path) -> list[Path]:
    return sorted(path for path in folder.glob("*.safetensors") if path.is_file())


def tensors(folder: Path) -> dict[str, Stored]:
    """Return the tensors of all safetensors files of a folder. Raises `ConfigError`."""
    found: dict[str, Stored] = {}
    for path in _shards(folder):
        start, header = _header(path)
        for name, entry in header.items():
            if name == "__metadata__":
                continue
            if name in found:
                raise ConfigError(f"{path}: {name} is in another file as well")
            begin, end = entry["data_offsets"]
            shape = entry.get("shape")
            shape = tuple(shape) if isinstance(shape, list) else ()
            found[name] = Stored(path, entry["dtype"], shape, start + begin, start + end)
    return found


def _mapped(stored: Mapping[str, Stored], mode: int) -> dict[Path, mmap.mmap]:
    """Map the files of tensors, until nothing refers to the maps."""
    maps: dict[Path, mmap.mmap] = {}
    for path in dict.fromkeys(one.path for one in stored.values()):
        with path.open("r+b" if mode == mmap.ACCESS_WRITE else "rb") as file:
            maps[path] = mmap.mmap(file.fileno(), 0, access=mode)
    return maps


def _bytes(maps: Mapping[Path, mmap.mmap], one: Stored) -> NDArray[np.uint8]:
    return np.frombuffer(maps[one.path], np.uint8, one.end - one.start, one.start)


def check_same_model(new: Mapping[str, Stored], old: Mapping[str, Stored], where: Path) -> None:
    """Raise `ConfigError` unless both have the same tensors."""
    odd = sorted(
        name
        for name in new.keys() | old.keys()
        if name not in new or name not in old or new[name].kind != old[name].kind
    )
    if odd:
        raise ConfigError(
            f"{where} is of another model than the version before: {len(odd)} tensors differ in"
            f" name, type or shape, the first is {odd[0]!s:.80}"
        )


def _check_finite(name: str, one: Stored, data: NDArray[np.uint8], where: Path) -> None:
    # The bits of a number's exponent: all of them are set in NaN and infinity.
    exponents = {"BF16": ("<u2", 0x7F80), "F16": ("<u2", 0x7C00), "F32": ("<u4", 0x7F800000)}
    kind, bits = exponents.get(one.dtype, ("", 0))
    if kind and data.size % np.dtype(kind).itemsize:
        raise ConfigError(f"{where}: {name} has not the bytes of whole numbers")
    if kind and (data.view(kind) & bits == bits).any():
        raise ConfigError(f"{where}: {name} holds NaN or infinity")


def _files(folder: Path) -> list[Path]:
    return sorted(path.relative_to(folder) for path in folder.rglob("*") if path.is_file())


def _can_be_delta(new: Path, old: Path) -> bool:
    """Return True if nothing but the values of tensors differs."""
    files = _files(new)
    if files != _files(old) or not any(path.suffix == ".safetensors" for path in files):
        return False
    others = [path for path in files if path.suffix != ".safetensors"]
    if any((new / path).read_bytes() != (old / path).read_bytes() for path in others):
        return False
    try:
        check_same_model(tensors(new), tensors(old), new)
    except ConfigError:
        return False
    return True


def write_version(root: Path, version: int, new: Path, old: Path | None, name: str) -> str:
    """Write a version: as a delta if ``old`` is the previous version and lies in ``root``, else
    whole.

    Args:
        root: The folder of all versions.
        version: Number of the version, from 1.
        new: Files of the version, or its only file. They are linked where the disk allows it.
        old: Files of the version before, if it is here.
        name: Name of the file, for a version of one file.

    Returns:
        ``delta`` or ``full``.
    """
    target = folder_of(root, version)
    part = target.with_name(f"{target.name}.part")
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir(parents=True)
    fulls = [
        one for one in versions(root) if one < version and not is_delta(folder_of(root, one))
    ]
    # A receiver that joins applies ten deltas at most.
    chain = folder_of(root, version - 1).exists() and version - max(fulls, default=0) < 10
    if chain and old is not None and new.is_dir() and _can_be_delta(new, old):
        _write_delta(part, version, new, old)
        what = "delta"
    else:
        for path in _files(new) if new.is_dir() else [Path()]:
            target_file = part / (path if path.name else name)
            target_file.parent.mkdir(parents=True, exist_ok=True)
            link(new / path, target_file)
        what = "full"
        for one in versions(root):
            if one < max(fulls, default=0):  # the chain before the last one
                shutil.rmtree(folder_of(root, one))
                note_of(root, one).unlink(missing_ok=True)
    shutil.rmtree(target, ignore_errors=True)
    part.rename(target)
    return what


def note_of(root: Path, version: int) -> Path:
    """Return where the signed manifest of a version lies."""
    return root / f"{folder_of(root, version).name}.json"


def link(source: Path, target: Path) -> None:
    """Link ``target`` to a file, or copy it if the disk knows no hard links or the file has as
    many as it may."""
    try:
        os.link(source, target)
    except OSError as error:
        if error.errno not in (errno.EXDEV, errno.EPERM, errno.EMLINK, errno.ENOTSUP):
            raise
        shutil.copyfile(source, target)


def _write_delta(target: Path, version: int, new: Path, old: Path) -> None:
    stored, before = tensors(new), tensors(old)
    sizes, sums = dict[str, int](), dict[str, str]()
    shard = "model-00000-of-00001.safetensors"
    frames = target / "frames"
    compressor = zstandard.ZstdCompressor(level=1)
    maps, old_maps = _mapped(stored, mmap.ACCESS_READ), _mapped(before, mmap.ACCESS_READ)
    with frames.open("wb") as file:
        for name, one in stored.items():
            data = _bytes(maps, one)
            changed = data ^ _bytes(old_maps, before[name])
            if changed.any():
                sizes[name] = file.write(compressor.compress(changed.data))
                sums[name] = f"{zlib.adler32(data.data):08x}"
    header: dict[str, Any] = {"__metadata__": sums}
    at = 0
    for name, size in sizes.items():
        header[name] = {"dtype": "U8", "shape": [size], "data_offsets": [at, at + size]}
        at += size
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    if sizes:
        with (target / shard).open("wb") as file, frames.open("rb") as packed:
            file.write(len(text).to_bytes(LENGTH_BYTES, "little") + text)
            shutil.copyfileobj(packed, file)
    frames.unlink()
    metadata = {
        "version": f"{version:06d}",
        "base_version": f"{version - 1:06d}",
        "delta_encoding": "xor",
        "compression_format": "zstd",
        "checksum_format": "adler32",
    }
    table = {"metadata": metadata, "weight_map": dict.fromkeys(sizes, shard)}
    (target / INDEX).write_text(json.dumps(table), encoding="utf-8")


def build(source: Path, version: int, previous: Path | None, target: Path) -> None:
    """Make the full checkpoint of a version at ``target``.

    Args:
        source: The version's folder.
        version: Its number.
        previous: The full checkpoint of the version before; None if there is none here.
        target: A new folder.

    Raises:
        ConfigError: The version is damaged, of another model, or follows another version.
    """
    part = target.with_name(f"{target.name}.part")
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir(parents=True)
    begun = previous if is_delta(source) else source
    if begun is None:
        raise ConfigError(
            f"{source} is a delta from version {version - 1}, which is not here: give the"
            " checkpoint that it began with as --base"
        )
    for path in _files(begun):
        (part / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(begun / path, part / path)
    if begun is previous:
        _apply(source, version, part)
    elif previous is not None:
        check_same_model(tensors(part), tensors(previous), source)
    stored = tensors(part)
    if not stored:
        raise ConfigError(f"{source} has no safetensors file")
    maps = _mapped(stored, mmap.ACCESS_READ)
    for name, one in stored.items():
        _check_finite(name, one, _bytes(maps, one), source)
    part.rename(target)


def _apply(source: Path, version: int, target: Path) -> None:
    said = metadata_of(source)
    wanted = {"version": version, "base_version": version - 1}
    for name, number in wanted.items():
        if str(said.get(name)) != f"{number:06d}":
            raise ConfigError(
                f"{source / INDEX}: {name} is {said.get(name)!s:.20}, not {number:06d}"
            )
    if said.get("compression_format") != "zstd":
        raise ConfigError(
            f"{source} is packed by {said.get('compression_format')!s:.20}, not zstd"
        )
    stored, deltas = tensors(target), tensors(source)
    sums: dict[str, Any] = {}
    for path in _shards(source):
        found = _header(path)[1].get("__metadata__", {})
        sums |= found if isinstance(found, dict) else {}
    maps, packed = _mapped(stored, mmap.ACCESS_WRITE), _mapped(deltas, mmap.ACCESS_READ)
    for name, delta in deltas.items():
        if name not in stored:
            raise ConfigError(f"{source}: the version before has no tensor {name!s:.80}")
        data = _bytes(maps, stored[name])
        _patch(data, _bytes(packed, delta), said["delta_encoding"], f"{source}: {name}")
        found = _checksum(str(said.get("checksum_format")), data, source)
        if found != sums.get(name):
            raise ConfigError(
                f"{source}: {name} comes to another checksum: it is damaged, or follows"
                " other weights"
            )


def _patch(
    data: NDArray[np.uint8], packed: NDArray[np.uint8], encoding: str, what: str
) -> None:
    room = data.size if encoding == "xor" else 4 + 5 * data.size
    try:
        reader = zstandard.ZstdDecompressor().stream_reader(packed.tobytes())
        plain = np.frombuffer(reader.read(room + 1), np.uint8)
    except zstandard.ZstdError as error:
        raise ConfigError(f"{what} is no zstd frame: {error}") from None
    if encoding == "xor" and plain.size == data.size:
        data ^= plain
        return
    count = int.from_bytes(plain[:4].tobytes(), "little")
    if encoding == "overwrite" and plain.size == 4 + 5 * count:
        places = np.frombuffer(plain[4 : 4 + 4 * count].tobytes(), "<u4")
        if not count or int(places.max()) < data.size:
            data[places] = plain[4 + 4 * count :]
            return
    if encoding not in ("xor", "overwrite"):
        raise ConfigError(
            f"{what}: there is no encoding {encoding!s:.20}: xor and overwrite are"
        )
    raise ConfigError(f"{what} has not the bytes of its tensor")


def _checksum(kind: str, data: NDArray[np.uint8], source: Path) -> str:
    if kind == "adler32":
        return f"{zlib.adler32(data.data):08x}"
    if kind == "blake3":
        return blake3(data.data).hexdigest()
    raise ConfigError(
        f"{source} has checksums by {kind:.20}: adler32 and blake3 can be checked, so let the"
        " trainer write one of these"
    )
