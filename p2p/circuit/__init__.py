"""Connections through a relay, and direct ones in their place: circuit relay v2 and DCUtR.

The files, in the order in which to read them
---------------------------------------------
`messages` has the wire formats. `relay` serves others, within the limits that `core` keeps.
`network` makes circuits look like any other network. `punch` replaces a circuit by a direct
connection.

How a connection comes about
----------------------------
::

    listener --- RESERVE ---> relay                       an hour, renewed before it ends
    dialer ---- CONNECT ----> relay ---- CONNECT ----> listener
    dialer <======== Noise and Yamux, end to end ========> listener
"""
