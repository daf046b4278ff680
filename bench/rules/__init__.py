"""The rules of each network service, and the exams that show what each is worth.

A rule is what refuses, limits, delays or prefers. `rule` says what one is and switches it off;
`shardcast`, `membership`, `gossip`, `dht`, `swarm` and `transport` have one service's rules
each. ``python -m bench ablate`` (`bench.ablate`) plays the exams and writes
``bench/rules.md``; ``tests/unit/test_rules.py`` finds rules without a row.
"""

from typing import Final

from bench.rules import dht, gossip, membership, shardcast, swarm, transport
from bench.rules.rule import Service

SERVICES: Final[dict[str, Service]] = {
    service.name: service
    for service in (
        shardcast.SERVICE,
        membership.SERVICE,
        gossip.SERVICE,
        dht.SERVICE,
        swarm.SERVICE,
        transport.SERVICE,
    )
}
