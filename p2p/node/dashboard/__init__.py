"""Views of a node: a page, numbers for Prometheus, and commands.

`core` decides what is shown; `snapshots` looks at a node and tells viewers, `server` says who
may ask, where, and answers, `metrics` writes the numbers, `page` holds the page's files and
writes a page with its data into one file. `commands` are ``shoal status``, ``peers`` and
``top``. The page itself is in the folder static: HTML, CSS and JavaScript as a browser gets
them, with no build step; uPlot draws the curves (its licence and digest are beside it).
"""
