"""The host of production: authenticated peers, messages and streams on any `Network`.

The files, in the order in which to read them
---------------------------------------------
`swarm` is the `Host` itself. It hands streams and messages between its parts, and ends what a
bad peer or a broken handler began.

Ordinary trio code: `connector` dials, accepts and closes connections, `outbox` queues messages,
one lane for each peer and protocol, and has the tasks that serve incoming streams, and
`identify` says who we are, and pings.

Decisions without I/O, in the folder `core`, with a map of its own: who makes room, whom to
dial, how a peer behaved.

How data flows
--------------
::

    in:   transport -> connector -> swarm -> a stream's handler, in a task of outbox
                                          -> a message's handler, at once
    out:  Host.send -> a lane of outbox ─┐
          Host.open_stream ──────────────┴-> connector -> transport

What a newcomer calls
---------------------
`p2p.open_host`, which is `swarm.open_host`.
"""
