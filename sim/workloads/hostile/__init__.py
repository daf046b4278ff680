"""Hostile members: their attacks, and the effect on honest members.

- `workload` (read it first): `HostileWorkload`, the course of every attack, and what is
  measured
- `attacks`: three attacks on membership and gossip; `heartbeats`: the heartbeats that they sign
- `eclipse`: a coalition that names no member but its own
- `squatters`: minted identities that fill the run's key in the DHT
"""
