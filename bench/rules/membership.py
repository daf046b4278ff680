"""Rules of `p2p.membership`."""

from __future__ import annotations

from typing import Final

from bench.rules.rule import (
    HUGE,
    UNLIMITED,
    UNLIMITED_EACH,
    Exam,
    Rule,
    Service,
    always,
    edit,
    edited,
    fixed,
)

CORE: Final = "p2p.membership.core"
QUOTAS: Final = f"{CORE}.quotas:FloodQuotas"
VIEW: Final = f"{CORE}.active_view:ActiveView"
ALIVE: Final = Exam(("death_seconds_p99", "coverage", "bytes_per_second"))
HOSTILE: Final = Exam(
    ("honest_neighbours_least", "honest_share_least", "attack_bytes_per_second")
)
SCENARIOS: Final = {
    "churn": ALIVE,
    "storm": ALIVE,
    "partition": ALIVE,
    "zone_wipe": ALIVE,
    "flash_crowd": Exam(("join_seconds_median", "coverage", "bytes_per_second")),
    "eclipse": Exam(("honest_neighbours_least", "honest_seen_least")),
    "accuse_flood": HOSTILE,
    "urgent_links": HOSTILE,
}
TESTS: Final = (
    "tests/attacks/test_membership_eclipse.py",
    "tests/attacks/test_membership_floods.py",
    "tests/attacks/test_membership_open_runs.py",
    "tests/unit/test_membership_core.py",
    "tests/unit/test_membership_dissemination.py",
    "tests/unit/test_membership_service.py",
)
RULES: Final = {
    "message quota": Rule(
        "what one peer sends costs a bounded share of a core",
        {f"{CORE}.core:MembershipCore()._message_quotas": UNLIMITED_EACH},
        tests="cut_off_and_penalised or flood",
    ),
    "trust": Rule(
        "lies about deaths end at the first honest node",
        {f"{QUOTAS}()._trust": UNLIMITED},
        scenarios=("churn", "accuse_flood", "urgent_links", "eclipse"),
        tests="accus",
    ),
    "restarts": Rule(
        "peers that are started again do not use up the trust",
        {f"{CORE}.quotas:RESTART": HUGE},
        scenarios=("churn", "accuse_flood", "urgent_links", "eclipse"),
        tests="restart",
    ),
    "restart quota": Rule(
        "who claims restarts all the time uses up the trust",
        {f"{QUOTAS}()._restarts": UNLIMITED_EACH},
        tests="claims_restarts",
    ),
    "checks": Rule(
        "lies about many make a node ask few peers",
        {f"{QUOTAS}().checks": UNLIMITED_EACH},
        tests="ask_few_peers",
    ),
    "unchecked": Rule(
        "few floods about strangers and good-byes pass",
        {f"{QUOTAS}().unchecked": UNLIMITED_EACH},
        scenarios=("churn", "accuse_flood", "urgent_links", "eclipse"),
        tests="ghosts or stranger",
    ),
    "asks": Rule(
        "who asks for links all the time is penalised",
        {f"{QUOTAS}().asks": UNLIMITED_EACH},
        scenarios=("flash_crowd", "accuse_flood", "urgent_links", "eclipse"),
        tests="flood_of_requests or asks",
    ),
    "walks": Rule(
        "who joins again and again does not walk",
        {f"{QUOTAS}().walks": UNLIMITED_EACH},
        tests="walks_once",
    ),
    "answers": Rule(
        "what one peer makes us send has a bound",
        {f"{QUOTAS}().answers": UNLIMITED_EACH},
        tests="handed_out or walks_from",
    ),
    "answers to a network": Rule(
        "minted identities of one network do not walk",
        {f"{QUOTAS}()._network": UNLIMITED_EACH},
        tests="led_through",
    ),
    "answers to strangers": Rule(
        "strangers of no network together make us send a bounded amount",
        {f"{QUOTAS}()._strangers": UNLIMITED, f"{QUOTAS}()._placeless": UNLIMITED},
        tests="all_strangers",
    ),
    "grants": Rule(
        "one network gets one guest seat at a time",
        edit(f"{VIEW}._grant", "(peer.digest, prefix)", "(peer.digest,)"),
        tests="no_more_than_one_guest_seat",
    ),
    "ask back": Rule(
        "a node without neighbours asks who suspects it",
        {f"{VIEW}.on_suspected": always(None)},
        scenarios=("zone_wipe", "partition", "storm"),
        tests="asks_who_asks or lonely or accusers",
    ),
    "own choice": Rule(
        "strangers do not fill the active view",
        {f"{VIEW}()._least_chosen": 0},
        tests="leaves_a_starting_node",
    ),
    "crowding": Rule(
        "one network gets two neighbours",
        {f"{VIEW}._is_crowding": always(False)},
        tests="gets_two_seats",
    ),
    "guests leave": Rule(
        "guest seats are free",
        {f"{VIEW}._release_guests": always(None)},
        scenarios=("flash_crowd", "accuse_flood", "urgent_links", "eclipse"),
        tests="flood_of_requests or seat",
    ),
    "anchors": Rule(
        "a restarted node asks old neighbours",
        {
            f"{VIEW}.anchors": fixed(()),
            f"{VIEW}.bootstrap": edited(f"{VIEW}.bootstrap", "anchors[:2]", "()"),
        },
        scenarios=("zone_wipe", "partition", "storm"),
        tests="anchors",
    ),
    "healing": Rule(
        "both sides of a partition find each other",
        {f"{VIEW}._heal": always(None)},
        scenarios=("zone_wipe", "partition", "storm"),
        tests="zone_comes_back or bootstrap",
    ),
    "avoid": Rule(
        "who refused a link is not asked again at once",
        {f"{VIEW}._avoid": always(None)},
        tests="refuses_is_not_asked",
    ),
    "two waves": Rule(
        "a flood crosses each link once",
        {f"{CORE}.dissemination:Dissemination._goes_first": lambda _, peers: list(peers)},
        scenarios=("accuse_flood", "zone_wipe"),
        tests="refutation",
    ),
    "floods remembered": Rule(
        "floods take bounded memory",
        {f"{CORE}.dissemination:MAX_FLOODS": HUGE},
        tests="remembered_within_a_bound",
    ),
    "heard elsewhere": Rule(
        "what a neighbour has is not sent to it",
        {f"{CORE}.dissemination:Dissemination.neighbour_heard": always(None)},
        scenarios=("accuse_flood",),
        tests="refutation",
    ),
    "heard peers": Rule(
        "a suspicion of a peer that we hear is checked first",
        edit(
            f"{CORE}.failure_detector:FailureDetector.on_suspect",
            "member.is_heard(now) or ",
            "",
        ),
        tests="shown_to_that_peer_alone",
    ),
    "requested keys": Rule(
        "requests take bounded memory",
        {f"{CORE}.pull:MAX_ASKED": HUGE},
        scenarios=("flash_crowd", "eclipse", "churn"),
        tests="ghosts_do_not_keep or asked",
    ),
    "pull budget": Rule(
        "digests cause bounded requests",
        {f"{CORE}.pull:Pull()._budget": UNLIMITED},
        tests="within_the_budget",
    ),
    "ghosts": Rule(
        "who names what it does not have is passed over",
        {f"{CORE}.pull:Pull()._unanswered": UNLIMITED_EACH},
        scenarios=("flash_crowd", "eclipse", "churn"),
        tests="ghosts_do_not_keep or never_named",
    ),
    "batches": Rule(
        "what can wait comes together, and a full view changes slowly",
        edit(f"{CORE}.pull:Pull.wanted", "3.0 *", "0.0 *"),
        tests="larger_than_the_view",
    ),
    "crowded view": Rule(
        "a full view sends digests with every third heartbeat",
        {f"{CORE}.member_list:MemberList.is_crowded": always(False)},
        tests="larger_than_the_view",
    ),
    "young": Rule(
        "invented names do not fill a view",
        {f"{CORE}.member_list:MemberList()._youth": 0.0},
        scenarios=("eclipse", "urgent_links"),
        tests="flushed or push_each_other",
    ),
    "network's share": Rule(
        "one network gets a quarter of a view",
        {f"{CORE}.member_list:MemberList._of_crowded_prefix": always([])},
        scenarios=("eclipse", "urgent_links"),
        tests="one_network",
    ),
    "crowds go first": Rule(
        "many identities in few networks get few places of a full view",
        edit(f"{CORE}.member_list:MemberList.evictee", "crowds[member.prefix]", "0"),
        tests="few_networks",
    ),
    "far networks": Rule(
        "neighbours are chosen in different networks",
        edit(f"{CORE}.member_list:MemberList.candidates", "member.prefix in near", "False"),
        tests="other_networks_first",
    ),
    "news first": Rule(
        "a new member or policy is named before the others",
        {f"{CORE}.member_list:MemberList.name_next": always(None)},
        tests="new_policy",
    ),
    "pace": Rule(
        "a peer's claimed interval is believed within bounds",
        {"p2p.membership.config:MembershipConfig.paced": lambda _, interval: interval},
        scenarios=("churn", "accuse_flood", "urgent_links", "eclipse"),
        tests="interval_counts",
    ),
    "back off": Rule(
        "unreachable peers are not dialled for each heartbeat",
        {f"{CORE}.local_heartbeat:LocalHeartbeat.back_off": always(None)},
        tests="spared",
    ),
    "gap": Rule(
        "suspicions do not make a node sign without a pause",
        {f"{CORE}.local_heartbeat:LocalHeartbeat._earliest": lambda _, now: now},
        tests="without_a_pause",
    ),
    "stamp first": Rule(
        "who shows no stamp is not listened to",
        {f"{CORE}.verifier:HeartbeatVerifier.has_stamp": always(True)},
        tests="no_stamp",
    ),
    "tombstones": Rule(
        "old heartbeats bring no dead peer back",
        {f"{CORE}.member_list:MemberList.seqno_of_dead": always(-1)},
        tests="does_not_come_back",
    ),
    "slack": Rule(
        "a node that lacks one neighbour does not ask around",
        edit(f"{VIEW}.__init__", "slack = 2", "slack = 0"),
        scenarios=("flash_crowd", "accuse_flood", "urgent_links", "eclipse"),
        tests="seat",
    ),
}
SERVICE: Final = Service(
    "membership",
    RULES,
    SCENARIOS,
    TESTS,
    {"heartbeat": "fields of the format", "messages": "fields of the format"},
)
