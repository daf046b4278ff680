"""The ledger without its disk: entries, segments and marks as pure functions of bytes.

`chain` says what an entry and a segment file are, what proves that an author forked its log,
and up to where there must be records, so that a torn end is told from rot. `inspection` looks
at a whole folder, and names each entry that is not as it was written. `exchange` is what a node
keeps of other authors' logs, what nodes ask each other, and which authors equivocate.
"""
