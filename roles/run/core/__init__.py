"""The signed document of a run without I/O: bytes and tables in, values or an error out.

Read `file`: the terms, their bounds, and how a document is signed and opened. `trust` is how
much of the work is checked, and what can slip through; `proposal` is what a trainer asks its
owner to change.
"""
