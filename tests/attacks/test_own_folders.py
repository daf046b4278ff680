"""``shoal run init`` with folders and drafts that nobody would write in good faith."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from p2p.errors import ConfigError
from roles.own.init import make
from roles.own.layout import RunFolder


def draft(*files: Path) -> str:
    tables = (
        f'[[environments]]\nname = "questions"\ndata = {json.dumps(str(file))}\n'
        for file in files
    )
    return 'name = "run"\nepoch = 1\ndays = 30\n' + "".join(tables)


@pytest.mark.parametrize("name", ["a\nb", "a\x1bb", "a\udcffb"])
def test_a_folder_whose_name_cannot_be_written_is_a_sentence(tmp_path: Path, name: str) -> None:
    """``node.toml`` names the folder."""
    with pytest.raises(ConfigError, match="no line of a file"):
        make(RunFolder(tmp_path / name), draft(), tmp_path, 1)
    assert not list(tmp_path.iterdir())


def test_two_files_of_one_name_do_not_become_one(tmp_path: Path) -> None:
    """Both environments got the questions of the second, and the run pinned them."""
    files = [tmp_path / folder / "questions.jsonl" for folder in "ab"]
    for file in files:
        file.parent.mkdir()
        file.write_text(str(file))
    with pytest.raises(ConfigError, match="have one name"):
        make(RunFolder(tmp_path / "run"), draft(*files), tmp_path, 1)


def test_a_device_is_not_copied(tmp_path: Path) -> None:
    """It has no end: the disk filled up."""
    with pytest.raises(ConfigError, match="no regular file"):
        make(RunFolder(tmp_path / "run"), draft(Path("/dev/null")), tmp_path, 1)
