"""Decisions of the production host without I/O: time comes in as ``now``.

`limits` counts what strangers hold of a node, and says which of them makes room when it is
full. `gater` remembers where peers can be dialled and how they behaved, and decides whom a host
dials, refuses and keeps; the simulated host asks it, too.
"""
