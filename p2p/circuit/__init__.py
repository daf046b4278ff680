"""Connections through a relay, and direct ones in their place: circuit relay v2 and DCUtR.

The files, in the order in which to read them
---------------------------------------------
`messages` has the wire formats.

`core` has decisions without I/O.
"""
