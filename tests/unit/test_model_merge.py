"""Models merged: the sums, the arc, whole folders, and what is refused."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from roles.models import merge as command
from roles.models.__main__ import main
from roles.models.blend import Floats, arc_factors, read_floats, shares_of, write_floats
from roles.models.merge import merge, places
from roles.models.safetensors import RawTensor
from tests.model_folders import LLAMA, make_folder, random_weights, write_weights


def numbers(folder: Path) -> dict[str, Floats]:
    return {name: np.concatenate([*one.slices()]) for name, one in places(folder).items()}


@pytest.mark.parametrize("share", [0.0, 0.25, 0.5, 1.0])
def test_the_arc_keeps_the_length_of_vectors_of_one_length(share: float) -> None:
    """And cuts the angle in the proportion of the shares, which a straight line does not."""
    one, two = np.array([1.0, 0.0]), np.array([math.cos(2.0), math.sin(2.0)])
    a, b = arc_factors(float(one @ one), float(two @ two), float(one @ two), share)
    between = a * one + b * two
    assert np.linalg.norm(between) == pytest.approx(1.0)
    assert math.atan2(between[1], between[0]) == pytest.approx(2.0 * share)


@pytest.mark.parametrize("both", [1.0, -1.0, 0.0])
def test_where_there_is_no_angle_the_arc_is_the_line(both: float) -> None:
    assert arc_factors(1.0, 0.0 if not both else 1.0, both, 0.25) == (0.75, 0.25)


def test_numbers_come_back_as_they_were_and_halves_go_to_the_even_one() -> None:
    bits = np.arange(0x3F80, 0x4080, dtype="<u2").tobytes()
    assert write_floats("BF16", read_floats("BF16", bits)) == bits
    half = np.array([0x3F80_8000, 0x3F81_8000, 0x3F80_8001], np.uint32).view(np.float32)
    assert np.frombuffer(write_floats("BF16", half), "<u2").tolist() == [0x3F80, 0x3F82, 0x3F81]


def test_a_linear_merge_is_the_weighted_mean_slice_by_slice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of three, one of them sharded in another way; slices of 100 bytes."""
    monkeypatch.setattr(command, "SLICE", 100)
    folders = [
        make_folder(tmp_path / str(seed), seed=seed, shards=3 if seed == 1 else 1)
        for seed in range(3)
    ]
    code = main(["merge", str(tmp_path / "m"), *map(str, folders), "--weights", "2,1,1"])
    assert code == 0
    found, parts = numbers(tmp_path / "m"), [numbers(one) for one in folders]
    for name, merged in found.items():
        mean = 0.5 * parts[0][name] + 0.25 * parts[1][name] + 0.25 * parts[2][name]
        assert merged == pytest.approx(mean, rel=2**-8, abs=1e-6)
    assert not (tmp_path / "m.partial").exists()
    assert (tmp_path / "m" / "tokenizer.json").exists()


def test_the_ends_of_an_arc_are_the_models(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    one, two = (make_folder(tmp_path / str(seed), seed=seed) for seed in range(2))
    for weights, end in (("1,0", one), ("0,1", two)):
        into = tmp_path / weights
        options = ["--method", "slerp", "--json", "--weights", weights]
        code = main(["merge", str(into), str(one), str(two), *options])
        assert code == 0
        assert json.loads(capsys.readouterr().out)["tensors"] == len(numbers(end))
        assert all(np.array_equal(numbers(into)[name], at) for name, at in numbers(end).items())
    middle = merge(tmp_path / "half", [one, two], "slerp", shares_of([1, 1]))
    assert middle["method"] == "slerp"
    name = "model.embed_tokens.weight"
    lengths = [float(np.linalg.norm(numbers(tmp_path / at)[name])) for at in ("half", "0")]
    assert lengths[0] == pytest.approx(lengths[1], rel=0.02)  # a mean would be 0.71 of it


def test_models_that_are_not_alike_are_refused_and_nothing_is_left(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first = make_folder(tmp_path / "first")
    wide = make_folder(tmp_path / "wide", replace(LLAMA, feed_forward=64))
    typed = make_folder(tmp_path / "typed")
    raw = random_weights(LLAMA)
    norm = raw["model.norm.weight"]
    wider = read_floats("BF16", bytes(norm.data)).tobytes()
    write_weights(typed, raw | {"model.norm.weight": RawTensor("F32", norm.shape, wider)})
    spoken = make_folder(tmp_path / "spoken")
    (spoken / "tokenizer.json").write_text((first / "tokenizer.json").read_text() + " ")
    cases = {wide: "another shape", typed: "norm.weight is F32", spoken: "another tokenizer"}
    for other, words in cases.items():
        assert main(["merge", str(tmp_path / "m"), str(first), str(other)]) == 1
        assert words in capsys.readouterr().err
    assert not (tmp_path / "m").exists()
    assert main(["merge", str(first), str(first), str(first)]) == 1
    assert "is there already" in capsys.readouterr().err


@pytest.mark.parametrize(
    "options", [["--weights", "1"], ["--weights", "0,0"], ["--weights", "1,x"], []]
)
def test_a_merge_that_makes_no_sense_is_said_to(options: list[str], tmp_path: Path) -> None:
    folders = [str(tmp_path / "a"), str(tmp_path / "b")][: 2 if options else 1]
    assert main(["merge", str(tmp_path / "m"), *folders, *options]) == 2
