"""The signed document of a run without I/O: bytes and tables in, values or an error out.

Read `file`: the terms, their bounds, and how a document is signed and opened. `bounds` checks
numbers, `names` names, `sizes` the length of messages. The tables of the file: `shape` (of the
model), `pin` (a file), `sampling`, `trust`, `diloco`.
"""
