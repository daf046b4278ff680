"""Rules of `p2p.transport`."""

from __future__ import annotations

from typing import Final

import trio

from bench.rules.rule import HUGE, Rule, Service, always, edit

BUDGET: Final = "p2p.transport.core.budget"
YAMUX: Final = "p2p.transport.core.yamux"
NOISE: Final = "p2p.transport.core.noise"
NEGOTIATE: Final = "p2p.transport.core.negotiate"
CONNECTION: Final = "p2p.transport.connection"
DIAL: Final = "p2p.transport.dial"
DNS: Final = "p2p.transport.dns"
TCP: Final = "p2p.transport.tcp"
WIRE: Final = "p2p.wire"


async def in_every_pass(_: object) -> None:
    """Make a checkpoint, as a task that waits for no other would."""
    await trio.lowlevel.checkpoint()


RULES: Final = {
    # Unread bytes.
    "unread bytes": Rule(
        "what nobody reads is bounded over all connections",
        {f"{BUDGET}:HostBudget().max_held": HUGE},
        tests="what_is_over",
    ),
    "age counts": Rule(
        "the hoard is given up, not the fastest sender",
        edit(f"{BUDGET}:HostBudget._evict", "(now - holder.since + 0.1)", "1"),
        tests="the_old_hoard",
    ),
    "bytes count": Rule(
        "the hoard is given up, not the slowest reader",
        edit(f"{BUDGET}:HostBudget._evict", "holder.held * (", "("),
        tests="who_pours_pays",
    ),
    "peers are weighed": Rule(
        "the peer with the most pays, however many streams it has",
        edit(
            f"{BUDGET}:HostBudget._evict",
            "weights.get(holder.peer, 0.0) + weight",
            "max(weights.get(holder.peer, 0.0), weight)",
        ),
        tests="who_pours_pays",
    ),
    "protected bytes": Rule(
        "peers that the node wants lose their bytes last",
        edit(f"{BUDGET}:HostBudget._evict", "self._protected(peer), ", ""),
        tests="the_protected_are",
    ),
    "an eighth is freed": Rule(
        "a flood pays for the choice of whom to evict only once in a while",
        edit(f"{BUDGET}:HostBudget._evict", " - self.max_held // 8", ""),
        tests="most_pays_however",
    ),
    "unfinished records": Rule(
        "records that no stream has yet are counted",
        {f"{CONNECTION}:Connection._hold_tail": always(None)},
        tests="an_unfinished_record",
    ),
    "waiting records": Rule(
        "records that wait for a choked peer are counted",
        edit(
            f"{CONNECTION}:Connection._wait_turn",
            "self.budget.hold(self, waiting)",
            "waiting = 0",
        ),
        tests="records_that_wait",
    ),
    "unfinished frames": Rule(
        "frames that a reader keeps are counted",
        {f"{WIRE}:FrameReader._tell": always(None)},
        tests="unfinished_frames_count",
    ),
    "taken bytes": Rule(
        "bytes count until the application comes back",
        edit(
            f"{CONNECTION}:MuxedStream.receive_some",
            "self._taken = len(chunk)",
            "self._owner.budget.release(self, len(chunk))",
        ),
        tests="received_counts_until",
    ),
    "unnamed streams": Rule(
        "streams without a protocol are counted",
        edit(f"{CONNECTION}:MuxedStream.__init__", "hold(self, 4 * KI)", "hold(self, 0)"),
        tests="a_protocol_count",
    ),
    "small pieces": Rule(
        "bytes that come one by one take no more memory",
        edit(f"{CONNECTION}:MuxedStream.feed", "size < (4 * KI)", "False"),
        tests="a_window_of",
    ),
    "cut records": Rule(
        "a rest of a record does not keep all of it",
        edit(
            f"{CONNECTION}:MuxedStream.feed", "data.__alloc__() <= size + size // 4 + 1", "True"
        ),
        tests="records_that_are",
    ),
    # Queued bytes.
    "queued bytes": Rule(
        "what waits for all peers is bounded",
        {f"{BUDGET}:MAX_OUTGOING": HUGE},
        tests="peers_that_read",
    ),
    "outgoing share": Rule(
        "no connection stands still for what others queue",
        edit(f"{YAMUX}:MuxQueue.room", "16 * KI", "0"),
        tests="what_others_queue",
    ),
    "queue of a stream": Rule(
        "what waits on one stream is bounded",
        {f"{YAMUX}:MAX_QUEUED": HUGE},
        tests="a_queue_is",
    ),
    "sealed bytes": Rule(
        "bytes that the network does not take count",
        {f"{YAMUX}:MuxQueue.seal": always(None)},
        tests="records_that_wait",
    ),
    "sealing buffers": Rule(
        "a peer that takes nothing does not hold a sealing buffer",
        edit(f"{CONNECTION}:Connection._send_batch", "_BATCH_BYTES // 8", "-1"),
        tests="records_that_wait",
    ),
    "short bursts": Rule(
        "a message does not wait for seconds behind bulk",
        {f"{BUDGET}:Burst.note_slow": always(None)},
        tests="a_connection_commits",
    ),
    "small frames first": Rule(
        "a heartbeat does not wait behind bulk",
        {f"{YAMUX}:SMALL": -1},
        tests="small_frames_share",
    ),
    "bulk has turns": Rule(
        "a flood of heartbeats does not stop the bulk",
        edit(f"{YAMUX}:MuxQueue._gather", "bool(self.small and self.bulk)", "False"),
        tests="small_frames_does",
    ),
    # Windows.
    "windows grow": Rule(
        "distance does not limit speed",
        {f"{YAMUX}:Mux._widen": always(0)},
        tests="a_window_grows",
    ),
    "windows grow when read quickly": Rule(
        "what is read slowly gets no window",
        edit(f"{YAMUX}:Mux._widen", "<= 0.25", "<= 1e9"),
        tests="a_window_that",
    ),
    "extra window": Rule(
        "windows over all connections are bounded",
        edit(f"{BUDGET}:HostBudget.widen", "10 * MIB", "10**9"),
        tests="one_connection_takes",
    ),
    "extra window of a connection": Rule(
        "one connection does not take the stock of window",
        edit(f"{BUDGET}:HostBudget.widen", "8 * MIB", "10**9"),
        tests="one_connection_takes",
    ),
    "half of the stock": Rule(
        "later streams get some window",
        edit(f"{BUDGET}:HostBudget.widen", "free // 2", "free"),
        tests="later_streams_get",
    ),
    "idle grants": Rule(
        "window that nobody uses returns to the stock",
        edit(f"{BUDGET}:HostBudget.widen", "self.now() - 10.0", "-1.0"),
        tests="the_stock_comes",
    ),
    "overrun windows": Rule(
        "a peer sends no more than its window",
        edit(f"{YAMUX}:Mux._receive_stream_frame", "length > stream.receive_window", "False"),
        tests="overrun",
    ),
    # Streams.
    "streams": Rule(
        "a peer has so many streams",
        {f"{YAMUX}:MAX_STREAMS": HUGE},
        tests="ten_thousand_openings",
    ),
    "lingering streams": Rule(
        "streams that peers do not end are bounded over all connections",
        edit(f"{YAMUX}:Mux._linger", "> 16_384", "> 10**9"),
        tests="streams_that_peers_never_end_are_bounded_over_all_connections",
    ),
    "lingering share": Rule(
        "a connection keeps some streams that its peer has yet to end",
        edit(f"{YAMUX}:Mux._linger", "len(own) > 32", "True"),
        tests="streams_that_peers_never_end_are_bounded_over_all_connections",
    ),
    "streams are swept": Rule(
        "a stream that the peer never ends is reset",
        {f"{YAMUX}:Mux.sweep": always(None)},
        tests="streams_of_the",
    ),
    "room for streams": Rule(
        "a stream that the peer never ends keeps out no new one",
        {f"{YAMUX}:Mux._make_room": always(False)},
        tests="streams_that_the",
    ),
    "control frames": Rule(
        "answers that a peer does not take are bounded",
        {f"{YAMUX}:MAX_CONTROL": HUGE},
        tests="a_flood_whose",
    ),
    "skipped ids": Rule(
        "skipped stream ids are bounded",
        {f"{YAMUX}:MAX_SKIPPED": 3200},
        tests="skipped_ids_are",
    ),
    "ids are used once": Rule(
        "an answer that crosses a reset reaches no other stream",
        {f"{YAMUX}:Mux._is_first_use": always(True)},
        tests="ids_may_come",
    ),
    "late data": Rule(
        "a peer learns that it is not read",
        edit(f"{YAMUX}:Mux._receive_payload", "> 4 * KI", "> 10**9"),
        tests="a_little_late",
    ),
    "data after the end": Rule(
        "an end is an end",
        edit(
            f"{YAMUX}:Mux._receive_stream_frame", "length and stream.remote_finished", "False"
        ),
        tests="data_after_the",
    ),
    "streams get a protocol": Rule(
        "a stream that never says its protocol is reset",
        edit(f"{CONNECTION}:Connection._tick", "stream.is_nameless()", "False"),
        tests="stream_that_never",
    ),
    "stalls": Rule(
        "a peer that takes nothing of an answer does not hold it",
        edit(f"{CONNECTION}:MuxedStream.has_stalled", "> 2", "> 10**9"),
        tests="not_taken_end",
    ),
    # Work.
    "frame rate": Rule(
        "tiny frames take a part of the core",
        {f"{CONNECTION}:_Pace.charge": always(0.0)},
        tests="small_frames_is",
    ),
    "cautious reads": Rule(
        "a read of tiny frames does not hold up others",
        {f"{CONNECTION}:_Pace.cautious": 512 * 1024},
        tests="small_frames_is",
    ),
    "streams are work": Rule(
        "many new streams leave turns to others",
        edit(f"{YAMUX}:Mux._find", "self.allowance -= 32", "self.allowance -= 1"),
        tests="used_up_and_goes_on",
    ),
    "crowds of frames": Rule(
        "many frames leave turns to others",
        {f"{CONNECTION}:_CROWD": HUGE},
        tests="floods_of_streams_leave",
    ),
    "one turn a pass": Rule(
        "many floods together leave turns to others",
        {f"{CONNECTION}:Turns.wait": in_every_pass},
        tests="one_goes_on",
    ),
    "yields": Rule(
        "a busy stream leaves turns to others",
        {f"{CONNECTION}:MuxedStream.yield_every": HUGE},
        tests="a_busy_stream",
    ),
    "proposals are frames": Rule(
        "a flood of proposals takes a part of the core",
        edit(f"{CONNECTION}:MuxedStream._negotiate", "negotiation.proposals - proposals", "0"),
        tests="flood_of_proposals",
    ),
    "proposals": Rule(
        "a dialer proposes so many protocols",
        edit(f"{NEGOTIATE}:Chooser.receive_data", "self.proposals > 32", "False"),
        tests="proposing_without_end",
    ),
    "lines": Rule(
        "a proposal is short", {f"{NEGOTIATE}:MAX_LINE": 2**40}, tests="is_no_negotiation"
    ),
    "handshake messages": Rule(
        "a handshake is short",
        edit(f"{NOISE}:NoiseHandshake.receive_data", "length > 4096", "False"),
        tests="a_huge_handshake",
    ),
    "muxers": Rule(
        "a peer offers few muxers",
        edit(f"{NOISE}:decode_hello_untrusted", "muxers[:16]", "muxers"),
        tests="a_peer_offers",
    ),
    "spoken protocols": Rule(
        "a peer's protocols are bounded",
        edit(f"{CONNECTION}:Connection.learn", "< 256", "< 10**9"),
        tests="a_peer_does",
    ),
    # Ends.
    "keep-alive": Rule(
        "a peer that is silent is gone",
        edit(f"{CONNECTION}:Connection._tick", "self._silence >= 3", "False"),
        tests="peer_that_hangs",
    ),
    "late keep-alives": Rule(
        "a machine that stood still drops nobody for it",
        edit(f"{CONNECTION}:Connection._tick", "self._keepalive / 2", "1e18"),
        tests="says_nothing_about",
    ),
    "closing ends": Rule(
        "a peer that takes nothing does not hold up the end",
        {f"{CONNECTION}:CLOSE_TIMEOUT": 1e6},
        tests="hold_up_the_end",
    ),
    # Dials.
    "staggered dials": Rule(
        "a silent address holds up no other",
        edit(f"{DIAL}:stagger", "0.25", "60.0"),
        tests="a_silent_address",
    ),
    "four dials at once": Rule(
        "a dial takes few sockets",
        edit(f"{DIAL}:stagger", "CapacityLimiter(4)", "CapacityLimiter(10**6)"),
        tests="few_addresses_are",
    ),
    "threads for names": Rule(
        "names without an answer hold up no other work in threads",
        edit(f"{TCP}:TcpNetwork.__init__", "CapacityLimiter(4)", "CapacityLimiter(10**6)"),
        tests="slow_names",
    ),
    "names' depth": Rule(
        "names that lead in circles end",
        edit(f"{DNS}:resolve", "range(4)", "range(1000)"),
        tests="names_that_lead",
    ),
    "names' addresses": Rule(
        "names that branch cost few questions",
        edit(f"{DNS}:resolve", "[:16]", ""),
        tests="names_that_branch",
    ),
    "names' patience": Rule(
        "a dead name server holds up no dial",
        edit(f"{DNS}:_texts", "move_on_after(1.0)", "move_on_after(1e9)"),
        tests="a_dead_name",
    ),
    "names' circles": Rule(
        "a name in a message ends",
        edit(f"{DNS}:_name_untrusted", "at >= limit", "False"),
        tests="points_to_itself",
    ),
}

SERVICE: Final = Service(
    "transport",
    RULES,
    tests=(
        "tests/unit/test_negotiate.py",
        "tests/unit/test_noise.py",
        "tests/unit/test_yamux.py",
        "tests/unit/test_connection.py",
        "tests/unit/test_dnsaddr.py",
        *[
            f"tests/attacks/test_transport_{name}.py"
            for name in (
                "accounts",
                "memory",
                "violation",
                "stream_ids",
                "pressure",
                "frames",
                "addresses",
            )
        ],
        "tests/attacks/test_live_turns.py",
        "tests/attacks/test_host_addresses.py",
        "tests/attacks/test_host_served.py",
        "tests/attacks/test_host_races.py",
        "tests/attacks/test_host_limits.py",
        "tests/conformance/test_hosts.py",
        "tests/transcripts/test_transcripts.py",
    ),
    formats={
        "core.noise:MAX_RECORD": "by its length field",
        "core.noise:MAX_PLAINTEXT": "by its length field",
        "dns:MAX_DATAGRAM": "what is read of an answer to our own question",
    },
)
