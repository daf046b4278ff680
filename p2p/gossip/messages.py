"""Messages of libp2p's ``/meshsub/1.1.0`` (specs/pubsub, gossipsub-v1.1), to the byte.

Each stream message is one `Rpc`, a protobuf:

    RPC      subscriptions = 1, publish = 2, control = 3
    SubOpts  subscribe = 1, topicid = 2
    Message  from = 1, data = 2, seqno = 3, topic = 4, signature = 5, key = 6
    Control  ihave = 1 (topic = 1, ids = 2), iwant = 2 (ids = 1), graft = 3 (topic = 1),
             prune = 4 (topic = 1, peers = 2, backoff = 3)

A message is signed over ``libp2p-pubsub:`` and the message without signature and key ("StrictSign"). Its
id is the author followed by the sequence number. The key is left out: an Ed25519 PeerId holds it.
"""

from __future__ import annotations

from dataclasses import dataclass, field as default
from typing import Final

from p2p.errors import BadMessage
from p2p.identity import PeerId, ProtocolId, Signer
from p2p.protobuf import as_bytes_untrusted, as_int_untrusted, as_text_untrusted, field, fields_untrusted
from p2p.wire import KI

PROTOCOL_ID: Final = ProtocolId("/meshsub/1.1.0")
SIGNATURE_PREFIX: Final = b"libp2p-pubsub:"
MAX_DATA: Final = 256 * KI
"""Bytes of one message's data. Ours are announcements of a few hundred; four of the largest fit an RPC."""
MAX_RPC: Final = 1024 * KI
"""Bytes of one RPC: a host's largest message, and go-libp2p's default."""
MAX_TOPIC: Final = 128
"""Bytes of a topic's name."""
MAX_ID: Final = 64
"""Bytes of a message id; ours have 46."""
SEQNO_BYTES: Final = 8
MAX_SUBSCRIPTIONS: Final = 256
MAX_MESSAGES: Final = 1024
MAX_CONTROL: Final = 256
"""Entries of each kind in one RPC: several times what a peer of 64 topics says in a heartbeat."""
MAX_IDS: Final = 5000
"""Message ids in all of one RPC; go-libp2p's limit for a heartbeat."""
MAX_BACKOFF: Final = 3600
"""Seconds a peer may ask us to stay away; longer is cut to this."""


@dataclass(frozen=True, slots=True)
class PubsubMessage:
    """Something published. Absent fields are None: what was signed must be rebuilt exactly."""

    author: bytes
    seqno: bytes
    topic: str
    data: bytes | None
    signature: bytes = b""
    key: bytes | None = None

    @property
    def id(self) -> bytes:
        """What it is called in IHAVE and IWANT."""
        return self.author + self.seqno

    def unsigned(self) -> bytes:
        """The protobuf without signature and key."""
        data = b"" if self.data is None else field(2, self.data)
        return field(1, self.author) + data + field(3, self.seqno) + field(4, self.topic)

    def wire(self) -> bytes:
        """The protobuf."""
        key = b"" if self.key is None else field(6, self.key)
        return self.unsigned() + field(5, self.signature) + key


@dataclass(slots=True)
class Rpc:
    """Everything one peer tells another at a time."""

    subscriptions: list[tuple[str, bool]] = default(default_factory=list)
    """Topic, and whether the sender subscribes to it or leaves it."""
    messages: list[PubsubMessage] = default(default_factory=list)
    ihave: list[tuple[str, list[bytes]]] = default(default_factory=list)
    iwant: list[bytes] = default(default_factory=list)
    graft: list[str] = default(default_factory=list)
    prune: list[tuple[str, int]] = default(default_factory=list)
    """Topic, and seconds until the receiver may graft again; 0 if it was not said."""


def sign_message(signer: Signer, topic: str, data: bytes, seqno: int) -> PubsubMessage:
    """A message of ours."""
    number = seqno.to_bytes(SEQNO_BYTES, "big")
    message = PubsubMessage(signer.peer_id.digest, number, topic, data)
    signature = signer.sign_raw(SIGNATURE_PREFIX + message.unsigned())
    return PubsubMessage(message.author, number, topic, data, signature)


def author_of(message: PubsubMessage) -> PeerId | None:
    """Who claims to have published it; None if its key is not Ed25519, or not the one it brings along."""
    try:
        author = PeerId(message.author)
    except ValueError:
        return None
    # An identity multihash is two bytes of head and the encoded key.
    return author if message.key in (None, b"", message.author[2:]) else None


def encode_rpc(rpc: Rpc) -> bytes:
    """The bytes of ``rpc``."""
    out = bytearray()
    for topic, wanted in rpc.subscriptions:
        out += field(1, field(1, wanted) + field(2, topic))
    for message in rpc.messages:
        out += field(2, message.wire())
    control = bytearray()
    for topic, ids in rpc.ihave:
        control += field(1, field(1, topic) + b"".join(field(2, each) for each in ids))
    if rpc.iwant:
        control += field(2, b"".join(field(1, each) for each in rpc.iwant))
    for topic in rpc.graft:
        control += field(3, field(1, topic))
    for topic, backoff in rpc.prune:
        control += field(4, field(1, topic) + (field(3, backoff) if backoff else b""))
    if control:
        out += field(3, bytes(control))
    return bytes(out)


def decode_rpc_untrusted(data: bytes) -> Rpc:
    """Raise `BadMessage`, and nothing else, whatever the bytes. Signatures are *not* checked."""
    if len(data) > MAX_RPC:
        raise BadMessage(f"an RPC has at most {MAX_RPC} bytes")
    rpc = Rpc()
    for number, value in fields_untrusted(data):
        if number == 1:
            rpc.subscriptions.append(_subscription_untrusted(as_bytes_untrusted(value, "a subscription")))
        elif number == 2:
            rpc.messages.append(decode_message_untrusted(as_bytes_untrusted(value, "a message")))
        elif number == 3:
            _control_untrusted(as_bytes_untrusted(value, "control"), rpc)
    counts = (len(rpc.ihave), len(rpc.graft), len(rpc.prune))
    if len(rpc.subscriptions) > MAX_SUBSCRIPTIONS or len(rpc.messages) > MAX_MESSAGES:
        raise BadMessage("an RPC has too many subscriptions or messages")
    if max(counts) > MAX_CONTROL or len(rpc.iwant) + sum(len(ids) for _, ids in rpc.ihave) > MAX_IDS:
        raise BadMessage("an RPC has too much control")
    return rpc


def decode_message_untrusted(data: bytes) -> PubsubMessage:
    """Raise `BadMessage`, and nothing else, whatever the bytes. The signature is *not* checked."""
    fields: dict[int, int | bytes] = {}
    for number, value in fields_untrusted(data):
        if 1 <= number <= 6:
            fields[number] = value
    payload = None if 2 not in fields else as_bytes_untrusted(fields[2], "data")
    key = None if 6 not in fields else as_bytes_untrusted(fields[6], "key")
    message = PubsubMessage(
        author=as_bytes_untrusted(fields.get(1, b""), "from"),
        seqno=as_bytes_untrusted(fields.get(3, b""), "seqno"),
        topic=_topic_untrusted(fields.get(4, b"")),
        data=payload,
        signature=as_bytes_untrusted(fields.get(5, b""), "signature"),
        key=key,
    )
    if len(message.seqno) != SEQNO_BYTES or not 0 < len(message.author) <= MAX_ID - SEQNO_BYTES:
        raise BadMessage("a message needs an author and 8 bytes of sequence number")
    if payload is not None and len(payload) > MAX_DATA:
        raise BadMessage(f"a message carries at most {MAX_DATA} bytes")
    return message


def _topic_untrusted(value: int | bytes) -> str:
    topic = as_text_untrusted(value, "a topic")
    if not topic or len(value if isinstance(value, bytes) else b"") > MAX_TOPIC:
        raise BadMessage(f"a topic has 1 to {MAX_TOPIC} bytes")
    return topic


def _subscription_untrusted(data: bytes) -> tuple[str, bool]:
    fields = dict(fields_untrusted(data))
    return _topic_untrusted(fields.get(2, b"")), bool(as_int_untrusted(fields.get(1, 0), "subscribe"))


def _id_untrusted(value: int | bytes) -> bytes:
    identity = as_bytes_untrusted(value, "a message id")
    if not 0 < len(identity) <= MAX_ID:
        raise BadMessage(f"a message id has 1 to {MAX_ID} bytes")
    return identity


def _control_untrusted(data: bytes, rpc: Rpc) -> None:
    for number, value in fields_untrusted(data):
        if not 1 <= number <= 4:
            continue
        body = list(fields_untrusted(as_bytes_untrusted(value, "a control message")))
        if number == 2:
            rpc.iwant += [_id_untrusted(each) for tag, each in body if tag == 1]
            continue
        topic = _topic_untrusted(dict(body).get(1, b""))
        if number == 1:
            rpc.ihave.append((topic, [_id_untrusted(each) for tag, each in body if tag == 2]))
        elif number == 3:
            rpc.graft.append(topic)
        else:
            backoff = as_int_untrusted(dict(body).get(3, 0), "backoff")
            rpc.prune.append((topic, min(backoff, MAX_BACKOFF)))
