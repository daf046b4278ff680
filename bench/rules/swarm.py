"""Rules of `p2p.swarm`."""

from __future__ import annotations

from typing import Final

from bench.rules.rule import HUGE, UNLIMITED, Rule, Service, always, edit, edited, fixed

LIMITS: Final = "p2p.swarm.core.limits"
GATER: Final = "p2p.swarm.core.gater"
OUTBOX: Final = "p2p.swarm.outbox"
CONNECTOR: Final = "p2p.swarm.connector"
SWARM: Final = "p2p.swarm.swarm"
IDENTIFY: Final = "p2p.swarm.identify"


RULES: Final = {
    # What strangers hold.
    "connections": Rule(
        "strangers open no more connections than there is room for",
        {f"{LIMITS}:ResourceLimits().connections": HUGE},
        tests="limits_leave_a",
    ),
    "handshakes": Rule(
        "unfinished handshakes are bounded",
        {f"{LIMITS}:ResourceLimits().handshakes": HUGE},
        tests="who_was_answered",
    ),
    "descriptors": Rule(
        "files and dials always find a descriptor",
        edit(f"{LIMITS}:ResourceLimits.within", "descriptors - 320", "descriptors"),
        tests="limits_leave_a",
    ),
    "room for dials": Rule(
        "those who dial us leave a quarter for our own dials",
        {f"{LIMITS}:ResourceLimits.inbound": fixed(HUGE)},
        tests="those_who_dial",
    ),
    "connections of a peer": Rule(
        "one identity does not fill a node",
        {f"{LIMITS}:ResourceLimits.per_peer": fixed(HUGE)},
        tests="one_identity_has",
    ),
    "connections of a host": Rule(
        "one address does not fill a node",
        {f"{LIMITS}:ResourceLimits.per_host": fixed(HUGE)},
        tests="of_the_connections",
    ),
    "connections of a network": Rule(
        "one network does not fill a node",
        {f"{LIMITS}:ResourceLimits.per_network": fixed(HUGE)},
        tests="of_the_connections",
    ),
    "handshakes of a host": Rule(
        "one address holds an eighth of the handshakes",
        edit(f"{LIMITS}:Budget._handshake_victim", "limits.handshakes // 8", "10**9"),
        tests="of_the_handshakes",
    ),
    "handshakes of a network": Rule(
        "one network holds a quarter of the handshakes",
        edit(f"{LIMITS}:Budget._handshake_victim", "limits.handshakes // 4", "10**9"),
        tests="of_the_handshakes",
    ),
    "silent first": Rule(
        "silent sockets push out no dialer that has spoken",
        edit(f"{LIMITS}:Budget._worst_handshake", "len(silent) * 4 > len(everyone)", "False"),
        tests="silent_sockets_do",
    ),
    "answered last": Rule(
        "a dialer that was answered is not given up for one that was not",
        edit(f"{LIMITS}:Budget._worst_handshake", "len(waiting) * 4 > len(everyone)", "False"),
        tests="who_was_answered",
    ),
    "most crowded": Rule(
        "the network with the most pays for newcomers",
        edit(f"{LIMITS}:_most_crowded", "most_common(1)", "most_common()[-1:]"),
        tests="the_network_with",
    ),
    "useful stay": Rule(
        "peers that we ask things of outlive a flood",
        edit(
            f"{LIMITS}:Budget._rank",
            "-one.usage.useful_at), 2 * share",
            "-one.usage.useful_at), 0",
        ),
        tests="a_flood_replaces",
    ),
    "veterans stay": Rule(
        "those of use for longest outlive a flood",
        edit(f"{LIMITS}:Budget._rank", "one.usage.since), 2 * share", "one.usage.since), 0"),
        tests="a_flood_replaces",
    ),
    "unused first": Rule(
        "who was used longest ago goes first",
        edit(f"{LIMITS}:Budget._rank", "one.usage.used_at", "-one.usage.used_at"),
        tests="a_flood_replaces",
    ),
    "evicted together": Rule(
        "a flood pays for the choice of whom to evict only once in a while",
        edit(f"{LIMITS}:Budget.admit", "limits.connections // 64", "0"),
        tests="a_flood_is",
    ),
    "protected peers": Rule(
        "peers that the node wants outlive a flood",
        {f"{GATER}:ConnectionGater.is_protected": always(False)},
        tests="what_is_sure",
    ),
    "served streams": Rule(
        "all peers together are served so much",
        {
            **edit(f"{LIMITS}:Budget.serve", "self._served_count > MAX_SERVED", "False"),
            f"{LIMITS}:MAX_SERVED": HUGE,
        },
        tests="the_most_streams",
    ),
    "served streams of a peer": Rule(
        "one peer is served so much",
        edit(f"{LIMITS}:Budget.serve", "len(own) > 256", "False"),
        tests="one_peer_has",
    ),
    "served most": Rule(
        "the peer with the most streams pays for a new one",
        edit(
            f"{LIMITS}:Budget.serve",
            "victim = next(reversed(self._served[most]))",
            "victim = stream",
        ),
        tests="peers_that_hold",
    ),
    "stalled streams": Rule(
        "a peer that takes nothing of an answer does not hold it",
        {f"{LIMITS}:Budget.end_stalled": always(None)},
        tests="not_taken_end",
    ),
    "relays' clients": Rule(
        "a relay does not pay for its clients",
        edit(f"{LIMITS}:group_of", "addr.relay is not None", "False"),
        tests="two_hosts_talk",
    ),
    # Dials on a stranger's word.
    "dials to a host": Rule(
        "strangers make us dial one host a few times at once",
        edit(f"{LIMITS}:DialTargets.begin", "self._open[group.host] >= 4", "False"),
        tests="one_target_is",
    ),
    "dials to a network": Rule(
        "strangers make us dial one network a few times at once",
        edit(f"{LIMITS}:DialTargets.begin", "self._open[group.network] >= 8", "False"),
        tests="one_network_is",
    ),
    "failed dials to a host": Rule(
        "a host that does not answer is left alone",
        edit(f"{LIMITS}:DialTargets.begin", ">= 8.0", ">= 1e9"),
        tests="targets_are_counted",
    ),
    "failed dials to a network": Rule(
        "a network that does not answer is left alone",
        edit(f"{LIMITS}:DialTargets.begin", ">= 32.0", ">= 1e9"),
        tests="one_network_is",
    ),
    "counted names": Rule(
        "minted names do not fill a table of counts",
        edit(f"{LIMITS}:FadingCounts.add", "len(self._counts) > self._most", "False"),
        tests="counts_of_minted",
    ),
    "least is forgotten": Rule(
        "minted names do not push out the worst",
        edit(f"{LIMITS}:FadingCounts.add", "min(oldest", "max(oldest"),
        tests="minted_identities_wash",
    ),
    "dials on hearsay": Rule(
        "silent addresses make us dial few at once",
        edit(
            f"{CONNECTOR}:Connector.__init__", "CapacityLimiter(16)", "CapacityLimiter(10**6)"
        ),
        tests="silent_contacts_do",
    ),
    "waiting dials": Rule(
        "dials on hearsay do not pile up",
        edit(f"{CONNECTOR}:Connector._dial", "tasks_waiting >= 256", "tasks_waiting >= 10**9"),
        tests="silent_contacts_do",
    ),
    "slots for our wishes": Rule(
        "hearsay does not hold up a dial that was asked for",
        edit(
            f"{CONNECTOR}:Connector._dial",
            "self._dial_slots if dial.trusted else self._hearsay_slots",
            "self._hearsay_slots",
        ),
        tests="silent_contacts_do",
    ),
    # Where peers are.
    "addresses of a peer": Rule(
        "a peer has few addresses", {f"{GATER}:MAX_ADDRS": HUGE}, tests="has_few_addresses"
    ),
    "hearsay of a peer": Rule(
        "a stranger makes us try few addresses of a peer",
        {f"{GATER}:MAX_HEARSAY_ADDRS": HUGE},
        tests="has_few_addresses",
    ),
    "known peers": Rule(
        "the address book is bounded",
        {f"{GATER}:MAX_PEERS": HUGE},
        tests="many_networks_together",
    ),
    "hearsay of a network": Rule(
        "one network does not push out what is known of others",
        edit(f"{GATER}:AddressBook._add_hearsay", "len(crowd) > MAX_PEERS // 32", "False"),
        tests="one_network_pushes",
    ),
    "largest network first": Rule(
        "the network with the most peers pays when the hearsay is full",
        edit(f"{GATER}:AddressBook._add_hearsay", "crowded and largest", "False"),
        tests="many_networks_together",
    ),
    "kept addresses": Rule(
        "strangers push out no address of a peer that we keep",
        {f"{GATER}:ConnectionGater._is_kept": always(False)},
        tests="many_networks_together",
    ),
    "hearsay apart": Rule(
        "hearsay pushes out nothing that was signed",
        edit(f"{GATER}:AddressBook.add", "source is AddrSource.HEARSAY", "False"),
        tests="what_is_sure",
    ),
    "no strangers' names": Rule(
        "no name server is asked on a stranger's word",
        edit(f"{GATER}:AddressBook._add_hearsay", "_nameless_places(", "_places("),
        tests="names_are_kept",
    ),
    "reach": Rule(
        "a stranger makes no public node dial into its site",
        edit(f"{GATER}:ConnectionGater.add_addrs", "reach_of(addr) >= reach", "True"),
        tests="a_stranger_names",
    ),
    "addresses rest": Rule(
        "dead addresses hold up no live one",
        edit(f"{GATER}:ConnectionGater.addr_failed", "600.0", "0.0"),
        tests="address_that_fails",
    ),
    "answered first": Rule(
        "the address that answered last is dialled first",
        edit(f"{GATER}:ConnectionGater.places_to_dial", "answered in known", "False"),
        tests="address_that_fails",
    ),
    "relays last": Rule(
        "a direct way is tried before a relay",
        edit(f"{GATER}:ConnectionGater.places_to_dial", "addr.relay is not None", "0"),
        tests="a_relay_comes",
    ),
    "wrong peer is forgotten": Rule(
        "an address at which another answers is not dialled again",
        {f"{GATER}:AddressBook.forget": always(None)},
        tests="a_peer_at",
    ),
    "back-off": Rule(
        "messages do not dial a dead peer again and again",
        edit(f"{GATER}:ConnectionGater.dial_failed", "now + 5.0", "now"),
        tests="a_back_off",
    ),
    # Whom to refuse.
    "points": Rule(
        "who misbehaves is cut off",
        {f"{GATER}:PENALTY_LIMIT": 1e9},
        tests="minted_identities_wash",
    ),
    "points fade": Rule(
        "a bad minute is forgotten",
        {f"{GATER}:PENALTY_HALF_LIFE": 1e9},
        tests="points_fade_and",
    ),
    "refusals last": Rule(
        "who was cut off stays away", {f"{GATER}:REFUSAL": 0.0}, tests="minted_identities_wash"
    ),
    "offences of a host": Rule(
        "new identities of one host wash off no penalty",
        edit(f"{CONNECTOR}:Connector.accept_from", ">= 8.0", ">= 1e9"),
        tests="new_identities_of",
    ),
    # The door.
    "first words": Rule(
        "handshakes end in time",
        {f"{CONNECTOR}:HANDSHAKE_TIMEOUT": 1e9},
        tests="a_silent_socket",
    ),
    "replaced": Rule(
        "one identity does not shake hands without end",
        edit(f"{CONNECTOR}:Connector._greet", ">= 16.0", ">= 1e9"),
        tests="an_identity_that",
    ),
    "handshake rate": Rule(
        "handshakes leave a part of the core",
        {f"{CONNECTOR}:HANDSHAKE_RATE": 1e9, f"{CONNECTOR}:_Turns()._limit": UNLIMITED},
        tests="handshakes_leave_a",
    ),
    "newest under overload": Rule(
        "newcomers do not wait behind a crowd that comes again",
        edit(f"{CONNECTOR}:_Turns.call", "pending.since > 0.4", "pending.since > 1e9"),
        tests="dialers_that_have",
    ),
    "fewest waiting first": Rule(
        "a flood waits behind itself",
        edit(
            f"{CONNECTOR}:_Turns.call",
            "min(self.waiting, key=self._networks.__getitem__)",
            "next(iter(self.waiting))",
        ),
        tests="a_flood_of",
    ),
    "gone take no turns": Rule(
        "dialers that hang up take no turns",
        edit(f"{CONNECTOR}:_Turns.call", "not pending.has_gone()", "True"),
        tests="dialers_that_have",
    ),
    "unused connections": Rule(
        "who connects and does nothing makes room",
        edit(f"{CONNECTOR}:Connector._sweep", "else 30.0", "else 1e9"),
        tests="idle_connections_end",
    ),
    "idle connections": Rule(
        "who does nothing any more makes room",
        edit(f"{CONNECTOR}:Connector._sweep", "= 300.0 if", "= 1e9 if"),
        tests="idle_connections_end",
    ),
    "one of each network": Rule(
        "a crowd of many networks leaves some of those who were there",
        edit(
            f"{LIMITS}:Budget._rank",
            "protect([first[name] for name in sorted(first, key=secret)], share)",
            "None",
        ),
        tests="fifty_networks",
    ),
    "dial deadlines": Rule(
        "a peer with many silent addresses holds a dial's place for seconds only",
        edit(f"{CONNECTOR}:Connector._dial", "20.0 if dial.trusted else 8.0", "1e9"),
        tests="accept_and_say_nothing",
    ),
    "late sweeps": Rule(
        "what came while this machine stood still is read before a connection counts as idle",
        edit(f"{CONNECTOR}:Connector._sweep", "now > self._sweep_due + STALL", "False"),
        tests="somebody_asks",
    ),
    "busy connections stay": Rule(
        "a slow request is not closed as idle",
        {f"{SWARM}:SwarmHost._is_busy": always(False)},
        tests="a_connection_with",
    ),
    "circuits retire": Rule(
        "a direct connection replaces a circuit",
        {f"{CONNECTOR}:Connector._retire": always(None)},
        tests="a_circuit_becomes",
    ),
    # Messages and services.
    "outbox": Rule(
        "what waits for one peer is bounded",
        {f"{OUTBOX}:MAX_OUTBOX": HUGE},
        tests="an_outbox_is",
    ),
    "all outboxes": Rule(
        "what waits for all peers is bounded",
        {f"{OUTBOX}:MAX_WAITING": HUGE},
        tests="peers_that_do",
    ),
    "least outbox": Rule(
        "peers that do not read cost each other messages only",
        {f"{OUTBOX}:MIN_OUTBOX": 0},
        tests="peers_that_do",
    ),
    "stuck lanes": Rule(
        "a peer that reads nothing holds nothing for long",
        edit(f"{OUTBOX}:Outbox.sweep", "lane.sweeps >= 4", "False"),
        tests="lane_that_a",
    ),
    "lanes move": Rule(
        "messages overtake nothing when a circuit is replaced",
        {
            f"{OUTBOX}:Lane._leave": edited(
                f"{OUTBOX}:Lane._leave", "await stream.send_eof()", "return"
            )
        },
        tests="no_message_is",
    ),
    "idle servers": Rule(
        "tasks that wait for a stream are few",
        edit(f"{OUTBOX}:Server.run", "len(idle) >= 16", "len(idle) >= 10**9"),
        tests="a_burst_of",
    ),
    "turns of messages": Rule(
        "a flood of messages leaves turns to others",
        edit(f"{SWARM}:SwarmHost._take_messages", "in_turn >= 64 or ", ""),
        tests="empty_messages_are",
    ),
    "message rate": Rule(
        "a flood of messages takes a part of the core",
        {f"{SWARM}:MESSAGE_RATE": 1e12},
        tests="empty_messages_are",
    ),
    "few streams": Rule(
        "ping and identify are served a few times at once",
        {f"{SWARM}:FEW_STREAMS": {}},
        tests="has_few_streams",
    ),
    "one lane": Rule(
        "a peer has one stream of messages of a protocol",
        edit(f"{SWARM}:SwarmHost._serve_soon", "in self._message_handlers", "in ()"),
        tests="peer_has_one",
    ),
    "pushes": Rule(
        "a peer does not push news without end",
        edit(
            f"{SWARM}:SwarmHost._take_push", "self.world.now() < last + PUSH_PAUSE / 2", "False"
        ),
        tests="does_not_push",
    ),
    "identify ends": Rule(
        "a peer that does not identify itself holds no task",
        {f"{SWARM}:IDENTIFY_TIMEOUT": 1e9},
        tests="idle_connections_end",
    ),
    "claimed addresses": Rule(
        "a peer claims few addresses",
        edit(f"{IDENTIFY}:decode_info_untrusted", "len(listen_addrs) < 16", "True"),
        tests="a_peer_claims",
    ),
    "claimed protocols": Rule(
        "a peer claims few protocols",
        edit(f"{IDENTIFY}:decode_info_untrusted", "len(protocols) < 128", "True"),
        tests="a_peer_claims",
    ),
    "plain protocols": Rule(
        "a claimed protocol takes a byte a character",
        edit(f"{IDENTIFY}:decode_info_untrusted", "protocol.isascii()", "True"),
        tests="a_peer_claims",
    ),
    "identify's size": Rule(
        "a peer's claims are short",
        edit(f"{IDENTIFY}:receive_info", "8 * KI", "2**40"),
        tests="a_peer_claims",
    ),
}

SERVICE: Final = Service(
    "swarm",
    RULES,
    tests=(
        *[
            f"tests/attacks/test_host_{name}.py"
            for name in (
                "limits",
                "door",
                "addresses",
                "served",
                "border",
                "races",
                "descriptors",
            )
        ],
        "tests/attacks/test_live_turns.py",
        "tests/attacks/test_relays.py",
        "tests/unit/test_circuit.py",
        "tests/unit/test_circuit_punch.py",
        "tests/unit/test_swarm.py",
        "tests/unit/test_gater.py",
        "tests/conformance/test_hosts.py",
        "tests/simulation/test_pauses.py",
    ),
)
