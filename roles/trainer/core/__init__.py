"""What a trainer decides without I/O.

`gate` says whose work may teach and who is convicted, by `records` of names and validators.
`buffer` holds accepted groups by age until a step takes them, and says when there is room;
`demand` orders work; `guards` says when learning goes wrong; `pace` measures workers by what
they bring.
`roles.trainer.intake` owns `buffer`: it adds the groups of deliveries, and hands them to
`roles.trainer.session` for a step.
"""
