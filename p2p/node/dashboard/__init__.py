"""What people see of a node: a page, numbers for Prometheus, and commands that ask.

`core` decides what is shown and to whom; `sight` looks at a node, `feed` tells viewers what has
changed, `app` answers requests, `sockets` listens, `metrics` writes the numbers. `report` puts
the same page, with its data, into one file. `commands` are ``shoal status``, ``peers`` and
``top``. The page itself is in the folder static: HTML, CSS and JavaScript as a browser gets
them, with no build step; uPlot draws the curves (its licence and digest are beside it).
"""
