"""Pre-training of one's own, from a folder of text to a sample."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

from p2p.machine import load_or_create_key
from roles.chat import sample
from roles.contract import decode_run_untrusted
from roles.own.__main__ import main as run_main
from roles.own.layout import RunFolder
from tests.terminal import terminal

pytest.importorskip("torch", reason="a trainer cannot be made without torch")
PLAY = "import sys; from roles.own.__main__ import main; sys.exit(main(sys.argv[1:]))"


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    """Two files of a few pages."""
    place = tmp_path / "fables"
    place.mkdir()
    for number in range(2):
        line = f"Fable {number}: the crow asked for cheese, and the fox asked for a song.\n"
        (place / f"{number}.txt").write_text(line * 400)
    return place


def test_init_makes_a_run_that_learns_from_a_folder_of_text(
    tmp_path: Path, texts: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = RunFolder(tmp_path / "words")
    assert run_main(["init", str(folder.path), "--diloco", "--corpus", str(texts)]) == 0
    said = capsys.readouterr()
    run = decode_run_untrusted(folder.document.read_bytes())
    assert folder.cast() == dict.fromkeys(("trainer-1", "trainer-2", "trainer-3"), "trainer")
    keys = [load_or_create_key(place / "key").peer_id for place in folder.trainers]
    assert list(run.terms.trainers) == keys
    assert run.terms.validators == run.terms.environments == ()
    assert run.terms.diloco.corpora == {"fables": 1.0}
    windows = sum(len(one.read_bytes()) for one in texts.iterdir()) // 257
    assert run.terms.diloco.held_out == windows // 20
    config = tomllib.loads(folder.config.read_text())
    assert config["role"]["trainer"]["corpora"] == {"fables": str(texts)}
    assert "3 trainers go" in said.err
    lines = [line for line in said.out.splitlines() if line.startswith("shoal node ")]
    assert ["--run" in line for line in lines] == [True, False, False]
    assert all(line.endswith(str(keys[0])) for line in lines[1:])


def test_several_texts_count_by_their_size_and_a_draft_says_which_it_reads(
    tmp_path: Path, texts: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    corpora = ["--corpus", f"a={texts}", "--corpus", f"b={texts / '0.txt'}"]
    first = tmp_path / "first"
    assert run_main(["init", str(first), "--diloco", "--nodes", "2", *corpora]) == 0
    draft = tomllib.loads((first / "draft.toml").read_text())
    assert draft["diloco"]["corpora"] == {"a": 0.67, "b": 0.33}
    again = ["init", str(tmp_path / "again"), "--draft", str(first / "draft.toml")]
    assert run_main(again) == 2
    assert "say where it lies, with --corpus a=PATH" in capsys.readouterr().err
    assert run_main([*again, *corpora]) == 0


@pytest.mark.deep
def test_from_a_folder_of_text_to_a_sample(
    tmp_path: Path, texts: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A run that was over took another round whenever its folder was played again."""
    folder = tmp_path / "words"
    made = ["init", str(folder), "--diloco", "--corpus", str(texts), "--nodes", "2"]
    assert run_main(made) == 0
    draft = (folder / "draft.toml").read_text()
    for key, value in (("outer_steps", 3), ("inner_steps", 20), ("warmup", 10)):
        draft = re.sub(f"(?m)^{key} = [0-9]+", f"{key} = {value}", draft)
    (folder / "draft.toml").write_text(draft)
    for rounds in (3, 3, 4):
        if rounds == 4:  # an edition that each trainer must follow
            longer = draft.replace("outer_steps = 3", "outer_steps = 4")
            (folder / "draft.toml").write_text(longer)
        with terminal("-c", PLAY, "start", str(folder)) as played:
            played.wait(" rounds, ")
            assert played.end() == 0
            said = played.said
        assert f"{rounds} of {rounds} rounds" in said
        assert "it goes on        " in said
        assert "editions of the run file" not in said
        (path,) = re.findall(r"newest model +(\S+)", said)
        assert Path(path, "README.md").exists()
    pinned = [place / "run.shoal" for place in RunFolder(folder).trainers]
    assert {decode_run_untrusted(one.read_bytes()).epoch for one in pinned} == {3}
    capsys.readouterr()
    assert sample([str(folder), "--prompt", "Fable 1", "--tokens", "20"]) == 0
    assert capsys.readouterr().out.strip()
