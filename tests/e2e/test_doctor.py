"""``shoal doctor`` on machines that lack one thing: it names that, and nothing else."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from p2p.identity import KeyPair
from p2p.machine import load_or_create_key
from p2p.sandbox.confinement import Mechanism
from p2p.sandbox.launch import find_containment
from roles.contract.core.file import sign_run
from roles.engines.hardware import cores
from tests.e2e.node_process import START_SECONDS, node
from tests.support.runs import OWNER, RUN, TERMS
from tests.sweeps import swept

TORCH = """
__version__ = "2.13.0"
class backends:
    class mps:
        is_available = staticmethod(lambda: False)
class cuda:
    class Card:
        name, total_memory = "A card", 1024
    is_available = staticmethod(lambda: {cards} > 0)
    device_count = staticmethod(lambda: {cards})
    get_device_properties = staticmethod(lambda number: cuda.Card)
"""
"""As much of torch as the doctor asks: to import the real one takes two seconds each time."""
AHEAD = "import time\nof_old = time.time\ntime.time = lambda: of_old() + 7200\n"
"""A machine whose clock is two hours ahead."""
ELSEWHERE = """
from p2p.multiaddr import Multiaddr
from p2p.swarm import identify
encode = identify.encode_info
outside = Multiaddr.parse("/ip4/203.0.113.7/tcp/4001")
identify.encode_info = lambda peer, protocols, addrs, _: encode(peer, protocols, addrs, outside)
"""
"""A node that sees everybody come from a router's address."""


@dataclass
class Machine:
    """A machine on which the doctor looks, and what a test makes of it."""

    folder: Path
    bootstrap: str
    stack: ExitStack
    arguments: list[str] = field(default_factory=list)
    around: list[str] = field(default_factory=list)  # a command in which the doctor runs

    @property
    def data(self) -> Path:
        return self.folder / "data"

    @property
    def libraries(self) -> Path:
        """Found before what is installed."""
        return self.folder / "libraries"

    def library(self, name: str, text: str) -> None:
        path = self.libraries / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)

    def within(self, *arguments: str) -> None:
        """Run the doctor in a container; skips where there can be none."""
        containment = find_containment(str(self.folder))
        if containment.mechanism is not Mechanism.BUBBLEWRAP:
            pytest.skip(f"no container here: {containment}")
        self.around = [containment.program, "--dev-bind", "/", "/", *arguments]

    def findings(self) -> dict[str, dict[str, str]]:
        """What is wrong, by name."""
        asked = ["--bootstrap", self.bootstrap] if self.bootstrap else []
        said = subprocess.run(
            [
                *self.around, sys.executable, "-m", "roles.doctor", "--json",
                "--data", str(self.data), *asked, *self.arguments,
            ],
            env=os.environ | {"PYTHONPATH": str(self.libraries)},
            capture_output=True, text=True, timeout=START_SECONDS, check=False,
        )  # fmt: skip
        assert said.stdout, said.stderr
        found = {one["name"]: one for one in json.loads(said.stdout)}
        fails = any(one["level"] == "fail" for one in found.values())
        assert said.returncode == fails
        return {name: one for name, one in found.items() if one["level"] in {"warn", "fail"}}


@pytest.fixture(scope="module")
def member(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a sound node."""
    folder = tmp_path_factory.mktemp("member")
    (folder / "given.shoal").write_bytes(RUN.document)
    with node(folder / "data", "--run", str(folder / "given.shoal")) as running:
        yield running.line_with("event", "started")["addrs"][0]


@pytest.fixture
def machine(tmp_path: Path, member: str) -> Iterator[Machine]:
    with ExitStack() as stack:
        found = Machine(tmp_path, member, stack)
        found.data.mkdir()
        (found.data / "run.shoal").write_bytes(RUN.document)
        load_or_create_key(found.data / "key")
        found.library("torch/__init__.py", TORCH.format(cards=0))
        yield found


def lacking() -> set[str]:
    """What the machine of the test itself lacks."""
    few = {"cores"} if cores() < 2 else set()
    return few | ({"sandbox"} if find_containment("/").mechanism is Mechanism.NONE else set())


def take_port(machine: Machine) -> None:
    taken = machine.stack.enter_context(socket.socket())
    taken.bind(("0.0.0.0", 0))
    taken.listen(1)
    machine.arguments += ["--port", str(taken.getsockname()[1])]


def flip_key(machine: Machine) -> None:
    data = bytearray((machine.data / "key").read_bytes())
    data[3] ^= 1
    (machine.data / "key").write_bytes(data)


def stay_silent(machine: Machine) -> None:
    silent = machine.stack.enter_context(socket.socket())
    silent.bind(("127.0.0.1", 0))
    silent.listen(1)
    peer = machine.bootstrap.rpartition("/")[2]
    machine.bootstrap = f"/ip4/127.0.0.1/tcp/{silent.getsockname()[1]}/p2p/{peer}"


def name_another(machine: Machine) -> None:
    place = machine.bootstrap.rpartition("/")[0]
    machine.bootstrap = f"{place}/{KeyPair(b'x' * 32).peer_id}"


def expire_run(machine: Machine) -> None:
    over = sign_run(replace(TERMS, name="over", expiry=1_700_000_000), OWNER)
    (machine.data / "run.shoal").write_bytes(over.document)
    machine.bootstrap = ""


def stand_behind_a_router(machine: Machine) -> None:
    place = machine.folder / "elsewhere"
    place.mkdir()
    (place / "sitecustomize.py").write_text(ELSEWHERE)
    run = machine.data / "run.shoal"
    begun = node(machine.folder / "node", "--run", str(run), PYTHONPATH=str(place))
    running = machine.stack.enter_context(begun)
    machine.bootstrap = running.line_with("event", "started")["addrs"][0]


def own_p2p(machine: Machine) -> None:
    machine.library("p2p_of_others-9.dist-info/METADATA", "Name: p2p-of-others\nVersion: 9\n")
    machine.library("p2p_of_others-9.dist-info/top_level.txt", "p2p\n")


PLANTED: dict[str, tuple[str, str, Callable[[Machine], object]]] = {
    "a port that is taken": ("port", "in use", take_port),
    "a folder that is read-only": (
        "folder", "Read-only file system",
        lambda one: one.within("--ro-bind", str(one.data), str(one.data))),
    "a damaged key": ("key", "is damaged, or no key", flip_key),
    "a disk that is nearly full": (
        "disk", "0.0 GiB free",
        lambda one: one.within("--size", str(1 << 20), "--tmpfs", str(one.data))),
    "a clock that is ahead": (
        "clock", r", 7,[12]\d\d s ahead of that of 1 bootstrap peers",
        lambda one: one.library("sitecustomize.py", AHEAD)),
    "a bootstrap peer that is silent": ("bootstrap", "no answer in time|nothing", stay_silent),
    "a bootstrap peer of another id": ("bootstrap", "another node answers", name_another),
    "a run that has expired": ("run", "'over', epoch 1, has expired", expire_run),
    "no torch": (
        "torch", "not installed",
        lambda one: one.library(
            "torch/__init__.py", "raise ModuleNotFoundError(\"No module named 'torch'\")")),
    "a torch that is broken": (
        "torch", "does not load: ImportError: libcudnn",
        lambda one: one.library("torch/__init__.py", "raise ImportError('libcudnn.so.9')")),
    "a card that is too small": (
        "gpu memory", "0.0 GiB on A card, the run 'sorting' asks",
        lambda one: one.library("torch/__init__.py", TORCH.format(cards=1))),
    "a router that lets nobody in": (
        "reachable", "peers see 203.0.113.7, and this machine is", stand_behind_a_router),
    "no sandbox": (
        "sandbox", "none: ", lambda one: one.within("--unshare-user", "--disable-userns")),
    "another distribution that owns p2p": (
        "packages", r"another .* names: p2p-of-others 9 \(p2p\)", own_p2p),
}  # fmt: skip


@pytest.mark.parametrize("fault", swept(list(PLANTED), 3))
def test_it_names_what_was_planted_and_nothing_else(machine: Machine, fault: str) -> None:
    name, said, plant = PLANTED[fault]
    plant(machine)
    found = machine.findings()
    assert set(found) == {name} | lacking()
    assert re.search(said, found[name]["seen"]), found[name]
    assert found[name]["remedy"]


def test_a_sound_machine_gets_no_finding(machine: Machine) -> None:
    (machine.libraries / "torch" / "__init__.py").unlink()
    (machine.libraries / "torch").rmdir()
    assert set(machine.findings()) == lacking()
