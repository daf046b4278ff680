"""Decisions of a trainer, without I/O.

`gate` says whose work may teach and who is convicted, by `records` of names and validators.
`buffer` holds accepted groups by age until a step takes them; `demand` says how many places
each worker is asked for; `guards` says when learning goes wrong; `pace` measures workers by
what they bring.
"""
