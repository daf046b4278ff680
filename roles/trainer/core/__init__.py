"""What a trainer decides without I/O.

`buffer` holds accepted groups by age until a step takes them, and says when there is room.
"""
