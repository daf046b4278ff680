"""Bytes that cost more to decode than to send: refused while they are read, by every parser."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from p2p.errors import BadMessage
from p2p.identity import KeyPair, verify
from p2p.ledger.core.chain import decode_entry_untrusted, decode_fork_untrusted
from p2p.shardcast.codec import decode_chunk_untrusted
from p2p.shardcast.forest import decode_roster_untrusted
from p2p.shardcast.index import Span, digest_of
from p2p.shardcast.manifest import PROTOCOL_ID, decode_manifest_untrusted
from p2p.shardcast.messages import decode_message_untrusted
from p2p.wire import KI, MIB, pack, unpack_untrusted
from roles.contract.core.file import decode_run_untrusted
from roles.protocol.core import window as windows
from roles.protocol.core.answer import decode_reply_untrusted, decode_request_untrusted
from roles.protocol.core.conviction import open_conviction_untrusted
from roles.protocol.core.groups import decode_groups_untrusted
from roles.protocol.core.verdict import decode_verdict_untrusted
from roles.trainer.taken import decode_taken_untrusted
from tests.counting import memory_at_most
from tests.support.foreign import BOMBS, listed
from tests.support.runs import sign_body

KEY = KeyPair(digest_of(b"somebody"))
PEAK = 12 * MIB  # bytes beside the message: 1,024 heads of lists of `MAX_PEERS` in the run file


def signed(data: bytes) -> bytes:
    return pack([data, KEY.sign(PROTOCOL_ID, data)])


PARSERS: dict[str, Callable[[bytes], object]] = {
    "msgpack": unpack_untrusted,
    "shardcast": decode_message_untrusted,
    "manifest": lambda data: decode_manifest_untrusted(data, b"run", verify),
    "signed manifest": lambda data: decode_manifest_untrusted(signed(data), b"run", verify),
    "roster": lambda data: decode_roster_untrusted(data, b"run", verify),
    "signed roster": lambda data: decode_roster_untrusted(signed(data), b"run", verify),
    "commitment": windows.decode_commitment_untrusted,
    "groups": decode_groups_untrusted,
    "submission": lambda data: windows.decode_submission_untrusted(data, verify),
    "verdict": lambda data: decode_verdict_untrusted(data, verify),
    "reply": lambda data: decode_reply_untrusted(data, verify),
    "request": decode_request_untrusted,
    "window": lambda data: windows.decode_window_untrusted(data, verify),
    "conviction": lambda data: open_conviction_untrusted(data, (), verify),
    "taken place": lambda data: decode_taken_untrusted(data, verify),
    "ledger entry": decode_entry_untrusted,
    "ledger fork": decode_fork_untrusted,
    "run file": decode_run_untrusted,
    "signed run file": lambda data: decode_run_untrusted(sign_body(data, KEY)[: 256 * KI]),
    "signed short run file": lambda data: decode_run_untrusted(sign_body(data[:200_000], KEY)),
}


@pytest.mark.parametrize("bomb", BOMBS.values(), ids=list(BOMBS))
@pytest.mark.parametrize("parse", PARSERS.values(), ids=list(PARSERS))
def test_no_parser_makes_room_for_a_bomb(parse: Callable[[bytes], object], bomb: bytes) -> None:
    with memory_at_most(PEAK), pytest.raises(BadMessage):
        parse(bomb)


def test_a_submission_with_a_bomb_inside_is_opened_as_far_as_its_signature() -> None:
    content = listed(MIB, b"\x90")
    digests = (windows.content_digest(content),)
    window = windows.Window(bytes(32), bytes(32), KEY.peer_id, 1, bytes(32), 0, digests, b"\1")  # type: ignore[arg-type]
    data = windows.Submission(windows.SignedWindow.sign(window, KEY), 0, content).to_bytes()
    asked = []

    def judge(*arguments: object) -> bool:
        asked.append(arguments[1])
        return False

    with memory_at_most(PEAK):
        with pytest.raises(BadMessage, match="signature"):
            windows.decode_submission_untrusted(data, judge)
        assert asked == [windows.WINDOW_DOMAIN]
        opened = windows.decode_submission_untrusted(data, verify)
        with pytest.raises(BadMessage):
            decode_groups_untrusted(opened.content)


@pytest.mark.parametrize(
    "exponent", [13, 17, 21, 31], ids=["8 MiB", "128 MiB", "2 GiB", "2 TiB"]
)
def test_a_chunk_with_a_huge_window_is_refused_before_memory_is_taken_for_it(
    exponent: int,
) -> None:
    # A zstd frame: magic, descriptor (content size of 8 bytes, window follows), window, size,
    # one raw block.
    head = b"\x28\xb5\x2f\xfd\xc0" + bytes((exponent << 3,)) + (100).to_bytes(8, "little")
    wire = head + (100 << 3 | 1).to_bytes(3, "little") + bytes(100)
    length = len(wire).to_bytes(4, "big")
    with memory_at_most(MIB), pytest.raises(BadMessage):
        decode_chunk_untrusted(Span(digest_of(wire), 100), length + wire)
