"""The command lines, one module each, and what several of them need.

- `line`: arguments that several have, and how each ends;
- `listening`: the ports that a pusher keeps;
- `source`: the files that a push or a server offers, where they lie, and their key;
- `edge`: the HTTP servers that stand beside a node;
- `push`, `pull`, `serve`, `inspect`: the commands; `pull_http` is a pull from HTTP servers;
- `unreachable`: why a puller waits.
"""
