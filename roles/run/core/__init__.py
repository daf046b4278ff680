"""The signed document of a run without I/O: bytes and tables in, values or an error out.

Read `file` first: the terms, their bounds, and how a document is signed and opened. `draft` is
the TOML table that its owner writes, in which all that has a good default may be left out.
"""
