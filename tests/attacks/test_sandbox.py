"""A worker that tries every door of this machine finds them shut, however its code came in.

The doors are in `tests.attacks.spies`. They are tried by a worker of its own, by the reward of
an environment from another package, and by its source of tasks.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import trio

from p2p.errors import LimitExceeded, WorkerDied, WorkerNotStarted
from p2p.machine import open_world
from p2p.sandbox import Confinement, Containment
from p2p.sandbox.confinement import CHATTER, HEARD, Mechanism
from p2p.sandbox.launch import find_containment, launch, try_containment
from p2p.world import Worker
from roles.engines.client import confinement_of
from roles.engines.config import EngineConfig
from roles.envs.base import Ration, Task
from roles.envs.client import WorkerEnvironment
from roles.envs.mix import EnvironmentPart, EnvironmentSetup
from roles.workers.calls import decode_reply, encode_request
from tests.support.packages import install_module
from tests.support.processes import children

CONTAINMENT = find_containment("/nowhere")
pytestmark = pytest.mark.skipif(
    CONTAINMENT.mechanism is not Mechanism.BUBBLEWRAP,
    reason=f"bubblewrap contains nothing here: {CONTAINMENT.reason}",
)
GIB = 1 << 30
STRICT = Confinement(memory=2 * GIB)
ARGV = ("tests.attacks.spies",)
SETUP = EnvironmentSetup(parts=(EnvironmentPart(name="spying"),))
ENVIRONMENT = """
from roles.envs.base import Task
from spying_doors import DOORS
from roles.workers.calls import decode_reply, encode_request
from tests.attacks.spies import attempt

class Spy:
    name = "spying"

    def task(self, seed, *, held_out=False):
        said = attempt(*DOORS[seed[0]]) if seed[0] < len(DOORS) else "shut"
        return Task((1,), (), said.encode(), environment="spying")

    def reward(self, task, tokens):
        return float(attempt(*DOORS[tokens[0]]) == "open")

    def evaluation(self):
        return [self.task(b"\\xff")]
"""


@dataclass(frozen=True)
class House:
    """What a spy would like to have: a node's folder, a home, and who listens."""

    folder: Path
    home: Path
    sockets: Path
    port: int

    @property
    def doors(self) -> dict[str, list[Any]]:
        """By a name for each, the door and what it needs to know."""
        here, key = str(Path(__file__)), str(self.folder / "key")
        node = os.getpid()
        return {
            "the node's key": ["read", key],
            "the node's folder": ["listed", str(self.folder / "ledger")],
            "a file at home": ["read", str(self.home / "secret")],
            "who has accounts": ["read", "/etc/passwd"],
            "a log": ["listed", "/var/log"],
            "this test, to write": ["write", here],
            "a module, to write": ["write", str(Path(here).with_name("new.py"))],
            "the system, to write": ["write", "/usr/new"],
            "the root, to write": ["write", "/new"],
            "devices, to write": ["write", "/dev/new"],
            "this test's mode": ["chmod", here],
            "the kernel's settings": ["write", "/proc/sys/kernel/core_pattern"],
            "a link to the key": ["link_out", "/tmp", key],
            "a link to this test": ["link_out", "/tmp", here],
            "tcp": ["connect", "tcp", ["127.0.0.1", self.port]],
            "udp": ["send_udp", self.port],
            "a socket file": ["connect", "unix", str(self.sockets / "socket")],
            "an abstract socket": ["connect", "abstract", f"spy-{self.port}"],
            "netlink": ["netlink"],
            "interfaces": ["interfaces"],
            "the node's memory": ["memory_of", node],
            "the node's memory, by a call": ["memory_read", node],
            "the node's environment": ["environment_of", node],
            "a secret in the environment": ["own_environment"],
            "tracing the node": ["trace", node],
            "tracing itself": ["trace_me"],
            "the first process' memory": ["write", "/proc/1/mem"],
            "ending the node": ["kill", node],
            "other processes": ["other_processes"],
            "a namespace": ["new_namespace"],
            "a mount": ["mounted"],
            "the kernel's keys": ["keys"],
            "the kernel's keyrings": ["keyring"],
            "root": ["become_root"],
            "limits": ["raise_limits"],
            "a process": ["start_processes"],
            "10,000 threads": ["start_threads", 10_000],
            "10 GB of memory": ["map_memory", 10 * GIB],
            "memory without an address": ["hide_memory"],
            "shared memory": ["share_memory"],
            "a file of 1 GB": ["fill", "/tmp/one", GIB],
            "a link": ["link", "/tmp", key],
            "sockets that can be sent to others": ["pair", 1, 2],
            "places for asynchronous reads": ["reserve_reads"],
            "the disks' write-back": ["write_back"],
            "a second core": ["take_cores"],
            "another limit on core dumps": ["lower_limit"],
            "the user's pending signals": ["pending_signals"],
        }


@pytest.fixture
def house(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[House]:
    home, sockets = tmp_path / "home", tmp_path / "sockets"
    for folder in (home, sockets, tmp_path / "node" / "ledger"):
        folder.mkdir(parents=True)
    (home / "secret").write_text("s")
    (tmp_path / "node" / "ledger" / "entry").write_text("s")
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setenv("SPY_SECRET", "s")
    with (
        socket.create_server(("127.0.0.1", 0)) as tcp,
        socket.socket(socket.AF_UNIX) as named,
        socket.socket(socket.AF_UNIX) as abstract,
    ):
        port = tcp.getsockname()[1]
        named.bind(str(sockets / "socket"))
        abstract.bind(f"\0spy-{port}")
        for one in (named, abstract):
            one.listen()
        yield House(tmp_path / "node", home, sockets, port)


@pytest.fixture
def package(house: House, monkeypatch: pytest.MonkeyPatch) -> House:
    """The spy as an environment of another package."""
    folder = house.folder.parent / "package"
    install_module(folder, "spying", ENVIRONMENT, "shoal.envs", spying="spying:Spy")
    doors = [[name, arguments] for name, *arguments in house.doors.values()]
    (folder / "spying_doors.py").write_text(f"DOORS = {doors!r}\n")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(folder), *sys.path]))
    return house


@asynccontextmanager
async def spying(
    folder: Path, confined: Confinement = STRICT, *, is_switching: bool = True
) -> AsyncIterator[Callable[..., Any]]:
    """Ask a spy: ``await ask(door, ...)``."""
    async with open_world(folder) as world:
        if CONTAINMENT.is_switching and not is_switching:
            world._workers._found = replace(CONTAINMENT, is_switching=False)
        async with world.open_worker(ARGV, name="a spy", confined=confined) as worker:
            yield partial(ask, worker)


async def ask(worker: Worker, *words: Any) -> str:
    said: str = decode_reply(await worker.call(encode_request("knock", *words)))
    return said


def test_the_doors_are_open_where_nothing_is_in_the_way(house: House) -> None:
    """Else a door that is shut would say nothing."""
    from tests.attacks.spies import attempt

    unharmful = {
        "the node's folder", "a file at home", "who has accounts", "tcp", "udp", "netlink",
        "a socket file", "an abstract socket", "the node's environment",
        "a secret in the environment",
        "other processes", "memory without an address", "limits",
        "sockets that can be sent to others", "places for asynchronous reads",
        "the user's pending signals",
    }  # fmt: skip
    found = {
        name: attempt(door, words)
        for name, (door, *words) in house.doors.items()
        if name in unharmful
    }
    assert {name for name, came in found.items() if came != "open"} == set()


@pytest.mark.parametrize("is_switching", [True, False], ids=["found", "namespace"])
async def test_a_worker_finds_every_door_shut(house: House, is_switching: bool) -> None:
    """As root, both as another user and in a user namespace, where root's threads are not
    counted."""
    doors = house.doors
    if not is_switching and CONTAINMENT.is_switching:
        del doors["10,000 threads"]
    async with spying(house.folder, is_switching=is_switching) as ask_spy:
        found = {name: await ask_spy(*words) for name, words in doors.items()}
    assert {name for name, came in found.items() if came == "open"} == set()


async def test_a_reward_finds_every_door_shut(package: House) -> None:
    """Seven of them were open: the key was read by an answer."""
    names = list(package.doors)
    async with environment_in(package) as environment:
        task = Task((1,), (), environment="spying")
        answers = [(task, [(number,) for number in range(len(names))])]
        rewards = dict(zip(names, await environment.rewards(answers), strict=True))
    assert {name for name, reward in rewards.items() if reward} == set()


@asynccontextmanager
async def environment_in(house: House) -> AsyncIterator[WorkerEnvironment]:
    async with open_world(house.folder) as world, AsyncExitStack() as stack:
        environment = WorkerEnvironment(world, SETUP, Ration(memory=2 * GIB, cpu=60.0), stack)
        await environment.open()
        yield environment


async def test_an_environment_that_spins_or_prints_is_ended(
    package: House, caplog: pytest.LogCaptureFixture
) -> None:
    (package.folder.parent / "package" / "spying_doors.py").write_text(
        f"DOORS = [['spin', []], ['print_much', [{GIB}]], ['answer_much', [{GIB}]]]\n"
    )
    caplog.set_level(logging.INFO)
    async with open_world(package.folder) as world, AsyncExitStack() as stack:
        environment = WorkerEnvironment(world, SETUP, Ration(memory=2 * GIB, cpu=1.0), stack)
        await environment.open()
        for number in range(3):
            with trio.fail_after(60):
                task = Task((1,), environment="spying")
                assert await environment.rewards([(task, [(number,)])]) == [0.0]
            assert environment._remote.process is None, "its process was ended"
    said = sum(len(record.getMessage()) for record in caplog.records)
    assert said < 3 * HEARD, "two processes printed"


async def test_1_gb_of_output_costs_the_node_neither_memory_nor_log(
    house: House, caplog: pytest.LogCaptureFixture
) -> None:
    """All of it was passed on, and a reply of 1 GiB was taken."""
    caplog.set_level(logging.INFO)
    async with spying(house.folder) as ask_spy:
        with pytest.raises(WorkerDied):
            await ask_spy("print_much", GIB)
    said = [record.getMessage() for record in caplog.records]
    assert any("printed more than it may" in line for line in said)
    assert sum(map(len, said)) < HEARD + 4096
    async with spying(house.folder) as ask_spy:
        with pytest.raises(LimitExceeded):
            await ask_spy("answer_much", GIB)
    assert CHATTER < GIB


async def test_a_fork_bomb_stays_where_it_is(house: House) -> None:
    """Of those that may fork: they are counted, and end together."""
    confined = replace(STRICT, forks=True, tasks=32)
    before = processes()
    async with spying(house.folder, confined) as ask_spy:
        assert await ask_spy("start_processes") == "open"
        assert await ask_spy("start_threads", 64) == "RuntimeError"
        assert (await trio.run_process(["true"])).returncode == 0
        assert 1 < processes() - before <= 40
    assert processes() <= before + 2


def processes() -> int:
    """Of a spy: by the module that they run."""
    count = 0
    for name in filter(str.isdecimal, os.listdir("/proc")):
        try:
            count += ARGV[0].encode() in Path(f"/proc/{name}/cmdline").read_bytes()
        except OSError:
            continue
    return count


@pytest.mark.parametrize("is_killed", [True, False], ids=["killed", "closed"])
async def test_nothing_outlives_a_worker(house: House, is_killed: bool) -> None:
    """A session of its own, two forks and blocked signals: what did this lived on."""
    shared = house.folder.parent / "shared"
    shared.mkdir(mode=0o777)
    shared.chmod(0o777)
    (shared / "lock").touch()
    (shared / "lock").chmod(0o666)
    confined = replace(STRICT, forks=True, writable=(str(shared),))
    async with open_world(house.folder) as world, AsyncExitStack() as stack:
        worker = await stack.enter_async_context(
            world.open_worker(ARGV, name="a spy", confined=confined)
        )
        assert await ask(worker, "outlive", str(shared / "lock")) == "open"
        with (shared / "lock").open() as lock:
            with pytest.raises(BlockingIOError):
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if is_killed:
                os.kill(worker.pid, signal.SIGKILL)
            else:
                await stack.aclose()
            with trio.fail_after(60):
                wait = partial(fcntl.flock, lock, fcntl.LOCK_EX)
                await trio.to_thread.run_sync(wait, abandon_on_cancel=True)


NODE = """
import os, sys, trio
from pathlib import Path
from p2p.machine import open_world
from p2p.sandbox import Confinement, Containment
from roles.workers.calls import encode_request

async def main(folder, shared):
    confined = Confinement(forks=True, writable=(shared,))
    async with open_world(Path(folder)) as world:
        argv = ["tests.attacks.spies"]
        async with world.open_worker(argv, name="a spy", confined=confined) as worker:
            await worker.call(encode_request("knock", "outlive", shared + "/lock"))
            os.write(1, b"ready")
            await trio.sleep_forever()

trio.run(main, *sys.argv[1:])
"""


async def test_nothing_outlives_a_node_that_was_killed(house: House) -> None:
    shared = house.folder.parent / "shared"
    shared.mkdir()
    shared.chmod(0o777)
    (shared / "lock").touch()
    (shared / "lock").chmod(0o666)
    command = [sys.executable, "-c", NODE, str(house.folder), str(shared)]
    node = await trio.lowlevel.open_process(command, stdout=subprocess.PIPE)
    assert isinstance(node.stdout, trio.abc.ReceiveStream)
    async with node.stdout:
        assert await node.stdout.receive_some(5) == b"ready"
        node.kill()
        await node.wait()
    with (shared / "lock").open() as lock, trio.fail_after(60):
        wait = partial(fcntl.flock, lock, fcntl.LOCK_EX)
        await trio.to_thread.run_sync(wait, abandon_on_cancel=True)


async def test_a_killed_worker_leaves_no_process_behind_for_another_to_bury(
    house: House,
) -> None:
    """In a container the node is the first process, and gets what is orphaned."""
    async with spying(house.folder, replace(STRICT, forks=True)) as ask_spy:
        worker = ask_spy.args[0]  # type: ignore[attr-defined]
        inner = children(worker.pid)
        with trio.move_on_after(0.1):
            await ask_spy("spin")
    assert inner
    for pid in inner:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


async def test_a_pair_of_sockets_is_joined_to_itself(house: House) -> None:
    """A pair of datagram sockets reached every such socket in sight."""
    address = str(house.sockets / "datagrams")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as server:
        server.bind(address)
        os.chmod(address, 0o777)
        async with spying(house.folder, replace(STRICT, readable=(str(house.sockets),))) as ask:
            assert await ask("send_from_pair", address) == "PermissionError"
            for family in (socket.AF_INET, socket.AF_TIPC, socket.AF_NETLINK):
                assert await ask("pair", family, socket.SOCK_STREAM) == "PermissionError"
            assert await ask("pair", socket.AF_UNIX, socket.SOCK_STREAM) == "open", "asyncio's"
            listener = house.sockets / "socket"
            listener.chmod(0o777)
            assert await ask("connect_from_pair", str(listener)) == "shut"


def test_a_worker_has_none_of_its_users_privileges() -> None:
    """A limit of 0 on core dumps starts the machine's crash handler, as root."""
    amounts = launch(["x"], STRICT, CONTAINMENT, folder="/nowhere").command
    limits = json.loads(next(word for word in amounts if word.startswith("{")))["amounts"]
    assert limits.items() >= {"RTPRIO": 0, "NICE": 0, "CORE": 1, "MEMLOCK": 0}.items()


async def test_a_worker_is_stopped_between_calls(house: House) -> None:
    """A thread that a call had left behind computed on all cores."""
    async with spying(house.folder) as ask:
        worker = ask.args[0]  # type: ignore[attr-defined]
        (first,) = children(worker.pid)
        for _ in range(2):
            (inner,) = children(first)
            with trio.fail_after(60):
                while state_of(inner) != "T":
                    await trio.lowlevel.checkpoint()
            assert await ask("pair", socket.AF_UNIX, socket.SOCK_STREAM) == "open"


def state_of(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


async def test_an_engine_plants_no_link_where_its_node_goes(house: House) -> None:
    """The node wrote an engine's next task over its own key."""
    key = house.folder / "key"
    async with open_world(house.folder) as world:
        secret = key.read_bytes()
        confined = confinement_of(world, EngineConfig(), "trainer")
        async with world.open_worker(ARGV, name="an engine", confined=confined) as worker:
            for own in ("engine/trainer", "trainer"):
                assert await ask(worker, "link", str(house.folder / own), str(key)) != "open"
                await world.disk.write(f"{own}/planted", b"tokens", 0)
    assert key.read_bytes() == secret


async def test_the_tokenizer_is_all_that_is_seen_of_the_nodes_folder(house: House) -> None:
    model = house.folder / "store" / "model"
    model.mkdir(parents=True)
    (model / "tokenizer.json").write_text("{}")
    (house.folder / "store" / "other").write_text("s")
    confined = replace(STRICT, readable=(str(model),))
    async with spying(house.folder, confined) as ask_spy:
        assert await ask_spy("read", str(model / "tokenizer.json")) == "open"
        assert await ask_spy("write", str(model / "tokenizer.json")) != "open"
        assert await ask_spy("write", str(model / "new")) != "open"
        assert await ask_spy("read", str(house.folder / "store" / "other")) != "open"
        assert await ask_spy("read", str(house.folder / "key")) != "open"
        assert await ask_spy("listed", str(house.folder)) == "open"  # store, and nothing else


async def test_a_folder_in_what_every_worker_sees_is_covered(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a container it may be `/usr/src/app/data`: all of it but the key could be read."""
    packages = house.folder.parent / "packages"
    folder = packages / "app" / "data"
    model = folder / "store" / "model"
    model.mkdir(parents=True)
    (packages / "app" / "__init__.py").touch()
    (model / "tokenizer.json").write_text("{}")
    (folder / "ledger").write_text("s")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(packages), *sys.path]))
    async with spying(folder, replace(STRICT, readable=(str(model),))) as ask_spy:
        assert await ask_spy("read", str(model / "tokenizer.json")) == "open"
        assert await ask_spy("listed", str(packages / "app")) == "open"
        for name in ("ledger", "key"):
            assert await ask_spy("read", str(folder / name)) != "open"
        assert await ask_spy("write", str(folder / "new")) != "open"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gets a machine without namespaces")
def test_a_program_that_leaves_the_files_where_they_are_is_not_believed(tmp_path: Path) -> None:
    """Wrappers go by the name of bwrap, too."""
    program = tmp_path / "bwrap"
    program.write_text(
        "#!/bin/sh\n"
        'while [ "$1" != -- ]; do shift; done\n'
        "shift\n"
        'exec unshare --pid --fork --mount-proc sh -c \'"$@"; exit $?\' sh "$@"\n'
    )
    program.chmod(0o755)
    candidate = Containment(
        mechanism=Mechanism.BUBBLEWRAP, program=str(program), is_switching=True
    )
    reason = try_containment(candidate, Confinement(tasks=16), str(tmp_path))
    assert reason == "it does not leave the node's namespaces (net, ipc, uts)"


async def test_an_engine_reads_no_secret_and_writes_what_is_its_own(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It ran as any program of the node's owner, with all of their environment."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    monkeypatch.setenv("HF_TOKEN_SECRET", "s")
    here, shared = str(Path(__file__)), house.folder / "store"
    shared.mkdir()
    (shared / "policy").write_text("w")
    own = house.folder / "trainer"
    async with open_world(house.folder) as world:
        scoring = confinement_of(world, EngineConfig(), "validator", learns=False)
        async with world.open_worker(ARGV, name="an engine", confined=scoring) as worker:
            folder = house.folder / "engine" / "validator"
            assert await ask(worker, "write", str(folder / "content")) == "open"
            assert await ask(worker, "write", str(house.folder / "validator" / "new")) != "open"
        confined = confinement_of(world, EngineConfig(), "trainer")
        async with world.open_worker(ARGV, name="an engine", confined=confined) as worker:
            for words in (
                ["read", str(shared / "policy")],
                ["read", here],
                ["write", str(own / "checkpoint")],
                ["write", str(house.folder / "engine" / "trainer" / "content")],
                ["write", "/tmp/compiled"],
                ["variable", "CUDA_VISIBLE_DEVICES"],
                ["start_threads", 100],
            ):
                assert await ask(worker, *words) == "open", words
            for words in (
                ["read", str(house.folder / "key")],
                ["read", str(house.home / "secret")],
                ["own_environment"],
                ["write", here],
                ["write", str(shared / "policy")],
                ["write", str(house.folder / "ledger" / "entry")],
                ["link_out", str(own), str(house.folder / "ledger" / "entry")],
                ["write", "/proc/sys/kernel/core_pattern"],
                ["connect", "tcp", ["127.0.0.1", house.port]],
                ["connect", "unix", str(house.sockets / "socket")],
                ["trace_me"],
                ["new_namespace"],
                ["start_processes"],
                ["kill", os.getpid()],
                ["environment_of", os.getpid()],
            ):
                assert await ask(worker, *words) != "open", words
    assert (own / "checkpoint").exists()


async def test_where_nothing_contains_an_engine_it_still_gains_no_privileges(
    house: House,
) -> None:
    async with open_world(house.folder) as world:
        world._workers._found = Containment(reason="a test")  # type: ignore[attr-defined]
        confined = confinement_of(world, EngineConfig(), "trainer")
        async with world.open_worker(ARGV, name="an engine", confined=confined) as worker:
            assert await ask(worker, "no_new_privileges") == "open"
            for words in (["own_environment"], ["trace_me"], ["new_namespace"], ["keys"]):
                assert await ask(worker, *words) != "open", words
        with pytest.raises(WorkerNotStarted, match=r"must not run uncontained.*a test"):
            async with world.open_worker(ARGV, name="a spy", confined=STRICT):
                pytest.fail("it runs")
