"""Weights from one folder to another over a swarm with a liar; others' receivers read them."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

import pytest

from p2p.cast.weight_v import folder_of, note_of, write_version
from tests.e2e.cast_process import LOCAL, cast
from tests.unit.test_cast_weight_v import checkpoint, contents

STEPS = int(os.environ.get("SHOAL_WEIGHT_V_STEPS", "5"))
SHAPES = {"embed.weight": (4096, 64), "layers.0.norm.weight": (64,), "head.weight": (64, 4096)}
LIAR = """
import sys
from p2p import cast
from p2p.shardcast.store import PolicyStore
true = PolicyStore.chunk
async def lie(self, policy, chunk):
    data = await true(self, policy, chunk)
    return data if data is None else bytes(len(data))
PolicyStore.chunk = lie
sys.exit(cast.pull(sys.argv[1:]))
"""


@contextmanager
def liar(*arguments: object) -> Iterator[subprocess.Popen[bytes]]:
    command = [sys.executable, "-c", LIAR, *map(str, arguments)]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as process:
        try:
            yield process
        finally:
            process.kill()


def slime_receiver(folder: Path) -> ModuleType | None:
    """The receiver in slime's patch of SGLang, cut out of a checkout; None without one."""
    place = os.environ.get("SHOAL_SLIME")
    if not place:
        return None
    name = "docker/patch/latest/sglang-pull_weights.patch"
    shown = ["git", "-C", place, "show", f"HEAD:{name}"]
    patch = subprocess.run(shown, capture_output=True, text=True, check=True).stdout
    part = patch.partition("b/python/sglang/srt/weight_sync/local_checkpoint.py\n@@")[2]
    lines = part.partition("\ndiff --git")[0].splitlines()[1:]
    path = folder / "slime_receiver.py"
    path.write_text("\n".join(line[1:] for line in lines if line.startswith("+")) + "\n")
    spec = importlib.util.spec_from_file_location("slime_receiver", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


MODEL_EXPRESS = """
import sys
from pathlib import Path
from types import SimpleNamespace
from modelexpress_rl.inference.receiver import _LocalCheckpoint, _S3Version
from modelexpress_rl.train import WeightPayloadFormat
root, cache = Path(sys.argv[1]), Path(sys.argv[2])
class Disk:
    def get(self, uri): return Path(uri).read_bytes()
    def size(self, uri): return Path(uri).stat().st_size
first = checkpoint = None
for number in map(int, sys.argv[3:]):
    folder, name = root / f"weight_v{number:06d}", f"{number:06d}"
    index = folder / "model.safetensors.index.json"
    if not index.exists():
        config = SimpleNamespace(initial_base_version_id=name, seed_checkpoint_path=folder,
            refit_checkpoint_dir=cache / name, refit_checkpoint_max_size_gb=None)
        checkpoint = _LocalCheckpoint(model_name="m", config=config, s3=Disk())
        checkpoint.initialize()
        continue
    version = _S3Version(version_id=name, base_version_id=f"{number - 1:06d}",
        payload_format=WeightPayloadFormat.XOR_DELTA, uri=str(index))
    prepared = checkpoint.prepare(version)
    checkpoint.activate(prepared)
    print(name, prepared.path)
"""


@pytest.mark.deep
def test_receivers_of_others_come_to_the_same_weights_past_a_liar(tmp_path: Path) -> None:
    root, out, state = tmp_path / "trainer", tmp_path / "out", tmp_path / "state"
    root.mkdir()
    old = checkpoint(tmp_path / "step-1", 1, SHAPES)
    write_version(root, 1, old, None, "x")
    push = cast("push", root, "--from", "weight_v", "--data", state, *LOCAL)
    with push as pusher:
        said = pusher.said("ticket")
        ticket, follow = said["ticket"], ("--follow", *LOCAL)
        lies = liar(ticket, "--out", tmp_path / "liar", *follow)
        honest = cast("pull", ticket, "--as", "weight_v", "--out", out, *follow)
        with lies as lying, honest as pull:
            sglang = slime_receiver(tmp_path)
            local = tmp_path / "sglang"
            for step in range(1, STEPS + 1):
                if step > 1:
                    new = checkpoint(tmp_path / f"step-{step}", step, SHAPES)
                    write_version(root, step, new, old, "x")
                    old = new
                path = str(folder_of(out, step))
                whole = pull.said("whole", 120, lambda event, path=path: event["path"] == path)
                assert whole["form"] == ("full" if step % 10 == 1 else "delta")
                if sglang is not None:
                    sglang.pull(str(local), str(old), str(out), step)
                    found = {**contents_of_files(local)}
                    assert found == contents(old)
                check_note(out, step)
            assert lying.poll() is None
            model_express(tmp_path, out)
    assert_pushed_again(tmp_path, root, state)


def contents_of_files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}


def check_note(out: Path, step: int) -> None:
    note = json.loads(note_of(out, step).read_text())
    data = bytes.fromhex(note["manifest"])
    from p2p.wire import unpack_untrusted  # the run stands in the signed body

    assert unpack_untrusted(data)
    assert note["version"] == f"{step:06d}"
    assert len(bytes.fromhex(note["state"])) == 32


def model_express(folder: Path, out: Path) -> None:
    python = os.environ.get("SHOAL_MODELEXPRESS_PYTHON")
    if not python:
        return
    first = STEPS - (STEPS - 1) % 10
    chain = [str(number) for number in range(first, STEPS + 1)]
    done = subprocess.run(
        [python, "-c", MODEL_EXPRESS, out, folder / "cache", *chain],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    rows = [line.split(" ", 1) for line in done.stdout.splitlines()]
    assert [name for name, _ in rows] == [
        f"{number:06d}" for number in range(first + 1, STEPS + 1)
    ]
    _, last = rows[-1]
    wanted = contents(folder / f"step-{STEPS}")
    found = contents_of_files(Path(last))
    assert {name: found[name] for name in wanted} == wanted


def assert_pushed_again(folder: Path, root: Path, state: Path) -> None:
    """A version that is written again under its number is refused by the next push."""
    other = checkpoint(folder / "other", 99, SHAPES)
    write_version(root, STEPS, other, None, "x")
    with cast("push", root, "--from", "weight_v", "--data", state, *LOCAL) as again:
        assert again.end() != 0
        assert f"weight_v{STEPS:06d}" in again.errors()
