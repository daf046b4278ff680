"""DNS messages, as far as ``/dnsaddr`` and mDNS need them: names and texts (RFC 1035).

A ``/dnsaddr`` is resolved here, because the system's resolver cannot be asked for texts: by
UDP, at the servers of /etc/resolv.conf. Who forges an answer costs us a dial: the peer that
answers there must prove its id.
"""

from __future__ import annotations

import os
import socket
import struct
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import trio

from p2p.errors import BadMessage
from p2p.multiaddr import MAX_MULTIADDR, Multiaddr

PTR: Final = 12
TXT: Final = 16
MAX_DATAGRAM: Final = 4096
"""Bytes that are read of a message over UDP. Reading the worst takes 6 ms."""
_HEAD: Final = struct.Struct(">HHHHHH")
_RECORD: Final = struct.Struct(">HHIH")
_IN: Final = 1


@dataclass(frozen=True, slots=True)
class DnsMessage:
    """The questions and the texts of a message."""

    id: int
    is_answer: bool
    questions: tuple[tuple[str, int], ...] = ()
    """Names, in lower case, and kinds of records asked for."""
    texts: tuple[tuple[str, tuple[str, ...]], ...] = ()
    """Names and strings of the TXT records, in any section."""


def encode_name(name: str) -> bytes:
    """Encode a name as labels. Raise `ValueError` if a label is empty or too long."""
    labels = [label.encode("ascii") for label in name.rstrip(".").split(".")]
    if not all(0 < len(label) < 64 for label in labels):
        raise ValueError(f"{name!r} is no name")
    return b"".join(bytes([len(label)]) + label for label in labels) + b"\0"


def encode_question(name: str, kind: int, number: int = 0, flags: int = 0) -> bytes:
    """Return a message with one question."""
    head = _HEAD.pack(number, flags, 1, 0, 0, 0)
    return head + encode_name(name) + struct.pack(">HH", kind, _IN)


def encode_record(name: str, kind: int, seconds: int, data: bytes) -> bytes:
    """Return one record of an answer."""
    return encode_name(name) + _RECORD.pack(kind, _IN, seconds, len(data)) + data


def decode_dns_untrusted(data: bytes) -> DnsMessage:
    """Decode a message. Raise `BadMessage`, and nothing else, whatever the bytes."""
    try:
        number, flags, asked, *counts = _HEAD.unpack_from(data)
        at, questions = _HEAD.size, list[tuple[str, int]]()
        texts = list[tuple[str, tuple[str, ...]]]()
        for _ in range(asked):
            name, at = _name_untrusted(data, at)
            questions.append((name, struct.unpack_from(">H", data, at)[0]))
            at += 4
        for _ in range(sum(counts)):
            name, at = _name_untrusted(data, at)
            kind, _, _, size = _RECORD.unpack_from(data, at)
            at += _RECORD.size
            if at + size > len(data):
                raise BadMessage("a DNS message is cut off")
            if kind == TXT:
                texts.append((name, _strings(data[at : at + size])))
            at += size
    except struct.error:
        raise BadMessage("a DNS message is cut off") from None
    return DnsMessage(number, bool(flags & 0x8000), tuple(questions), tuple(texts))


def _name_untrusted(data: bytes, at: int) -> tuple[str, int]:
    """Return a name and the offset behind it. Each pointer must lead further back than the one
    before, so that there are no loops."""
    labels, end, limit, size = list[str](), 0, at, 0
    while True:
        if at >= len(data):
            raise BadMessage("a name in a DNS message is cut off")
        length = data[at]
        if length >= 0xC0:
            end = end or at + 2
            at = struct.unpack_from(">H", data, at)[0] & 0x3FFF
            if at >= limit:
                raise BadMessage("a name in a DNS message leads in circles")
            limit = at
            continue
        size += length + 1
        if length >= 0x40 or size > 255:
            raise BadMessage("a name in a DNS message is too long")
        label, at = data[at + 1 : at + 1 + length], at + 1 + length
        if not length:
            return ".".join(labels), end or at
        labels.append(label.decode("latin-1").lower())


def _strings(data: bytes) -> tuple[str, ...]:
    found, at = list[str](), 0
    while at < len(data):
        found.append(data[at + 1 : at + 1 + data[at]].decode("latin-1"))
        at += 1 + data[at]
    return tuple(found)


def dnsaddrs_untrusted(strings: Iterable[str]) -> list[Multiaddr]:
    """Return the addresses among the strings of texts. Other strings are ignored."""
    found = list[Multiaddr]()
    for text in strings:
        name, _, value = text.partition("=")
        if name != "dnsaddr" or len(value) > MAX_MULTIADDR:
            continue
        try:
            found.append(Multiaddr.parse(value))
        except ValueError:  # of a kind that we do not dial
            continue
    return found


def name_servers(path: Path = Path("/etc/resolv.conf")) -> list[str]:
    """Return the first three name servers of this machine."""
    try:
        lines = [line.split() for line in path.read_text(encoding="latin-1").splitlines()]
    except OSError:
        return []
    return [line[1] for line in lines if line[:1] == ["nameserver"] and len(line) > 1][:3]


async def resolve(addr: Multiaddr, servers: Iterable[tuple[str, int]] = ()) -> list[Multiaddr]:
    """Return the addresses of the peer at a ``/dnsaddr/NAME/p2p/ID``. Raise `OSError` if no
    name server answers, or if the name has none of this peer."""
    chosen = list(servers) or [(host, 53) for host in name_servers()]
    found, level = list[Multiaddr](), [addr]
    for _ in range(4):  # names that lead to one another, as in go-libp2p
        names = [one.parts[0][1] for one in level if one.parts[0][0] == "dnsaddr"]
        level = []
        for name in dict.fromkeys(names):
            level += dnsaddrs_untrusted(await _texts(f"_dnsaddr.{name}", chosen))
        # Each may be a name to look up.
        level = [one for one in level if one.peer_id in (addr.peer_id, None)][:16]
        found += [one for one in level if one.parts[0][0] != "dnsaddr"]
    if not found:
        raise OSError(f"the name has no address of {addr.peer_id}")
    return found


async def _texts(name: str, servers: Iterable[tuple[str, int]]) -> list[str]:
    for host, port in servers:
        number = int.from_bytes(os.urandom(2), "big")  # noqa: TID251 - a real name server
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        with trio.socket.socket(family, socket.SOCK_DGRAM) as sock, trio.move_on_after(1.0):
            try:
                await sock.connect((host, port))
                # The flag asks for a recursive lookup.
                await sock.send(encode_question(name, TXT, number, 0x0100))
                while True:
                    try:
                        answer = decode_dns_untrusted(await sock.recv(MAX_DATAGRAM))
                    except BadMessage:
                        continue
                    if answer.is_answer and answer.id == number:
                        return [text for _, texts in answer.texts for text in texts]
            except ValueError as error:
                raise OSError(str(error)) from None
            except OSError:
                continue
    raise OSError("no name server answers")
