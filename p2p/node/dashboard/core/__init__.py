"""What a dashboard shows and whom it lets in: pure by contract.

`reading` takes from a health what panels name, `history` keeps the curves, `picture` puts all
of it together, `patch` says what has changed since, `door` who may ask.
"""
