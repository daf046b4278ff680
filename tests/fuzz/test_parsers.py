"""Whatever the bytes, each parser raises `BadMessage` or returns what keeps its law."""

from __future__ import annotations

import contextlib
import io
import json
import struct
import zipfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from ipaddress import IPv4Address
from typing import Any

import numpy as np
import pytest
from hypothesis import given, strategies as st

from bench.dht import Swarm
from p2p.circuit import messages as circuit
from p2p.dht import Record, messages as dht
from p2p.dht.record import decode_addrs_untrusted, decode_record_untrusted, encode_addrs
from p2p.equivocation import Equivocation
from p2p.errors import BadMessage
from p2p.gossip import messages as gossip
from p2p.identity import FOREIGN, KeyPair, ProtocolId, decode_peer_id_untrusted, verify
from p2p.ledger.core.chain import (
    EMPTY,
    decode_entry_untrusted,
    decode_fork_untrusted,
    make_entry,
)
from p2p.ledger.core.exchange import Exchange, Question, Shelf, decode_question_untrusted
from p2p.membership import heartbeat, messages as membership
from p2p.multiaddr import Multiaddr, decode_multiaddr_untrusted
from p2p.node import admission
from p2p.node.clock import decode_clock_untrusted
from p2p.node.plugins import open_run_untrusted
from p2p.node.wiring import places_untrusted
from p2p.protobuf import field, fields_untrusted
from p2p.reach import mapping, messages as autonat
from p2p.shardcast import messages as shardcast
from p2p.shardcast.codec import decode_chunk_untrusted, encode_chunk
from p2p.shardcast.forest import Roster, RosterEntry, decode_roster_untrusted
from p2p.shardcast.index import Index, PolicyFile, Span, decode_index_untrusted, digest_of
from p2p.shardcast.manifest import (
    NO_POLICY,
    Encoding,
    Manifest,
    PolicyVersion,
    decode_manifest_untrusted,
)
from p2p.swarm.identify import decode_info_untrusted, encode_info
from p2p.transport import dns as names
from p2p.transport.core.noise import decode_hello_untrusted, decode_public_key_untrusted
from p2p.wire import FrameParser, decode_varint_untrusted, frame, pack, unpack_untrusted
from proofs.checks import Verdict
from roles.contract.core.diloco import Codec
from roles.contract.core.file import decode_run_untrusted
from roles.diloco.core import messages as diloco, quant
from roles.engines.base import Completion, Group
from roles.envs.capsule import read_capsule_untrusted
from roles.envs.text import (
    Message,
    TextTask,
    pack_text_task,
    unpack_text_task_untrusted,
)
from roles.models.config import read_config_untrusted, read_end_tokens_untrusted
from roles.models.safetensors import RawTensor, decode_untrusted, encode
from roles.protocol.core import answer
from roles.protocol.core.account import decode_account_untrusted
from roles.protocol.core.conviction import open_conviction_untrusted
from roles.protocol.core.groups import (
    decode_groups_untrusted,
    decode_logprobs_untrusted,
    encode_groups,
)
from roles.protocol.core.statements import decode_accusation_untrusted
from roles.protocol.core.verdict import decode_verdict_untrusted
from roles.protocol.core.window import (
    decode_commitment_untrusted,
    decode_submission_untrusted,
    decode_window_untrusted,
)
from roles.trainer.taken import decode_taken_untrusted
from tests.support.foreign import damaged
from tests.support.models import SMOLLM2
from tests.support.runs import RUN
from tests.unit import work_messages as made
from tests.unit.core_swarm import FakeSigner, peer_named

ALICE, BOB, MALLORY = (KeyPair(bytes([number]) * 32) for number in (1, 2, 3))
ADDR = Multiaddr.tcp("1.2.3.4", 5)


@dataclass(frozen=True)
class Parser:
    """A parser, what it reads, and what holds of a value that it made of bytes."""

    read: Callable[[bytes], Any]
    valid: tuple[bytes, ...] = ()
    holds: Callable[[Any, bytes], bool] = lambda value, data: True


def rewritten(
    read: Callable[[bytes], Any], write: Callable[[Any], bytes], *valid: bytes
) -> Parser:
    """A parser that understands what is written of whatever it has understood."""
    return Parser(read, valid, lambda value, _: read(write(value)) == value)


def exact(read: Callable[[bytes], Any], write: Callable[[Any], bytes], *valid: bytes) -> Parser:
    """A parser for which there is one way to write a value."""
    return Parser(read, valid, lambda value, data: write(value) == data)


def anyone(*_: object) -> bool:
    """Take each signature for good, so that what was signed is looked at."""
    return True


# Transport and addresses

PUBLIC_KEY = field(1, 1) + field(2, ALICE.peer_id.public_key)
SIGNED_STATIC = ALICE.sign(FOREIGN, b"noise-libp2p-static-key:" + bytes(32))
HELLO = field(1, PUBLIC_KEY) + field(2, SIGNED_STATIC) + field(4, field(2, b"/yamux/1.0.0"))
PROTOCOLS = [ProtocolId("/a"), ProtocolId("/b")]
INFO = encode_info(ALICE.peer_id, PROTOCOLS, [ADDR], Multiaddr.tcp("::1", 6))
NAMED = Multiaddr.parse("/dns4/example.org/tcp/4001").with_peer(ALICE.peer_id)


def is_place(addr: Multiaddr) -> bool:
    place = addr.transport
    return bool(
        place.peer_id is None
        and place.with_peer(BOB.peer_id).transport == place
        and (
            addr.relay is not None
            or place.parts[0][0] == "memory"
            or place.host_port[1] < 2**16
        )
    )


TRANSPORT = {
    "public key": Parser(decode_public_key_untrusted, (PUBLIC_KEY,)),
    "noise hello": Parser(lambda data: decode_hello_untrusted(data, bytes(32)), (HELLO,)),
    "identify": Parser(
        decode_info_untrusted, (INFO,), lambda info, _: len(info.protocols) <= 128
    ),
    "address": Parser(
        decode_multiaddr_untrusted,
        (NAMED.to_bytes(), ADDR.with_peer(BOB.peer_id).through.to_bytes(), b"\x29" + bytes(16)
         + b"\x06\x10\xe1"),
        lambda addr, _: is_place(addr) and decode_multiaddr_untrusted(addr.to_bytes()) == addr,
    ),
    "peer id": exact(decode_peer_id_untrusted, lambda peer: peer.digest, ALICE.peer_id.digest),
    "varint": Parser(decode_varint_untrusted, (b"\xac\x02",)),
    "msgpack": Parser(unpack_untrusted, (pack([1, "a", b"b", None, {"c": [True]}]),)),
    "protobuf": Parser(lambda data: list(fields_untrusted(data)), (INFO,)),
    "frames": Parser(lambda data: list(FrameParser(50).receive_data(data)), (frame(b"a"),)),
}  # fmt: skip

# Circuits, reachability, routers

CIRCUIT = ADDR.with_peer(ALICE.peer_id).through
VOUCHER = circuit.sign_voucher(ALICE, BOB.peer_id, 1_800_000_000)
HOP = circuit.HopMessage(
    kind=circuit.HopType.STATUS,
    peer=BOB.peer_id,
    reservation=circuit.Reservation(1, (CIRCUIT,), VOUCHER),
    limit=circuit.Limit(1, 2),
    status=100,
)
STOP = circuit.StopMessage(
    kind=circuit.StopType.CONNECT, peer=BOB.peer_id, limit=circuit.Limit(1)
)
DIALS = (
    autonat.DialRequest((CIRCUIT, None), 7).encode(),
    autonat.DialResponse(200, 1, 200).encode(),
    autonat.DialDataRequest(1, 30_000).encode(),
    autonat.DialDataResponse(b"x" * 40).encode(),
)
ROUTER, NONCE = "192.168.1.1", bytes(range(12))
PCP = struct.pack(">BBxBII12x12sB3xHH16s", 2, 129, 0, 60, 9, NONCE, 6, 7, 8, bytes(16))
PMP = struct.pack(">BBHIHHI", 0, 130, 0, 9, 7, 8, 60)
URL = f"http://{ROUTER}:5000/a?b=c"
SSDP = f"HTTP/1.1 200 OK\r\nST: x\r\nLOCATION: {URL}\r\n\r\n".encode()
KIND = "urn:schemas-upnp-org:service:WANPPPConnection:1"
DESCRIPTION = (
    f"<service><serviceType>{KIND}</serviceType><controlURL>{URL}</controlURL></service>"
).encode()
SOAP = b"<errorCode>718</errorCode><NewExternalIPAddress>8.8.8.8</NewExternalIPAddress>"
CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n0\r\n\r\n"
SIZED = b"HTTP/1.1 200 OK\r\nContent-Length: 3\r\n\r\nabc"
NAME = "a.example"
PLACE = f"dnsaddr=/ip4/1.2.3.4/tcp/5/p2p/{ALICE.peer_id}"
QUESTION = names.encode_question(NAME, names.TXT)[12:]
TEXT = names.encode_record(NAME, names.TXT, 9, bytes([len(PLACE)]) + PLACE.encode() + b"\1x")
BACK = b"\xc0\x0c" + TEXT[len(NAME) + 2 :]
"""The same record, whose name is a pointer to the question's."""
DNS = struct.pack(">HHHHHH", 7, 0x8400, 1, 2, 0, 0) + QUESTION + TEXT + BACK


def text(read: Callable[[str], Any]) -> Callable[[bytes], Any]:
    return lambda data: read(data.decode("utf-8", "replace"))


def belongs_to_router(url: tuple[int, str], _: bytes) -> bool:
    return 0 <= url[0] <= 0xFFFF and not set(url[1]) & set(" \r\n")


REACH = {
    "hop": rewritten(circuit.decode_hop_untrusted, circuit.HopMessage.encode, HOP.encode()),
    "stop": rewritten(circuit.decode_stop_untrusted, circuit.StopMessage.encode, STOP.encode()),
    "punch": Parser(
        circuit.decode_punch_untrusted,
        (circuit.HolePunch(circuit.PunchType.CONNECT, (CIRCUIT,) * 6).encode(),),
        lambda punch, _: len(punch.addrs) <= circuit.MAX_ADDRS,
    ),
    "voucher": Parser(
        lambda data: circuit.check_voucher_untrusted(data, ALICE.peer_id, BOB.peer_id),
        (VOUCHER,),
    ),
    "voucher of another relay": Parser(
        lambda data: circuit.check_voucher_untrusted(data, MALLORY.peer_id, BOB.peer_id),
        holds=lambda *_: False,
    ),
    "autonat": Parser(autonat.decode_untrusted, DIALS),
    "dial back": Parser(
        autonat.decode_dial_back_untrusted,
        (autonat.encode_dial_back(7),),
        lambda nonce, _: 0 <= nonce < 2**64,
    ),
    "pcp": Parser(
        lambda data: mapping.decode_pcp_untrusted(data, NONCE, 7), (PCP,),
        lambda it, _: it.port < 2**16,
    ),
    "pmp": Parser(
        lambda data: mapping.decode_pmp_untrusted(data, 2, 7), (PMP,),
        lambda it, _: it.port < 2**16,
    ),
    "http": Parser(
        mapping.decode_http_untrusted,
        (CHUNKED, SIZED),
        lambda found, data: 0 <= found[0] <= 999 and len(found[1]) <= len(data),
    ),
    "ssdp": Parser(
        lambda data: mapping.decode_ssdp_untrusted(data, ROUTER), (SSDP,), belongs_to_router
    ),
    "url": Parser(
        text(lambda said: mapping.decode_url_untrusted(said, ROUTER)), (URL.encode(),),
        belongs_to_router,
    ),
    "description": Parser(
        text(lambda said: mapping.decode_description_untrusted(said, ROUTER, 80, "/")),
        (DESCRIPTION,),
        lambda service, _: service.host == ROUTER,
    ),
    "soap": Parser(
        text(lambda said: mapping.decode_soap_untrusted(500, said, ["NewExternalIPAddress"])),
        (SOAP,),
        lambda reply, _: reply[0] in range(1000) and all(len(x) <= 64 for x in reply[1]),
    ),
    "ipv4": Parser(
        text(mapping.decode_ipv4_untrusted), (b"8.8.8.8",),
        lambda it, _: isinstance(it, IPv4Address),
    ),
    "dns": Parser(
        names.decode_dns_untrusted,
        (DNS, names.encode_question(NAME, names.PTR, 3)),
        lambda message, data: sum(len(t) for _, texts in message.texts for t in texts)
        <= len(data),
    ),
    "dnsaddr": Parser(
        lambda data: names.dnsaddrs_untrusted(data.decode("latin-1").split("\n")),
        ("\n".join([PLACE, "x"]).encode(),),
        lambda found, data: len(found) <= data.count(b"\n") + 1,
    ),
}  # fmt: skip

# Services

ONE, TWO, THREE = Swarm(3, 1).nodes.values()
OWN = ONE.core.own
BODIES = (
    dht.Ping(),
    dht.FindNode(bytes(20)),
    dht.FindValue(bytes(20)),
    dht.Store(bytes(20), b"record"),
    dht.Pong(),
    dht.Nodes((TWO.core.own, THREE.core.own)),
    dht.Values((b"record",), (TWO.core.own,)),
    dht.Stored(True),
)
RECORD = Record("run", b"name", ALICE.peer_id, bytes(8), 1, 9, b"value", bytes(64))
RPC = gossip.Rpc(
    subscriptions=[("topic", True)],
    messages=[gossip.sign_message(ALICE, "topic", b"data", 7)],
    ihave=[("topic", [b"one", b"two"])],
    iwant=[b"three"],
    graft=["topic"],
    prune=[("other", 60)],
)
PROFILE = heartbeat.Profile(addrs=(ADDR,), roles=("liar",), policy=3, version="0.1.0")
BEAT = heartbeat.sign_heartbeat(
    heartbeat.Heartbeat(
        peer=ALICE.peer_id, seqno=7, expires=1000, interval=5.0, profile=PROFILE
    ),
    ALICE,
)
SAID: tuple[membership.Message, ...] = (
    membership.Beat(True, BEAT, (heartbeat.Digest(b"8 bytes.", 5, 2),)),
    membership.Join(BEAT),
    membership.ForwardJoin(2, BEAT),
    membership.Neighbor(True, BEAT),
    membership.NeighborReply(True, BEAT),
    membership.Disconnect(),
    membership.Newcomers((BEAT.digest,)),
    membership.Want((ALICE.peer_id.public_key[:8], b"8 bytes.")),
    membership.Heartbeats((BEAT,)),
    membership.Suspect((BEAT,)),
)
ENTRIES = [make_entry(EMPTY, ALICE, "verdict", body, 0) for body in (b"yes", b"no")]
INVITE = admission.sign_invite(RUN.id, "inference", 3, 2_000_000_000, b"s" * 32, ALICE)
PASS = INVITE.pass_for(ALICE.peer_id).to_bytes()
SHELF = Shelf(10**6)
for one in ENTRIES[:1]:
    SHELF.add(one)
QUESTION_OF_LEDGERS = Question({ALICE.peer_id: SHELF.extent(9)}, [BOB.peer_id]).to_bytes()


def is_answered(question: Question) -> bool:
    """Return True if a node tells of the authors that it is asked about and of no others."""
    exchange = Exchange(verify)
    exchange.follow([ALICE.peer_id])
    exchange.take_untrusted(ENTRIES[0])
    answered = exchange.answer(question).statements
    return all(statement.author in question.extents for statement in answered)


def read_dht(data: bytes) -> tuple[int, dht.Contact, Any]:
    envelope = dht.decode_untrusted(data)
    return envelope.request_id, envelope.sender, envelope.body


SERVICES = {
    "dht": rewritten(
        read_dht, lambda it: dht.encode(*it), *(dht.encode(7, OWN, body) for body in BODIES)
    ),
    "dht contact": Parser(dht.decode_contact_untrusted),
    "dht record": rewritten(decode_record_untrusted, Record.encode, RECORD.encode()),
    "dht addresses": Parser(decode_addrs_untrusted, (encode_addrs((ADDR,)),)),
    "gossip": rewritten(gossip.decode_rpc_untrusted, gossip.encode_rpc, gossip.encode_rpc(RPC)),
    "gossip message": Parser(gossip.decode_message_untrusted, (RPC.messages[0].wire(),)),
    "membership": rewritten(
        membership.decode_message_untrusted,
        membership.encode_message,
        *map(membership.encode_message, SAID),
    ),
    "heartbeat": exact(
        heartbeat.decode_heartbeat_untrusted, lambda signed: signed.wire, BEAT.wire
    ),
    "run file": Parser(decode_run_untrusted, (RUN.document,)),
    "run file by plug-in": Parser(
        lambda data: open_run_untrusted(data, verify), (RUN.document,)
    ),
    "ledger entry": Parser(decode_entry_untrusted, (ENTRIES[0].encode(),)),
    "ledger fork": Parser(decode_fork_untrusted, (Equivocation(*ENTRIES).encode(),)),
    "ledger question": Parser(
        decode_question_untrusted, (QUESTION_OF_LEDGERS,), lambda asked, _: is_answered(asked)
    ),
    "clock": Parser(decode_clock_untrusted, (pack([1.8e9]),)),
    "invite": Parser(
        lambda data: admission.decode_invite_untrusted(data.decode("latin-1")),
        (INVITE.to_text().encode(),),
    ),
    "pass": Parser(admission.decode_pass_untrusted, (PASS,)),
    "credential": Parser(
        admission.decode_credential_untrusted,
        (admission.Credential(b"n" * 8, PASS, b"w" * 8).to_bytes(),),
    ),
    "run record": Parser(
        lambda data: places_untrusted(replace(RECORD, name=RUN.id, value=data)),
        (pack([b"\x04\x7f\x00\x00\x01\x06\x10\x00"]),),
    ),
}

# SHARDCAST

RAW = b"\x01\x3f\x7f\x3f" * 25
SPANS = [Span(digest_of(RAW), len(RAW), kind) for kind in (0, 2, 4)]
POLICY = digest_of(b"policy")
INDEX = Index.of(
    [PolicyFile("a/b", 60), PolicyFile("c", 0), PolicyFile("d", 40)],
    [Span(digest_of(b"%d" % number), 20, number % 2 * 2) for number in range(5)],
)
MANIFEST = Manifest(
    ALICE.peer_id, b"run", PolicyVersion(1), NO_POLICY, b"", INDEX.digest, 100,
    (Encoding.anchor(INDEX, 50),),
).sign(ALICE)  # fmt: skip
ROSTER = Roster.sign(ALICE, b"run", 1, [RosterEntry(one.peer_id) for one in (BOB, MALLORY)])
NEWS: tuple[shardcast.Message, ...] = (
    shardcast.Hello(-1),
    shardcast.PolicyNews(MANIFEST.encode(), INDEX.data),
    shardcast.RosterNews(ROSTER.encode()),
    shardcast.Evidence(MANIFEST.encode(), MANIFEST.encode()),
    shardcast.Ask(POLICY, True),
    shardcast.Have(POLICY, ((0, 3), (5, 1))),
    shardcast.Taken(POLICY, ((7, 1),)),
    shardcast.Skipped(POLICY, 1, 0, ((2, 2),)),
    shardcast.Want(POLICY, (1, 2)),
    shardcast.Credit(POLICY, 3, 5),
    shardcast.Receipt(POLICY, 1500, ((1, 0, 12), (1, 3, 9))),
    shardcast.Blame(POLICY, BOB.peer_id),
)
HEAD = shardcast.encode_chunk_header(shardcast.ChunkHeader(POLICY, 2, 1, 0))

SHARDCAST = {
    "shardcast": rewritten(
        shardcast.decode_message_untrusted,
        shardcast.encode_message,
        *map(shardcast.encode_message, NEWS),
    ),
    "chunk header": exact(
        shardcast.decode_chunk_header_untrusted, shardcast.encode_chunk_header, HEAD
    ),
    "manifest": exact(
        lambda data: decode_manifest_untrusted(data, b"run", anyone),
        lambda manifest: manifest.encode(),
        MANIFEST.encode(),
    ),
    "roster": exact(
        lambda data: decode_roster_untrusted(data, b"run", anyone),
        lambda roster: roster.encode(),
        ROSTER.encode(),
    ),
    "index": Parser(
        lambda data: decode_index_untrusted(data, digest_of(data), 5, 100),
        (INDEX.data,),
        lambda index, _: (
            Index.of(index.files, index.spans) == index
            and all(index.place(span).offset < 100 for span in range(5))
        ),
    ),
    **{
        f"chunk of kind {span.kind}": Parser(
            lambda data, span=span: bytes(decode_chunk_untrusted(span, data)),
            (encode_chunk(span, RAW),),
            lambda raw, _: raw == RAW,
        )
        for span in SPANS
    },
}

# Roles

MEMBERS = tuple(sorted(peer_named(number) for number in range(64)))
PREVIOUS = digest_of(b"before")


def plan_of(count: int) -> diloco.Plan:
    members = MEMBERS[:count]
    return diloco.Plan(
        3, PREVIOUS, tuple((one, digest_of(one.digest)) for one in members), members
    )


def rounds_of(count: int) -> list[diloco.RoundMessage]:
    """One of each message of a round of ``count`` members."""

    def signed(said):  # type: ignore[no-untyped-def]
        return said.signed(PREVIOUS, FakeSigner(said.author))

    me, plan, one, other = MEMBERS[0], plan_of(count), digest_of(b"1"), digest_of(b"2")
    outcome = diloco.Outcome(plan, one, other)
    ready = signed(diloco.Ready(3, 0, PREVIOUS, 9, 1.5, (1.0, 2.0), (one,) * 2, author=me))
    votes = [signed(diloco.Vote(3, 1, outcome, author=peer)) for peer in MEMBERS[:count]]
    promises = tuple(
        signed(diloco.Promise(3, 2, PREVIOUS, vote, MEMBERS[:1], author=vote.author))
        for vote in votes
    )
    total, lie = (
        signed(diloco.Sum(3, 1, plan.id, 0, (digest,), author=me)) for digest in (one, other)
    )
    record = diloco.Record(1, outcome, tuple((vote.author, vote.signature) for vote in votes))
    return [
        ready, votes[0], promises[0], total, record,
        signed(diloco.Propose(3, 2, plan, outcome, promises, author=me)),
        signed(diloco.Propose(3, 0, plan, None, (), author=me)),
        diloco.Beat(
            5, PREVIOUS, 4, 2, 2**63, 1, 0, is_planned=True, is_leaving=False, faults=1
        ),
        diloco.Chain((record,) * 3),
        diloco.Doubled(total, lie),
        diloco.BadPart(ready, 1, b"piece"),
        diloco.Unreadable(total, 0, b"piece"),
        diloco.BadSum(total, plan, (ready,) * count, 0, (b"x",) * count),
    ]  # fmt: skip


WORKER, VALIDATOR, TRAINER = made.key(0), made.key(0, "validator"), made.key(0, "trainer")
WINDOW = made.window(WORKER, version=3)
SUBMISSION = made.submission_of(WINDOW.window.commitment(5))
REJECTION = made.verdict(VALIDATOR, SUBMISSION.commitment, Verdict.REJECTED)
ANSWER = made.answer(TRAINER, WINDOW, tuple(range(16)))
CONVICTION = pack([REJECTION.to_bytes(), SUBMISSION.to_bytes(), None])
REQUESTS = (
    answer.WindowRequest(WINDOW, b"stamp"),
    answer.ContentRequest(WINDOW, ANSWER, 5, 1000),
    answer.VerdictRequest(REJECTION),
    answer.ContestRequest(REJECTION, WINDOW),
)
REPLIES = (
    ANSWER, REJECTION, answer.Refused("the first place is 7", retry=False, next=7),
    *answer.Word,
)  # fmt: skip
GROUP = Group(0, (Completion((1, 2, 70_000), proof=b"p"), Completion((3,), proof=b"q")))
WEIGHTS = encode(
    {"a": RawTensor("F32", (2, 2), b"0" * 16), "b": RawTensor("BF16", (3,), b"1" * 6)}
)

SIGNED = {
    "commitment": Parser(decode_commitment_untrusted, (SUBMISSION.commitment.to_bytes(),)),
    "window": Parser(lambda data: decode_window_untrusted(data, verify), (WINDOW.to_bytes(),)),
    "submission": Parser(
        lambda data: decode_submission_untrusted(data, verify), (SUBMISSION.to_bytes(),)
    ),
    "verdict": Parser(
        lambda data: decode_verdict_untrusted(data, verify), (REJECTION.to_bytes(),)
    ),
    "answer": Parser(
        lambda data: answer.decode_answer_untrusted(data, verify), (ANSWER.to_bytes(),)
    ),
    "conviction": Parser(
        lambda data: open_conviction_untrusted(data, {made.TERMS}, verify), (CONVICTION,)
    ),
    "request": rewritten(
        answer.decode_request_untrusted,
        answer.encode_request,
        *map(answer.encode_request, REQUESTS),
    ),
    "reply": rewritten(
        lambda data: answer.decode_reply_untrusted(data, verify),
        answer.encode_reply,
        *map(answer.encode_reply, REPLIES),
    ),
}
ASKED = TextTask((Message("user", "1 + 1?"),), "", "2")
CAPSULE = io.BytesIO()
with zipfile.ZipFile(CAPSULE, "w", zipfile.ZIP_DEFLATED) as archive:
    archive.writestr("environment.py", "pass")
ROLES = {
    "round": rewritten(
        diloco.decode_message_untrusted,
        diloco.encode_message,
        *map(diloco.encode_message, rounds_of(3)),
    ),
    "groups": exact(decode_groups_untrusted, encode_groups, encode_groups((GROUP,))),
    "log-probs": Parser(
        lambda data: decode_logprobs_untrusted(data, (GROUP,)),
        (bytes(8), struct.pack("<4e", -1, -2, 0, -65504)),
        lambda groups, _: all(
            -65504 <= value <= 0 for one in groups[0].completions for value in one.logprobs
        ),
    ),
    "account": Parser(decode_account_untrusted),
    "accusation": Parser(decode_accusation_untrusted, (pack([BOB.peer_id.digest, PREVIOUS]),)),
    "taken place": Parser(lambda data: decode_taken_untrusted(data, verify)),
    "safetensors": Parser(decode_untrusted, (WEIGHTS,)),
    "model": Parser(read_config_untrusted, (json.dumps(SMOLLM2).encode(),)),
    "end tokens": Parser(lambda data: read_end_tokens_untrusted(data, 9)),
    "text task": rewritten(unpack_text_task_untrusted, pack_text_task, pack_text_task(ASKED)),
    "capsule": Parser(read_capsule_untrusted, (CAPSULE.getvalue(),)),
    **{
        f"{codec.value} piece": Parser(
            lambda data, codec=codec: quant.decode_untrusted(codec, data, 9),
            (quant.encode(codec, np.arange(9, dtype=np.float32)),),
            lambda values, _: values.size == 9 and bool(np.isfinite(values).all()),
        )
        for codec in Codec
    },
}

PARSERS = {**TRANSPORT, **REACH, **SERVICES, **SHARDCAST, **SIGNED, **ROLES}


@pytest.mark.parametrize("name", PARSERS)
def test_what_is_written_is_read(name: str) -> None:
    parser = PARSERS[name]
    for data in parser.valid:
        assert parser.holds(parser.read(data), data)


@pytest.mark.parametrize(
    ("name", "valid"),
    [(name, one) for name, parser in PARSERS.items() for one in parser.valid or (b"",)],
    ids=lambda part: part if isinstance(part, str) else "",
)
@given(data=st.data())
def test_whatever_the_bytes_a_parser_raises_bad_message_or_keeps_its_law(
    name: str, valid: bytes, data: st.DataObject
) -> None:
    parser, said = PARSERS[name], data.draw(damaged(valid))
    with contextlib.suppress(BadMessage):
        assert parser.holds(parser.read(said), said)


def test_answers_of_routers_and_names_are_understood() -> None:
    assert mapping.decode_pcp_untrusted(PCP, NONCE, 7).port == 8
    assert mapping.decode_pmp_untrusted(PMP, 2, 7).seconds == 60
    assert mapping.decode_http_untrusted(CHUNKED) == (200, "abc")
    assert mapping.decode_ssdp_untrusted(SSDP, ROUTER) == (5000, "/a?b=c")
    service = mapping.decode_description_untrusted(DESCRIPTION.decode(), ROUTER, 80, "/")
    assert (service.kind, service.port) == ("WANPPPConnection:1", 5000)
    assert mapping.decode_soap_untrusted(500, SOAP.decode(), []) == (718, ())
    message = names.decode_dns_untrusted(DNS)
    assert message.questions == ((NAME, names.TXT),)
    assert message.texts == ((NAME, (PLACE, "x")),) * 2
    assert [str(addr) for addr in names.dnsaddrs_untrusted([PLACE, "x"])] == [PLACE[8:]]
    assert names.decode_dns_untrusted(names.encode_question(NAME, names.PTR, 3)).id == 3
    info = decode_info_untrusted(INFO)
    assert (info.protocols, info.listen_addrs) == (("/a", "/b"), (ADDR,))
    assert info.observed_addr == Multiaddr.tcp("::1", 6)


@pytest.mark.parametrize("count", [1, 14, 64])
def test_what_the_largest_round_says_is_read(count: int) -> None:
    """What a node may send, its peers can read, with the most members that there may be."""
    for message in rounds_of(count):
        assert diloco.fits(message)
        assert diloco.decode_message_untrusted(diloco.encode_message(message)) == message


def test_messages_of_work_keep_their_limits() -> None:
    assert max(map(len, map(answer.encode_request, REQUESTS))) <= answer.MAX_REQUEST
    assert max(map(len, map(answer.encode_reply, REPLIES))) <= answer.MAX_REPLY
    assert len(ANSWER.to_bytes()) <= answer.MAX_ANSWER


def test_a_changed_field_breaks_each_signature() -> None:
    for data in (
        replace(ANSWER, owed=0).to_bytes(),
        replace(REJECTION, verdict=Verdict.ACCEPTED).to_bytes(),
        replace(WINDOW, window=replace(WINDOW.window, first=1)).to_bytes(),
    ):
        for parser in SIGNED.values():
            with pytest.raises(BadMessage):
                parser.read(data)


@pytest.mark.parametrize(
    "request_",
    [
        answer.ContentRequest(made.window(WORKER, version=4), ANSWER, 5, 1000),
        answer.ContentRequest(WINDOW, replace(ANSWER, wanted=(1, 2)), 5, 1000),
        answer.ContentRequest(WINDOW, replace(ANSWER, wanted=(5, 5)), 5, 1000),
        answer.ContentRequest(WINDOW, ANSWER, 5, 1 << 40),
        answer.ContestRequest(REJECTION, made.window(WORKER, version=4)),
        answer.ContestRequest(REJECTION, made.window(WORKER, version=3, kind="other")),
    ],
)
def test_parts_that_do_not_belong_together_are_refused(
    request_: answer.ContentRequest | answer.ContestRequest,
) -> None:
    with pytest.raises(BadMessage):
        answer.decode_request_untrusted(answer.encode_request(request_))
