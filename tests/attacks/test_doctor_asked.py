"""Bootstrap peers that lie to ``shoal doctor``: whatever they say, it ends, with findings."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import trio

from p2p.host import Stream, serve_requests
from p2p.identity import PeerId
from p2p.multiaddr import Multiaddr
from p2p.node.clock import CLOCK_PROTOCOL
from p2p.node.rundoc import PROTOCOL_ID
from p2p.swarm import identify
from p2p.swarm.swarm import open_host
from p2p.wire import KI, MIB, pack
from roles.contract.core.file import sign_run
from roles.doctor import asking
from roles.doctor.asking import Answer
from roles.doctor.checks import examine
from tests.support.doctor import SOUND
from tests.support.runs import OWNER, RUN, TERMS


async def asked_of(
    document: bytes = RUN.document,
    clock: Callable[[], bytes] = lambda: pack([1.9e9]),
    sees: str = "/ip4/192.0.2.1/tcp/4001",
) -> Answer:
    """What comes of a peer that hands over ``document``, tells the time of ``clock``, and says
    that it ``sees`` us there."""

    async def hand_over(_: PeerId, __: bytes) -> bytes:
        return document

    async def tell(_: PeerId, __: bytes) -> bytes:
        return clock()

    async def identified(stream: Stream) -> None:
        info = identify.encode_info(host.peer_id, (), (), Multiaddr.parse(sees))
        await identify.send_info(stream, info)

    async with open_host() as host:
        host.set_handler(PROTOCOL_ID, serve_requests(hand_over, max_request=KI))
        host.set_handler(CLOCK_PROTOCOL, serve_requests(tell, max_request=KI))
        host._handlers[identify.PROTOCOL_ID] = identified
        with trio.fail_after(60):
            (answer,) = await asking._ask_all(host.addrs)
    found = examine(replace(SOUND, answers=(answer,)))  # whatever was said, it is judged
    text = "".join(finding.seen + finding.remedy for finding in found)
    assert text.isprintable()
    assert len(text) < 8 * KI
    return answer


@pytest.mark.parametrize(
    ("sees", "observed"),
    [
        ("/ip4/192.0.2.1/tcp/4001", "192.0.2.1"),
        ("/memory/7", ""),
        ("/dns/tell-me-who-asks.example/tcp/4001", ""),
    ],
)
async def test_what_is_no_address_is_not_looked_up_or_told(
    monkeypatch: pytest.MonkeyPatch, sees: str, observed: str
) -> None:
    """An address of another kind ended the doctor with a traceback; a name was resolved, and
    the person was told to announce it."""
    looked: list[str] = []
    monkeypatch.setattr(asking, "local_address", lambda host: looked.append(host) or "")
    assert (await asked_of(sees=sees)).observed == observed
    assert looked == [observed] * bool(observed)


@pytest.mark.parametrize(
    "document",
    [
        sign_run(replace(TERMS, expiry=2**37), OWNER).document,
        b"\x94" + bytes(300),
        bytes(MIB),
        b"\x1b[2J" * 100,
        RUN.document[:-1],
    ],
    ids=["without end", "nonsense", "endless", "control characters", "cut off"],
)
async def test_whatever_is_handed_over_as_a_run_is_judged(document: bytes) -> None:
    """A run that ends in the year 36812 ended the doctor, and `shoal run show`."""
    answer = await asked_of(document)
    assert (answer.run is None) is bool(answer.trouble)


@pytest.mark.parametrize("said", [b"", pack([float("nan")]), pack([-1e308]), b"\xff" * 99])
async def test_whatever_a_clock_says_is_a_number(said: bytes) -> None:
    answer: Any = await asked_of(clock=lambda: said)
    assert answer.run is not None


def test_no_run_ends_later_than_calendars_do() -> None:
    with pytest.raises(ValueError, match="expiry"):
        replace(TERMS, expiry=2**40)
