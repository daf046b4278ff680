"""Configuration: tables map one to one to dataclasses, and every mistake is named with its
place.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import NewType

import pytest
from hypothesis import given, strategies as st

from p2p.errors import ConfigError
from p2p.identity import KeyPair, PeerId
from p2p.multiaddr import Multiaddr
from p2p.node.config import NodeConfig, load_config
from p2p.node.tables import read_table, write_table

PEER = KeyPair(b"p" * 32).peer_id
Count = NewType("Count", int)


class Colour(Enum):
    RED = "red"
    BLUE = "blue"


@dataclass(frozen=True, slots=True, kw_only=True)
class Inner:
    rate: float = 0.5
    pair: tuple[float, float] = (1.0, 2.0)

    def __post_init__(self) -> None:
        if self.rate <= 0:
            raise ValueError("rate is positive")


@dataclass(frozen=True, slots=True, kw_only=True)
class Outer:
    name: str
    count: Count = Count(1)
    on: bool = False
    data: bytes = b""
    colour: Colour = Colour.RED
    peers: tuple[PeerId, ...] = ()
    addr: Multiaddr | None = None
    inner: Inner = field(default_factory=Inner)
    rest: Mapping[str, object] = field(default_factory=dict)


def test_a_table_becomes_a_value_and_back() -> None:
    table = {
        "name": "n",
        "count": 3,
        "on": True,
        "data": b"\0",
        "colour": "blue",
        "peers": [str(PEER)],
        "addr": "/ip4/127.0.0.1/tcp/1",
        "inner": {"rate": 2, "pair": [3, 4]},
        "rest": {"any": [1, "two"]},
    }
    value = read_table(Outer, table, "here")
    assert value == Outer(
        name="n",
        count=Count(3),
        on=True,
        data=b"\0",
        colour=Colour.BLUE,
        peers=(PEER,),
        addr=Multiaddr.tcp("127.0.0.1", 1),
        inner=Inner(rate=2.0, pair=(3.0, 4.0)),
        rest={"any": [1, "two"]},
    )
    assert isinstance(value.inner.rate, float)
    assert read_table(Outer, write_table(value), "here") == value


@given(
    st.builds(
        Inner, rate=st.floats(1e-9, 1e9), pair=st.tuples(st.floats(-9, 9), st.floats(-9, 9))
    )
)
def test_writing_and_reading_are_inverse(inner: Inner) -> None:
    assert read_table(Inner, write_table(inner), "here") == inner


@pytest.mark.parametrize(
    ("table", "sentence"),
    [
        ({}, "here: the key 'name' is missing"),
        ({"nmae": "n"}, "here: there is no key 'nmae'; did you mean 'name'?"),
        ({"zzz": 1}, "here: there is no key 'zzz'; known are addr, colour, count, "),
        ({"name": 1}, "here: name must be a text, not a whole number"),
        ({"name": "n", "count": True}, "here: count must be a whole number, not true or false"),
        ({"name": "n", "count": 1.5}, "here: count must be a whole number, not a number"),
        ({"name": "n", "on": 1}, "here: on must be true or false, not a whole number"),
        ({"name": "n", "colour": "green"}, "here: colour must be one of red, blue"),
        ({"name": "n", "peers": str(PEER)}, "here: peers must be a list, not a text"),
        ({"name": "n", "peers": ["x0"]}, "here: peers[0]: '0' is not a base58 character"),
        (
            {"name": "n", "addr": "localhost"},
            "here: addr: 'localhost' is no address; write for example",
        ),
        ({"name": "n", "inner": 3}, "here: inner must be a table, not a whole number"),
        ({"name": "n", "inner": {"rate": 0}}, "here: inner: rate is positive"),
        ({"name": "n", "inner": {"rate": float("nan")}}, "here: inner: rate is not a number"),
        ({"name": "n", "inner": {"pair": [1]}}, "here: inner: pair must have 2 items, not 1"),
        (
            {"name": "n", "inner": {"rat": 1}},
            "here: inner: there is no key 'rat'; did you mean 'rate'?",
        ),
        ({"name": "n", "rest": []}, "here: rest must be a table, not a list"),
        ([], "here must be a table, not a list"),
    ],
)
def test_every_mistake_is_named(table: object, sentence: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read_table(Outer, table, "here")
    assert str(caught.value).startswith(sentence)


def written(folder: Path, text: str) -> Path:
    path = folder / "node.toml"
    path.write_text(text)
    return path


def test_a_node_is_configured_by_toml(tmp_path: Path) -> None:
    text = f"""
    listen = ["/ip4/127.0.0.1/tcp/4001"]
    bootstrap = ["/ip4/127.0.0.1/tcp/4002/p2p/{PEER}"]

    [membership]
    interval = 1

    [role.trainer]
    threads = 2
    """
    config = load_config(written(tmp_path, text))
    assert config.listen == (Multiaddr.tcp("127.0.0.1", 4001),)
    assert config.bootstrap[0].peer_id == PEER
    assert config.membership.interval == 1.0
    assert config.role == {"trainer": {"threads": 2}}
    assert load_config(written(tmp_path, "")) == NodeConfig()


def test_the_run_file_lays_its_settings_over_ours() -> None:
    config = NodeConfig()
    changed = config.with_components({"membership": {"interval": 2.0}})
    assert changed.membership.interval == 2.0
    assert changed.gossip == config.gossip
    assert changed.shardcast == config.shardcast
    with pytest.raises(ConfigError, match="the run file sets 'telepathy'"):
        config.with_components({"telepathy": {}})
    with pytest.raises(ConfigError, match="the run file: membership: there is no key"):
        config.with_components({"membership": {"speed": 1}})
