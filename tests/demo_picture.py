"""``python -m tests.demo_picture FILE [STEP]``: a picture of the demo's terminal at that step.

README.md has one. It is an SVG, whose text a reader can copy.
"""

from __future__ import annotations

import io
import re
import sys
import tempfile
import time
from pathlib import Path

import trio
from rich.console import Console

from roles.demo.command import prepare
from roles.demo.shows import SORTING
from roles.own.layout import RunFolder
from roles.own.nodes import LocalNodes

COLUMNS = 80
"""Of the terminal, which the demo's view fits."""
FONT = re.compile(r"@font-face \{.*?\}", re.DOTALL)
"""rich asks another site for its font; a reader's own will do."""


async def take(file: str, step: str = "40") -> None:
    """Let the demo learn until ``step``, and draw what its terminal shows then."""
    began = time.monotonic()  # noqa: TID251 - a tool for writers, outside every world

    def look() -> None:
        if nodes.status.trainer.get("step", 0) >= int(step):
            console = Console(record=True, width=COLUMNS, file=io.StringIO())
            console.print("[green]$[/] make demo")
            console.print(SORTING.draw(nodes, time.monotonic() - began))  # noqa: TID251
            text = console.export_svg(title="make demo")
            Path(file).write_text(FONT.sub("", text), encoding="utf-8")
            nursery.cancel_scope.cancel()

    with tempfile.TemporaryDirectory() as place:
        folder = RunFolder(Path(place))
        run = prepare(SORTING, 0, folder)
        async with trio.open_nursery() as nursery:
            nodes = LocalNodes(folder, run, SORTING.cast, nursery)
            try:
                await nodes.start()
                await nodes.wait_done(look)
            finally:
                with trio.CancelScope(shield=True):
                    await nodes.stop()


if __name__ == "__main__":
    trio.run(take, *sys.argv[1:])
