"""The HTTP edge: whole versions for curl, browsers, CDNs and the PyPI package shardcast.

Inside the swarm, chunks travel over SHARDCAST's own streams. This package serves programs that
speak only HTTP. `p2p.cast.pull_http` fetches the versions that only HTTP servers have.

The files, in the order in which to read them
---------------------------------------------
- `library`: what is offered. A `Release` is one version, a list of files that never change;
  a `PolicyLibrary` offers what a node's `Shardcast` holds, a `Shelf` what its owner puts there;
- `app`: which answer belongs to which path, as an ASGI application;
- `server`: its sockets, by hypercorn, and what one client may hold;
- `core`: the pure functions below all that (ranges, archives, listings).

How a download flows
--------------------
::

    client -> server -> app: path -> Release -> Body -> pieces -> disk -> client

What a newcomer calls
---------------------
``async with serve_http(HttpEdge(world, library), host, port)``. This package imports hypercorn,
which takes a fifth of a second: import it where it is used.
"""
