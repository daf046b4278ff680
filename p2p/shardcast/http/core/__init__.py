"""HTTP as pure functions: byte ranges, tar archives, shardcast 0.3.2's listing.

- `hosts`: which machine a Host header names, against DNS rebinding;
- `ranges`: which bytes of a body a request asks for, and whether the client has it already;
- `body`: a body as a list of pieces of files and of bytes between them, read from any offset;
- `tar`: many files as one body, equal on every machine;
- `listing`: the ``distribution.txt`` of the PyPI package shardcast 0.3.2, both ways.
"""
