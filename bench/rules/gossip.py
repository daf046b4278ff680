"""Rules of `p2p.gossip`."""

from __future__ import annotations

from typing import Any, Final

from bench.rules.rule import HUGE, UNLIMITED_EACH, Exam, Rule, Service, always, edit
from p2p.gossip.config import RATE
from p2p.gossip.core.promises import Promises
from p2p.gossip.core.quotas import PeerQuotas

CORE: Final = "p2p.gossip.core"
SCENARIOS: Final = {
    "ghost_mesh": Exam(
        ("reached_least", "reached_mean", "dead_in_mesh_most", "attack_bytes_per_second")
    )
}
TESTS: Final = (
    "tests/attacks/test_gossip_decoding.py",
    "tests/attacks/test_gossip_floods.py",
    "tests/attacks/test_gossip_mesh.py",
    "tests/attacks/test_gossip_pools.py",
    "tests/attacks/test_gossip_stopped.py",
    "tests/unit/test_gossip_core.py",
    "tests/transcripts/test_transcripts.py",
)
_QUOTA_HEARTBEAT: Final = PeerQuotas.heartbeat
_PROMISES_HEARTBEAT: Final = Promises.heartbeat


def _without_crowd(quotas: Any) -> list[Any]:
    persistent = _QUOTA_HEARTBEAT(quotas)
    quotas._rate = RATE
    return persistent


def _without_persistent(quotas: Any) -> list[Any]:
    _QUOTA_HEARTBEAT(quotas)
    return []


def _without_broken(promises: Any, now: float) -> list[Any]:
    _PROMISES_HEARTBEAT(promises, now)
    return []


RULES: Final = {
    "bucket": Rule(
        "what one peer sends costs a bounded share of a core",
        {f"{CORE}.quotas:PeerQuotas.admit": always(True)},
        tests="flood_is_dropped",
    ),
    "price of an RPC": Rule(
        "empty RPCs cost their sender",
        {f"{CORE}.quotas:RPC_COST": 0},
        tests="flood_is_dropped",
    ),
    "price of a field": Rule(
        "fields cost their sender",
        {f"{CORE}.quotas:FIELD_COST": 0},
        tests="flood_is_dropped or largest_rpc",
    ),
    "price of a signature": Rule(
        "signatures to check cost their sender",
        {f"{CORE}.quotas:VERIFY_COST": 0},
        tests="verified_on_account",
    ),
    "price of the ignored": Rule(
        "messages that nobody wants cost their sender",
        {f"{CORE}.quotas:IGNORED_COST": 0},
        tests="ignored_messages or flush",
    ),
    "newcomer": Rule(
        "a new name has no whole burst",
        {f"{CORE}.quotas:NEWCOMER": HUGE},
        tests="flood or reconnecting or account",
    ),
    "authors": Rule(
        "an author's messages are bounded, whoever brings them",
        {f"{CORE}.quotas:PeerQuotas().authors": UNLIMITED_EACH},
        scenarios=("ghost_mesh",),
        tests="admitted_author",
    ),
    "flood": Rule(
        "who floods is disconnected",
        {f"{CORE}.quotas:PeerQuotas.take_flood": always(False)},
        scenarios=("ghost_mesh",),
        tests="flood_is_dropped or goes_on_is_blamed",
    ),
    "persistent flood": Rule(
        "who is over quota all the time is disconnected",
        {f"{CORE}.quotas:PeerQuotas.heartbeat": _without_persistent},
        scenarios=("ghost_mesh",),
        tests="little_too_much",
    ),
    "crowd": Rule(
        "a thousand peers at their quota share what 16 may cost",
        {f"{CORE}.quotas:PeerQuotas.heartbeat": _without_crowd},
        scenarios=("ghost_mesh",),
        tests="crowd_spends",
    ),
    "departed": Rule(
        "reconnecting fills no bucket",
        {
            f"{CORE}.quotas:PeerQuotas.disconnected": lambda quotas, peer: quotas._accounts.pop(
                peer, None
            )
        },
        tests="reconnecting",
    ),
    "grace": Rule(
        "no peer is penalised because we were stopped",
        {f"{CORE}.core:STALL": float(HUGE)},
        tests="minute_of_traffic",
    ),
    "broken promises": Rule(
        "who advertises what it does not send is penalised",
        {f"{CORE}.promises:Promises.heartbeat": _without_broken},
        scenarios=("ghost_mesh",),
        tests="ihave_and_iwant",
    ),
    "who is asked": Rule(
        "a message is asked of few peers, the proven first",
        {f"{CORE}.promises:Promises.should_ask": always(True)},
        scenarios=("ghost_mesh",),
        tests="promise or ihave_and_iwant",
    ),
    "open promises": Rule(
        "promises take bounded memory",
        {f"{CORE}.promises:MAX_PROMISES": HUGE},
        scenarios=("ghost_mesh",),
        tests="thousands_of_ids",
    ),
    "promises of a peer": Rule(
        "one peer that advertises without end costs little to ask",
        {f"{CORE}.promises:MAX_OWED": HUGE},
        scenarios=(),
        tests="owes_no_more",
    ),
    "first deliveries": Rule(
        "who brings messages first is preferred",
        {f"{CORE}.promises:FirstDeliveries.delivered_first": always(None)},
        scenarios=("ghost_mesh",),
        tests="bring_news",
    ),
    "opportunistic graft": Rule(
        "a silent mesh is replaced",
        edit(f"{CORE}.mesh:Mesh.maintain", "% 60", "% 10**9"),
        scenarios=("ghost_mesh",),
        tests="bring_news",
    ),
    "flood publishing": Rule(
        "own messages do not depend on the mesh",
        {f"{CORE}.mesh:MAX_FLOOD_PUBLISH": 0},
        scenarios=("ghost_mesh",),
        tests="publication_reaches",
    ),
    "flood publishing's bound": Rule(
        "an own message goes to few peers",
        {f"{CORE}.mesh:MAX_FLOOD_PUBLISH": HUGE},
        scenarios=("ghost_mesh",),
        tests="publication_reaches",
    ),
    "topics": Rule(
        "subscriptions take bounded memory",
        {f"{CORE}.mesh:MAX_TOPICS_OF_PEER": HUGE},
        tests="subscriptions_of_one or graft_of_a_topic",
    ),
    "backoff": Rule(
        "who was pruned does not graft at once",
        {f"{CORE}.mesh:Mesh.is_backed_off": always(False)},
        scenarios=("ghost_mesh",),
        tests="graft_and_prune",
    ),
    "backoffs": Rule(
        "backoffs take bounded memory",
        {f"{CORE}.mesh:MAX_BACKOFFS": HUGE},
        tests="backoffs_of_minted",
    ),
    "backoff slack": Rule(
        "an honest GRAFT is not too early",
        {f"{CORE}.mesh:Mesh()._slack": 0.0},
        scenarios=("ghost_mesh",),
        tests="graft_and_prune",
    ),
    "outbound": Rule(
        "strangers who connect do not fill a mesh",
        {"p2p.gossip.config:GossipConfig().outbound": 0},
        scenarios=("ghost_mesh",),
        tests="graft_first",
    ),
    "mesh size": Rule(
        "a mesh has a largest size",
        {"p2p.gossip.config:GossipConfig().high": HUGE},
        scenarios=("ghost_mesh",),
        tests="graft_and_prune or graft_first",
    ),
    "cut back": Rule(
        "a mesh keeps its best and its outbound peers",
        {
            f"{CORE}.mesh:Mesh._excess": lambda mesh, peers: mesh._rng.sample(
                peers, len(peers) - mesh._config.degree
            )
        },
        scenarios=("ghost_mesh",),
        tests="bring_news or mesh",
    ),
    "answer": Rule(
        "an IWANT gets a bounded answer",
        edit(f"{CORE}.core:GossipCore._on_iwant", "size > msg.MAX_RPC // 2", "False"),
        tests="fits_one_rpc or stand_on",
    ),
    "cache": Rule(
        "messages take bounded memory",
        {f"{CORE}.caches:MAX_CACHE_BYTES": HUGE},
        tests="one_author or without_data",
    ),
    "message cost": Rule(
        "empty messages are not free",
        {f"{CORE}.caches:size_of": lambda message: len(message.data or b"")},
        tests="without_data",
    ),
    "seen": Rule(
        "ids take bounded memory",
        {f"{CORE}.caches:MAX_SEEN": HUGE},
        tests="noise or flush",
    ),
    "rejected": Rule(
        "each peer that sends a rejected message is penalised",
        {f"{CORE}.caches:SeenCache.reject": always(None)},
        tests="forged_message",
    ),
}
SERVICE: Final = Service(
    "gossip", RULES, SCENARIOS, TESTS, {"messages": "fields of the format"}
)
