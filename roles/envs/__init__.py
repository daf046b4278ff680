"""Environments: where tasks come from, and who checks the answers.

`base` is what an environment has to be; `sort` is the one that comes with Shoal. A role sees it
through `client`, which runs foreign ones in a process (`worker`) with limits on time and memory
(`ration`); `contained` makes one error of all that they may raise or pay; `installed` takes the
digest that a run pins.
"""
