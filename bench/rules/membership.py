"""Rules of `p2p.membership`."""

from __future__ import annotations

from typing import Final

from bench.rules.rule import HUGE, UNLIMITED, UNLIMITED_EACH, Exam, Rule, Service, always

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
    "tests/attacks/test_membership_services.py",
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
        tests="accus or accomplices",
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
        scenarios=("churn", "accuse_flood", "urgent_links", "eclipse"),
        tests="restart",
    ),
    "checks": Rule(
        "a neighbour's lies make a node ask few peers",
        {f"{QUOTAS}().checks": UNLIMITED_EACH},
        scenarios=("churn", "accuse_flood", "urgent_links", "eclipse"),
        tests="accus or accomplices",
    ),
    "final checks": Rule(
        "lies about many make a node ask few peers",
        {f"{QUOTAS}().final_checks": UNLIMITED},
        scenarios=("churn", "accuse_flood", "urgent_links", "eclipse"),
        tests="accus or ghosts or deaths",
    ),
    "unchecked": Rule(
        "few floods about strangers and good-byes pass",
        {f"{QUOTAS}().unchecked": UNLIMITED_EACH},
        scenarios=("churn", "accuse_flood", "urgent_links", "eclipse"),
        tests="ghosts or stranger",
    ),
    "newcomers": Rule(
        "invented newcomers are not announced to all",
        {f"{QUOTAS}().newcomers": UNLIMITED_EACH},
        scenarios=("flash_crowd", "accuse_flood", "urgent_links", "eclipse"),
        tests="ghosts",
    ),
    "asks": Rule(
        "who asks for links all the time is penalised",
        {f"{QUOTAS}().asks": UNLIMITED_EACH},
        scenarios=("flash_crowd", "accuse_flood", "urgent_links", "eclipse"),
        tests="flood_of_requests or asks",
    ),
    "refusals": Rule(
        "refusals take a bounded share of the upload",
        {f"{QUOTAS}()._refusals": UNLIMITED},
        scenarios=("flash_crowd", "accuse_flood", "urgent_links", "eclipse"),
        tests="flood_of_requests or led_through",
    ),
    "network's refusals": Rule(
        "one network does not make us silent to others",
        {f"{QUOTAS}()._network_refusals": UNLIMITED_EACH},
        scenarios=("flash_crowd", "accuse_flood", "urgent_links", "eclipse"),
        tests="flood_of_requests or led_through",
    ),
    "walks": Rule(
        "who joins again and again does not walk",
        {f"{QUOTAS}()._walks": UNLIMITED_EACH},
        scenarios=("flash_crowd", "accuse_flood", "urgent_links", "eclipse"),
        tests="flood_of_requests or led_through",
    ),
    "network's walks": Rule(
        "minted identities of one network do not walk",
        {f"{QUOTAS}()._network_walks": UNLIMITED_EACH},
        scenarios=("flash_crowd", "accuse_flood", "urgent_links", "eclipse"),
        tests="led_through",
    ),
    "forwarded walks": Rule(
        "a neighbour's walks have a bound",
        {f"{QUOTAS}().forwarded_walks": UNLIMITED_EACH},
        scenarios=("flash_crowd", "accuse_flood", "urgent_links", "eclipse"),
        tests="walks_from or led_through",
    ),
    "answers": Rule(
        "who asks for heartbeats gets a bounded number",
        {f"{QUOTAS}()._answered": UNLIMITED_EACH},
        scenarios=("flash_crowd", "accuse_flood", "urgent_links", "eclipse"),
        tests="handed_out",
    ),
    "answers to others": Rule(
        "all strangers together get a bounded number",
        {f"{QUOTAS}()._answered_to_others": UNLIMITED},
        scenarios=("flash_crowd", "accuse_flood", "urgent_links", "eclipse"),
        tests="handed_out or answers",
    ),
    "grants": Rule(
        "urgent requests get few guest seats",
        {f"{VIEW}()._grants": UNLIMITED},
        scenarios=("flash_crowd", "accuse_flood", "urgent_links", "eclipse"),
        tests="flood_of_requests or surrounded or seat",
    ),
    "ask back": Rule(
        "a node without neighbours asks who suspects it",
        {f"{VIEW}.on_suspected": always(None)},
        scenarios=("zone_wipe", "partition", "storm"),
        tests="asks_who_asks or lonely or accusers",
    ),
    "ask back slowly": Rule(
        "suspicions make a lonely node send little",
        {f"{VIEW}()._ask_backs": UNLIMITED},
        tests="lonely or accusers",
    ),
    "own choice": Rule(
        "strangers do not fill the active view",
        {f"{VIEW}()._least_chosen": 0},
        scenarios=("flash_crowd", "accuse_flood", "urgent_links", "eclipse"),
        tests="own_choice or surrounded or flood_of_requests",
    ),
    "crowding": Rule(
        "one network gets two neighbours",
        {f"{VIEW}._is_crowding": always(False)},
        scenarios=("flash_crowd", "accuse_flood", "urgent_links", "eclipse"),
        tests="one_network",
    ),
    "guests leave": Rule(
        "guest seats are free",
        {f"{VIEW}._release_guests": always(None)},
        scenarios=("flash_crowd", "accuse_flood", "urgent_links", "eclipse"),
        tests="flood_of_requests or seat",
    ),
    "anchors": Rule(
        "a restarted node asks old neighbours",
        {f"{CORE}.active_view:ANCHORS": 0},
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
        scenarios=("zone_wipe", "partition", "storm"),
        tests="refuses or bootstrap",
    ),
    "two waves": Rule(
        "a flood crosses each link once",
        {f"{CORE}.dissemination:Dissemination._goes_first": lambda _, peers: list(peers)},
        scenarios=("zone_wipe", "partition", "storm"),
        tests="goes_first",
    ),
    "heard elsewhere": Rule(
        "what a neighbour has is not sent to it",
        {f"{CORE}.dissemination:Dissemination.neighbour_heard": always(None)},
        scenarios=("churn", "accuse_flood", "urgent_links", "eclipse"),
        tests="accusing or refutation or accomplices",
    ),
    "crossing answers": Rule(
        "a refutation on its way is not sent twice",
        {f"{CORE}.dissemination:Dissemination.is_passing": always(False)},
        scenarios=("churn", "accuse_flood", "urgent_links", "eclipse"),
        tests="accusing or refutation or accomplices",
    ),
    "floods remembered": Rule(
        "floods take bounded memory",
        {f"{CORE}.dissemination:MAX_FLOODS": HUGE},
        scenarios=("zone_wipe", "partition", "storm"),
        tests="rumour or ghosts",
    ),
    "newcomers at once": Rule(
        "an announcement fits a request",
        {f"{CORE}.dissemination:MAX_NEWCOMERS": HUGE},
        scenarios=("flash_crowd", "accuse_flood", "urgent_links", "eclipse"),
        tests="ghosts or one_by_one",
    ),
    "probes": Rule(
        "suspicions of neighbours take bounded memory",
        {f"{CORE}.failure_detector:MAX_PROBED": HUGE},
        scenarios=("churn", "accuse_flood", "urgent_links", "eclipse"),
        tests="accus or refutation",
    ),
    "heard peers": Rule(
        "a suspicion of a peer that we hear is not believed",
        {f"{CORE}.member_list:MemberState.is_heard": always(False)},
        scenarios=("churn", "accuse_flood", "urgent_links", "eclipse"),
        tests="cannot_kill or accus",
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
        scenarios=("flash_crowd", "eclipse", "churn"),
        tests="ghosts or asked",
    ),
    "ghosts": Rule(
        "who names what it does not have is passed over",
        {f"{CORE}.pull:Pull()._unanswered": UNLIMITED_EACH},
        scenarios=("flash_crowd", "eclipse", "churn"),
        tests="ghosts_do_not_keep or never_named",
    ),
    "renewal": Rule(
        "a full view changes slowly",
        {f"{CORE}.pull:Pull()._unknown": UNLIMITED},
        scenarios=("eclipse", "urgent_links"),
        tests="flushed or seat",
    ),
    "batches": Rule(
        "what can wait comes together",
        {f"{CORE}.pull:BATCH_INTERVALS": 0.0},
        scenarios=("flash_crowd", "eclipse", "churn"),
        tests="free_seat or ghosts",
    ),
    "crowded view": Rule(
        "a full view sends digests with every third heartbeat",
        {f"{CORE}.member_list:MemberList.is_crowded": always(False)},
        scenarios=("eclipse", "urgent_links"),
        tests="flushed",
    ),
    "young": Rule(
        "invented names do not fill a view",
        {f"{CORE}.member_list:YOUNG": 0.0},
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
        "no introducer gets more than its share",
        {
            f"{CORE}.member_list:_most_crowded": lambda drawn, otherwise: (
                drawn[0].peer if drawn else otherwise
            )
        },
        scenarios=("eclipse", "urgent_links"),
        tests="flushed or one_network",
    ),
    "far networks": Rule(
        "neighbours are chosen in different networks",
        {
            f"{CORE}.member_list:MemberList._by_network": lambda members, neighbours, now: [
                member.peer
                for member in members._members.values()
                if member.peer not in neighbours and member.is_candidate(now)
            ]
        },
        scenarios=("eclipse", "urgent_links"),
        tests="one_network",
    ),
    "news first": Rule(
        "a new member is named before the others",
        {f"{CORE}.member_list:MemberList.name_next": always(None)},
        scenarios=("flash_crowd", "accuse_flood", "urgent_links", "eclipse"),
        tests="push_each_other or knows_itself",
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
        tests="interest",
    ),
    "gap": Rule(
        "suspicions do not make a node beat without a pause",
        {f"{CORE}.local_heartbeat:LocalHeartbeat._earliest": lambda _, now: now},
        scenarios=("churn", "accuse_flood", "urgent_links", "eclipse"),
        tests="beat_to_all or accus",
    ),
    "stamp first": Rule(
        "who shows no stamp is not listened to",
        {f"{CORE}.core:_NEEDS_STAMP": frozenset()},
        tests="no_stamp",
    ),
    "tombstones": Rule(
        "old heartbeats bring no dead peer back",
        {f"{CORE}.member_list:MemberList.seqno_of_dead": always(-1)},
        scenarios=("churn", "accuse_flood", "urgent_links", "eclipse"),
        tests="replay or brings_nobody",
    ),
    "slack": Rule(
        "a node that lacks one neighbour does not ask around",
        {f"{CORE}.active_view:SLACK": 0},
        scenarios=("flash_crowd", "accuse_flood", "urgent_links", "eclipse"),
        tests="seat or knows_itself",
    ),
}
SERVICE: Final = Service(
    "membership",
    RULES,
    SCENARIOS,
    TESTS,
    {"heartbeat": "fields of the format", "messages": "fields of the format"},
)
