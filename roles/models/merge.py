"""``shoal models merge INTO DIR DIR ...``: the weights of several models of one shape as one.

``linear`` adds the models up by their weights; ``slerp`` takes two, and goes the second's share
of the way along the arc from the first to the second. Everything but the weights comes from the
first folder. Some MiB of each model are in memory at a time.
"""

from __future__ import annotations

import argparse
import json
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Final

import numpy as np

from p2p.errors import ShoalError
from p2p.naming import derived
from p2p.node.usage import FAILED, WRONG_USAGE, complain
from roles.models.blend import (
    KINDS,
    Floats,
    arc_factors,
    blended,
    read_floats,
    shares_of,
    write_floats,
)
from roles.models.bundle import (
    SLICE,
    check_weights,
    pin_folder,
    read_config,
    read_spans,
    weight_files,
)
from roles.models.errors import BadModel
from roles.models.files import MAX_TOKENIZER, read_bounded
from roles.models.safetensors import TensorSpan

METHODS: Final = ("linear", "slerp")
TOKENIZER: Final = "tokenizer.json"


@dataclass(frozen=True, slots=True)
class Place:
    """Where a tensor of one model is."""

    path: Path
    span: TensorSpan

    def slices(self) -> Iterator[Floats]:
        """Its numbers, some MiB at a time."""
        with self.path.open("rb") as file:
            file.seek(self.span.begin)
            left = self.span.end - self.span.begin
            while left:
                data = file.read(min(SLICE, left))
                if not data:
                    raise BadModel(f"{self.path} was cut off while it was read")
                left -= len(data)
                yield read_floats(self.span.dtype, data)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the command."""
    parser.add_argument("into", type=Path, metavar="INTO", help="the folder to make")
    parser.add_argument("folders", type=Path, metavar="DIR", nargs="+", help="two or more")
    parser.add_argument("--method", choices=METHODS, default="linear")
    parser.add_argument(
        "--weights", metavar="W,W,...", help="of the models, in their order; default: alike"
    )
    parser.add_argument("--json", action="store_true", help="one JSON object")


def run(options: argparse.Namespace) -> int:
    """Merge, and say what came of it; the exit code."""
    folders: list[Path] = options.folders
    if len(folders) < 2 or (options.method == "slerp" and len(folders) != 2):
        complain("a merge takes two models or more; slerp takes two")
        return WRONG_USAGE
    try:
        given = (options.weights or ",".join("1" * len(folders))).split(",")
        shares = shares_of([float(one) for one in given])
        if len(shares) != len(folders):
            raise ValueError(f"there are {len(folders)} models")
    except (ValueError, OverflowError) as error:
        complain(f"--weights {options.weights}: it takes a number for each model: {error}")
        return WRONG_USAGE
    try:
        said = merge(options.into, folders, options.method, shares)
    except ShoalError as error:
        complain(error)
        return FAILED
    text = json.dumps(said) if options.json else (
        f"{said['into']}: {said['tensors']} tensors, {said['bytes']:,} bytes of weights"
    )  # fmt: skip
    print(text)  # noqa: T201 - this is the result
    return 0


def merge(
    into: Path, folders: Sequence[Path], method: str, shares: Sequence[float]
) -> dict[str, object]:
    """Make the folder, whole or not at all. Raises `BadModel`."""
    if into.exists():
        raise BadModel(f"{into} is there already: a merge makes a new folder")
    models = [places(folder) for folder in folders]
    for folder, model in zip(folders[1:], models[1:], strict=True):
        check_alike(folders[0], models[0], folder, model)
    unfinished = into.with_name(derived(into.name, after=".partial"))
    try:
        unfinished.mkdir(parents=True)
    except OSError as error:  # what is there may be somebody's model
        raise BadModel(f"{unfinished} cannot be made: {error.strerror}; remove it") from None
    try:
        size = 0
        for pin in pin_folder(folders[0]):
            shutil.copyfile(folders[0] / pin.name, unfinished / pin.name)
        for path in weight_files(folders[0]):
            with (unfinished / path.name).open("r+b") as file:
                size += _overwrite(file, path, models, method, shares)
        unfinished.rename(into)
    except OSError as error:
        raise BadModel(f"{into} cannot be written: {error.strerror}") from None
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)  # unless it has got its name
    return {
        "into": str(into),
        "method": method,
        "models": [
            {"folder": str(folder), "share": share}
            for folder, share in zip(folders, shares, strict=True)
        ],
        "tensors": len(models[0]),
        "bytes": size,
    }


def places(folder: Path) -> dict[str, Place]:
    """Where each tensor of a model is. Raises `BadModel` unless it can be used."""
    check_weights(folder, read_config(folder))
    return {
        name: Place(path, span)
        for path in weight_files(folder)
        for name, span in read_spans(path).items()
    }


def check_alike(
    first: Path, model: dict[str, Place], other: Path, second: dict[str, Place]
) -> None:
    """Raise `BadModel` unless two models are of one shape, dtype and vocabulary."""
    if read_config(first).shape != read_config(other).shape:
        raise BadModel(
            f"{other} is a model of another shape than {first}: their config.json differ"
        )
    for name in sorted(model.keys() | second.keys()):
        one, two = model.get(name), second.get(name)
        if one is None or two is None:
            raise BadModel(f"{other if two is None else first} lacks the tensor {name}")
        if (one.span.dtype, one.span.shape) != (two.span.dtype, two.span.shape):
            raise BadModel(
                f"{other}: {name} is {two.span.dtype} of shape {two.span.shape}, and"
                f" {one.span.dtype} of shape {one.span.shape} in {first}: convert one of them"
            )
    one_text, other_text = (
        read_bounded(at / TOKENIZER, MAX_TOKENIZER) for at in (first, other)
    )
    if one_text != other_text:
        raise BadModel(
            f"{other} has another {TOKENIZER} than {first}: their tokens mean different things"
        )


def _overwrite(
    file: BinaryIO,
    path: Path,
    models: Sequence[dict[str, Place]],
    method: str,
    shares: Sequence[float],
) -> int:
    """Put the merged tensors in the place of those of the first model; their bytes."""
    size = 0
    for name, span in read_spans(path).items():
        if span.dtype not in KINDS:
            continue  # frequencies that follow from the configuration: nothing reads them
        found = [model[name] for model in models]
        factors = shares if method == "linear" else _arc(found, shares[1])
        file.seek(span.begin)
        for parts in zip(*(place.slices() for place in found), strict=True):
            size += file.write(write_floats(span.dtype, blended(parts, factors)))
    return size


def _arc(found: Sequence[Place], share: float) -> tuple[float, float]:
    first = second = both = 0.0
    for one, two in zip(found[0].slices(), found[1].slices(), strict=True):
        a, b = one.astype(np.float64), two.astype(np.float64)
        first, second, both = first + float(a @ a), second + float(b @ b), both + float(a @ b)
    return arc_factors(first, second, both, share)
