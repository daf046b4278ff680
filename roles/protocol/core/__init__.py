"""Messages between the roles, without I/O.

`window` is what a worker commits to, under the digest of `terms`; `answer` has the trainer's
answer and all requests and replies; `verdict` is what a scorer signs; `conviction` is the proof
against one who lied, which `findings` weigh. `groups` encodes the content of a place.
`assignment` derives the tasks and draws of a node, `turnstile` says which stranger is heard
next, `account` is what a trainer tells a node of what became of its work, `statements` are the
kinds of entries in ledgers, and `work` counts tokens and FLOPs.
"""
