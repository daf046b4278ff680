"""One node: the composition root, its configuration, and the command line.

A node is a host, the swarm services (membership, gossip, DHT, SHARDCAST), one run, and roles.
Nothing here knows what a role does; `p2p.node.plugins` finds them.
"""
