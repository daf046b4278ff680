"""Code that every layer of roles uses.

* `backoff`: pauses between attempts;
* `durable`: writes that a role cannot do without;
* `checked_json`: small files that notice damage;
* `exchange`: the folder between a node and a trainer of somebody's own;
* `reasons`: sentences of peers, counted apart and fit for a terminal.
"""
