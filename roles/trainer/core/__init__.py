"""Decisions of a trainer, without I/O.

`gate` decides whose work may teach and who is convicted, using `records` of names and
validators. `buffer` holds accepted groups by age until a step takes them; `demand` decides how
many places each worker is asked for; `guards` warns when learning goes wrong; `pace` measures
the speed of workers by their accepted work.
"""
