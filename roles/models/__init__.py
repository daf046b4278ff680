"""Models as folders: what a run pins of them.

Read `pin` first.
"""
