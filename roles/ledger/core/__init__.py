"""Evaluation of ledgers, without I/O.

`wording` puts an entry into words, `contribution` adds up what each worker has done, and
`receipt` is the document by which one worker proves its share to a stranger.
"""
