"""Folders of weights in the datacentres' form: both ways, and what is refused."""

from __future__ import annotations

import json
import os
import shutil
import zlib
from pathlib import Path
from random import Random

import numpy as np
import pytest
import zstandard
from blake3 import blake3

from p2p.cast.weight_v import (
    build,
    folder_of,
    is_delta,
    note_of,
    stamp_of,
    tensors,
    versions,
    write_version,
)
from p2p.errors import ConfigError
from roles.models.safetensors import RawTensor, encode

SHAPES = {"embed.weight": (64, 8), "layers.0.norm.weight": (8,), "lm_head.weight": (8, 64)}


def checkpoint(folder: Path, step: int, shapes: dict[str, tuple[int, ...]] = SHAPES) -> Path:
    """Weights in bfloat16, in two files; the norm changes in every third step only."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    for number, (name, shape) in enumerate(shapes.items()):
        rng = np.random.default_rng([step // 3 if "norm" in name else step, number])
        values = rng.standard_normal(shape).astype("<f4").view("<u4") >> 16
        raw = RawTensor("BF16", shape, values.astype("<u2").tobytes())
        path = folder / f"model-{number % 2 + 1:05d}-of-00002.safetensors"
        path.write_bytes(encode({name: raw, **others(path)}))
    return folder


def others(path: Path) -> dict[str, RawTensor]:
    from roles.models.safetensors import decode_untrusted

    return dict(decode_untrusted(path.read_bytes())) if path.exists() else {}


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_what_is_written_is_read_back_and_two_chains_stay(tmp_path: Path) -> None:
    root, old, built = tmp_path / "root", None, None
    root.mkdir()
    kinds = []
    for version in range(1, 25):
        new = checkpoint(tmp_path / f"new-{version}", version)
        kinds.append(write_version(root, version, new, old, "x"))
        build(folder_of(root, version), version, built, tmp_path / f"built-{version}")
        built = tmp_path / f"built-{version}"
        assert contents(built) == contents(new)
        old = new
    assert [at for at, kind in enumerate(kinds, 1) if kind == "full"] == [1, 11, 21]
    assert versions(root) == list(range(11, 25))
    index = json.loads((folder_of(root, 12) / "model.safetensors.index.json").read_text())
    assert set(index["weight_map"]) == {
        "embed.weight",
        "lm_head.weight",
        "layers.0.norm.weight",
    }
    index = json.loads((folder_of(root, 13) / "model.safetensors.index.json").read_text())
    assert set(index["weight_map"]) == {"embed.weight", "lm_head.weight"}
    assert not note_of(root, 3).exists()


def test_what_cannot_be_a_delta_is_written_whole(tmp_path: Path) -> None:
    first = checkpoint(tmp_path / "a", 1)
    write_version(tmp_path / "root", 1, first, None, "x")
    other = checkpoint(tmp_path / "b", 2, {**SHAPES, "lm_head.weight": (8, 65)})
    assert write_version(tmp_path / "root", 2, other, first, "x") == "full"
    (second := checkpoint(tmp_path / "c", 2)).joinpath("config.json").write_text('{"a": 1}')
    assert write_version(tmp_path / "root", 2, second, first, "x") == "full"
    again = write_version(tmp_path / "root", 3, second, second, "x")
    assert (again, tensors(folder_of(tmp_path / "root", 3))) == ("delta", {})


@pytest.mark.parametrize("encoding", ["xor", "overwrite"])
@pytest.mark.parametrize("kind", ["adler32", "blake3"])
def test_both_encodings_of_slime_are_read(encoding: str, kind: str, tmp_path: Path) -> None:
    old, new = checkpoint(tmp_path / "old", 1), checkpoint(tmp_path / "new", 2)
    root = tmp_path / "root"
    write_version(root, 1, old, None, "x")
    write_version(root, 2, new, old, "x")
    frames, sums = {}, {}
    for name, one in tensors(new).items():
        after = one.path.read_bytes()[one.start : one.end]
        start = tensors(old)[name].start
        before = (old / one.path.name).read_bytes()[start : start + len(after)]
        if after == before:
            continue
        packed = bytes(a ^ b for a, b in zip(after, before, strict=True))
        if encoding == "overwrite":
            places = [at for at, byte in enumerate(packed) if byte]
            packed = np.array([len(places), *places], "<u4").tobytes()
            packed += bytes(after[at] for at in places)
        frames[name] = zstandard.compress(packed, 1)
        sums[name] = f"{zlib.adler32(after):08x}"
        if kind == "blake3":
            sums[name] = blake3(after).hexdigest()
    folder = folder_of(root, 2)
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    index["metadata"] |= {"delta_encoding": encoding, "checksum_format": kind}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    [shard] = folder.glob("*.safetensors")
    header, at = {"__metadata__": sums}, 0
    for name, frame in frames.items():
        span = [at, at := at + len(frame)]
        header[name] = {"dtype": "U8", "shape": [len(frame)], "data_offsets": span}
    text = json.dumps(header).encode()
    shard.write_bytes(len(text).to_bytes(8, "little") + text + b"".join(frames.values()))
    build(folder, 2, old, tmp_path / "built")
    assert contents(tmp_path / "built") == contents(new)


def test_bad_folders_are_one_sentence_each_and_leave_nothing(tmp_path: Path) -> None:
    old, new = checkpoint(tmp_path / "old", 1), checkpoint(tmp_path / "new", 2)
    root, target = tmp_path / "root", tmp_path / "built"
    write_version(root, 1, old, None, "x")
    write_version(root, 2, new, old, "x")
    folder = folder_of(root, 2)
    index = folder / "model.safetensors.index.json"
    good = index.read_text()

    def refused(said: str, previous: Path | None = old, number: int = 2) -> None:
        with pytest.raises(ConfigError, match=said):
            build(folder_of(root, number), number, previous, target)
        assert not target.exists()

    refused("is a delta from version 1, which is not here: .* as --base", None)
    refused("comes to another checksum: it is damaged, or follows other weights", new)
    for key, value, said in (
        ("version", "000003", "version is 000003, not 000002"),
        ("base_version", "000000", "base_version is 000000, not 000001"),
        ("checksum_format", "xxh3-128", "adler32 and blake3 can be checked"),
        ("delta_encoding", "sum", "there is no encoding 'sum'|there is no encoding sum"),
        ("compression_format", "lz4", "packed by lz4"),
    ):
        index.write_text(good.replace(f'"{key}": "', f'"{key}": "{value}", "was": "'))
        refused(said)
    index.write_text("[]")
    refused("is no index")
    index.write_text(good)
    [shard] = folder.glob("*.safetensors")
    data = shard.read_bytes()
    for rng in map(Random, range(40)):  # a byte anywhere
        at = rng.randrange(len(data))
        shard.write_bytes(
            data[:at] + bytes([data[at] ^ 1 << rng.randrange(8)]) + data[at + 1 :]
        )
        with pytest.raises(ConfigError):
            build(folder, 2, old, target)
    shard.write_bytes(data[:-5])
    refused("is no whole safetensors file: it is cut off")
    other = checkpoint(tmp_path / "other", 3, {"embed.weight": (8, 8)})
    write_version(root, 3, other, None, "x")
    refused("is of another model than the version before: 3 tensors differ", old, 3)
    shutil.rmtree(folder_of(root, 3))
    bad = checkpoint(tmp_path / "bad", 3)
    weights = sorted(bad.glob("*.safetensors"))[0]
    weights.write_bytes(weights.read_bytes()[:-2] + b"\xc0\x7f")
    write_version(root, 3, bad, None, "x")
    refused("holds NaN or infinity", old, 3)
    assert not is_delta(folder_of(root, 3))


def test_a_folder_that_would_hang_or_break_is_refused_with_a_sentence(tmp_path: Path) -> None:
    """Pipes, links to nowhere, folders in the place of files, and half a number."""
    for number, (name, said) in enumerate(
        [("model.safetensors.index.json", "no index"), ("a.safetensors", "no safetensors file")]
    ):
        for kind, place in enumerate((Path.mkdir, os.mkfifo, "nowhere")):
            folder = tmp_path / f"{number}-{kind}"
            folder.mkdir()
            path = folder / name
            if isinstance(place, str):
                path.symlink_to(place)
                assert stamp_of(folder)
                said = "no safetensors file"
            else:
                place(path)
            with pytest.raises(ConfigError, match=said):
                build(folder, 1, None, tmp_path / "built")
    half = tmp_path / "half"
    half.mkdir()
    odd = RawTensor("BF16", (1,), b"12")
    data = encode({"w": odd}).replace(b"[0,2]", b"[0,1]").replace(b"[0, 2]", b"[0, 1]")[:-1]
    (half / "a.safetensors").write_bytes(data)
    with pytest.raises(ConfigError, match="whole numbers"):
        build(half, 1, None, tmp_path / "built")
