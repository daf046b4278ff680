"""The signed document of a run without I/O: bytes and tables in, values or an error out.

Read `file`: the terms, their bounds, and how a document is signed and opened. `trust` has the
numbers of its table of that name.
"""
