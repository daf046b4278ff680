"""Whatever comes in, SHARDCAST's parsers raise `BadMessage` or give a value that encodes
back.
"""

from __future__ import annotations

import contextlib
from random import Random

from hypothesis import given, strategies as st

from p2p.errors import BadMessage
from p2p.identity import KeyPair
from p2p.shardcast.adapter import (
    AdapterFile,
    Piece,
    Target,
    merge_run_untrusted,
    read_adapter_untrusted,
)
from p2p.shardcast.codec import decode_chunk_untrusted, encode_chunk
from p2p.shardcast.config import ShardcastConfig
from p2p.shardcast.core import events as ev
from p2p.shardcast.core.core import ShardcastCore
from p2p.shardcast.core.statements import Statements
from p2p.shardcast.forest import FOREST_RULE, Roster, RosterEntry, decode_roster_untrusted
from p2p.shardcast.index import (
    Index,
    PolicyFile,
    Span,
    decode_index_untrusted,
    digest_of,
)
from p2p.shardcast.layout import Tensor, tensors_untrusted
from p2p.shardcast.manifest import (
    NO_POLICY,
    Encoding,
    Manifest,
    PolicyVersion,
    decode_manifest_untrusted,
)
from p2p.shardcast.messages import (
    BULK_OVERHEAD,
    Ask,
    Blame,
    ChunkHeader,
    Credit,
    Evidence,
    Have,
    Hello,
    Message,
    PolicyNews,
    Receipt,
    RosterNews,
    Skipped,
    Taken,
    Want,
    decode_chunk_header_untrusted,
    decode_message_untrusted,
    encode_chunk_header,
    encode_message,
)
from p2p.shardcast.patch import SpanRun
from p2p.wire import pack
from tests.support.foreign import BOMBS

KEY = KeyPair(digest_of(b"trainer"))
OTHERS = [KeyPair(digest_of(b"%d" % number)).peer_id for number in range(3)]
NAME = digest_of(b"policy")
RAW = b"\x01\x3f\x7f\x3f" * 25
WIRES = [encode_chunk(Span(digest_of(RAW), len(RAW), kind), RAW) for kind in (0, 2, 4)]
INDEX = Index.of(
    [PolicyFile("a/b", 60), PolicyFile("c", 0), PolicyFile("d", 40)],
    [Span(digest_of(b"%d" % number), 20, number % 2 * 2) for number in range(5)],
)
MANIFEST = Manifest(
    KEY.peer_id,
    b"run",
    PolicyVersion(1),
    NO_POLICY,
    b"",
    INDEX.digest,
    100,
    (Encoding.anchor(INDEX, 50),),
).sign(KEY)
ROSTER = Roster.sign(KEY, b"run", 1, [RosterEntry(peer) for peer in OTHERS])
MESSAGES: list[Message] = [
    Hello(-1),
    PolicyNews(MANIFEST.encode(), INDEX.data),
    RosterNews(ROSTER.encode()),
    Evidence(MANIFEST.encode(), MANIFEST.encode()),
    Ask(NAME, True),
    Have(NAME, ((0, 3), (5, 1))),
    Taken(NAME, ((7, 1),)),
    Skipped(NAME, 1, 0, ((2, 2),)),
    Want(NAME, (1, 2)),
    Credit(NAME, 3, 5),
    Receipt(NAME, 1500, ((1, 0, 12), (1, 3, 9))),
    Blame(NAME, OTHERS[0]),
]

nested = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.binary(max_size=40)
    | st.text(max_size=9),
    lambda inner: st.lists(inner, max_size=9),
    max_leaves=12,
)
KINDS = (
    "hello",
    "policy",
    "roster",
    "evidence",
    "ask",
    "have",
    "taken",
    "want",
    "credit",
    "blame",
)
kinds = st.sampled_from(KINDS)
shaped = st.tuples(kinds, st.lists(nested, max_size=4)).map(
    lambda pair: pack([pair[0], *pair[1]])
)
valid = st.sampled_from([encode_message(message) for message in MESSAGES])


@st.composite
def mutated(draw, source):
    data = bytearray(draw(source))
    for _ in range(draw(st.integers(0, 3))):
        data[draw(st.integers(0, len(data) - 1))] = draw(st.integers(0, 255))
    return (
        bytes(data[: draw(st.integers(0, len(data)))]) if draw(st.booleans()) else bytes(data)
    )


bombs = st.builds(
    lambda bomb, cut: bomb[:cut], st.sampled_from(list(BOMBS.values())), st.integers(0, 5000)
)
foreign = st.one_of(st.binary(max_size=200), shaped, mutated(valid), bombs)


def test_every_message_survives_the_wire() -> None:
    for message in MESSAGES:
        assert decode_message_untrusted(encode_message(message)) == message


@given(foreign)
def test_messages(data: bytes) -> None:
    with contextlib.suppress(BadMessage):
        message = decode_message_untrusted(data)
        assert decode_message_untrusted(encode_message(message)) == message


@given(
    st.one_of(
        st.binary(max_size=100),
        st.binary(min_size=BULK_OVERHEAD - 1, max_size=BULK_OVERHEAD).map(b"\0".__add__),
    )
)
def test_heads_of_chunks(data: bytes) -> None:
    with contextlib.suppress(BadMessage):
        assert encode_chunk_header(decode_chunk_header_untrusted(data)) == data


@given(
    st.one_of(
        st.binary(max_size=200), nested.map(pack), mutated(st.just(MANIFEST.encode())), bombs
    )
)
def test_manifests(data: bytes) -> None:
    with contextlib.suppress(BadMessage):
        assert decode_manifest_untrusted(data, b"run", lambda *_: True).encode()


@given(st.lists(nested, max_size=10).map(pack) | bombs)
def test_manifests_with_a_good_signature(content: bytes) -> None:
    with contextlib.suppress(BadMessage):
        decode_manifest_untrusted(pack([content, bytes(64)]), b"run", lambda *_: True)


def _as_rows(rows: bytes) -> bytes:
    return pack([FOREST_RULE, KEY.peer_id.digest, b"run", 1, rows])


@given(st.one_of(st.binary(max_size=200), mutated(st.just(ROSTER.encode())), bombs))
def test_rosters(data: bytes) -> None:
    with contextlib.suppress(BadMessage):
        assert decode_roster_untrusted(data, b"run", lambda *_: True).encode() == data


@given(st.lists(nested, max_size=5).map(pack) | bombs | st.binary(max_size=200).map(_as_rows))
def test_rosters_with_a_good_signature(content: bytes) -> None:
    with contextlib.suppress(BadMessage):
        decode_roster_untrusted(pack([content, bytes(64)]), b"run", lambda *_: True)


@given(st.binary(max_size=300) | mutated(st.just(INDEX.data)), st.integers(1, 6))
def test_indexes(data: bytes, count: int) -> None:
    with contextlib.suppress(BadMessage):
        index = decode_index_untrusted(data, digest_of(data), count, 100)
        assert Index.of(index.files, index.spans) == index
        assert all(index.place(span).offset < 100 for span in range(count))


@given(
    st.one_of(
        st.binary(max_size=100),
        st.binary(max_size=50).map(lambda b: b"\x28\xb5\x2f\xfd" + b),
        mutated(st.sampled_from(WIRES)),
    ),
    st.sampled_from([0, 2, 4]),
)
def test_chunks(data: bytes, kind: int) -> None:
    with contextlib.suppress(BadMessage):
        raw = decode_chunk_untrusted(Span(digest_of(RAW), len(RAW), kind), data)
        assert bytes(raw) == RAW


steps = st.lists(
    st.tuples(st.sampled_from(OTHERS), st.one_of(st.sampled_from(MESSAGES), st.integers(0, 8))),
    max_size=25,
)


@given(steps)
def test_no_order_of_messages_breaks_a_core(course) -> None:
    statements = Statements(b"run", KEY.peer_id.__eq__, lambda *_: True)
    core = ShardcastCore(OTHERS[0], ShardcastConfig(), statements, Random(1))
    now = 0.0
    for peer, step in course:
        now += 0.3
        with contextlib.suppress(BadMessage):
            if isinstance(step, int):
                header = ChunkHeader(MANIFEST.digest, step, 1, step % 3)
                core.handle(ev.ChunkCame(peer, header, 10), now)
            else:
                core.handle(ev.Heard(peer, _about(step), gossip=peer == OTHERS[2]), now)
        if core.next_deadline <= now:
            core.handle(ev.Tick(), now)
            assert core.next_deadline > now


def _about(message: Message) -> Message:
    """The same about the policy that the core may know."""
    if isinstance(message, Ask | Have | Taken | Skipped | Want | Credit | Blame):
        return type(message)(
            MANIFEST.digest, *[getattr(message, name) for name in message.__slots__[1:]]
        )
    return message


@given(st.binary(max_size=600), st.binary(max_size=9))
def test_adapters_are_judged_whatever_they_are(header: bytes, terms: bytes) -> None:
    target = b'{"a.weight":{"dtype":"BF16","shape":[4,2],"data_offsets":[0,16]}}'
    policy = [tensors_untrusted(target, 8 + len(target) + 16)]
    good = (
        b'{"a.lora_A":{"dtype":"F32","shape":[1,2],"data_offsets":[0,8]},"a.lora_B":{"dtype":"F32"'
        b',"shape":[4,1],"data_offsets":[8,24]},"lora":{"dtype":"F32","shape":[2],"data_offsets":'
        b"[24,32]}}"
    )
    at = len(header) % len(good)
    for data in (header, good, good[:at] + header[:3] + good[at + 3 :]):
        with contextlib.suppress(BadMessage):
            found = tensors_untrusted(data, 8 + len(data) + 32)
            read_adapter_untrusted("a", found, terms, policy)


@given(st.binary(min_size=8, max_size=8), st.binary(min_size=16, max_size=16))
def test_sums_of_any_bits_are_right_or_not(down: bytes, up: bytes) -> None:
    run, span = SpanRun(0, 1, 16, 2), Span(digest_of(bytes(16)), 16, 2)
    factor = Tensor(0, 16, 4, dtype="F32")
    target = Target(0, Tensor(0, 16, 2, dtype="BF16"), factor, factor)
    piece = Piece(0, 16, 0, down, up, target, AdapterFile("", 1e30, 1, (target,)))
    raw, mask = merge_run_untrusted(run, [span], bytes(16), [piece])
    assert mask == (raw == bytes(16))
