"""Names of files that stand beside another one while it is made, and text of strangers."""

from __future__ import annotations

from typing import Final

from blake3 import blake3

MAX_NAME: Final = 255
"""Most bytes of a file's name on the usual file systems."""


def derived(name: str, *, before: str = "", after: str = "") -> str:
    """Return ``name`` with something before and after it, short enough for a file system.

    A stranger's name may have `MAX_NAME` bytes by itself. Where the whole would be longer, the
    name's digest stands for it. The same name always gives the same result, so what a killed
    process left behind is found again.
    """
    whole = f"{before}{name}{after}"
    if len(whole.encode(errors="surrogateescape")) <= MAX_NAME:
        return whole
    # Hexadecimal digits that stand for a name that is too long: 128 bits.
    digest = blake3(name.encode(errors="surrogateescape")).hexdigest()[:32]
    return f"{before}{digest}{after}"


def unencodable(error: UnicodeEncodeError) -> str:
    """Return an error that says that this process cannot use such a file name, and what to
    do."""
    name = error.object.rpartition("/")[2]
    return (
        f"no file can be called {name!r} here: file names are {error.encoding} in this"
        " environment; set LC_ALL=C.UTF-8"
    )


def printable(text: str) -> str:
    """Replace characters that a terminal could interpret in strangers' text."""
    return "".join(sign if sign.isprintable() else "?" for sign in text)


def printable_lines(text: str) -> str:
    """Do so in each line of our own text, which may quote a stranger's."""
    return "\n".join(map(printable, text.split("\n")))
