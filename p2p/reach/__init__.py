"""Reachability: the addresses of a node that others can dial, and remedies if there are none.

The files, in the order in which to read them
---------------------------------------------
`messages` has the wire format of AutoNAT v2. `autonat` asks peers and answers them. `mapping`
asks the home router for a port, by PCP, NAT-PMP or UPnP. `relays` keeps reservations while
nobody can dial us. `nat` is all of it in one block. `lan` finds peers in the local network, if
the owner asks for it. `core` judges what peers answer, and chooses relays.
"""
