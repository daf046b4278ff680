"""Rules of `p2p.gossip`."""

from __future__ import annotations

from typing import Any, Final

from bench.rules.rule import HUGE, UNLIMITED_EACH, Exam, Rule, Service, always
from p2p.gossip.core.promises import Promises
from p2p.gossip.core.quotas import PeerQuotas

CORE: Final = "p2p.gossip.core"
SCENARIOS: Final = {
    "ghost_mesh": Exam(
        ("reached_least", "reached_mean", "dead_in_mesh_most", "attack_bytes_per_second")
    )
}
TESTS: Final = (
    "tests/attacks/test_gossip_floods.py",
    "tests/attacks/test_gossip_mesh.py",
    "tests/attacks/test_gossip_pools.py",
    "tests/attacks/test_gossip_stopped.py",
    "tests/unit/test_gossip_core.py",
)
_QUOTA_HEARTBEAT: Final = PeerQuotas.heartbeat
_PROMISES_HEARTBEAT: Final = Promises.heartbeat


def _without_crowd(quotas: Any) -> list[Any]:
    persistent = _QUOTA_HEARTBEAT(quotas)
    quotas._rate = quotas._config.rate
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
    ),
    "overdrawn": Rule(
        "signatures and answers are paid for",
        {f"{CORE}.quotas:PeerQuotas.is_overdrawn": always(False)},
    ),
    "price of an RPC": Rule("empty RPCs cost their sender", {f"{CORE}.quotas:RPC_COST": 0}),
    "price of a field": Rule("fields cost their sender", {f"{CORE}.quotas:FIELD_COST": 0}),
    "price of a signature": Rule(
        "signatures to check cost their sender", {f"{CORE}.quotas:VERIFY_COST": 0}
    ),
    "price of the ignored": Rule(
        "messages that nobody wants cost their sender", {f"{CORE}.quotas:IGNORED_COST": 0}
    ),
    "newcomer": Rule("a new name has no whole burst", {f"{CORE}.quotas:NEWCOMER": HUGE}),
    "authors": Rule(
        "an author's messages are bounded, whoever brings them",
        {f"{CORE}.quotas:PeerQuotas().authors": UNLIMITED_EACH},
    ),
    "flood": Rule("who floods is disconnected", {f"{CORE}.quotas:FLOOD_BURSTS": HUGE}),
    "persistent flood": Rule(
        "who is over quota all the time is disconnected",
        {f"{CORE}.quotas:PeerQuotas.heartbeat": _without_persistent},
    ),
    "crowd": Rule(
        "a thousand peers at their quota share what 16 may cost",
        {f"{CORE}.quotas:PeerQuotas.heartbeat": _without_crowd},
    ),
    "departed": Rule(
        "reconnecting fills no bucket",
        {
            f"{CORE}.quotas:PeerQuotas.disconnected": lambda quotas, peer: quotas._accounts.pop(
                peer, None
            )
        },
    ),
    "grace": Rule(
        "no peer is penalised because we were stopped", {f"{CORE}.core:STALL": float(HUGE)}
    ),
    "broken promises": Rule(
        "who advertises what it does not send is penalised",
        {f"{CORE}.promises:Promises.heartbeat": _without_broken},
    ),
    "who is asked": Rule(
        "a message is asked of few peers, the proven first",
        {f"{CORE}.promises:Promises.should_ask": always(True)},
    ),
    "asked at once": Rule(
        "IHAVE causes bounded requests", {f"{CORE}.promises:MAX_ASKED": HUGE}
    ),
    "open promises": Rule(
        "promises take bounded memory", {f"{CORE}.promises:MAX_PROMISES": HUGE}
    ),
    "penalised": Rule(
        "penalties take bounded memory", {f"{CORE}.promises:MAX_PENALISED": HUGE}
    ),
    "mesh threshold": Rule(
        "a penalised peer leaves the mesh",
        {f"{CORE}.promises:PeerScores.may_mesh": always(True)},
    ),
    "gossip threshold": Rule(
        "a penalised peer's IHAVE and IWANT are ignored",
        {f"{CORE}.promises:PeerScores.may_gossip": always(True)},
    ),
    "first deliveries": Rule(
        "who brings messages first is preferred",
        {f"{CORE}.promises:PeerScores.delivered_first": always(None)},
    ),
    "opportunistic graft": Rule(
        "a silent mesh is replaced",
        {f"{CORE}.mesh:OPPORTUNISTIC_GRAFT_HEARTBEATS": HUGE},
    ),
    "flood publishing": Rule(
        "own messages do not depend on the mesh", {f"{CORE}.mesh:MAX_FLOOD_PUBLISH": 0}
    ),
    "flood publishing's bound": Rule(
        "an own message goes to few peers", {f"{CORE}.mesh:MAX_FLOOD_PUBLISH": HUGE}
    ),
    "topics": Rule(
        "subscriptions take bounded memory", {f"{CORE}.mesh:MAX_TOPICS_OF_PEER": HUGE}
    ),
    "backoff": Rule(
        "who was pruned does not graft at once",
        {f"{CORE}.mesh:Mesh.is_backed_off": always(False)},
    ),
    "backoffs": Rule("backoffs take bounded memory", {f"{CORE}.mesh:MAX_BACKOFFS": HUGE}),
    "backoff slack": Rule(
        "an honest GRAFT is not too early", {f"{CORE}.mesh:BACKOFF_SLACK": 0.0}
    ),
    "outbound": Rule(
        "strangers who connect do not fill a mesh",
        {"p2p.gossip.config:GossipConfig().outbound": 0},
    ),
    "mesh size": Rule(
        "a mesh has a largest size", {"p2p.gossip.config:GossipConfig().high": HUGE}
    ),
    "cut back": Rule(
        "a mesh keeps its best and its outbound peers",
        {
            f"{CORE}.mesh:Mesh._excess": lambda mesh, peers: mesh._rng.sample(
                peers, len(peers) - mesh._config.degree
            )
        },
    ),
    "pending": Rule("validation takes bounded memory", {f"{CORE}.core:MAX_PENDING": HUGE}),
    "answer": Rule("an IWANT gets a bounded answer", {f"{CORE}.core:MAX_ANSWER": HUGE}),
    "answers of one message": Rule(
        "one peer gets a message three times",
        {
            f"{CORE}.caches:MessageCache.get_for_peer": lambda cache, identity, _: (
                cache._messages.get(identity)
            )
        },
    ),
    "cache": Rule("messages take bounded memory", {f"{CORE}.caches:MAX_CACHE_BYTES": HUGE}),
    "message cost": Rule("empty messages are not free", {f"{CORE}.caches:MESSAGE_COST": 0}),
    "seen": Rule("ids take bounded memory", {f"{CORE}.caches:MAX_SEEN": HUGE}),
    "rejected": Rule(
        "each peer that sends a rejected message is penalised",
        {f"{CORE}.caches:SeenCache.reject": always(None)},
    ),
}
SERVICE: Final = Service(
    "gossip", RULES, SCENARIOS, TESTS, {"messages": "fields of the format"}
)
