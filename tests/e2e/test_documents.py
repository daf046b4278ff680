"""Tutorials and cookbooks, followed block by block; and commands that the documents name."""

from __future__ import annotations

import ast
import contextlib
import io
import os
import re
import shlex
import shutil
import subprocess
import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest
from sybil import Document
from sybil.parsers.markdown import CodeBlockParser

from p2p.node.commands import main
from tests.documents import ROOT, Reader

FOLDERS = (ROOT / "docs" / "tutorials", ROOT / "docs" / "cookbook")
DOCUMENTS = [
    *ROOT.glob("*.md"),
    *(ROOT / "docs").rglob("*.md"),
    *(ROOT / "examples").rglob("*.md"),
    ROOT / "deploy" / "README.md",
]
PAGES = sorted(path for folder in FOLDERS for path in folder.glob("*.md"))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_page_that_is_to_be_followed_can_be(page: Path, tmp_path: Path) -> None:
    """Each block runs and prints what the page shows; slow ones only in a deep run."""
    if Reader(tmp_path).follow(page) == 0:
        pytest.skip("all its blocks are slow")


@pytest.mark.deep
@pytest.mark.parametrize("page", [ROOT / "README.md", *PAGES], ids=lambda page: page.stem)
def test_a_page_can_be_followed_in_a_terminal(page: Path, tmp_path: Path) -> None:
    """Each command ends well, or goes on as it is to, before a screen of 80 x 24."""
    for name in ("Qwen3-8B/model.bin", "texts/book.txt"):
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).write_text("It was the best of times. " * 4000)
    assert Reader(tmp_path, in_terminal=True).follow(page)


SIGNING = [page for page in DOCUMENTS if "$ shoal run create" in page.read_text("utf-8")]


@pytest.mark.parametrize("page", SIGNING, ids=lambda page: page.stem)
def test_whoever_signs_again_as_a_page_says_signs_the_next_edition(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A tutorial changed the recipe and signed epoch 1 again: nodes went on under the old one.

    Each block that signs is played with a draft of the network that sorts, which was signed
    before if the page makes it with ``init``. Its owner changes something each time.
    """
    text = page.read_text(encoding="utf-8")
    made = set(re.findall(r"^\$ shoal run init (\S+)", text, re.MULTILINE))
    blocks = re.findall(r"^```console\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    for number, block in enumerate(one for one in blocks if "shoal run create" in one):
        monkeypatch.setenv("HOME", str(tmp_path / str(number)))
        (tmp_path / str(number)).mkdir()
        monkeypatch.chdir(tmp_path / str(number))
        (name,) = set(re.findall(r"shoal run create (\S+)", block))
        draft = Path(name).expanduser()
        play("run", "init", str(draft.parent if str(Path(name).parent) in made else "first"))
        if not draft.exists():
            for made_first in ("draft.toml", "people.toml"):
                shutil.copyfile(Path("first") / made_first, draft.with_name(made_first))
        for line in re.findall(r"^\$ (.*)", block, re.MULTILINE):
            words = [os.path.expanduser(word) for word in shlex.split(line, comments=True)]
            if words[0] in ("perl", "sed"):
                subprocess.run(words, check=True)
            elif words[:3] == ["shoal", "run", "create"]:
                before = draft.read_text("utf-8")
                draft.write_text(re.sub("^steps = ", "steps = 1", before, flags=re.MULTILINE))
                assert draft.read_text("utf-8") != before
                play(*words[1:])


def play(*arguments: str) -> None:
    with contextlib.redirect_stdout(io.StringIO()):
        assert main(list(arguments)) == 0, arguments


@pytest.mark.parametrize(("language", "read"), [("python", ast.parse), ("toml", tomllib.loads)])
def test_blocks_of_all_documents_are_in_their_language(
    language: str, read: Callable[[str], object]
) -> None:
    parser = CodeBlockParser(language, lambda example: read(example.parsed) and None)
    examples = [one for page in DOCUMENTS for one in Document.parse(str(page), parser)]
    assert examples
    for example in examples:
        example.evaluate()


def test_the_site_lists_every_document_and_their_links_lead_somewhere() -> None:
    """Two pages were in no list, and a link led out of the site: ``make docs`` failed."""
    index = (ROOT / "docs" / "index.rst").read_text(encoding="utf-8")
    entries = re.findall(r"^   (?:.*<)?(/?[\w/-]+)>?$", index, re.MULTILINE)
    listed = {ROOT / one[1:] if one[0] == "/" else ROOT / "docs" / one for one in entries}
    pages = {page.with_suffix("") for page in (ROOT / "docs").rglob("*.md")}
    pages.remove(ROOT / "docs" / "events")  # a generated table for whoever reads JSON logs
    assert pages - listed == set()
    for page in DOCUMENTS:
        text = page.read_text(encoding="utf-8")
        for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", text):
            place = page.parent / target
            assert place.exists(), f"{page}: {target}"
            if place.suffix == ".md":
                assert place.resolve().with_suffix("") in listed, f"{page}: {target}"


WITH_COMMANDS = {"envs", "ledger", "models", "rl", "run", "sim"}
"""Commands whose first word is another."""


def named() -> dict[tuple[str, ...], set[str]]:
    """Each command of ours that a document types, by its words, with the options it gives."""
    found: dict[tuple[str, ...], set[str]] = {}
    for path in DOCUMENTS:
        text = path.read_text(encoding="utf-8").replace("\\\n", " ")
        for line in re.findall(r"^\$ shoal (.*)$", text, re.MULTILINE):
            words = line.partition("#")[0].split()
            inner = words[1:2] if words[0] in WITH_COMMANDS else []
            options = {word.partition("=")[0] for word in words if word.startswith("--")}
            found.setdefault((words[0], *inner), set()).update(options)
    return found


def test_commands_in_documents_have_the_options_that_they_are_given() -> None:
    missing = {}
    for words, options in named().items():
        out = io.StringIO()
        with contextlib.redirect_stdout(out), pytest.raises(SystemExit) as ended:
            raise SystemExit(main([*words, "--help"]))
        assert ended.value.code in {0, None}, words
        if gone := {option for option in options if option not in out.getvalue()}:
            missing[words] = gone
    assert missing == {}
    assert len(named()) > 15
