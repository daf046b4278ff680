"""The ledger without its disk: entries, segments and marks as pure functions of bytes.

`chain` says what an entry and a segment file are, and what proves that an author forked its
log. `synced` says up to where there must be records, so that a torn end is told from rot.
`inspection` looks at a whole folder, and names each entry that is not as it was written.
`shelf` is what a node keeps of another author's log, `exchange` whose those are, and who has
told two stories.
"""
