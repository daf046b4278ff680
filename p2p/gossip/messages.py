"""Messages of libp2p's ``/meshsub/1.1.0`` (specs/pubsub, gossipsub-v1.1), to the byte.

Each stream message is one `Rpc`, a protobuf:

    RPC      subscriptions = 1, publish = 2, control = 3
    SubOpts  subscribe = 1, topicid = 2
    Message  from = 1, data = 2, seqno = 3, topic = 4, signature = 5, key = 6
    Control  ihave = 1 (topic = 1, ids = 2), iwant = 2 (ids = 1), graft = 3 (topic = 1),
             prune = 4 (topic = 1, peers = 2, backoff = 3)

A message is signed over ``libp2p-pubsub:`` and the message without signature and key
("StrictSign"). Its id is the author followed by the sequence number. The key is left out: an
Ed25519 PeerId holds it.
"""

from __future__ import annotations

from collections.abc import Sized
from dataclasses import dataclass, field as default, replace
from typing import Final

from p2p.errors import BadMessage
from p2p.identity import FOREIGN, PeerId, ProtocolId, Signer
from p2p.protobuf import (
    FieldBudget,
    as_bytes_untrusted,
    as_int_untrusted,
    as_text_untrusted,
    field,
    fields_untrusted,
)
from p2p.wire import KI

PROTOCOL_ID: Final = ProtocolId("/meshsub/1.1.0")
SIGNATURE_PREFIX: Final = b"libp2p-pubsub:"
MAX_DATA: Final = 256 * KI
"""Maximum bytes of one message's data. Ours are announcements of a few hundred; four of the
largest fit an RPC."""
MAX_RPC: Final = 1024 * KI
"""Maximum bytes of one RPC: a host's largest message, and go-libp2p's default."""
MAX_TOPIC: Final = 128
"""Maximum bytes of a topic's name. A run's, ``/shoal/run/<id>/policy``, has 82."""
MAX_ID: Final = 64
"""Maximum bytes of a message id. Ours have 46: a PeerId of 38 and a sequence number of 8."""
SEQNO_BYTES: Final = 8
"""Bytes of a message's sequence number, by the specification."""
MAX_ENTRIES: Final = 256
"""Maximum number of entries of each kind in one RPC: of subscriptions, four times what we
remember of a peer; of messages, which take 30 ms to verify, twice what we ask one peer for at a
time; of control entries, several times what a peer with 64 topics sends in a heartbeat."""
MAX_IDS: Final = 5000
"""Maximum number of message ids in one RPC; go-libp2p's limit for a heartbeat."""
MAX_FIELDS: Final = 8 * KI
"""Maximum number of protobuf fields in one RPC, including those of unknown kinds. 5,000 ids,
256 messages and 256 subscriptions make 7,560. Fields are counted while decoding, before they
cost time."""


@dataclass(frozen=True, slots=True)
class PubsubMessage:
    """A published message. Absent fields are None, as the signed bytes must be rebuilt
    exactly."""

    author: bytes
    seqno: bytes
    topic: str
    data: bytes | None
    signature: bytes = b""
    key: bytes | None = None

    @property
    def id(self) -> bytes:
        """Message id in IHAVE and IWANT: the author and the sequence number."""
        return self.author + self.seqno

    def unsigned(self) -> bytes:
        """Return the protobuf without signature and key, over which the signature is made."""
        data = b"" if self.data is None else field(2, self.data)
        return field(1, self.author) + data + field(3, self.seqno) + field(4, self.topic)

    def wire(self) -> bytes:
        """Return the whole protobuf."""
        key = b"" if self.key is None else field(6, self.key)
        return self.unsigned() + field(5, self.signature) + key


@dataclass(slots=True)
class Rpc:
    """One RPC of a peer: subscriptions, messages and control."""

    subscriptions: list[tuple[str, bool]] = default(default_factory=list)
    """Pairs of a topic and True if the sender subscribes to it, False if it leaves it."""
    messages: list[PubsubMessage] = default(default_factory=list)
    ihave: list[tuple[str, list[bytes]]] = default(default_factory=list)
    iwant: list[bytes] = default(default_factory=list)
    graft: list[str] = default(default_factory=list)
    prune: list[tuple[str, int]] = default(default_factory=list)
    """Pairs of a topic and the seconds until the receiver may graft again; 0 if unspecified."""
    fields: int = default(default=0, compare=False)
    """Number of protobuf fields that were read to decode it."""


def sign_message(signer: Signer, topic: str, data: bytes, seqno: int) -> PubsubMessage:
    """Sign a message of ``signer``; ``seqno`` must be the next number that it has not used
    yet."""
    number = seqno.to_bytes(SEQNO_BYTES, "big")
    message = PubsubMessage(signer.peer_id.digest, number, topic, data)
    signature = signer.sign(FOREIGN, SIGNATURE_PREFIX + message.unsigned())
    return replace(message, signature=signature)


def author_of(message: PubsubMessage) -> PeerId | None:
    """Return the peer that claims to be the author; None if its key is not Ed25519 or differs
    from the attached one."""
    try:
        author = PeerId(message.author)
    except ValueError:
        return None
    # An identity multihash is two bytes of head and the encoded key.
    return author if message.key in (None, b"", message.author[2:]) else None


def encode_rpc(rpc: Rpc) -> bytes:
    """Return the protobuf of ``rpc``, which is empty if ``rpc`` is."""
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
    """Decode an RPC without checking signatures.

    Raises:
        BadMessage: The bytes are not an RPC. Nothing else is raised, whatever the bytes.
    """
    if len(data) > MAX_RPC:
        raise BadMessage(f"an RPC has at most {MAX_RPC} bytes")
    rpc, budget = Rpc(), FieldBudget(MAX_FIELDS)
    for number, value in fields_untrusted(data, budget):
        if number == 1:
            _count(rpc.subscriptions)
            entry = as_bytes_untrusted(value, "a subscription")
            rpc.subscriptions.append(_subscription_untrusted(entry, budget))
        elif number == 2:
            _count(rpc.messages)
            entry = as_bytes_untrusted(value, "a message")
            rpc.messages.append(decode_message_untrusted(entry, budget))
        elif number == 3:
            _control_untrusted(as_bytes_untrusted(value, "control"), rpc, budget)
    rpc.fields = MAX_FIELDS - budget.left
    return rpc


def decode_message_untrusted(data: bytes, budget: FieldBudget | None = None) -> PubsubMessage:
    """Decode a message without checking its signature.

    Raises:
        BadMessage: The bytes are not a message. Nothing else is raised, whatever the bytes.
    """
    fields: dict[int, int | bytes] = {}
    for number, value in fields_untrusted(data, budget):
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


def _count(entries: Sized) -> None:
    """Raise `BadMessage` if ``entries`` has no room for another entry."""
    if len(entries) >= MAX_ENTRIES:
        raise BadMessage(f"an RPC has more than {MAX_ENTRIES} entries of a kind")


def _subscription_untrusted(data: bytes, budget: FieldBudget) -> tuple[str, bool]:
    fields = dict(fields_untrusted(data, budget))
    subscribed = as_int_untrusted(fields.get(1, 0), "subscribe")
    return _topic_untrusted(fields.get(2, b"")), bool(subscribed)


def _id_untrusted(value: int | bytes) -> bytes:
    identity = as_bytes_untrusted(value, "a message id")
    if not 0 < len(identity) <= MAX_ID:
        raise BadMessage(f"a message id has 1 to {MAX_ID} bytes")
    return identity


def _ids_untrusted(
    data: bytes, tag: int, rpc: Rpc, budget: FieldBudget
) -> tuple[bytes, list[bytes]]:
    """Return the topic in field 1 and the ids in the fields ``tag`` of an IHAVE, or of an IWANT
    with tag 1."""
    room = MAX_IDS - len(rpc.iwant) - sum(len(ids) for _, ids in rpc.ihave)
    topic = b""
    ids: list[bytes] = []
    for number, value in fields_untrusted(data, budget):
        if number == tag:
            if len(ids) >= room:
                raise BadMessage(f"an RPC has more than {MAX_IDS} ids")
            ids.append(_id_untrusted(value))
        elif number == 1:
            topic = as_bytes_untrusted(value, "a topic")
    return topic, ids


def _control_untrusted(data: bytes, rpc: Rpc, budget: FieldBudget) -> None:
    for number, value in fields_untrusted(data, budget):
        if not 1 <= number <= 4:
            continue
        body = as_bytes_untrusted(value, "a control message")
        if number == 1:
            _count(rpc.ihave)
            topic, ids = _ids_untrusted(body, 2, rpc, budget)
            rpc.ihave.append((_topic_untrusted(topic), ids))
        elif number == 2:
            rpc.iwant.extend(_ids_untrusted(body, 1, rpc, budget)[1])
        elif number == 3:
            _count(rpc.graft)
            rpc.graft.append(_topic_untrusted(dict(fields_untrusted(body, budget)).get(1, b"")))
        else:
            _count(rpc.prune)
            fields = dict(fields_untrusted(body, budget))
            backoff = as_int_untrusted(fields.get(3, 0), "backoff")
            # An hour is the most that a PRUNE may ask for.
            rpc.prune.append((_topic_untrusted(fields.get(1, b"")), min(backoff, 3600)))
