"""Which of a node's addresses others can dial, and what to do if none can.

The files, in the order in which to read them
---------------------------------------------
`messages` has the wire format of AutoNAT v2. `autonat` asks peers and answers them. `mapping`
asks the home router for a port, by PCP, NAT-PMP or UPnP. `core` judges what peers
answer.
"""
