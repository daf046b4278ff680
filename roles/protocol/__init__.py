"""What the roles say to each other.

`messages` are the bytes. `assignment` says which work is whose, and who judges it. `request`
asks a peer until there is an answer.
"""
