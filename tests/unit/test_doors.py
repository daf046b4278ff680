"""What an embedding program passes wrongly is refused at the door, by the argument's name.

One table has every public function with what fits each argument and what does not; a law holds
the table to `p2p.__all__`.
"""

from __future__ import annotations

import inspect
import math
import re
from collections.abc import Callable, Mapping
from contextlib import AbstractAsyncContextManager
from functools import partial, reduce
from pathlib import Path
from typing import Any

import pytest
import trio

import p2p
import p2p.node.config
import p2p.node.node
from p2p.errors import ShoalError
from p2p.host import MAX_MESSAGE

PEER = p2p.KeyPair(b"p" * 32).peer_id
ADDR = p2p.Multiaddr.parse("/memory/7").with_peer(PEER)
ECHO = "/example/echo/1.0.0"


async def serve(stream: p2p.Stream) -> None: ...
async def answer(peer: p2p.PeerId, data: bytes) -> bytes:
    return data


def take(peer: p2p.PeerId, message: bytes) -> None: ...
def hear(event: object) -> None: ...
async def find(peer: p2p.PeerId) -> None: ...


TEXT = ("text", [b"text", 7, None])
BYTES = (b"data", ["data", 7, None, [1]])
PEERS = (PEER, [str(PEER), PEER.digest, None, 7])
PROTOCOL = (ECHO, [b"/example/echo/1.0.0", None, 7, "echo", "", "/a b"])
SIZE = (100, [-1, "100", 1.5, None])
SECONDS = (60.0, ["60", None, math.nan, -1.0, 0.0])


class Callable1:
    """An object that is called, and not async."""

    def __call__(self, stream: object) -> None: ...


ASYNC = (
    serve,
    [take, hear, None, "serve", answer, lambda: None, Callable1(), Callable1, partial(hear)],
)
TAKES = (take, [answer, None, hear, "take"])
HEARS = (hear, [serve, None, take, "hear"])
REAL = object()
"""Stands for what is open while the test runs."""
HOST: tuple[Any, list[Any]] = (REAL, [None, "host", 7, p2p.open_host])
WORLD: tuple[Any, list[Any]] = (REAL, [None, "world", 7, p2p.open_world])

Arguments = Mapping[str, tuple[Any, list[Any]]]
"""By the argument's name: what fits, and what does not."""
FUNCTIONS: dict[str, Arguments] = {
    "frame": {"payload": BYTES},
    "send_frame": {"stream": (REAL, [None, "stream"]), "payload": BYTES},
    "serve_requests": {
        "answer": (answer, [take, serve, None, "answer"]), "max_request": SIZE,
        "may_have": (lambda peer, size: True, [answer, "may_have", 7]),
    },
    "request": {
        "host": HOST, "peer": PEERS, "protocol": PROTOCOL, "payload": BYTES, "max_reply": SIZE,
    },
    "ping": {"host": HOST, "peer": PEERS},
    "FrameReader": {"stream": (REAL, [None, "stream"]), "max_bytes": SIZE},
    "KeyPair": {"seed": (b"s" * 32, ["s" * 32, None, b"short", 7])},
    "PeerId": {"digest": (PEER.digest, [str(PEER), None, b"short", 7])},
    "PeerId.from_base58": {"text": (str(PEER), [PEER.digest, None, "0", "text"])},
    "Multiaddr": {"parts": (ADDR.parts, ["/ip4/127.0.0.1/tcp/1", None, ()])},
    "Multiaddr.parse": {"text": (str(ADDR), [b"/memory/7", None, "memory", ""])},
    "Multiaddr.tcp": {"host": ("127.0.0.1", [None, 7]), "port": (1, ["1", -1, 1 << 16, None])},
    "open_host": {
        "network": (p2p.MemoryNetwork(), ["tcp", p2p.TcpNetwork, 7]),
        "world": (None, WORLD[1][1:]),
        "listen": (["/memory/0"], ["/memory/0", b"/memory/0", None, [7], ["here"], 7]),
        "key": (None, [b"k" * 32, "key", 7]),
        "strict": (False, [1, "no", None]),
        "nat": (False, [1, "no", None]),
        "config": (None, [{}, 7, p2p.DhtConfig()]),
    },
    "open_nat": {
        "host": HOST, "signer": (p2p.KeyPair(b"s" * 32), []),
        "config": (None, [{}, 7, p2p.SwarmConfig()]),
        "named": ((), [str(ADDR), [str(ADDR)], ADDR, None]),
    },
    "open_world": {"data": (None, [7, b"folder"]), "key": (None, [b"k" * 32, "key"])},
    "open_gossip": {"world": WORLD, "host": HOST, "config": (None, [{}, p2p.SwarmConfig()])},
    "open_dht": {
        "world": WORLD, "host": HOST, "config": (None, [{}, p2p.SwarmConfig()]),
        "namespaces": ((), ["room", [b"room"], 7]),
    },
    "open_membership": {
        "world": WORLD, "host": HOST, "config": (None, [{}, p2p.SwarmConfig()]),
        "may": (bool, [serve, None, "all"]), "stamp": (b"", ["", None]),
        "is_stamped": (None, [answer, "yes", hear]),
    },
    "SwarmConfig": {
        "announce": ((ADDR,), [str(ADDR), [str(ADDR)], None]), "identify": (True, ["yes", 1]),
        "strict": (True, ["yes", 1]), "keepalive": (1.0, ["1", None, 0.0, -1, math.nan]),
        "limits": (p2p.SwarmConfig().limits, [{}, None, 7]),
    },
    "Namespace": {
        "name": ("room", [b"room", None]), "valid": (bool, [serve, None, take]),
        "salts": (1, [0, -1, "1"]), "max_lifetime": SECONDS,
    },
    "Multiaddr.with_peer": {"peer": PEERS},
    "MemoryNetwork.dial": {"addr": (ADDR, [str(ADDR), None])},
    "MemoryNetwork.listen": {"addr": (ADDR, [str(ADDR), None])},
    "TcpNetwork.dial": {"addr": (ADDR, [str(ADDR), None])},
    "TcpNetwork.listen": {"addr": (ADDR, [str(ADDR), None])},
    "node.node.open_node": {
        "world": WORLD, "host": HOST, "config": (p2p.node.config.NodeConfig(), [{}, None]),
        "document": (None, ["run", 7]),
        "bootstrap": ((), [str(ADDR), [str(ADDR)], ADDR, None]),
        "reader": (lambda *_: None, [None, "reader", hear]),
    },
}  # fmt: skip
METHODS: dict[str, Arguments] = {
    "host.set_handler": {"protocol": PROTOCOL, "handler": ASYNC},
    "host.serving": {"protocol": PROTOCOL, "handler": ASYNC},
    "host.receiving": {"protocol": PROTOCOL, "handler": TAKES, "max_message": SIZE},
    "host.watching": {"listener": HEARS},
    "host.finding": {"find": (find, [hear, None, answer])},
    "host.add_addrs": {"peer": PEERS, "addrs": ([ADDR], [str(ADDR), [str(ADDR)], None, ADDR])},
    "host.addrs_of": {"peer": PEERS},
    "host.connect": {"peer": PEERS},
    "host.connect_addr": {"addr": (ADDR, [b"/memory/7", None, PEER, "here"])},
    "host.disconnect": {"peer": PEERS},
    "host.open_stream": {"peer": PEERS, "protocol": PROTOCOL},
    "host.send": {"peer": PEERS, "protocol": (ECHO, [b"/echo", None]),
                  "message": (b"m", ["m", None, 7, bytes(MAX_MESSAGE + 1)])},
    "host.protect": {"purpose": TEXT, "peers": ([PEER], [PEER, str(PEER), [str(PEER)], None])},
    "host.penalise": {
        "peer": PEERS, "points": (1.0, ["1", -1.0, None]), "reason": ("why", []),
    },
    "host.ban": {"peer": PEERS},
    "host.info": {"peer": PEERS},
    "host.network_of": {"peer": PEERS},
    "host.is_direct": {"peer": PEERS},
    "host.has_dialled": {"peer": PEERS},
    "host.dial_direct": {"peer": PEERS},
    "host.look_from": {"peer": PEERS},
    "host.set_standing": {"standing": ({}, [None, 7, [ADDR]])},
    "host.remote_addr": {"peer": PEERS},
    "host.punch": {
        "peer": PEERS, "addrs": ([], [str(ADDR), [str(ADDR)], None, ADDR]),
        "is_client": (True, ["yes", None, 1]),
    },
    "membership.shown_by": {"peer": PEERS},
    "host.set_mapped": {"addr": (None, [str(ADDR), 7])},
    "host.listen": {"addr": (ADDR, ["/memory/0", None])},
    "gossip.subscribe": {"topic": TEXT, "validate": TAKES, "deliver": TAKES},
    "gossip.unsubscribe": {"topic": TEXT},
    "gossip.publish": {"topic": TEXT, "data": BYTES},
    "dht.bootstrap": {"peers": ([], [str(ADDR), ADDR, PEER, [7], ["here"], None])},
    "dht.put": {"namespace": TEXT, "name": BYTES, "value": BYTES, "lifetime": SECONDS},
    "dht.get": {"namespace": TEXT, "name": BYTES},
    "dht.forget": {"namespace": TEXT, "name": BYTES},
    "dht.find_peer": {"peer": PEERS},
    "membership.join": {"addrs": ([], [str(ADDR), ADDR, [7], ["here"], None])},
    "membership.me.update": {
        "roles": (("echo",), ["echo", [b"echo"], None]), "run": (b"", ["run", None]),
        "policy": (1, ["1", 1.5, None]), "version": ("1", [b"1", None]),
        "addrs": ((), [str(ADDR), [str(ADDR)], None]), "load": (0.5, ["1", None, math.nan]),
    },
    "membership.on_change": {"listener": HEARS},
    "membership.find": {"role": TEXT},
    "membership.interest": {"peers": ([PEER], [PEER, [str(PEER)], None])},
    "membership.locate": {"peer": PEERS, "among": ([PEER], [])},
}  # fmt: skip
UNCHECKED = {
    "source", "mounts", "trims", "replaces", "has_audience", "cls",
    "fields", "kwargs", "args", "max_message", "is_member", "offers", "seek", "network",
}  # fmt: skip
"""Arguments that no table has: they are keywords of few values, or for people to read."""


async def refused(call: Callable[..., Any], name: str, arguments: dict[str, Any]) -> str:
    """The sentence with which ``call`` refuses its arguments."""
    try:
        with trio.fail_after(60):
            made = call(**arguments)
            if hasattr(made, "__aenter__"):
                async with made:
                    pass
            elif hasattr(made, "__enter__"):
                with made:
                    pass
            elif inspect.isawaitable(made):
                await made
    except (TypeError, ValueError, ShoalError) as error:
        return f"{name}: {error}"
    raise AssertionError(f"{name} was taken")


async def check_all(table: Mapping[str, Arguments], found: Callable[[str], Any]) -> None:
    """Each wrong value of each argument is refused by a sentence that has one or the other."""
    for entry, arguments in table.items():
        fits = {name: values[0] for name, values in arguments.items()}
        for name, (_, wrong) in arguments.items():
            for value in wrong:
                call, given = found(entry), fits | {name: value}
                if callable(value) and name in {"host", "world"}:
                    given[name] = value()  # not entered
                said = await refused(call, f"{entry}({name}={value!r:.40})", given)
                sentence = said.partition("): ")[2]
                is_text = isinstance(value, str | bytes | tuple) or value == ["here"]
                assert re.search(rf"\b{name}\b", sentence) or is_text, said
                assert "object has no attribute" not in said
                assert len(said) < 400


async def test_every_public_function_names_the_argument_that_is_wrong(tmp_path: Path) -> None:
    """``listen="/memory/0"`` was a list of characters, ``key=b"..."`` an `AttributeError`."""
    async with p2p.open_world(tmp_path) as world:
        network = p2p.MemoryNetwork()
        async with p2p.open_host(world=world, network=network, listen=["/memory/0"]) as host:
            real = {
                "host": host,
                "world": world,
                "stream": trio.testing.memory_stream_pair()[0],
            }

            def found(entry: str) -> Any:
                function: Any = p2p
                for part in entry.split("."):
                    function = getattr(function, part)
                first = {
                    "Multiaddr.with_peer": [ADDR],
                    "MemoryNetwork.dial": [network], "MemoryNetwork.listen": [network],
                    "TcpNetwork.dial": [p2p.TcpNetwork()],
                    "TcpNetwork.listen": [p2p.TcpNetwork()],
                }.get(entry, [])  # fmt: skip
                return lambda **given: function(
                    *first,
                    **{name: real[name] if one is REAL else one for name, one in given.items()},
                )

            await check_all(FUNCTIONS, found)


async def test_every_method_names_the_argument_that_is_wrong(tmp_path: Path) -> None:
    """``open_stream(str(peer))`` dialled it, and a handler that is not async failed later."""
    async with (
        p2p.open_world(tmp_path) as world,
        p2p.open_host(world=world, network=p2p.MemoryNetwork(), listen=["/memory/0"]) as host,
        p2p.open_gossip(world, host) as gossip,
        p2p.open_dht(world, host, p2p.DhtConfig(difficulty=0)) as dht,
        p2p.open_membership(world, host) as membership,
    ):
        owners = {"host": host, "gossip": gossip, "dht": dht, "membership": membership}

        def found(entry: str) -> Any:
            owner, *methods = entry.split(".")
            return reduce(getattr, methods, owners[owner])

        await check_all(METHODS, found)


def test_the_tables_have_every_public_argument() -> None:
    owners = {"host": p2p.SwarmHost, "gossip": p2p.Gossip, "dht": p2p.Dht,
              "membership": p2p.Membership}  # fmt: skip
    methods = {
        f"{name}.{method}": getattr(owner, method)
        for name, owner in owners.items()
        for method in vars(owner)
        if not method.startswith("_") and inspect.isfunction(getattr(owner, method))
    }
    functions = {
        name: found for name in p2p.__all__ if inspect.isfunction(found := getattr(p2p, name))
    }
    lacking = [
        f"{entry}({argument})"
        for table, entries in ((METHODS, methods), (FUNCTIONS, functions))
        for entry, function in entries.items()
        for argument in inspect.signature(function).parameters
        if argument not in {"self", *UNCHECKED, *table.get(entry, {})}
    ]
    assert lacking == ["host.running(addrs)"], "which is for `open_host`"


async def test_a_stream_names_the_argument_that_is_wrong() -> None:
    """``drained(-1)`` waited for ever."""
    network = p2p.MemoryNetwork()
    async with (
        p2p.open_host(network=network, listen=["/memory/0"]) as one,
        p2p.open_host(network=network, listen=["/memory/0"]) as other,
    ):
        other.set_handler(ECHO, p2p.serve_requests(answer))
        peer = await one.connect_addr(other.addrs[0])
        async with await one.open_stream(peer, ECHO) as stream:
            with pytest.raises(TypeError, match="data must be bytes"):
                await stream.send_all("text")  # type: ignore[arg-type]
            with pytest.raises(ValueError, match="at_most must be at least 0"):
                await stream.drained(-1)
            with pytest.raises(ValueError, match="max_bytes must be"):
                await stream.receive_some(0)


async def awaited(call: Callable[[], Any]) -> None:
    made = call()
    if inspect.isawaitable(made):
        await made


async def test_what_is_closed_says_so(tmp_path: Path) -> None:
    """A closed DHT had found nothing, and a closed host no way to the peer."""
    async with (
        p2p.open_world(tmp_path) as world,
        p2p.open_host(world=world, network=p2p.MemoryNetwork(), listen=["/memory/0"]) as host,
        p2p.open_gossip(world, host) as gossip,
        p2p.open_dht(world, host, p2p.DhtConfig(difficulty=0)) as dht,
        p2p.open_membership(world, host) as membership,
    ):
        pass
    calls: list[Callable[[], Any]] = [
        partial(host.connect, PEER),
        partial(host.connect_addr, ADDR),
        partial(host.open_stream, PEER, ECHO),
        partial(host.send, PEER, ECHO, b""),
        partial(host.set_handler, ECHO, serve),
        lambda: host.receiving(ECHO, take).__enter__(),
        partial(p2p.request, host, PEER, ECHO, b""),
        partial(p2p.ping, host, PEER),
        partial(host.listen, ADDR),
        partial(gossip.publish, "topic", b""),
        partial(gossip.subscribe, "topic", take, take),
        partial(dht.get, "room", b"name"),
        partial(dht.put, "room", b"name", b"value", 60),
        partial(dht.find_peer, PEER),
        partial(dht.bootstrap, [ADDR]),
        partial(membership.join, [ADDR]),
    ]
    for call in calls:
        with trio.fail_after(60), pytest.raises(trio.ClosedResourceError, match="is closed"):
            await awaited(call)
    with pytest.raises(ValueError, match="world is closed"):
        async with p2p.open_host(world=world):
            pass


async def test_a_second_handler_does_not_win_in_silence() -> None:
    async with p2p.open_host(network=p2p.MemoryNetwork(), listen=["/memory/0"]) as host:
        host.set_handler(ECHO, serve)
        for again in (
            lambda: host.set_handler(ECHO, serve),
            lambda: host.receiving(ECHO, take).__enter__(),
            lambda: host.serving(ECHO, serve).__enter__(),
        ):
            with pytest.raises(ValueError, match="is served already"):
                again()
        host.set_handler(ECHO, serve, replaces=True)


@pytest.mark.parametrize("name", ["world", "host", "gossip", "dht", "membership"])
async def test_what_a_block_raises_comes_out_as_it_was(name: str) -> None:
    """Ctrl-C was 79 lines of groups in groups, which ``except KeyboardInterrupt`` missed."""

    async def press_ctrl_c(block: AbstractAsyncContextManager[object]) -> None:
        async with block:
            await trio.lowlevel.checkpoint()
            raise KeyboardInterrupt

    async with p2p.open_world() as world, p2p.open_host(world=world, listen=[]) as host:
        blocks: dict[str, Callable[[], AbstractAsyncContextManager[object]]] = {
            "world": p2p.open_world,
            "host": p2p.open_host,
            "gossip": partial(p2p.open_gossip, world, host),
            "dht": partial(p2p.open_dht, world, host, p2p.DhtConfig(difficulty=0)),
            "membership": partial(p2p.open_membership, world, host),
        }
        with pytest.raises(KeyboardInterrupt):
            await press_ctrl_c(blocks[name]())
