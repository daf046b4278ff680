"""Who asks a node's page for more than to be shown something, and peers who lie to be shown."""

from __future__ import annotations

import re
from typing import Any

import pytest
import trio

from p2p.node.dashboard import sockets
from tests.unit.test_dashboard import get, serving


@pytest.mark.parametrize(
    "rest",
    [
        "Host: 127.0.0.1\r\nConnection: close\r\n\r\n",
        "Host: 127.0.0.1\r\n\r\n",
        "Host: evil.example\r\n\r\n",
        "Host: 127.0.0.1\r\nContent-Length: 9\r\n\r\n",
        "Host: 127.0.0.1\r\n\r\nGET",
    ],
)
async def test_whoever_has_had_an_answer_and_says_no_more_gives_the_seat_back(
    monkeypatch: pytest.MonkeyPatch, rest: str
) -> None:
    """Each request left its connection open for ever, also one that was refused: a page of
    another site needed 64 to lock the node's owner out."""

    def limits(server: Any) -> Any:
        return server.EdgeConfig(connections=1, idle=0.05)

    monkeypatch.setattr(sockets, "_limits", limits)
    async with serving() as (url, _, __):
        port = int(re.findall(r":(\d+)/", url)[0])
        with trio.fail_after(10):
            async with await trio.open_tcp_stream("127.0.0.1", port) as stream:
                await stream.send_all(b"GET /healthz HTTP/1.1\r\n" + rest.encode())
                while await stream.receive_some(65536):
                    pass
            assert (await get(url, "/healthz"))[0] == 200
