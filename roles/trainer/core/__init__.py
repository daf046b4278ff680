"""What a trainer decides without I/O.

`buffer` holds accepted groups by age until a step takes them, and says when there is room.
`roles.trainer.intake` adds to it, `roles.trainer.session` takes from it.
"""
