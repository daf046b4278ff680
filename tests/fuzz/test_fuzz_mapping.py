"""Whatever a router says, our parsers of it raise `BadMessage` or nothing."""

from __future__ import annotations

import contextlib
import struct
from ipaddress import IPv4Address

from hypothesis import given, strategies as st

from p2p.errors import BadMessage
from p2p.reach.mapping import (
    decode_description_untrusted,
    decode_http_untrusted,
    decode_ipv4_untrusted,
    decode_pcp_untrusted,
    decode_pmp_untrusted,
    decode_soap_untrusted,
    decode_ssdp_untrusted,
    decode_url_untrusted,
)
from tests.fuzz.test_fuzz_transport import mutated

HOST, NONCE = "192.168.1.1", bytes(range(12))
PCP = struct.pack(">BBxBII12x12sB3xHH16s", 2, 129, 0, 60, 9, NONCE, 6, 7, 8, bytes(16))
PMP = struct.pack(">BBHIHHI", 0, 130, 0, 9, 7, 8, 60)
URL = f"http://{HOST}:5000/a?b=c"
SSDP = f"HTTP/1.1 200 OK\r\nST: x\r\nLOCATION: {URL}\r\n\r\n".encode()
TYPE = "urn:schemas-upnp-org:service:WANPPPConnection:1"
DESCRIPTION = (
    f"<service><serviceType>{TYPE}</serviceType><controlURL>{URL}</controlURL></service>"
)
SOAP = "<errorCode>718</errorCode><NewExternalIPAddress>8.8.8.8</NewExternalIPAddress>"
HTTP = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n0\r\n\r\n"


def texts(valid: str) -> st.SearchStrategy[str]:
    return st.text(max_size=100) | mutated(valid.encode()).map(
        lambda data: data.decode("utf-8", "replace")
    )


@given(mutated(PCP), mutated(PMP), st.sampled_from([0, 2]))
def test_datagrams(pcp: bytes, pmp: bytes, op: int) -> None:
    with contextlib.suppress(BadMessage):
        assert decode_pcp_untrusted(pcp, NONCE, 7).port <= 0xFFFF
    with contextlib.suppress(BadMessage):
        assert decode_pmp_untrusted(pmp, op, 7).port <= 0xFFFF


@given(
    mutated(HTTP) | mutated(HTTP.replace(b"Transfer-Encoding: chunked", b"Content-Length: 9"))
)
def test_responses(data: bytes) -> None:
    with contextlib.suppress(BadMessage):
        status, text = decode_http_untrusted(data)
        assert 0 <= status <= 999
        assert len(text) <= len(data)


@given(texts(URL), mutated(SSDP))
def test_places(url: str, ssdp: bytes) -> None:
    with contextlib.suppress(BadMessage):
        port, path = decode_url_untrusted(url, HOST)
        assert 0 <= port <= 0xFFFF
        assert not set(path) & set(" \r\n")
    with contextlib.suppress(BadMessage):
        decode_ssdp_untrusted(ssdp, HOST)


@given(texts(DESCRIPTION))
def test_descriptions(text: str) -> None:
    with contextlib.suppress(BadMessage):
        assert decode_description_untrusted(text, HOST, 80, "/").host == HOST


@given(st.sampled_from([200, 302, 500]), texts(SOAP), texts("8.8.8.8"))
def test_replies(status: int, text: str, host: str) -> None:
    with contextlib.suppress(BadMessage):
        code, values = decode_soap_untrusted(status, text, ["NewExternalIPAddress"])
        assert code in range(1000)
        assert all(len(value) <= 64 for value in values)
    with contextlib.suppress(BadMessage):
        assert isinstance(decode_ipv4_untrusted(host), IPv4Address)


def test_valid_words_are_understood() -> None:
    assert decode_pcp_untrusted(PCP, NONCE, 7).port == 8
    assert decode_pmp_untrusted(PMP, 2, 7).seconds == 60
    assert decode_http_untrusted(HTTP) == (200, "abc")
    assert decode_ssdp_untrusted(SSDP, HOST) == (5000, "/a?b=c")
    service = decode_description_untrusted(DESCRIPTION, HOST, 80, "/")
    assert (service.kind, service.port) == ("WANPPPConnection:1", 5000)
    assert decode_soap_untrusted(500, SOAP, []) == (718, ())
